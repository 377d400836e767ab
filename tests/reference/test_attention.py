"""Absorbed attention of tree rows against textbook MLA: full keys and values of every head on a dense mask, in f64."""

from dataclasses import dataclass

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from support import DTYPES, EPS, ODD_SIZES

from ddtree.batch import visible_rows
from ddtree.reference import attention as module
from ddtree.reference.attention import attention
from ddtree.reference.linear import head_linear

NOPE, ROPE, RANK, VALUE, SCALE = 12, 8, 33, 17, 0.19


@dataclass(frozen=True)
class Case:
    """`rows` query rows of a random tree on `context_len` committed ones; `kind` says what is hard about it."""

    context_len: int
    rows: int
    heads: int = 3
    kind: str = "normal"

    def __str__(self):
        return f"{self.kind}-context{self.context_len}-rows{self.rows}-heads{self.heads}"


CONTEXTS = (0, 1, 3, 31, 32, 33, 62, 63, 64, 65, 66, 127, 128, 129, 300)
CASES = [
    *(Case(context_len, 7) for context_len in CONTEXTS),
    *(Case(61, rows) for rows in ODD_SIZES),
    Case(63, 5, heads=1),
    Case(64, 5, heads=8),
    Case(40, 130, kind="chain"),  # the rows themselves fill tiles, and more than one portion of rows
    Case(0, 65, kind="chain"),
    *(Case(100, 9, kind=kind) for kind in ("outliers", "equal keys", "one key wins", "tiny")),
]


def random_lineage(rng, rows, chain):
    """depths i32[rows] and lineage i32[rows, D] of a random tree, or of a chain."""
    depths, lineage = np.zeros(rows, np.int32), np.full((rows, rows), -1, np.int32)
    for row in range(rows):
        if row:
            parent = row - 1 if chain else int(rng.integers(max(0, row - 4), row))
            depths[row], lineage[row] = depths[parent] + 1, lineage[parent]
        lineage[row, depths[row]] = row
    return depths, np.ascontiguousarray(lineage[:, : depths.max() + 1])


