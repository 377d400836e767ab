"""Sampling: an oracle in plain Python, the exact distribution, and rows that do not feel their neighbours."""

import math

import numpy as np
import pytest

from ddtree.config import SamplingConfig
from ddtree.errors import ConfigError
from ddtree.reference import sample as sample_module
from ddtree.reference.philox import uniform
from ddtree.reference.sample import sample
from ddtree.reference.topk import argmax
from ddtree.sampling import choose_tokens

MOST = 1 - 2.0**-24  # the greatest uniform number
SETTINGS = [
    (1.0, 0, 1.0),
    (0.7, 5, 1.0),
    (1.3, 0, 0.8),
    (0.5, 20, 0.95),
    (2.0, 1, 1.0),
    (1.0, 0, 1e-9),
    (9.0, 999, 1.0),
]


def draw(logits, positions, temperature=1.0, top_k=0, top_p=1.0, seed=11, sequence=2):
    """Sample into garbage."""
    out = np.full(len(logits), -777, np.int32)
    sample(logits, np.asarray(positions, np.int32), temperature, top_k, top_p, seed, sequence, out)
    return out


def oracle_distribution(row, temperature, top_k, top_p):
    """Return [(id, probability)] in the order of the inverse CDF, literally as the rule says."""
    row = [-math.inf if math.isnan(x) else float(x) for x in row]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: top_k or len(row)]
    weights = [math.exp((row[i] - row[order[0]]) / temperature) for i in order]
    total = math.fsum(weights)
    probabilities = [weight / total for weight in weights]
    kept = next((n for n in range(1, len(order)) if math.fsum(probabilities[:n]) >= top_p), len(order))
    mass = math.fsum(probabilities[:kept])
    return [(order[n], probabilities[n] / mass) for n in range(kept)]


def oracle(row, u, temperature, top_k, top_p):
    """Return the first id whose cumulative probability passes u."""
    distribution = oracle_distribution(row, temperature, top_k, top_p)
    for n in range(len(distribution)):
        if math.fsum(p for _, p in distribution[: n + 1]) > u:
            return distribution[n][0]
    raise AssertionError("the last cumulative probability is 1 > u")


