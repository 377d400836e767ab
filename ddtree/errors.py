"""The errors a user can cause or meet; each message is one line saying what, where and what to do.

The command line turns any of them into that line on stderr and exit code 2.
"""


class DdtreeError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(DdtreeError):
    """A model, drafter or decode setting is missing, of the wrong type or out of range."""


class CheckpointError(DdtreeError):
    """A checkpoint lacks tensors, has extra ones, or has some of the wrong shape or dtype."""


class CapacityError(DdtreeError):
    """A call needs more cache rows or more scratch than was allocated; nothing was written."""


class DeviceMemoryError(DdtreeError):
    """The device has too little free memory: how many bytes were needed, for what, and how many are free."""


class NumericsError(DdtreeError):
    """A logits row that decides a token has a NaN or no finite value; nothing of the round was committed."""


class UsageError(DdtreeError):
    """A request that cannot be met: unknown method, missing drafter, unreadable prompt, unwritable output."""
