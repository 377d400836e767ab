"""The kernels: one file an operation. Each launcher checks its arguments, then launches; nothing here knows a model."""

from numba import config

# Numba warns at every launch of fewer than 128 blocks. A call on one token is meant to be a small grid (in a captured
# graph it costs a microsecond), and where warnings are errors that warning would stop the launch.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
