"""Text in, text out: one prompt decoded, streamed as rounds commit it, and summed up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ddtree.config import DecodeConfig
from ddtree.decode import Round, decode
from ddtree.engine import Engine
from ddtree.metrics import Tally
from ddtree.trace import write_trace


def generate(
    engine: Engine,
    prompt: str,
    config: DecodeConfig,
    trace: Path | str | None = None,
    on_text: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Continue `prompt`; returns text, token_ids, finish and the figures of the decode as plain values.

    `on_text` gets each piece of text as soon as it is final; `trace` names a file that receives every round. Raises
    what `decode` raises, and UsageError when the trace cannot be written; then no trace is left behind.
    """
    prompt_ids = engine.bundle.encode(prompt)
    rounds: list[Round] = []
    printed, token_ids = 0, []
    with write_trace(trace, engine) if trace is not None else nullcontext() as writer:
        if writer:
            writer.run("prompt", prompt_ids, config, sequence=0)
        for this in decode(engine, prompt_ids, config):
            rounds.append(this)
            token_ids.extend(this.tokens)
            if writer:
                writer.round(this, with_table=True)
            text = engine.bundle.decode(token_ids)
            if on_text:
                ready = (
                    text if this.finish else text.rstrip("\ufffd")
                )  # half a character waits for its other half
                on_text(ready[printed:])
                printed = max(printed, len(ready))
    tally = Tally()
    tally.add(prompt_ids, rounds)
    return {
        "prompt": prompt,
        "text": text,
        "token_ids": token_ids,
        "finish": rounds[-1].finish,
        "prompt_tokens": len(prompt_ids),
        "rounds": tally.rounds,
        "nodes_per_round": tally.nodes_per_round,
        "mean_acceptance": tally.mean_acceptance,
        "loop_share": tally.loop_share,
        "tokens_per_second": tally.tokens_per_second,
        "prefill_seconds": sum(rounds[0].seconds.values()),
        "stage_ms": tally.stage_milliseconds(),
    }
