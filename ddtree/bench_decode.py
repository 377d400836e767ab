"""`bench decode`: rounds of autoregressive, chain and tree decoding, on the GPU and on the host that drives it.

The decoding is `ddtree.compare`'s. Beside its figures stand the host's own microseconds a round, the wall clock, and
the same rounds launched eagerly; on a model of random weights, whose drafts are never right, the equality of
`ddtree.bench_equality` besides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddtree.bench import document_head
from ddtree.bench_equality import tree_equals_autoregressive
from ddtree.bench_layers import mode_of
from ddtree.compare import ACCEPTANCE_NOTE, Row, compare, format_table, name_of_method, plan, report
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.decode import Round
from ddtree.engine import Engine
from ddtree.prompts import Prompt
from ddtree.rounds import HOST_PARTS

OWN_PARTS = tuple(
    part for part in HOST_PARTS if part not in ("loop", "wait")
)  # what a round itself asks of the host
EAGER_PROMPTS = 4

Samples = dict[tuple[str, int, float], dict[str, list[dict[str, float]]]]  # by row, by prompt: a round each
OpenEngine = Callable[[bool], Engine]  # of whether rounds are captured in graphs


class HostTimes:
    """Collects the host's seconds of every round but the prefill, and the tokens, by row and prompt."""

    def __init__(self) -> None:
        self.samples: Samples = defaultdict(dict)
        self.tokens: dict[tuple, list[int]] = {}

    def add(self, row: Row, prompt: Prompt, rounds: list[Round]) -> None:
        """What `compare` calls after each decode."""
        found = [this.host_seconds for this in rounds[1:] if this.host_seconds is not None]
        self.tokens[*key_of(row.config), prompt.id] = [token for this in rounds for token in this.tokens]
        if found:
            self.samples[key_of(row.config)][prompt.id] = found

    def of(self, config: DecodeConfig, prompts: Sequence[Prompt]) -> list[dict[str, float]]:
        """The rounds of one row on these prompts."""
        by_prompt = self.samples.get(key_of(config), {})
        return [sample for prompt in prompts for sample in by_prompt.get(prompt.id, ())]


def key_of(config: DecodeConfig) -> tuple[str, int, float]:
    """What tells rows of one comparison apart."""
    return config.method, config.budget, config.sampling.temperature


def host_record(samples: list[dict[str, float]]) -> dict[str, Any] | None:
    """Microseconds a round, median and 90th percentile: `own` is launching, asking for the copy and bookkeeping.

    `loop` is the decode loop and its reader between two rounds, `wait` the time that the host waits for the GPU,
    `wall` all of it. None where the host computes the rounds itself.
    """
    if not samples:
        return None
    columns = {part: np.array([sample[part] for sample in samples]) * 1e6 for part in HOST_PARTS}
    columns["own"] = sum(columns[part] for part in OWN_PARTS)
    columns["wall"] = sum(columns[part] for part in HOST_PARTS)
    return {
        name: {"median": float(np.median(values)), "p90": float(np.percentile(values, 90))}
        for name, values in columns.items()
    }


def wall_seconds(samples: list[dict[str, float]]) -> float:
    """Seconds of the rounds by the wall clock, prefill left out."""
    return sum(sum(sample.values()) for sample in samples)


def measure(engine: Engine, prompts: list[Prompt], rows: list[Row], on_decode: Any = None) -> HostTimes:
    """Decode every prompt by every row, as `compare` does, and collect the host's times."""
    host = HostTimes()

    def keep(row: Row, prompt: Prompt, rounds: list[Round]) -> None:
        host.add(row, prompt, rounds)
        if on_decode:
            on_decode()

    compare(engine, prompts, rows, keep)
    return host


