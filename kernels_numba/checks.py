"""What every launcher checks before it launches: shape, dtype and contiguity of each array."""


class LaunchError(ValueError):
    """An argument that a kernel cannot take: its name, what was wanted, what was given. Nothing was launched."""


def check(name, array, dtypes, shape):
    """Raise LaunchError unless `array` is C-contiguous, of one of `dtypes` (names) and of `shape` (None: any size)."""
    wanted = (dtypes,) if isinstance(dtypes, str) else dtypes
    found = getattr(array, "dtype", type(array))
    if str(found) not in wanted:
        raise LaunchError(f"{name}: expected dtype {' or '.join(wanted)}, found {found}")
    fits = len(array.shape) == len(shape) and all(
        size is None or size == given for size, given in zip(shape, array.shape, strict=True)
    )
    if not fits:
        raise LaunchError(f"{name}: expected shape {shape}, found {tuple(array.shape)}")
    if not is_contiguous(array):
        raise LaunchError(f"{name}: expected a C-contiguous array, found strides {array.strides}")


def is_contiguous(array):
    """Whether elements follow one another in row-major order; sizes of one have any stride."""
    step = array.dtype.itemsize
    for size, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if size != 1 and stride != step:
            return not all(array.shape)
        step *= size
    return True


def require(condition, message):
    """Raise LaunchError with `message` unless `condition` holds."""
    if not condition:
        raise LaunchError(message)
