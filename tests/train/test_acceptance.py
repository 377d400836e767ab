"""Rounds along known continuations: branch-aware trees."""

import numpy as np

from ddtree.train.acceptance import Continuation, branch_tree, marginal_tree, mean_acceptance


def table(rng, roots, horizon=5, k=16):
    logits = np.sort(rng.normal(size=(roots, horizon, k)) * 2)[..., ::-1]
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    ids = np.stack([[rng.permutation(60)[:k] for _ in range(horizon)] for _ in range(roots)])
    return ids.astype(np.int32), log_probs.astype(np.float32)


def test_a_table_that_ignores_the_parent_gives_the_marginal_tree():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 60, 7).astype(np.int32)
    ids, log_probs = table(rng, 6)
    same = np.repeat(log_probs[:, :, None, :], 16, axis=2)
    this = Continuation(np.array([1]), tokens, ids, log_probs, same)
    for root in range(6):
        for budget, depth in ((1, 5), (16, 5), (16, 2), (40, 5)):
            plain, branch = (build(this, root, budget, depth) for build in (marginal_tree, branch_tree))
            assert branch.token_ids.tolist() == plain.token_ids.tolist()
            assert branch.parents.tolist() == plain.parents.tolist()
            assert np.allclose(branch.log_weights, plain.log_weights)
            branch.validate()


def test_a_child_is_chosen_below_its_own_parent():
    ids = np.array([[[1, 2], [3, 4]]], np.int32)
    log_probs = np.log(np.array([[[0.6, 0.4], [0.5, 0.5]]], np.float32))
    conditional = np.log(np.array([[[[0.6, 0.4], [0, 0]], [[0.1, 0.9], [0.95, 0.05]]]], np.float32) + 1e-30)
    this = Continuation(np.array([9]), np.array([0, 1, 4, 8], np.int32), ids, log_probs, conditional)
    tree = branch_tree(this, 0, 4, 2)
    paths = {(int(tree.token_ids[tree.parents[row]]), int(tree.token_ids[row])) for row in range(1, 5)}
    assert paths == {(0, 1), (0, 2), (1, 4), (2, 3)}


def test_rounds_count_tokens_with_the_bonus():
    rng = np.random.default_rng(5)
    tokens = np.arange(10, 20, dtype=np.int32)
    ids, log_probs = table(rng, 9)
    for root in range(9):
        for depth in range(5):
            if root + 1 + depth < 10:
                ids[root, depth, 0] = tokens[root + 1 + depth]
    ids[4, 1, 0] = 63  # a root whose second guess is wrong
    this = Continuation(np.array([1]), tokens, ids, log_probs)
    # from 0: 1 node of budget 1 and the bonus: 2 tokens a round; from 8 on one token is left
    counts = mean_acceptance([this], marginal_tree, 1)
    assert counts == {"rounds": 5, "acceptance": 9 / 5, "rounds_outside": 5, "acceptance_outside": 9 / 5}


def test_a_round_drafts_no_deeper_than_the_tokens_that_are_left():
    ids = np.array([[[1, 2], [3, 4]]] * 2, np.int32)
    log_probs = np.log(np.array([[[0.6, 0.3], [0.99, 0.01]]] * 2, np.float32))
    this = Continuation(np.array([9]), np.array([0, 2, 7], np.int32), ids, log_probs)
    # two tokens are left: one draft and the bonus, so the second node is a sibling and not a child
    assert mean_acceptance([this], marginal_tree, 2)["acceptance"] == 2.0