def run_decode_bench(
    open_engine: OpenEngine,
    prompts: list[Prompt],
    budgets: Sequence[int],
    samplings: Sequence[SamplingConfig],
    base: DecodeConfig,
    equality: Sequence[int] = (),
    progress: Callable[[int], None] = lambda total: None,
) -> dict[str, Any]:
    """The document that --json prints; `progress(total)` is called after each decode.

    `rows` are compare's records with mode, host times and the wall clock's tokens per second; `graphs_against_eager`
    the wall times of a round both ways, on the first prompts; `equality` the records of `bench_equality` for the
    budgets asked for, or None.
    """
    engine = open_engine(True)
    captured = engine.runner is not None and engine.runner.graphs
    rows = plan(engine.horizon, budgets, samplings, base)
    few = prompts[:EAGER_PROMPTS] if captured else []
    total = len(rows) * (len(prompts) + len(few))
    host = measure(engine, prompts, rows, lambda: progress(total))
    records = [
        record | mode_of(engine) | _host_columns(host.of(row.config, prompts), row)
        for row, record in zip(rows, report(rows), strict=True)
    ]
    document = document_head("ddtree decode bench", engine) | {
        "prompts": len(prompts),
        "max_new_tokens": base.max_new_tokens,
        "rows": records,
        "graphs_against_eager": [],
        "equality": None,
    }
    if equality:
        prompt_ids = engine.bundle.encode(prompts[0].text)
        document["equality"] = [
            mode_of(engine) | record for record in tree_equals_autoregressive(engine, prompt_ids, equality)
        ]
    if captured:
        again = plan(engine.horizon, budgets, samplings, base)
        del engine  # its memory may be wanted for the second
        eager = measure(open_engine(False), few, again, lambda: progress(total))
        document["graphs_against_eager"] = [
            _against_eager(mine, theirs, host, eager, few) for mine, theirs in zip(rows, again, strict=True)
        ]
    return document


def _host_columns(samples: list[dict[str, float]], row: Row) -> dict[str, Any]:
    seconds = wall_seconds(samples)
    return {
        "host_us": host_record(samples),
        "wall_ms_per_round": 1e3 * seconds / len(samples) if samples else None,
        "tokens_per_second_wall": sum(row.tally.lengths) / seconds if seconds else None,
    }


def _against_eager(
    mine: Row, theirs: Row, host: HostTimes, eager: HostTimes, prompts: list[Prompt]
) -> dict[str, Any]:
    """Milliseconds a round by the wall clock, captured and eager, on the same prompts at the same budget."""
    spans = [
        (wall_seconds(s), len(s)) for s in (host.of(mine.config, prompts), eager.of(theirs.config, prompts))
    ]
    graphs_ms, eager_ms = (1e3 * seconds / max(count, 1) for seconds, count in spans)
    method, budget, temperature = key = key_of(mine.config)
    shape = mine.config.shape if method == "tree" else None
    same = all(host.tokens[*key, prompt.id] == eager.tokens[*key, prompt.id] for prompt in prompts)
    return {
        **{"method": method, "shape": shape, "budget": budget, "temperature": temperature},
        "prompts": len(prompts),
        **{
            "graphs_ms": graphs_ms,
            "eager_ms": eager_ms,
            "eager_over_graphs": eager_ms / max(graphs_ms, 1e-9),
        },
        "tokens_equal": same,
    }


def passed(document: dict[str, Any]) -> bool:
    """Whether all tokens were those of autoregressive decoding, and every equality held."""
    rows = (*document["rows"], *document["graphs_against_eager"])
    return all(row["tokens_equal"] for row in rows) and all(r["equal"] for r in document["equality"] or ())


def format_decode_table(document: dict[str, Any]) -> str:
    """The document as text: compare's table, then the host's microseconds, then eager rounds, then equality."""
    first = document["rows"][0]
    lines = [
        f"{document['model']}, {document['prompts']} prompts: {first['backend']}, {first['dtype']}, "
        f"gemm {first['gemm']}, {first['mode']}",
        format_table(document["rows"]),
        ACCEPTANCE_NOTE,
    ]
    for row in document["rows"]:
        if row["host_us"] is not None:
            parts = ", ".join(
                f"{name} {row['host_us'][name]['median']:.0f}/{row['host_us'][name]['p90']:.0f}"
                for name in ("own", "launch", "copy", "bookkeeping", "loop", "wait", "wall")
            )
            lines.append(
                f"{_name(row)}: host us median/p90: {parts}; {row['tokens_per_second_wall']:.0f} tok/s wall"
            )
    for row in document["graphs_against_eager"]:
        lines.append(
            f"{_name(row)}: graphs {row['graphs_ms']:.3f} ms, eager {row['eager_ms']:.3f} ms a round, "
            f"{row['eager_over_graphs']:.1f} times{'' if row['tokens_equal'] else ', TOKENS DIFFER'}"
        )
    for row in document["equality"] or ():
        what = "equal" if row["equal"] else f"NOT EQUAL: {row}"
        lines.append(f"tree of {row['nodes']} nodes, {row['accepted']} tokens accepted: {what}")
    return "\n".join(lines)


def _name(row: dict[str, Any]) -> str:
    return f"{name_of_method(row)} {row['budget']} at T {row['temperature']:g}"
