"""Autoregressive, chain and tree on the same prompts: are the tokens equal, and what did each method cost?

Prompts are the outer loop, so that every method meets the same moments of a busy machine. Tokens are compared within
one temperature and seed; sampling is keyed by position, so they must be equal there too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.decode import STAGES, Round, checked_prompt, decode
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.lab import dash_or
from ddtree.metrics import Tally
from ddtree.prompts import Prompt

WARM_UP_TOKENS = 8


@dataclass
class Row:
    """One method at one budget and temperature; `differing` are the prompts whose tokens are not those of ar."""

    config: DecodeConfig
    tally: Tally = field(default_factory=Tally)
    differing: list[dict[str, Any]] = field(default_factory=list)


def plan(
    horizon: int, budgets: Iterable[int], samplings: Iterable[SamplingConfig], base: DecodeConfig
) -> list[Row]:
    """The rows of a comparison: ar, chains and trees at each budget, and the fair pair.

    A chain cannot be longer than the horizon, so chain(horizon) stands beside tree(horizon + 1) at every temperature.
    """
    chains = sorted({min(budget, horizon) for budget in budgets} | {horizon})
    trees = sorted({*budgets, horizon + 1})
    methods = [("ar", 0), *(("chain", budget) for budget in chains), *(("tree", budget) for budget in trees)]
    return [
        Row(replace(base, method=method, budget=budget, sampling=sampling))
        for sampling in samplings
        for method, budget in methods
    ]


def compare(
    engine: Engine,
    prompts: list[Prompt],
    rows: list[Row],
    on_decode: Callable[[Row, Prompt, list[Round]], None] | None = None,
) -> None:
    """Decode every prompt by every row and fill the rows' tallies; an ar row must precede what it is compared with.

    A few tokens by every row come first and count for nothing: kernels compile and graphs are captured then.
    """
    encoded = [_encode(engine, prompt) for prompt in prompts]
    for row in rows:
        warm_up = replace(row.config, max_new_tokens=WARM_UP_TOKENS)
        deque(decode(engine, encoded[0], warm_up), maxlen=0)
    for sequence, (prompt, prompt_ids) in enumerate(zip(prompts, encoded, strict=True)):
        expected: dict[SamplingConfig, list[int]] = {}
        for row in rows:
            rounds = list(decode(engine, prompt_ids, row.config, sequence))
            tokens = [token for this in rounds for token in this.tokens]
            row.tally.add(prompt_ids, rounds)
            reference = expected.setdefault(row.config.sampling, tokens)
            if tokens != reference:
                row.differing.append({"prompt": prompt.id, "index": _first_difference(tokens, reference)})
            if on_decode:
                on_decode(row, prompt, rounds)


def _encode(engine: Engine, prompt: Prompt) -> list[int]:
    """A prompt's token ids; UsageError with its name when it cannot be decoded after."""
    try:
        return checked_prompt(engine, engine.bundle.encode(prompt.text)).tolist()
    except UsageError as error:
        raise UsageError(f"prompt {prompt.id}: {error}") from None


def _first_difference(left: list[int], right: list[int]) -> int:
    """The index of the first token that differs, or the shorter length."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def report(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows as plain numbers; acceptance lengths count the bonus token, speeds leave the prefill out."""
    speeds = {row.config.sampling: row.tally.tokens_per_second for row in rows if row.config.method == "ar"}
    return [_record(row, speeds.get(row.config.sampling)) for row in rows]


def _record(row: Row, ar_speed: float | None) -> dict[str, Any]:
    tally, config = row.tally, row.config
    speed = tally.tokens_per_second
    return {
        "method": config.method,
        "shape": config.shape if config.method == "tree" else None,
        "budget": config.budget,
        "temperature": config.sampling.temperature,
        "tokens_equal": not row.differing,
        "differing": row.differing,
        "tokens": tally.tokens,
        "rounds": tally.rounds,
        "nodes_per_round": tally.nodes_per_round,
        "mean_acceptance": tally.mean_acceptance,
        "loop_share": tally.loop_share,
        "mean_acceptance_outside_loops": tally.mean_acceptance_outside_loops,
        "tokens_per_second": speed,
        "speed_over_ar": speed / ar_speed if speed and ar_speed else None,
        "stage_ms": tally.stage_milliseconds(),
    }


def fair_pairs(records: list[dict[str, Any]], horizon: int) -> list[dict[str, Any]]:
    """chain(horizon) and tree(horizon + 1) of each temperature: as many rows verified, in the same mode."""
    pair = {("chain", horizon), ("tree", horizon + 1)}
    return [record for record in records if (record["method"], record["budget"]) in pair]


def best_rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each temperature, each method's fastest row: what a method can do at its own best budget."""
    best: dict[tuple[float, str], dict[str, Any]] = {}
    for record in records:
        key = (record["temperature"], record["method"])
        if key not in best or (record["tokens_per_second"] or 0) > (best[key]["tokens_per_second"] or 0):
            best[key] = record
    return list(best.values())


def name_of_method(record: dict[str, Any]) -> str:
    """A record's method, with the shape of its trees unless that is best_first."""
    plain = record.get("shape") in (None, "best_first")
    return record["method"] if plain else f"{record['method']} {record['shape']}"


HEADINGS = (
    "temp",
    "method",
    "budget",
    "nodes",
    "equal",
    "rounds",
    "accept",
    "no loops",
    "in loops",
    "tok/s",
    "x ar",
)

ACCEPTANCE_NOTE = (
    "accept: tokens a round, bonus token included; no loops: the same over rounds that start outside a loop\n"
    "(a small model repeats itself under greedy decoding, and repetition is easy to draft); nodes: verified a round."
)


def format_table(records: list[dict[str, Any]]) -> str:
    """The comparison as text: acceptance length with bonus, then outside loops, then milliseconds a round by stage."""
    lines = [HEADINGS + tuple(f"{stage} ms" for stage in STAGES)]
    for record in records:
        lines.append(
            (
                f"{record['temperature']:g}",
                name_of_method(record),
                str(record["budget"]),
                dash_or(record["nodes_per_round"], 1),
                "yes" if record["tokens_equal"] else f"NO ({len(record['differing'])})",
                str(record["rounds"]),
                dash_or(record["mean_acceptance"], 2),
                dash_or(record["mean_acceptance_outside_loops"], 2),
                f"{100 * record['loop_share']:.0f}%",
                dash_or(record["tokens_per_second"], 1),
                dash_or(record["speed_over_ar"], 2),
                *(dash_or(record["stage_ms"][stage], 2) for stage in STAGES),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)
