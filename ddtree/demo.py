"""The demo: a few prompts continued, the methods compared on them, and one round's tree drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from ddtree.compare import ACCEPTANCE_NOTE, Row, compare, format_table, plan, report
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.decode import Round
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.plots import token_label, tree_figure
from ddtree.prompts import Prompt, load_prompts
from ddtree.study_rounds import departure
from ddtree.trace import write_trace

PROMPTS = ("function", "class", "test", "docstring", "parsing", "algorithm")  # the first of each kind
BUDGET = 32
NEW_TOKENS = 64
TEMPERATURES = (0.0, 0.8)


def run_demo(open_engine: Callable[[int], Engine], out: Path, say: Callable[[str], None]) -> bool:
    """Run it, leave tree.png, trace.jsonl and compare.json in `out`, and say whether all tokens were equal."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot make the folder: {error.strerror}") from None
    engine = open_engine(BUDGET)
    if engine.drafter is None:
        raise UsageError(f"{engine.bundle.path}: the bundle has no drafter; name one with --drafter")
    prompts = _first_of_each_kind(load_prompts())
    samplings = [SamplingConfig(temperature=t, top_p=0.95 if t else 1.0) for t in TEMPERATURES]
    base = DecodeConfig(max_new_tokens=NEW_TOKENS, stop_token_ids=engine.config.eos_token_ids)
    rows = plan(engine.horizon, [BUDGET], samplings, base)
    kept: dict[str, list[Round]] = {}
    drawn: list[tuple[Prompt, Round]] = []

    with (
        write_trace(out / "trace.jsonl", engine) as writer,
        tqdm(total=len(rows) * len(prompts), desc="demo", unit="decode") as bar,
    ):

        def keep(row: Row, prompt: Prompt, rounds: list[Round]) -> None:
            bar.update()
            config = row.config
            if config.method != "tree" or not config.sampling.greedy:
                return
            writer.run(prompt.id, engine.bundle.encode(prompt.text), config, prompts.index(prompt))
            for this in rounds:
                writer.round(this)
            if config.budget == BUDGET:
                kept[prompt.id] = rounds
            elif config.budget == engine.horizon + 1:
                drawn.extend((prompt, this) for this in rounds[1:])

        compare(engine, prompts, rows, keep)

    for prompt in prompts:
        tokens = [token for this in kept[prompt.id] for token in this.tokens]
        say(f"\n--- {prompt.id}: the prompt, then what the model continued ---")
        say(f"{prompt.text}▌{engine.bundle.decode(tokens)}")
    records = report(rows)
    equal = all(record["tokens_equal"] for record in records)
    say(f"\n{format_table(records)}\n{ACCEPTANCE_NOTE}")
    say(f"\nTree and chain tokens are {'the same as' if equal else 'NOT those of'} autoregressive decoding.")
    (out / "compare.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    _draw(engine, *_most_telling(drawn), out / "tree.png")
    say(f"Wrote {out / 'tree.png'}, {out / 'trace.jsonl'} and {out / 'compare.json'}.")
    return equal


def _first_of_each_kind(prompts: list[Prompt]) -> list[Prompt]:
    first = {prompt.kind: prompt for prompt in reversed(prompts)}
    return [first[kind] for kind in PROMPTS]


def _most_telling(drawn: list[tuple[Prompt, Round]]) -> tuple[Prompt, Round]:
    """The round whose accepted path left the spine and went furthest: what a chain would have missed."""
    return max(drawn, key=lambda item: departure(item[1].tree, item[1].path))


def _draw(engine: Engine, prompt: Prompt, this: Round, path: Path) -> None:
    labels = [token_label(engine.bundle.decode([int(token)])) for token in this.tree.token_ids]
    bonus = token_label(engine.bundle.decode([this.bonus]))
    title = f"Draft tree of round {this.index}, prompt {prompt.id}"
    tree_figure(this.tree, this.path, bonus, labels, title).savefig(path, dpi=150)
