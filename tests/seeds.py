"""Seeds for tests that draw their inputs afresh each time."""

import numpy as np


def fresh_seed():
    """A seed nobody chose, u32; a test that takes one names it in its messages."""
    return int(np.random.SeedSequence().generate_state(1)[0])