def hard_logits(rows, vocab, seed):
    """Return f32 rows with outliers, ties and -inf."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[1::4, 1::2] = -np.inf
    logits[2::5, vocab // 2] = 40
    return logits


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
@pytest.mark.parametrize("vocab", [1, 3, 33, 64])
def test_agrees_with_the_oracle(vocab, temperature, top_k, top_p):
    logits = hard_logits(65, vocab, seed=vocab)
    positions = np.arange(100, 165)
    got = draw(logits, positions, temperature, top_k, top_p)
    numbers = uniform(11, positions, 2)
    want = [oracle(row, u, temperature, top_k, top_p) for row, u in zip(logits, numbers, strict=True)]
    assert got.tolist() == want


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_the_distribution_is_exact(temperature, top_k, top_p):
    num_draws, vocab = 20_000, 12
    row = hard_logits(2, vocab, seed=1)[1]
    tokens = draw(np.tile(row, (num_draws, 1)), np.arange(num_draws), temperature, top_k, top_p)
    counts = np.bincount(tokens, minlength=vocab)
    distribution = dict(oracle_distribution(row, temperature, top_k, top_p))
    expected = np.array([distribution.get(token, 0.0) for token in range(vocab)]) * num_draws
    assert not counts[expected == 0].any()
    common = expected >= 5
    statistic = (np.square(counts - expected)[common] / expected[common]).sum()
    freedom = max(1, common.sum() - 1)
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab", [31, 513])
def test_a_row_depends_on_itself_alone(vocab, monkeypatch):
    logits = hard_logits(67, vocab, seed=5)
    positions = np.arange(67) * 3
    args = {"temperature": 0.8, "top_k": 29, "top_p": 0.9}
    together = draw(logits, positions, **args)
    alone = [draw(logits[i : i + 1], positions[i : i + 1], **args)[0] for i in range(67)]
    shuffled = np.random.default_rng(0).permutation(67)
    assert alone == together.tolist()
    assert draw(logits[shuffled], positions[shuffled], **args).tolist() == together[shuffled].tolist()
    assert draw(np.asfortranarray(logits), positions, **args).tolist() == together.tolist()
    monkeypatch.setattr(sample_module, "CHUNK_ELEMENTS", vocab * 4)
    assert draw(logits, positions, **args).tolist() == together.tolist()


def test_ties_go_by_the_lower_id():
    assert set(draw(np.zeros((500, 9), np.float32), range(500), top_k=3)) == {0, 1, 2}
    assert set(draw(np.zeros((500, 10), np.float32), range(500), top_p=0.3)) == {0, 1, 2}
    assert set(draw(np.array([[1.0, 2.0, 2.0, 2.0]] * 500), range(500), top_k=2)) == {1, 2}


@pytest.mark.parametrize("u", [0.0, MOST])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_the_ends_of_the_unit_interval(u, temperature, top_k, top_p, monkeypatch):
    """At the least and the greatest number the token still has a probability above 0 and is in the prefix."""
    logits = hard_logits(65, 33, seed=8)
    monkeypatch.setattr(
        sample_module, "uniform", lambda seed, positions, sequence: np.full(len(positions), u)
    )
    for row, token in zip(logits, draw(logits, range(65), temperature, top_k, top_p), strict=True):
        distribution = oracle_distribution(row, temperature, top_k, top_p)
        assert dict(distribution)[token] > 0
        if u == 0:
            assert token == distribution[0][0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1.0, 1e300])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_rows_and_temperatures(temperature, dtype):
    inf, nan, top = np.inf, np.nan, np.finfo(dtype).max
    rows = np.array(
        [
            [top, -top, 0, 1],
            [inf, 0, inf, 5],
            [-inf, -inf, 2, -inf],
            [nan, 3, -inf, nan],
            [nan] * 4,
            [-inf] * 4,
        ],
        dtype,
    )
    allowed = [{0, 1, 2, 3} if temperature == 1e300 else {0}, {0, 2}, {2}, {1}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    for top_k, top_p in ((0, 1.0), (3, 0.9), (99, 1e-300)):
        for position in range(40):
            tokens = draw(rows, [position] * 6, temperature, top_k, top_p)
            assert all(token in legal for token, legal in zip(tokens.tolist(), allowed, strict=True))


def test_a_nan_counts_as_minus_infinity():
    logits = hard_logits(65, 33, seed=9)
    without = logits.copy()
    logits[:, 3:9], without[:, 3:9] = np.nan, -np.inf
    for settings in SETTINGS:
        assert draw(logits, range(65), *settings).tolist() == draw(without, range(65), *settings).tolist()


def test_a_number_on_a_boundary_takes_the_token_above_it(monkeypatch):
    numbers = np.array([0, 0.25, 0.5, 0.75, MOST])
    monkeypatch.setattr(sample_module, "uniform", lambda seed, positions, sequence: numbers)
    assert draw(np.zeros((5, 4), np.float32), range(5)).tolist() == [0, 1, 2, 3, 3]


def test_low_temperature_is_argmax():
    logits = hard_logits(40, 65, seed=2)
    logits += np.arange(65, dtype=np.float32) * 1e-3  # no equal maxima
    greedy = np.zeros(40, np.int32)
    argmax(logits, greedy)
    assert draw(logits, range(40), temperature=1e-30).tolist() == greedy.tolist()


def test_seed_position_and_sequence_each_matter():
    logits = np.zeros((64, 1000), np.float32)
    base = draw(logits, range(64))
    assert draw(logits, range(64)).tolist() == base.tolist()
    for change in ({"seed": 12}, {"seed": 11 + 2**32}, {"sequence": 0}):
        assert (draw(logits, range(64), **change) != base).sum() > 50
    assert draw(logits, range(1, 65))[:-1].tolist() == base[1:].tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (0, 0, 1),
        (-1, 0, 1),
        (math.nan, 0, 1),
        (math.inf, 0, 1),
        (1, -1, 1),
        (1, 0, 0),
        (1, 0, 1.1),
        (1, 0, math.nan),
    ],
)
def test_settings_out_of_range_are_refused(temperature, top_k, top_p):
    with pytest.raises(ConfigError, match="wanted a finite temperature"):
        draw(np.zeros((1, 3), np.float32), [0], temperature, top_k, top_p)


def test_empty_inputs():
    with pytest.raises(ConfigError, match="empty"):
        draw(np.zeros((1, 0), np.float32), [0])
    assert draw(np.zeros((0, 5), np.float32), []).shape == (0,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf, True, "1", None)),
        *(("top_k", value) for value in (-1, 1.5, True)),
        *(("top_p", value) for value in (0, -0.5, 1.01, math.nan)),
        *(("seed", value) for value in (-1, 2**64, 0.5)),
    ],
)
def test_config_names_the_field(field, value):
    with pytest.raises(ConfigError, match=f"^{field}: expected"):
        SamplingConfig(**{field: value})


def test_choose_tokens_takes_the_greatest_or_draws():
    class Ops:
        argmax = staticmethod(argmax)
        sample = staticmethod(sample)

    logits, positions, out = (
        hard_logits(40, 33, seed=4),
        np.arange(40, dtype=np.int32),
        np.zeros(40, np.int32),
    )
    choose_tokens(Ops, logits, positions, SamplingConfig(seed=2**64 - 1), 2, out)
    assert SamplingConfig().greedy and out.tolist() == logits.argmax(axis=1).tolist()
    config = SamplingConfig(temperature=3, top_k=9, top_p=0.9, seed=11)
    choose_tokens(Ops, logits, positions, config, 2, out)
    assert not config.greedy and out.tolist() == draw(logits, positions, 3.0, 9, 0.9).tolist()
    assert (out != logits.argmax(axis=1)).any()
