"""Rows of `study routing` made by hand, of trees of nine rows whose experts the caller draws; and recorded ones."""

import numpy as np
from study.recorded import tree_of

from ddtree.study_models import recorded_sharing
from ddtree.study_overlap import round_routing
from ddtree.study_routing_record import routing_row
from ddtree.tree import DraftTree

TREE = tree_of([0] * 4 + list(range(1, 5)), range(1, 9), [0.5] * 8)  # nine rows
EXPERTS, CHOSEN = 32, 3


def routed(draw, prompts=40, layers=2, rounds=10, shape="best_first", budget=8, cut=0):
    """Rows as `study routing` writes them, of choices that `draw()` makes for a row: a list of experts.

    After the full rounds of each prompt come `cut` ones of the root alone.
    """
    rows = []
    for prompt in range(prompts):
        found = []
        for tree in [TREE] * rounds + [DraftTree.root_only(0)] * cut:
            chosen = np.zeros((layers, len(tree.parents), EXPERTS), bool)
            for layer in chosen:
                for row in layer:
                    row[draw()] = True
            found.append(round_routing(tree, chosen))
        outside = np.arange(rounds + cut) % 2 == 0
        about = {"prompt": str(prompt), "temperature": 0.0, "shape": shape, "budget": budget}
        about |= {"experts": EXPERTS, "experts_per_token": CHOSEN}
        rows += [
            about | {"layer": 3 + n} | routing_row(found, n, outside, budget, EXPERTS, CHOSEN)
            for n in range(layers)
        ]
    return rows


def trees_of_64(router):
    """What greedy trees of 64 nodes were recorded to touch and share under a router, over all layers."""
    found = recorded_sharing(router)
    (each,) = [
        s for s in found if (s.shape, s.budget, s.layer, s.temperature) == ("best_first", 64, None, 0.0)
    ]
    return each
