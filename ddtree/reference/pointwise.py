"""RMSNorm, alone and after the residual add, SwiGLU, a plain sum, and the copy that collects features."""

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """out = weight * (x / sqrt(mean(x^2) + eps)) over the last axis; x and out [..., H], weight [H]."""
    mean_square = np.square(x).sum(axis=-1, keepdims=True) / x.dtype.type(x.shape[-1])
    np.multiply(x, 1 / np.sqrt(mean_square + x.dtype.type(eps)), out=out)
    np.multiply(out, weight, out=out)


def add_norm(
    residual: np.ndarray, branch: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray
) -> None:
    """residual += branch, then out = rms_norm(residual); all [..., H] but weight [H]; out may be branch."""
    np.add(residual, branch, out=residual)
    rms_norm(residual, weight, eps, out)


def swiglu(gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> None:
    """out = gate * sigmoid(gate) * up, all of one shape; out may be gate."""
    with np.errstate(over="ignore"):  # exp(-gate) = inf makes the sigmoid 0, as it should
        np.multiply(gate / (1 + np.exp(-gate)), up, out=out)


def add(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """out = x + y, all of one shape; out may be either."""
    np.add(x, y, out=out)


def copy_columns(x: np.ndarray, column: int, out: np.ndarray) -> None:
    """out[:, column : column + H] = x; x [M, H], out [M, at least column + H]."""
    out[:, column : column + x.shape[1]] = x
