"""DDTree speculative decoding of MLA + MoE transformers, with NumPy and Numba CUDA arithmetic."""

__version__ = "0.1.0"
