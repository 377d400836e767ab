"""The drafter's block attention against a softmax over each key head's gathered rows in f64, and against itself."""

from dataclasses import dataclass

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.attention_tree import chains_of
from kernels.device import bf16_bits, bf16_values, poisoned, scalar, to_device, to_host
from kernels.softmax import EPS, softmax_average
from seeds import fresh_seed

from kernels_numba.attention_combine import MAX_SPLITS, TILE
from kernels_numba.block_attention import block_attention, block_attention_scratch
from kernels_numba.checks import LaunchError
from kernels_numba.primitives_attend_steps import key_warps_for, plan_of

GUARD = 64  # elements behind outputs
SEED = fresh_seed()


@dataclass(frozen=True)
class Case:
    """A block of `block` places over the last `window` (0: all) of `context_len` rows; `kind`: what is hard."""

    context_len: int
    window: int = 0
    block: int = 3
    heads: int = 1
    key_heads: int = 1
    dim: int = 8
    half: bool = False
    kind: str = "normal"
    spare: int = 3  # cache rows behind the context

    def __str__(self):
        mode = "bf16" if self.half else "f32"
        heads = f"heads{self.heads}of{self.key_heads}-dim{self.dim}"
        return f"{self.kind}-context{self.context_len}-window{self.window}-block{self.block}-{heads}-{mode}"

    @property
    def start(self):
        """The first cache row that is seen."""
        return max(0, self.context_len - self.window) if self.window else 0


LONG = MAX_SPLITS * TILE
SMALL = [
    Case(0),
    Case(1, block=1),
    *(
        Case(TILE - 3 + past, half=past % 2 == 0) for past in (-1, 0, 1)
    ),  # the block ends about the end of a tile
    *(Case(TILE + past, half=past % 2 == 0) for past in (-1, 0)),
    Case(2 * TILE, window=TILE - 1, half=True),
    Case(7, window=7, block=2, heads=4, key_heads=2, dim=16),
    Case(7, window=1, block=5, heads=6, key_heads=2, dim=24, half=True),
    Case(5, window=60, block=2, heads=9, dim=32),
    Case(LONG + 9, block=2, half=True),
    Case(4, block=2, kind="one key wins"),
    Case(4, block=2, kind="equal keys"),
]
MODEL = {"block": 16, "heads": 8, "key_heads": 4, "dim": 32}
KIMI = {"block": 8, "heads": 64, "key_heads": 8, "dim": 128}
LARGE = [
    *(
        Case(context_len, window=256, half=half, **MODEL)
        for context_len in (0, 1, 31, 111, 112, 113, 127, 128, 129, 255, 256, 257, 1000)
        for half in (False, True)
    ),
    *(Case(context_len, half=half, **KIMI) for context_len in (0, 120, 1000, 8192) for half in (False, True)),
    Case(LONG + 300, half=True, **KIMI),
    Case(5000, window=4096, half=True, **KIMI),
    *(Case(70, block=block, heads=5, key_heads=5, dim=64) for block in (1, 3, 31, 32, 33)),
    *(Case(70, heads=heads, key_heads=1, dim=40, half=True) for heads in (1, 3, 7, 12)),
    *(
        Case(300, kind=kind, half=half, **MODEL)
        for kind in ("one key wins", "equal keys")
        for half in (False, True)
    ),
]
CASES = [pytest.param(case, id=str(case), marks=pytest.mark.simulator) for case in SMALL] + [
    pytest.param(case, id=str(case), marks=pytest.mark.gpu) for case in LARGE
]


def make(case, seed=SEED):
    """query, key cache, value cache, block key, block value; the caches hold NaN outside the window."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    capacity = case.context_len + case.spare
    shapes = (case.block, case.heads), (capacity, case.key_heads), (case.block, case.key_heads)
    query, keys, values, own_keys, own_values = (
        rng.standard_normal((*shapes[i], case.dim)).astype(np.float32) for i in (0, 1, 1, 2, 2)
    )
    if case.kind == "one key wins":
        own_keys[case.block // 2] = 1e3
        query = np.abs(query)
    elif case.kind == "equal keys":
        keys[:] = own_keys[:] = own_keys[0, 0]
    for cache in (keys, values):
        cache[: case.start] = cache[case.context_len :] = np.nan
    return query, keys, values, own_keys, own_values


def launch(case, query, keys, values, own_keys, own_values):
    """The kernel's output on the host; what stands behind the output and the scratch is found unchanged."""
    stored = [bf16_bits(cache) if case.half else cache for cache in (keys, values)]
    sizes = case.block, case.heads, case.key_heads, case.dim
    wanted = block_attention_scratch(*sizes, len(keys), case.window)
    out, scratch = poisoned(query.size + GUARD), poisoned(wanted + GUARD)
    block_attention(
        *(to_device(array) for array in (query, *stored, own_keys, own_values)),
        scalar(case.context_len),
        case.window,
        case.dim**-0.5,
        out[: query.size].reshape(*query.shape),
        scratch[:wanted],
    )
    assert np.isnan(to_host(scratch)[wanted:]).all(), "written behind the scratch"
    host = to_host(out)
    assert np.isnan(host[query.size :]).all(), "written behind the output"
    return host[: query.size].reshape(query.shape)


