"""The figures of docs/quantised_log.md and data/README.md that records under data/results/h200 hold."""

import json
from pathlib import Path

import pytest

from ddtree.study_layers import fit_experts

ROOT = Path(__file__).resolve().parents[2]
LOG = (ROOT / "docs" / "quantised_log.md").read_text("utf-8").split("## 7. As it stands")[1]
RESULTS = ROOT / "data" / "results" / "h200"
ROWS = (1, 8, 16, 65)
CASES = {
    "INT4 experts, 384 top-8 of 2048, hidden 7168": "experts int4 {}x7168 8 of 384x2048",
    "fp8 experts, 256 top-8 of 2048": "experts fp8 {}x7168 8 of 256x2048",
    "fp8 matrix 7168 -> 18432": "linear fp8 {}x7168x18432",
}


def read(name):
    return json.loads((RESULTS / name).read_text("utf-8"))


@pytest.mark.parametrize("row", CASES)
def test_what_part_of_its_floor_a_quantised_case_reaches(row):
    cases = {case["name"]: case for case in read("kernels.json")["cases"]}
    cells = []
    for rows in ROWS:
        case = cases.get(CASES[row].format(rows))
        cells.append(f"{case['graph_us']:.1f} ({case['fraction']:.0%})" if case else "-")
    assert f"| {row} | {' | '.join(cells)} |" in LOG


@pytest.mark.parametrize("where", ["data/README.md", "README.md"])
def test_what_a_touched_expert_costs(where):
    fit = fit_experts(read("layers_kimi-k2.6_int4.json"))
    text = (ROOT / where).read_text("utf-8").replace("\n", " ")
    assert f"take {fit.base_us:.1f} us" in text and f"{fit.expert_us:.1f} us more for each" in text
    assert f"off by {fit.rms:.1%} in the mean square, by {fit.worst:.0%} at worst" in text
