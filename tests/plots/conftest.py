"""A small trace by the shipped model, and the documents beside it, written once a session."""

import json

import numpy as np
import pytest
from plots.examples import gates, kernel_document, layer_document, record
from study.routed import CHOSEN, EXPERTS, routed
from support import trained

from ddtree.cli_keep import keep_rounds
from ddtree.compare import compare, plan, report
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.engine import Engine
from ddtree.prompts import load_prompts
from ddtree.study_experts import summarise_routing
from ddtree.study_experts_table import routing_summary
from ddtree.study_routing import routing_document


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """The folder of trace.jsonl (2 prompts, budgets 4 and 16, tables), compare.json and made-up documents."""
    folder = tmp_path_factory.mktemp("recorded")
    engine, prompts = Engine(trained(), max_budget=16), load_prompts()[:2]
    rows = plan(engine.horizon, [4], [SamplingConfig()], DecodeConfig(max_new_tokens=24))
    with keep_rounds(engine, prompts, str(folder / "trace.jsonl"), tables=True) as keep:
        compare(engine, prompts, rows, keep)
    documents = {
        "compare": {"rows": report(rows)},
        "two": {
            "rows": [record(m, b, t) for t in (0.0, 0.8) for m, b in (("ar", 0), ("tree", 8), ("tree", 16))]
        },
        "layers": layer_document(),
        "kernels": kernel_document(),
        "train_mine": {"logs": {"target": [{"step": step, "loss": 9.0 / step} for step in (1, 2, 3)]}},
        "routing": routing_document({1: gates(seed=1), 4: gates(seed=4)}),
    }
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    rng = np.random.default_rng(0)
    rows = routed(lambda: rng.choice(EXPERTS, CHOSEN, replace=False), prompts=2)
    (folder / "routing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "row.jsonl").write_text(json.dumps(rows[0]) + "\n")
    summary = routing_summary(summarise_routing(rows), {"prompts": 2})
    (folder / "routing_summary.json").write_text(json.dumps(summary))
    return folder
