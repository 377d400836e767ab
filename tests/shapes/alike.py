"""Shapes that read a candidate's log-probability below its parent, on tables that know no parents."""

import functools

import numpy as np

from ddtree.shapes import is_conditional


def alike_below_every_parent(build):
    """The build function itself, or one that takes log_probs [L, K] and gives it those below every parent."""
    if not is_conditional(build):
        return build

    @functools.wraps(build)
    def build_alike(token_ids, log_probs, *bounds, **root):
        return build(token_ids, np.repeat(log_probs[:, None], log_probs.shape[1], axis=1), *bounds, **root)

    return build_alike
