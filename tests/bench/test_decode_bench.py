"""`bench decode` without a GPU: what it says of rounds, of the host, of equality; and its command line."""

import json

import pytest
from bench.small import write_small_config
from support import trained

from ddtree import bench_decode
from ddtree.bench_decode import format_decode_table, host_record, run_decode_bench
from ddtree.bench_random import open_random
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.engine import Engine
from ddtree.prompts import load_prompts
from ddtree.rounds import HOST_PARTS


def run(bundle, equality=()):
    return run_decode_bench(
        lambda graphs: Engine(bundle, max_budget=63),
        load_prompts()[:2],
        [8],
        [SamplingConfig(), SamplingConfig(0.8)],
        DecodeConfig(max_new_tokens=12),
        equality,
    )


def test_the_document():
    document = run(trained(), (8, 16))
    json.dumps(document)
    assert bench_decode.passed(document) and document["graphs_against_eager"] == []
    for row in document["rows"]:
        assert (row["mode"], row["dtype"], row["gemm"], row["backend"]) == (
            "host",
            "f32",
            "invariant",
            "numpy",
        )
        assert row["host_us"] is None and row["wall_ms_per_round"] is None and row["tokens_per_second"] > 0
    assert [record["accepted"] for record in document["equality"]] == [9, 16]
    assert "tree of 16 nodes, 16 tokens accepted: equal" in format_decode_table(document)


@pytest.mark.parametrize("where", ["rows", "graphs_against_eager", "equality"])
def test_a_difference_fails(where):
    document = {"rows": [{"tokens_equal": True}], "graphs_against_eager": [{"tokens_equal": True}]}
    document["equality"] = [{"equal": True}]
    assert bench_decode.passed(document)
    document[where] = [{"tokens_equal": False, "equal": False}]
    assert not bench_decode.passed(document)


def test_host_times_are_medians_and_the_wait_is_no_work():
    samples = [dict(zip(HOST_PARTS, (1e-6 * n, 2e-6, 3e-6, 1e-3, 4e-6), strict=True)) for n in (1, 2, 9)]
    record = host_record(samples)
    assert record["own"] == {"median": pytest.approx(9), "p90": pytest.approx(9)}
    assert record["loop"]["median"] == pytest.approx(2) and record["loop"]["p90"] == pytest.approx(7.6)
    assert record["wall"]["median"] == pytest.approx(1011)
    assert host_record([]) is None
    assert bench_decode.wall_seconds(samples) == pytest.approx(3 * 1009e-6 + 12e-6)


@pytest.fixture
def small(tmp_path):
    """The path of a small config with a drafter beside it."""
    return write_small_config(tmp_path)


def test_decode_of_random_weights(command, small):
    code, out, err = command(
        "bench",
        "decode",
        "--config",
        small,
        "--budget",
        4,
        "--max-new-tokens",
        8,
        "--limit",
        1,
        "--json",
    )
    document = json.loads(out)
    assert code == 0 and "backend numpy" in err
    assert document["model"] == "small" and document["prompts"] == 1
    assert [(r["budget"], r["accepted"], r["equal"]) for r in document["equality"]] == [
        (63, 6, True),
        (4, 5, True),
    ]
    assert command("bench", "decode", "--config", small, "--budget", 4, "--limit", 1)[0] == 0


def test_decode_exits_1_when_a_bit_differs(command, monkeypatch, small):
    unequal = [{"nodes": 4, "accepted": 3, "equal": False}]
    monkeypatch.setattr(bench_decode, "tree_equals_autoregressive", lambda *arguments: unequal)
    code, out, _ = command("bench", "decode", "--config", small, "--max-new-tokens", 2, "--limit", 1)
    assert code == 1 and "NOT EQUAL" in out


def test_layers_of_random_weights(command, small):
    code, out, _ = command("bench", "layers", "--config", small, "--rows", 3, "--context", 20, "--json")
    document = json.loads(out)
    assert code == 0 and document["times"] is None
    assert document["parity"][0]["passed"] and document["parity"][0]["context_len"] == 20
    code, out, _ = command(
        "bench",
        "layers",
        "--config",
        small,
        "--layers",
        1,
        "--rows",
        3,
        "--context",
        20,
        "--json",
    )
    assert code == 0 and len([s for s in json.loads(out)["parity"][0]["steps"] if s["step"] == "layer"]) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("layers", "--layers", 2), "layers: only a model of random weights"),
        (("layers", "--config", "random-4.8b", "--layers", 13), "layers: expected 1 to 12, found 13"),
        (
            ("layers", "--config", "no-such"),
            "deepseek-v2-lite, deepseek-v3, kimi-k2, kimi-k2.6, random-4.8b; found",
        ),
        (("decode", "--config", "kimi-k2"), "there is no drafter"),
        (("layers", "--weights", "fp8"), "weights: only those of a random model"),
        (("decode", "--weights", "int4"), "weights: only those of a random model"),
    ],
)
def test_wrong_usage_is_one_line(command, arguments, says):
    code, out, err = command("bench", *arguments)
    assert code == 2 and not out and says in err and len(err.splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_on_the_gpu(dtype, small):
    bundle = open_random(str(small))

    def open_engine(graphs):
        return Engine(bundle, backend="cuda", dtype=dtype, max_budget=63, graphs=graphs)

    document = run_decode_bench(
        open_engine, load_prompts()[:2], [8], [SamplingConfig()], DecodeConfig(max_new_tokens=12), (63, 8)
    )
    assert bench_decode.passed(document)
    assert {row["mode"] for row in document["rows"]} == {"graphs"}
    assert all(row["host_us"]["own"]["median"] > 0 for row in document["rows"])
    assert all(row["eager_over_graphs"] > 1 for row in document["graphs_against_eager"])
