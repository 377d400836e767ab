"""How a token is chosen from a row of logits: the one call that obeys the settings.

Knows no arithmetic: that is in `ops`.
"""


def choose_tokens(ops, logits, positions, config, sequence, out):
    """Write the token that each row of logits [M, V] chooses to out i32 [M].

    positions i32 [M] are the chosen tokens' own (row position + 1); sequence is the prompt's index. `ops` has
    `argmax` and `sample`.
    """
    if config.greedy:
        ops.argmax(logits, out)
    else:
        ops.sample(
            logits, positions, config.temperature, config.top_k, config.top_p, config.seed, sequence, out
        )
