"""The micro model by the CUDA kernels alone, in the simulator: trees, paths and tokens are the NumPy backend's."""

import pytest
from engine.micro import BRANCHED, DRAFTER, TARGET, write_micro_bundle

from ddtree.bundle import open_bundle
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.decode import decode
from ddtree.engine import Engine

SAMPLED = SamplingConfig(temperature=0.8, top_k=20, top_p=0.95, seed=3)
# Seeds of weights at which rounds accept drafted tokens and move them: random drafters mostly miss.
CASES = {
    "greedy": (6, [60, 7], SamplingConfig(), "best_first"),
    "sampled": (31, [40, 3], SAMPLED, "best_first"),
    "branch_aware": (344, [60, 7], SamplingConfig(), "branch_aware"),
}


def run(bundle, prompt, sampling, shape, **engine):
    config = DecodeConfig("tree", budget=3, max_new_tokens=5, sampling=sampling, shape=shape)
    return list(decode(Engine(bundle, max_budget=3, max_context=16, **engine), prompt, config))


@pytest.mark.simulator
@pytest.mark.parametrize("case", CASES)
def test_tree_by_simulated_kernels_is_numpys(case, tmp_path):
    seed, prompt, *settings = CASES[case]
    drafter = BRANCHED if case == "branch_aware" else DRAFTER
    bundle = open_bundle(write_micro_bundle(tmp_path, seed, TARGET, drafter))
    want = run(bundle, prompt, *settings)
    got = run(bundle, prompt, *settings, backend="cuda", prefill_chunk=2)
    assert [len(this.path) for this in want] == [1, 2, 2]
    assert any(this.path.tolist() != list(range(len(this.path))) for this in want), "some round compacts"
    for mine, theirs in zip(got, want, strict=True):
        assert mine.tree.to_json() | {"log_weights": None} == theirs.tree.to_json() | {"log_weights": None}
        assert mine.path.tolist() == theirs.path.tolist()
        assert mine.target_tokens.tolist() == theirs.target_tokens.tolist()
        assert (mine.tokens, mine.bonus, mine.context_len) == (
            theirs.tokens,
            theirs.bonus,
            theirs.context_len,
        )
        assert (mine.finish, mine.num_bad_rows) == (theirs.finish, 0)
