"""Ways to choose a tree's nodes, one file each.

A shape is a function `build(token_ids i32 [L, K], log_probs f32 [L, K], budget, max_depth, *, root_token)`
that returns a valid DraftTree of at most budget nodes, none deeper than max_depth, from per-depth candidates
in descending order. A new shape is one file with such a function and one line here.
"""

from ddtree.shapes import best_first, chain

SHAPES = {"best_first": best_first.build, "chain": chain.build}
