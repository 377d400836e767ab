"""Rounds out of recordings: the same sibling table and calibration as those of the decodes that were recorded."""

from dataclasses import replace

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from study.conftest import TEMPERATURES

from ddtree.decode import decode
from ddtree.study_rerun import recorded_rounds
from ddtree.study_rounds import seen_rounds
from ddtree.study_tables import calibration, sibling_table


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    ("shape", "method", "budget"),
    [("best_first", "tree", 16), ("chain", "chain", 15), ("branch_aware", "tree", 16)],
)
def test_tables_of_recordings_are_those_of_decodes(request, temperature, shape, method, budget):
    prefix = "branch_" if shape == "branch_aware" else ""
    engine, recorded = (request.getfixturevalue(prefix + name) for name in ("engine", "recorded"))
    sampling = replace(recorded.config.sampling, temperature=temperature)
    config = replace(recorded.config, method=method, budget=budget, sampling=sampling)
    if method == "tree":
        config = replace(config, shape=shape)
    real = []
    for sequence, prompt in enumerate(recorded.prompts):
        ids = engine.bundle.encode(prompt.text)
        real += list(decode(engine, ids, config, sequence=sequence))
    mine = [each for each in recorded.recordings if each.temperature == temperature]
    found = list(recorded_rounds(mine, shape, budget))
    for one, other in zip(seen_rounds(found), seen_rounds(real), strict=True):
        assert one.tokens == tuple(other.tokens) and one.path.tolist() == list(other.path)
        assert np.array_equal(one.continuation, other.continuation)
        if prefix and other.table:
            assert_same_bits(one.conditional, other.conditional, "what the branch head said")
        else:
            assert one.conditional is None and other.conditional is None
    a, b = sibling_table(found), sibling_table(real)
    for name in ("hits", "beyond", "followed", "child_right"):
        rows = min(len(getattr(a, name)), len(getattr(b, name)))
        assert np.array_equal(getattr(a, name)[:rows], getattr(b, name)[:rows]), name
    assert a.first_misses > 10
    c, d = calibration(found), calibration(real)
    assert np.array_equal(c.counts, d.counts) and np.array_equal(c.observed, d.observed, equal_nan=True)
