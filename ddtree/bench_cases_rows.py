"""Cases of the operations that touch each element once: norms, residual adds, rotary, embedding and column copies.

Real sizes are Kimi K2's: hidden 7168, 64 heads of 128 + 64, latents of 512 + 64. The embedding table
is a part of the real one, of which a gather reads as many rows as there are tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.bench_data import (
    EPS,
    generator,
    normal,
    poisoned,
    require_close,
    require_equal,
    rotary_tables,
    scalar,
    stored,
    values_of,
)
from ddtree.bench_kernels import Case, Work
from ddtree.reference import linear, pointwise, position

BF16_STEP = 2.0**-8  # a bf16 is within this much, relatively, of what was rounded to it
NORM_EPS = 1e-6


def cases(quick: bool) -> list[Case]:
    """Each operation at one and at 64 rows; quick: at few rows, with widths for 16-byte accesses and without."""
    rows = (3,) if quick else (1, 64)
    widths = (64, 33) if quick else (7168,)
    found = [case(m, w) for case in (swiglu, add, rms_norm, add_norm) for w in widths for m in rows]
    heads, nope, dim, rank, query = (3, 16, 8, 32, 48) if quick else (64, 128, 64, 512, 1536)
    found += [rope(m, heads, dim, dtype) for dtype in ("f32", "bf16") for m in rows]
    found += [split_query(m, heads, nope, dim) for m in rows]
    ranks = (rank, 33) if quick else (rank,)
    found += [
        append_latent(m, query, r, dim, dtype) for dtype in ("f32", "bf16") for r in ranks for m in rows
    ]
    vocab = 100 if quick else 4096
    found += [embed(m, vocab, w, dtype) for dtype in ("f32", "bf16") for w in widths for m in rows]
    found += [copy_columns(m, w, 3) for w in widths for m in rows]
    return found


def swiglu(rows: int, width: int) -> Case:
    name = f"swiglu f32 {rows}x{width}"

    def prepare() -> Work:
        from kernels_numba import pointwise as kernels

        rng = generator(name)
        gate, up = normal(rng, rows, width, scale=4), normal(rng, rows, width)

        def check(found: Any) -> None:
            want = np.empty((rows, width))
            pointwise.swiglu(values_of(gate), values_of(up), want)
            # exp of x errs by 2 ulp and x eps of the argument's own rounding; then a sum, a quotient, a product
            require_close("out", found["out"], want, 8 * EPS)

        arrays = {"gate": gate, "up": up, "out": poisoned(rows, width)}
        return Work(arrays, ("out",), lambda d, s: kernels.swiglu(d.gate, d.up, d.out, s), check)

    return Case(name, "pointwise.swiglu", 12 * rows * width, 5 * rows * width, prepare)


def add(rows: int, width: int) -> Case:
    name = f"add f32 {rows}x{width}"

    def prepare() -> Work:
        from kernels_numba import pointwise as kernels

        rng = generator(name)
        x, y = normal(rng, rows, width), normal(rng, rows, width)
        arrays = {"x": x, "y": y, "out": poisoned(rows, width)}
        return Work(
            arrays,
            ("out",),
            lambda d, s: kernels.add(d.x, d.y, d.out, s),
            lambda found: require_equal("out", found["out"], x + y),
        )

    return Case(name, "pointwise.add", 12 * rows * width, rows * width, prepare)


def rms_norm(rows: int, width: int) -> Case:
    name = f"rms_norm f32 {rows}x{width}"

    def prepare() -> Work:
        from kernels_numba import norm as kernels

        rng = generator(name)
        x, weight = normal(rng, rows, width, scale=3), normal(rng, width)

        def check(found: Any) -> None:
            want = np.empty((rows, width))
            pointwise.rms_norm(values_of(x), values_of(weight), NORM_EPS, want)
            # a sum of `width` squares errs by width eps at most, its root by half of that
            require_close("out", found["out"], want, (width / 2 + 8) * EPS)

        arrays = {"x": x, "weight": weight, "out": poisoned(rows, width)}
        return Work(arrays, ("out",), lambda d, s: kernels.rms_norm(d.x, d.weight, NORM_EPS, d.out, s), check)

    return Case(name, "norm.rms_norm", 4 * (2 * rows + 1) * width, 4 * rows * width, prepare)


def add_norm(rows: int, width: int) -> Case:
    name = f"add_norm f32 {rows}x{width}"

    def prepare() -> Work:
        from kernels_numba import norm as kernels

        rng = generator(name)
        x, branch, weight = (
            normal(rng, rows, width, scale=3),
            normal(rng, rows, width, scale=3),
            normal(rng, width),
        )

        def launch(d: Any, s: Any) -> None:
            kernels.add_norm(d.residual, d.branch, d.weight, NORM_EPS, d.out, s)

        def check(found: Any) -> None:
            wide, want = values_of(x), np.empty((rows, width))
            pointwise.add_norm(wide, values_of(branch), values_of(weight), NORM_EPS, want)
            require_close("residual", found["residual"], wide, EPS / 2)
            require_close("out", found["out"], want, (width / 2 + 10) * EPS)  # as rms_norm's, of rounded sums

        arrays = {"residual": x, "branch": branch, "weight": weight, "out": poisoned(rows, width)}
        return Work(arrays, ("residual", "out"), launch, check)

    return Case(name, "norm.add_norm", 4 * (4 * rows + 1) * width, 5 * rows * width, prepare)


def _places(rows: int, context: int) -> dict[str, np.ndarray]:
    """Depths of a tree's rows and the context they follow."""
    return {"depths": np.arange(rows, dtype=np.int32) % 16, "context_len": scalar(context)}


