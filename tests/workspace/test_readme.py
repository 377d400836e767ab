"""The README's figures of an H200 are those recorded under data/results/h200."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
RESULTS = ROOT / "data" / "results" / "h200"


def read(name):
    return json.loads((RESULTS / name).read_text("utf-8"))


def numbers_of(row):
    """The numbers in the cells of the README's table row that begins with `row`."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {row} |")]
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line.split("|", 2)[2])]


@pytest.mark.parametrize(
    ("row", "temperature"),
    [("greedy (28% of the tokens in loops)", 0.0), ("temperature 0.8, top-p 0.95", 0.8)],
)
def test_tokens_per_second(row, temperature):
    at = {
        (r["method"], r["budget"]): r for r in read("decode.json")["rows"] if r["temperature"] == temperature
    }
    keys = ("ar", 0), ("chain", 15), ("tree", 16), ("tree", 64)
    assert numbers_of(row) == [round(at[key]["tokens_per_second"]) for key in keys]
    assert all(record["tokens_equal"] for record in at.values())
    if not temperature:
        wall = "{}, {}, {} and {} tokens/s".format(
            *(round(at[key]["tokens_per_second_wall"]) for key in keys)
        )
        assert wall in README.replace("\n", " ")
        assert round(100 * at["tree", 64]["loop_share"]) == 28


def test_host_and_wait_of_a_round():
    (record,) = [
        r
        for r in read("decode.json")["rows"]
        if (r["budget"], r["method"], r["temperature"]) == (64, "tree", 0)
    ]
    own, wait = (round(record["host_us"][name]["median"]) for name in ("own", "wait"))
    said = f"In a round of tree 64 the host has {own} us of work of its own (median) and waits {wait} us for the GPU."
    assert said in README


def test_eager_rounds_and_errors():
    times = [record["eager_over_graphs"] for record in read("decode.json")["graphs_against_eager"]]
    assert f"{round(min(times))} to {round(max(times))} times slower" in README
    worst = max(record["worst_layer"]["error"] for record in read("layers.json")["parity"])
    assert "within 3.1e-7 relative of f64" in README and 3e-7 < worst <= 3.1e-7


@pytest.mark.parametrize("rows", [1, 64])
def test_the_larger_model(rows):
    (record,) = [record for record in read("layers_random-4.8b.json")["times"] if record["rows"] == rows]
    time, floor = record["forward"]["us"], record["forward"]["floor_us"]
    assert numbers_of(str(rows)) == [round(time), round(floor), round(time / floor, 1)]
    assert all(record["equal"] for record in read("decode_random-4.8b.json")["equality"])


KERNELS = {
    "logits to tree, 15 x 163,840, budget 64 / 512": [
        f"logits_to_tree f32 15x163840 budget {budget}" for budget in (64, 512)
    ],
    "accept + compaction, 61 layers x (512 + 64) bf16, 64 nodes": [
        "accept_compact bf16 61 layers 512+64 64 nodes"
    ],
    "branch scores / a branch-aware tree of 64 nodes / a plain one": [
        "branch_scores 15x16 rank 64 vocab 163840",
        "build_branch_tree 15x16 budget 64",
        "build_tree 15x64 budget 64",
    ],
    "tree attention, 64 heads, 512 + 64, bf16, context 8192, 1 row / 64 rows": [
        f"attention bf16 {rows}x64x512+64 after 8192" for rows in (1, 64)
    ],
    "the same, 1 row after 65,536 positions": ["attention bf16 1x64x512+64 after 65536"],
    "linear 7168 x 18432 bf16, 1 / 16 / 64 / 128 / 256 rows": [
        f"linear bf16 {rows}x7168x18432" for rows in (1, 16, 64, 128, 256)
    ],
    "MoE, 384 experts top-8 of 2048, hidden 7168, INT4, random routing, 1 / 16 / 65 rows": [
        f"experts int4 {rows}x7168 8 of 384x2048" for rows in (1, 16, 65)
    ],
    "MoE, 256 experts top-8 of 2048, hidden 7168, fp8, random routing, 1 / 65 rows": [
        f"experts fp8 {rows}x7168 8 of 256x2048" for rows in (1, 65)
    ],
}