def textbook(case, *arrays):
    """(out, allowed), f64 [B, H, D]: a softmax over the window and the block for each head."""
    query, keys, values, own_keys, own_values = (
        bf16_values(bf16_bits(array)) if case.half else array for array in arrays
    )
    seen = slice(case.start, case.context_len)
    widths = case.dim, -(-case.dim // 16) * 16 + case.dim
    plan = plan_of(*widths, case.half, key_warps_for(*widths, case.half))
    chains = chains_of(plan, case.context_len - case.start + case.block, case.half)
    out, allowed = np.empty((2, *query.shape))
    for head in range(case.heads):
        of = head // (case.heads // case.key_heads)
        rows = (np.concatenate([a[seen, of], b[:, of]]) for a, b in ((keys, own_keys), (values, own_values)))
        out[:, head], allowed[:, head] = softmax_average(query[:, head], *rows, case.dim**-0.5, *chains)
    return out, allowed


@pytest.mark.parametrize("case", CASES)
def test_is_textbook_attention(case):
    arrays = make(case)
    want, allowed = textbook(case, *arrays)
    assert_close(launch(case, *arrays), want, EPS, str(case), scale=allowed)


SAME = [
    pytest.param(Case(TILE, window=TILE + 1, heads=2, half=True), marks=pytest.mark.simulator),
    pytest.param(Case(300, window=256, **MODEL), marks=pytest.mark.gpu),
    pytest.param(Case(300, window=256, half=True, **MODEL), marks=pytest.mark.gpu),
    pytest.param(Case(1000, half=True, **KIMI), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("case", SAME, ids=str)
def test_bits_depend_on_what_is_seen_alone(case):
    """Not on where the window lies in the cache, the cache's capacity, or the other places of the block asking."""
    query, *rest = make(case)
    keys, values, own_keys, own_values = rest
    want = launch(case, query, *rest)
    shift = 2 * TILE + 5
    moved = [
        np.concatenate([np.full((shift, *cache.shape[1:]), np.nan, np.float32), cache[case.start :]])
        for cache in (keys, values)
    ]
    length = case.context_len - case.start
    later = Case(**{**vars(case), "context_len": shift + length, "window": length})
    got = launch(later, query, *moved, own_keys, own_values)
    assert_same_bits(got, want, "the window elsewhere, in a cache of another size")
    got = launch(case, query[::-1].copy(), *rest)
    assert_same_bits(got, want[::-1], "queries in another order")


@pytest.mark.simulator
def test_the_block_has_no_causality():
    """The first query sees the last key of the block."""
    case = Case(2)
    arrays = make(case, seed=1)  # the last key has some weight
    first = launch(case, *arrays)
    arrays[4][-1] += 1
    assert (np.abs(launch(case, *arrays)[0] - first[0]) > 1e-3).all()


@pytest.mark.simulator
def test_a_shorter_window_is_noticed():
    """The check is sharp: one key less moves the result by far more than is allowed, where it has some weight."""
    case = Case(6, window=6)
    arrays = make(case, seed=1)
    want, allowed = textbook(case, *arrays)
    got = launch(Case(6, window=5), *arrays)
    assert (np.abs(got - want) > 100 * EPS * allowed).any()


def arguments(case):
    """Arguments of a launch that would run."""
    arrays = make(case)
    sizes = case.block, case.heads, case.key_heads, case.dim
    scratch = poisoned(block_attention_scratch(*sizes, len(arrays[1]), case.window))
    given = [to_device(array) for array in arrays]
    return [*given, scalar(case.context_len), case.window, 0.1, poisoned(arrays[0].shape), scratch]


WRONG = [
    (0, lambda a: poisoned(a.shape, np.float64), "query: expected dtype float32"),
    (0, lambda a: poisoned((*a.shape[:2], 12)), "D: expected a multiple of 8, found 12"),
    (0, lambda a: poisoned((a.shape[0], 3, a.shape[2])), "H: expected a multiple of G = 2, found 3"),
    (1, lambda a: poisoned(a.shape, np.int32), "key_cache: expected dtype"),
    (2, lambda a: poisoned(a.shape, np.uint16), "value_cache: expected dtype float32, found uint16"),
    (3, lambda a: poisoned((a.shape[0] + 1, *a.shape[1:])), "block_key: expected shape"),
    (4, lambda a: poisoned((a.shape[0], 1, a.shape[2])), "block_value: expected shape"),
    (5, lambda a: poisoned(1, np.int64), "context_len: expected dtype int32"),
    (6, lambda a: -1, "window: expected 0 or more, found -1"),
    (9, lambda a: poisoned(a.size - 1), "scratch: expected"),
]


@pytest.mark.simulator
@pytest.mark.parametrize(("position", "change", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_refuses(position, change, message):
    given = arguments(Case(3, heads=4, key_heads=2))
    given[position] = change(given[position])
    if message.startswith("H:"):
        given[8] = poisoned(given[0].shape)
    with pytest.raises(LaunchError, match=f"block_attention: {message}"):
        block_attention(*given)
    assert np.isnan(to_host(given[8])).all(), "launched all the same"