def rope(rows: int, heads: int, dim: int, dtype: str) -> Case:
    name = f"rope {dtype} {rows}x{heads}x{dim}"

    def prepare() -> Work:
        from kernels_numba import position as kernels

        x = normal(generator(name), rows, heads, dim)
        cos, sin = rotary_tables(64, dim)
        at = _places(rows, 7)

        def check(found: Any) -> None:
            want = np.empty(x.shape)
            position.rope(values_of(x), values_of(cos), values_of(sin), at["depths"], 7, want)
            # two products and a sum, each element's scale at most |a| + |b| <= sqrt(2) of the pair's length
            bound = 4 * EPS + (BF16_STEP if dtype == "bf16" else 0)
            require_close("out", found["out"], want, bound, _pair_lengths(values_of(x)))

        out = poisoned(*x.shape, dtype=np.uint16 if dtype == "bf16" else np.float32)
        arrays = {"x": x, "cos": cos, "sin": sin, **at, "out": out}
        return Work(
            arrays,
            ("out",),
            lambda d, s: kernels.rope(d.x, d.cos, d.sin, d.depths, d.context_len, d.out, s),
            check,
        )

    size = rows * heads * dim
    return Case(name, "position.rope", size * (6 if dtype == "bf16" else 8), 3 * size, prepare)


def _pair_lengths(x: np.ndarray) -> np.ndarray:
    """sqrt(2) times the length of the pair that each element of the last axis is rotated in."""
    first, second = np.split(x, 2, axis=-1)
    length = np.sqrt(2 * (first**2 + second**2))
    return np.concatenate([length, length], axis=-1)


def split_query(rows: int, heads: int, nope: int, dim: int) -> Case:
    name = f"split_query f32 {rows}x{heads}x{nope}+{dim}"

    def prepare() -> Work:
        from kernels_numba import position as kernels

        query = normal(generator(name), rows, heads, nope + dim)
        cos, sin = rotary_tables(64, dim)
        at = _places(rows, 7)

        def check(found: Any) -> None:
            wide, wide_rope = np.empty((rows, heads, nope)), np.empty((rows, heads, dim))
            tables = values_of(cos), values_of(sin)
            position.split_query(values_of(query), *tables, at["depths"], 7, wide, wide_rope)
            require_close("q_nope", found["q_nope"], wide, 0)
            pairs = _pair_lengths(values_of(query[..., nope:]))
            require_close("q_rope", found["q_rope"], wide_rope, 4 * EPS, pairs)

        arrays = {"query": query, "cos": cos, "sin": sin, **at}
        arrays |= {"q_nope": poisoned(rows, heads, nope), "q_rope": poisoned(rows, heads, dim)}
        return Work(
            arrays,
            ("q_nope", "q_rope"),
            lambda d, s: kernels.split_query(
                d.query, d.cos, d.sin, d.depths, d.context_len, d.q_nope, d.q_rope, s
            ),
            check,
        )

    size = rows * heads * (nope + dim)
    return Case(name, "position.split_query", 8 * size, 3 * rows * heads * dim, prepare)


