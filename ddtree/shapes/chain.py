"""Chain: the spine alone, the top-1 token at every depth."""

import math

import numpy as np

from ddtree.errors import ConfigError
from ddtree.tree import DraftTree


def build(token_ids, log_probs, budget, max_depth, *, root_token):
    """Return the chain DraftTree of min(budget, L, max_depth) nodes, cut before a log-prob that is not finite.

    Arguments as in ddtree.shapes. Raises ConfigError for a negative budget or max_depth.
    """
    if budget < 0 or max_depth < 0:
        raise ConfigError(f"chain: budget {budget}, max_depth {max_depth}: neither may be negative")
    tokens, log_weights = [root_token], [0.0]
    if log_probs.shape[1]:
        length = min(budget, max_depth)
        for token, log_prob in zip(
            token_ids[:length, 0].tolist(), log_probs[:length, 0].tolist(), strict=True
        ):
            if not math.isfinite(log_prob):
                break
            tokens.append(token)
            log_weights.append(log_weights[-1] + log_prob)
    depths = np.arange(len(tokens), dtype=np.int32)
    return DraftTree(np.array(tokens, np.int32), depths - 1, depths, np.array(log_weights, np.float64))
