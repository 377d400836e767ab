"""How checkpoints store a weight: plain, fp8 with block scales, or packed INT4, and what is checked of each.

    plain    W.weight bf16, f16 or f32 [N, K]
    fp8      W.weight f8_e4m3 [N, K], W.weight_scale_inv f32 [ceil(N / 128), ceil(K / 128)]
    int4     W.weight_packed i32 [N, K / 8], W.weight_scale bf16 [N, K / 32], W.weight_shape i32 or i64 [2]

Any matrix but the embedding may be quantised. Names are those of `ddtree.checkpoint_names`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import numpy as np

from ddtree.errors import CheckpointError
from ddtree.quantised import E4M3, GROUP, arrays_of
from ddtree.weights_pieces import pieces

Shape = tuple[int, ...]
Stored = dict[str, tuple[tuple[str, ...], Shape]]  # of each tensor, the dtypes it may have and its shape

WEIGHT_DTYPES = ("bf16", "f16", "f32")
MATRICES = {
    "fp8": ("", "_scale_inv"),
    "int4": ("_packed", "_scale"),
}  # endings of a quantised matrix's two arrays
SHAPE = "_shape"
PIECE = 1 << 22  # elements checked at a time


def format_of(name: str, names: Container[str]) -> str:
    """plain, fp8 or int4: what the names beside it say of the weight `name`, also where some of them are missing."""
    if any(name + ending in names for ending in (*MATRICES["int4"], SHAPE)):
        return "int4"
    return "fp8" if f"{name}_scale_inv" in names else "plain"


def holds_fp8(names: Iterable[str]) -> bool:
    """Whether an array of a model is of an fp8 weight outside the routed experts, which `linear` multiplies."""
    ending = MATRICES["fp8"][1]
    return any(name.endswith(ending) and ".mlp.experts." not in name for name in names)


def formats_of(expected: Mapping[str, Shape], found: Mapping[str, tuple[str, Shape]]) -> dict[str, str]:
    """The format of every weight that is not plain; `found` is name -> (dtype, shape)."""
    formats = {}
    for name, shape in expected.items():
        if len(shape) == 2 and "embed_tokens" not in name:
            stored = "fp8" if found.get(name, ("",))[0] == "f8_e4m3" else format_of(name, found)
            if stored != "plain":
                formats[name] = stored
    return formats


def stored_tensors(name: str, shape: Shape, stored: str) -> Stored:
    """The tensors that a weight [N, K] is stored as; K of INT4 must be a multiple of 32."""
    if stored == "plain":
        return {name: (WEIGHT_DTYPES, shape)}
    dtypes = {"fp8": ("f8_e4m3", "f32"), "int4": ("i32", "bf16")}[stored]
    parts = zip(MATRICES[stored], dtypes, arrays_of(shape, stored), strict=True)
    tensors: Stored = {name + ending: ((dtype,), size) for ending, dtype, (size, _) in parts}
    return tensors if stored == "fp8" else tensors | {name + SHAPE: (("i32", "i64"), (2,))}


def not_in_groups(expected: Mapping[str, Shape], formats: Mapping[str, str]) -> list[str]:
    """The INT4 weights whose K is no multiple of a group."""
    return [
        f"{name}: K = {expected[name][1]} is no multiple of {GROUP}"
        for name, stored in formats.items()
        if stored == "int4" and expected[name][1] % GROUP
    ]


def mixed_experts(expected: Mapping[str, Shape], formats: Mapping[str, str]) -> list[str]:
    """The MoE layers whose routed experts are not all of one format; kernels take them as one stack."""
    layers: dict[str, dict[str, str]] = {}
    for name in expected:
        layer, found, _ = name.partition(".mlp.experts.")
        if found:
            layers.setdefault(layer, {}).setdefault(formats.get(name, "plain"), name)
    return [" and ".join(names.values()) for names in layers.values() if len(names) > 1]


def check_scheme(formats: Mapping[str, str], scheme: str | None, where: str) -> None:
    """CheckpointError where a weight's format is not the one that config.json names."""
    for name, stored in formats.items():
        if stored != scheme:
            says = f"says {scheme}" if scheme else "is missing"
            raise CheckpointError(
                f"{where}: {name}: its tensors are {stored}, but quantization_config {says}"
            )


def check_shape(name: str, found: np.ndarray, expected: Shape, where: str) -> None:
    """CheckpointError unless an INT4 weight's `weight_shape` is its shape."""
    if tuple(found.tolist()) != expected:
        raise CheckpointError(
            f"{where}: {name}{SHAPE}: expected {list(expected)}, the shape of the weight, found {found.tolist()}"
        )


def check_numbers(name: str, array: np.ndarray, where: str) -> None:
    """CheckpointError where a quantised weight's scale is not finite, or a byte of e4m3 is NaN (0x7f, 0xff)."""
    scale = name.endswith((".weight_scale", ".weight_scale_inv"))
    if not scale and array.dtype != E4M3:
        return
    for place, piece in pieces(array, PIECE):
        finite = np.isfinite(piece) if scale else (piece.view(np.uint8) & 0x7F) != 0x7F
        if not finite.all():
            bad = np.unravel_index(place + int(finite.argmin()), array.shape)
            value = f"{float(array[bad])} at {[int(i) for i in bad]}"
            raise CheckpointError(f"{where}: {name}: expected finite numbers, found {value}")