def append_latent(rows: int, query: int, rank: int, dim: int, dtype: str) -> Case:
    name = f"append_latent {dtype} {rows}x{query}+{rank}+{dim}"
    context, capacity = 5, 5 + rows + 2

    def prepare() -> Work:
        from kernels_numba import position as kernels

        rng = generator(name)
        qkv, weight = normal(rng, rows, query + rank + dim, scale=2), normal(rng, query + rank)
        cos, sin = rotary_tables(64, dim)
        at = _places(rows, context)

        def check(found: Any) -> None:
            latents, ropes = np.full((capacity, rank), np.nan), np.full((capacity, dim), np.nan)
            wide, normed = [values_of(array) for array in (qkv, weight, cos, sin)], np.empty((rows, query))
            places = at["depths"], context, normed
            position.append_latent(*wide[:2], NORM_EPS, *wide[2:], *places, latents, ropes)
            require_close("q_lora", found["q_lora"], normed, (query / 2 + 8) * EPS)
            rounding = BF16_STEP if dtype == "bf16" else 0
            require_close("latent_cache", found["latent_cache"], latents, (rank / 2 + 8) * EPS + rounding)
            lengths = np.zeros((capacity, dim))
            lengths[context : context + rows] = _pair_lengths(values_of(qkv[:, query + rank :]))
            require_close("rope_cache", found["rope_cache"], ropes, 4 * EPS + rounding, lengths)

        kind = np.uint16 if dtype == "bf16" else np.float32
        outs = {"q_lora": poisoned(rows, query), "latent_cache": poisoned(capacity, rank, dtype=kind)}
        outs["rope_cache"] = poisoned(capacity, dim, dtype=kind)
        arrays = {"qkv": qkv, "weight": weight, "cos": cos, "sin": sin, **at, **outs}
        return Work(
            arrays,
            tuple(outs),
            lambda d, s: kernels.append_latent(
                *(d.qkv, d.weight, NORM_EPS, d.cos, d.sin, d.depths),
                *(d.context_len, d.q_lora, d.latent_cache, d.rope_cache, s),
            ),
            check,
        )

    size = rows * (query + rank + dim)
    moved = 8 * size - 2 * rows * (rank + dim) * (dtype == "bf16")
    return Case(name, "position.append_latent", moved, 4 * size, prepare)


def embed(rows: int, vocab: int, width: int, dtype: str) -> Case:
    name = f"embed {dtype} {rows} of {vocab}x{width}"

    def prepare() -> Work:
        from kernels_numba import embed as kernels

        rng = generator(name)
        token_ids = rng.integers(0, vocab, rows, np.int32)
        table = stored(normal(rng, vocab, width), dtype)

        def check(found: Any) -> None:
            want = np.empty((rows, width))
            linear.embed(token_ids, values_of(table), want)
            require_close("out", found["out"], want, 0)

        arrays = {"token_ids": token_ids, "table": table, "out": poisoned(rows, width)}
        return Work(arrays, ("out",), lambda d, s: kernels.embed(d.token_ids, d.table, d.out, s), check)

    size = rows * width
    return Case(name, "embed.embed", size * (6 if dtype == "bf16" else 8), 0, prepare)


def copy_columns(rows: int, width: int, groups: int) -> Case:
    name = f"copy_columns f32 {rows}x{width} of {groups}"

    def prepare() -> Work:
        from kernels_numba import embed as kernels

        x = normal(generator(name), rows, width)
        out = poisoned(rows, groups * width)

        def check(found: Any) -> None:
            want = out.copy()
            pointwise.copy_columns(x, width, want)
            require_equal("out", found["out"], want)

        arrays = {"x": x, "out": out}
        return Work(arrays, ("out",), lambda d, s: kernels.copy_columns(d.x, width, d.out, s), check)

    return Case(name, "embed.copy_columns", 8 * rows * width, 0, prepare)