def test_the_log_s_last_forward():
    log = (ROOT / "docs" / "forward_log.md").read_text("utf-8")
    found = [each["forward"] for each in read("layers_random-4.8b.json")["times"] if each["rows"] in (1, 64)]
    cells = [
        f"{each['us']:.0f} ({each['us_range'][0]:.0f}), {each['us'] / each['floor_us']:.2f} times"
        for each in found
    ]
    assert f"| the same, recorded again | {' | '.join(cells)} |" in log


@pytest.mark.parametrize("row", KERNELS)
def test_kernel_times(row):
    times = {case["name"]: case["graph_us"] for case in read("kernels.json")["cases"]}
    assert numbers_of(row) == [round(times[name], 1) for name in KERNELS[row]]


def test_what_attention_reaches():
    cases = {case["name"]: case for case in read("kernels.json")["cases"]}
    many = cases["attention bf16 64x64x512+64 after 8192"]
    one = cases["attention bf16 1x64x512+64 after 65536"]
    (layer,) = [
        each
        for each in read("layers_kimi-k2.6_int4.json")["times"]
        if (each["rows"], each["context_len"]) == (64, 8192)
    ]
    (us,) = [e["us"] for e in layer["operations"] if (e["kind"], e["operation"]) == ("moe", "attention")]
    text = README.replace("\n", " ")
    assert f"at {many['tflop_s']:.0f} TFLOP/s on wgmma from Python ({many['graph_us']:.0f} us; in" in text
    assert f"room for 131,072 positions, it takes {us:.0f}); one row" in text
    assert f"one row after 65,536 positions at {one['fraction']:.0%} of copy bandwidth" in text


LAYERS = {
    "Kimi K2.6, INT4 experts: layer": ("layers_kimi-k2.6_int4", lambda record: moe_of(record)),
    "its experts, routed and shared": ("layers_kimi-k2.6_int4", lambda record: experts_of(record, "us")),
    "their floor": ("layers_kimi-k2.6_int4", lambda record: experts_of(record, "floor_us")),
    "experts touched of 384": (
        "layers_kimi-k2.6_int4",
        lambda record: record["forward"]["experts_touched"][0],
    ),
    "DeepSeek-V3, fp8: layer": ("layers_deepseek-v3_fp8", lambda record: moe_of(record)),
    "experts touched of 256": (
        "layers_deepseek-v3_fp8",
        lambda record: record["forward"]["experts_touched"][0],
    ),
}


def moe_of(record):
    (us,) = [layer["us"] for layer in record["layers"] if layer["kind"] == "moe"]
    return us


def experts_of(record, column):
    """Routed experts, and what makes the shared one beside them: three products, swiglu, add."""
    return sum(
        each[column]
        for each in record["operations"]
        if each["kind"] == "moe"
        and (
            each["operation"].startswith(("experts ", "linear mlp.shared"))
            or each["operation"] in ("swiglu", "add")
        )
    )


@pytest.mark.parametrize("row", LAYERS)
def test_layers_at_true_shape(row):
    name, value = LAYERS[row]
    at = {each["rows"]: each for each in read(f"{name}.json")["times"] if each["context_len"] == 8192}
    assert numbers_of(row) == [round(value(at[rows])) for rows in (1, 8, 64, 256)]


def test_a_draft_at_true_shape():
    (draft,) = [
        each
        for each in read("draft_kimi-k2.6.json")["times"]
        if (each["what"], each["context_len"]) == ("draft", 8192)
    ]
    assert f"takes {draft['us'] / 1e3:.1f} ms there, {draft['fraction']:.0%} of copy bandwidth" in README


def test_it_can_fail(monkeypatch):
    monkeypatch.setitem(globals(), "README", README.replace(" us |", "1 us |"))
    with pytest.raises(AssertionError):
        test_kernel_times(next(iter(KERNELS)))