def make(case, dtype):
    """Queries, caches with NaN past the last row, projections w_kc and w_vc, depths and lineage."""
    rng = np.random.default_rng(case.context_len * 1000 + case.rows + case.heads)
    total = case.context_len + case.rows
    q_nope, q_rope = (rng.standard_normal((case.rows, case.heads, width)) for width in (NOPE, ROPE))
    latents, ropes = (rng.standard_normal((total, width)) for width in (RANK, ROPE))
    if case.kind == "outliers":
        latents[:: total // 5] *= 1e4
        q_rope[::3] *= 1e4
    elif case.kind == "equal keys":
        latents[:], ropes[:] = latents[0], ropes[0]
    elif case.kind == "one key wins":
        ropes[case.context_len // 2] = 1e4
        q_rope[:] = np.abs(q_rope)
    elif case.kind == "tiny":
        latents *= 1e-20
        q_nope *= 1e-20
    w_kc = rng.standard_normal((case.heads, RANK, NOPE)) / 4
    w_vc = rng.standard_normal((case.heads, VALUE, RANK)) / 4
    depths, lineage = random_lineage(rng, case.rows, case.kind == "chain")
    padded = (np.concatenate([array, np.full((70, array.shape[1]), np.nan)]) for array in (latents, ropes))
    arrays = [array.astype(DTYPES[dtype]) for array in (q_nope, q_rope, *padded, w_kc, w_vc)]
    return *arrays, depths, lineage


def textbook(q_nope, q_rope, latents, ropes, w_kc, w_vc, lineage, context_len):
    """softmax(scale q k^T + mask) v by head, keys and values unabsorbed, f64 [M, H, VALUE]."""
    rows, heads, _ = q_nope.shape
    total = context_len + rows
    q_nope, q_rope, latents, ropes, w_kc, w_vc = (
        a.astype(np.float64) for a in (q_nope, q_rope, latents[:total], ropes[:total], w_kc, w_vc)
    )
    mask = np.concatenate([np.ones((rows, context_len), bool), visible_rows(lineage)], axis=1)
    out = np.empty((rows, heads, VALUE))
    for head in range(heads):
        keys = np.concatenate([latents @ w_kc[head], ropes], axis=1)
        values = latents @ w_vc[head].T
        for row in range(rows):
            seen = mask[row]
            scores = SCALE * keys[seen] @ np.concatenate([q_nope[row, head], q_rope[row, head]])
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values[seen] / weights.sum()
    return out


def absorbed(q_nope, q_rope, latents, ropes, w_kc, w_vc, depths, lineage, context_len):
    """The workspace's way, into outputs full of NaN: (latent output, value output)."""
    rows, heads, _ = q_nope.shape
    q_latent, o_latent, out = (
        np.full((rows, heads, width), np.nan, q_nope.dtype) for width in (RANK, RANK, VALUE)
    )
    head_linear(q_nope, w_kc, q_latent)
    attention(q_latent, q_rope, latents, ropes, lineage, depths, context_len, SCALE, o_latent)
    head_linear(o_latent, w_vc, out)
    return o_latent, out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_absorbed_is_textbook(case, dtype):
    *arrays, depths, lineage = make(case, dtype)
    _, out = absorbed(*arrays, depths, lineage, case.context_len)
    want = textbook(*arrays, lineage, case.context_len)
    assert_close(out, want, 40 * EPS[dtype], str(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys_give_the_mean(dtype):
    """Exact ties of all scores: every visible position weighs the same, at a count that is no power of two."""
    case = Case(97, 3, kind="equal keys")
    *arrays, depths, lineage = make(case, dtype)
    o_latent, _ = absorbed(*arrays, depths, lineage, case.context_len)
    want = np.broadcast_to(arrays[2][0].astype(np.float64), o_latent.shape)
    assert_close(o_latent, want, 40 * EPS[dtype], "mean of equals", elementwise=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context_len", [0, 40, 63, 64, 100])
def test_rows_off_a_lineage_are_never_read(context_len, dtype):
    """NaN in every row that is not an ancestor: siblings, later rows, rows past the call's. Same bits as without."""
    case = Case(context_len, 17)
    q_nope, q_rope, latents, ropes, w_kc, w_vc, depths, lineage = make(case, dtype)
    want, _ = absorbed(q_nope, q_rope, latents, ropes, w_kc, w_vc, depths, lineage, context_len)
    for row in range(case.rows):
        poisoned = latents.copy(), ropes.copy()
        hidden = np.setdiff1d(np.arange(case.rows), lineage[row])
        for value, cache in zip((np.nan, np.inf), poisoned, strict=True):
            cache[context_len + hidden] = value
        one = slice(row, row + 1)
        got, _ = absorbed(
            q_nope[one], q_rope[one], *poisoned, w_kc, w_vc, depths[one], lineage[one], context_len
        )
        assert_same_bits(got, want[one], f"row {row} on {context_len}")


@pytest.mark.parametrize("size", [1, 3, 64, 1000])
def test_how_many_rows_are_worked_on_at_once_changes_nothing(size, monkeypatch):
    case = Case(70, 65)
    *arrays, depths, lineage = make(case, "f32")
    want, _ = absorbed(*arrays, depths, lineage, case.context_len)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", size)
    got, _ = absorbed(*arrays, depths, lineage, case.context_len)
    assert_same_bits(got, want, f"{size} rows at once")


def test_a_position_too_far_or_a_missing_ancestor_is_noticed():
    """The oracle is sharp: dropping one ancestor, or adding one row, moves the result by far more than the bound."""
    case = Case(20, 9)
    *arrays, depths, lineage = make(case, "f64")
    row = int(depths.argmax())
    want = textbook(*arrays, lineage, case.context_len)
    wrong = lineage.copy()
    wrong[row, 1] = wrong[row, 0]  # the ancestor at depth 1 replaced by the root
    _, out = absorbed(*arrays, depths, wrong, case.context_len)
    assert np.abs(out[row] - want[row]).max() > 1e-4
    with pytest.raises(AssertionError, match=rf"the worst, \[{row}, "):
        assert_close(out, want, 1e-10, "wrong lineage")
