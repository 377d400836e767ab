"""What tests of losslessness share: the prompts' length, and the two ways to choose a token."""

from ddtree.config import SamplingConfig

PROMPT_LENGTH = 64
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "sampled": SamplingConfig(temperature=0.8, top_k=40, top_p=0.9, seed=5),
}
