"""Cases of what reads whole rows of logits: top-k, argmax, the check for bad rows, sampling; and its random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.bench_data import EPS, generator, normal, poisoned, require_close, require_equal
from ddtree.bench_kernels import Case, Work
from ddtree.reference import sample as sampling
from ddtree.reference import topk
from ddtree.reference.philox import philox4x32_10 as reference_philox

SEED, SEQUENCE = 0x0123456789ABCDEF, 3


def cases(quick: bool) -> list[Case]:
    """Vocabularies of Kimi K2 and of the shipped model; quick: small and odd ones."""
    if quick:
        vocabs = (65, 500)
        found = [top_k(3, v, k) for v in vocabs for k in (1, 30)]
        found += [case(3, v) for case in (argmax, row_is_bad, argmax_and_bad) for v in vocabs]
        settings = ((0, 1.0), (20, 0.9))
        return found + [sample(3, v, *s) for v in vocabs for s in settings] + [philox(70)]
    found = [top_k(15, 163840, k) for k in (64, 512)] + [top_k(15, 2048, 64)]
    for vocab in (163840, 2048):
        found += [case(m, vocab) for case in (argmax, row_is_bad, argmax_and_bad) for m in (1, 64)]
        found += [sample(m, vocab, *s) for s in ((0, 1.0), (50, 0.95)) for m in (1, 64)]
    return found + [philox(1 << 20)]


def logits_of(name: str, rows: int, vocab: int) -> np.ndarray:
    """Normal logits with ties among the greatest."""
    rng = generator(name)
    logits = normal(rng, rows, vocab, scale=2.5)
    for row in logits:
        row[rng.integers(0, vocab, 3)] = row.max()
    return logits


def top_k(rows: int, vocab: int, k: int) -> Case:
    name = f"topk_log_softmax f32 {rows}x{vocab} k={k}"

    def prepare() -> Work:
        from kernels_numba import topk as kernels

        logits = logits_of(name, rows, vocab)
        groups = kernels.num_groups(vocab)

        def check(found: Any) -> None:
            check_top_k(logits, k, found)

        arrays = {
            "logits": logits,
            "token_ids": poisoned(rows, k, dtype=np.int32),
            "log_probs": poisoned(rows, k),
        }
        arrays |= {"keys": poisoned(rows, groups, dtype=np.uint64), "sums": poisoned(rows, groups)}
        return Work(
            arrays,
            ("token_ids", "log_probs"),
            lambda d, s: kernels.topk_log_softmax(d.logits, k, d.token_ids, d.log_probs, d.keys, d.sums, s),
            check,
        )

    return Case(name, "topk.topk_log_softmax", 4 * rows * vocab + 8 * rows * k, 4 * rows * vocab, prepare)


def check_top_k(logits: np.ndarray, k: int, found: Any) -> None:
    """Hold token_ids and log_probs of a top-k to the reference."""
    ids, log_probs = np.empty((len(logits), k), np.int32), np.empty((len(logits), k), np.float32)
    topk.topk_log_softmax(logits.astype(np.float64), k, ids, log_probs)
    require_equal("token_ids", found["token_ids"], ids)
    # 20 additions and 2 exponentials of 2 ulp lie on a term's way into the sum, its arguments are rounded before
    scale = 40 + 2 * np.log(logits.shape[1]) + 2 * np.abs(log_probs)
    require_close("log_probs", found["log_probs"], log_probs, EPS, scale)


def argmax(rows: int, vocab: int) -> Case:
    name = f"argmax f32 {rows}x{vocab}"

    def prepare() -> Work:
        from kernels_numba import argmax as kernels

        logits = logits_of(name, rows, vocab)

        def check(found: Any) -> None:
            want = np.empty(rows, np.int32)
            topk.argmax(logits, want)
            require_equal("out", found["out"], want)

        arrays = {"logits": logits, "out": poisoned(rows, dtype=np.int32)}
        return Work(arrays, ("out",), lambda d, s: kernels.argmax(d.logits, d.out, s), check)

    return Case(name, "argmax.argmax", 4 * rows * vocab, 0, prepare)


def row_is_bad(rows: int, vocab: int) -> Case:
    name = f"row_is_bad f32 {rows}x{vocab}"

    def prepare() -> Work:
        from kernels_numba import argmax as kernels

        logits = logits_of(name, rows, vocab)
        logits[-1, vocab // 2] = np.nan

        def check(found: Any) -> None:
            require_equal("out", found["out"], _bad(logits))

        arrays = {"logits": logits, "out": poisoned(rows, dtype=np.uint8)}
        return Work(arrays, ("out",), lambda d, s: kernels.row_is_bad(d.logits, d.out, s), check)

    return Case(name, "argmax.row_is_bad", 4 * rows * vocab, 0, prepare)


def _bad(logits: np.ndarray) -> np.ndarray:
    want = np.empty(len(logits), bool)
    topk.row_is_bad(logits, want)
    return want.astype(np.uint8)


def argmax_and_bad(rows: int, vocab: int) -> Case:
    name = f"argmax_and_bad f32 {rows}x{vocab}"

    def prepare() -> Work:
        from kernels_numba import argmax as kernels

        logits = logits_of(name, rows, vocab)
        logits[-1, vocab // 2] = np.nan

        def check(found: Any) -> None:
            want = np.empty(rows, np.int32)
            topk.argmax(logits, want)
            require_equal("tokens", found["tokens"], want)
            require_equal("bad", found["bad"], _bad(logits))
            require_equal("scratch", found["scratch"], np.zeros((rows, 2), np.uint64))

        arrays = {"logits": logits, "tokens": poisoned(rows, dtype=np.int32)}
        arrays |= {"bad": poisoned(rows, dtype=np.uint8), "scratch": np.zeros((rows, 2), np.uint64)}
        return Work(
            arrays,
            ("tokens", "bad", "scratch"),
            lambda d, s: kernels.argmax_and_bad(d.logits, d.tokens, d.bad, d.scratch, s),
            check,
        )

    return Case(name, "argmax.argmax_and_bad", 4 * rows * vocab, 0, prepare)


def sample(rows: int, vocab: int, top: int, share: float) -> Case:
    name = f"sample f32 {rows}x{vocab} top-k {top} top-p {share}"
    temperature = 0.8

    def prepare() -> Work:
        from kernels_numba import sample as kernels

        logits = logits_of(name, rows, vocab)
        positions = 100 + np.arange(rows, dtype=np.int32)

        def check(found: Any) -> None:
            want = np.empty(rows, np.int32)
            sampling.sample(logits, positions, temperature, top, share, SEED, SEQUENCE, want)
            require_equal("out", found["out"], want)

        arrays = {"logits": logits, "positions": positions, "out": poisoned(rows, dtype=np.int32)}
        arrays["settings"] = kernels.pack_settings(temperature, top, share, SEED, SEQUENCE)
        return Work(
            arrays, ("out",), lambda d, s: kernels.sample(d.logits, d.positions, d.settings, d.out, s), check
        )

    return Case(name, "sample.sample", 4 * rows * vocab, 4 * rows * vocab, prepare)


def philox(count: int) -> Case:
    name = f"philox4x32_10 {count}"

    def prepare() -> Work:
        from kernels_numba import philox as kernels

        rng = generator(name)
        counter = rng.integers(0, 1 << 32, (count, 4), np.uint32)
        key = rng.integers(0, 1 << 32, 2, np.uint32)

        def check(found: Any) -> None:
            require_equal("out", found["out"], reference_philox(counter, key))

        arrays = {"counter": counter, "key": key, "out": poisoned(count, 4, dtype=np.uint32)}
        return Work(arrays, ("out",), lambda d, s: kernels.philox4x32_10(d.counter, d.key, d.out, s), check)

    return Case(name, "philox.philox4x32_10", 32 * count, 0, prepare)
