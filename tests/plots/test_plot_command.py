"""`ddtree plot` as a user meets it: every kind from files, and one line for whatever is wrong."""

import functools
import json
import os
from types import SimpleNamespace

import pytest

from ddtree.cli_keep import keep_rounds
from ddtree.cli_plot_kinds import KINDS
from ddtree.errors import UsageError
from ddtree.trace import read_trace


@pytest.fixture
def run(command):
    """Run `ddtree plot` in this process; returns (exit code, stdout, stderr)."""
    return functools.partial(command, "plot")


WORKS = [
    ("tree", "trace.jsonl", ()),
    ("tree", "trace.jsonl", ("--budget", 4, "--round", 1)),
    ("acceptance", "trace.jsonl", ()),
    ("budgets", "compare.json", ()),
    ("budgets", "two.json", ("--over-ar", "--temperature", 0.8)),
    ("stages", "trace.jsonl", ()),
    ("stages", "compare.json", ()),
    ("layers", "layers.json", ("--rows", 16)),
    ("parity", "layers.json", ()),
    ("routing", "routing.json", ("--layer", 4)),
    ("load", "routing.json", ()),
    ("experts", "routing.jsonl", ()),
    ("experts", "row.jsonl", ("--layer", 3)),
    ("experts", "routing_summary.json", ("--layer", 4, "--temperature", 0)),
    ("training", "train_mine.json", ()),
    ("roofline", "kernels.json", ()),
    ("calibration", "trace.jsonl", ()),
    ("siblings", "trace.jsonl", ("--method", "chain")),
    ("expected", "trace.jsonl", ("--max-budget", 20)),
    ("cost", "trace.jsonl", ()),
    ("cost", "two.json", ("--temperature", 0)),
]


@pytest.mark.parametrize(("kind", "file", "options"), WORKS, ids=lambda value: str(value))
def test_a_figure_is_written(run, recorded, tmp_path, kind, file, options):
    out = tmp_path / "figure.png"
    code, stdout, err = run(kind, recorded / file, "-o", out, *options)
    assert (code, stdout, err) == (0, "", f"Wrote {out}.\n")
    assert out.read_bytes().startswith(b"\x89PNG") and os.listdir(tmp_path) == ["figure.png"]


def test_every_kind_is_tried():
    assert {kind for kind, _, _ in WORKS} == set(KINDS)


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")])
def test_the_suffix_is_the_format(run, recorded, tmp_path, suffix, magic):
    out = tmp_path / f"figure.{suffix}"
    code, stdout, _ = run(
        "budgets", recorded / "compare.json", "-o", out, "--title", "cost in $ and $", "--json"
    )
    assert code == 0 and json.loads(stdout)["output"] == str(out)
    assert out.read_bytes().startswith(magic)


def test_the_list_names_every_kind(run):
    code, out, _ = run("--list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(KINDS)
    assert set(json.loads(run("--list", "--json")[1])) == set(KINDS)


WRONG = {
    "unknown kind": (("pie", "compare.json"), "unknown kind 'pie'; give one of tree, "),
    "no kind": ((), "no kind was given"),
    "no file": (("tree",), "give a file with a trace"),
    "missing file": (("tree", "no-such.jsonl"), "cannot read"),
    "no JSON": (("budgets", "text.json"), "neither a trace nor a JSON document"),
    "a bare number": (("budgets", "number.json"), "bare int"),
    "a trace for a comparison": (("budgets", "trace.jsonl"), "expected the document of compare"),
    "a comparison for a trace": (("tree", "compare.json"), "no trace"),
    "the wrong document": (("roofline", "layers.json"), "expected a document of kind 'ddtree kernel bench'"),
    "no such layer": (
        ("experts", "routing.jsonl", "--layer", 9),
        "with a layer and temperature as asked for",
    ),
    "no such temperature": (
        ("experts", "routing_summary.json", "--temperature", 0.3),
        "as asked for; temperatures there: 0",
    ),
    "no rows of routing": (("experts", "compare.json"), "expected rows of study routing"),
    "rows of two models in one file": (("experts", "two_models.jsonl"), "those of one model, found several"),
    "rows and their summary": (
        ("experts", "routing.jsonl", "routing_summary.json"),
        "two records of one model",
    ),
    "one sweep twice": (("experts", "routing.jsonl", "routing.jsonl"), "expected those of one sweep"),
    "no experts": (("experts", "no_experts.jsonl"), "not in the form that plot experts reads"),
    "cut rows": (("experts", "cut_rows.jsonl"), "neither a trace nor a JSON document"),
    "no such round": (("tree", "trace.jsonl", "--round", 999), "no such round"),
    "no such budget": (("calibration", "trace.jsonl", "--budget", 5), "no run of method tree"),
    "no tables": (("siblings", "plain.jsonl"), "record the trace with tables"),
    "no round after the prefill": (("acceptance", "short.jsonl"), "no round after the prefill"),
    "a cut trace": (("tree", "cut.jsonl"), "line 3: not JSON"),
    "two temperatures": (("cost", "two.json"), "choose one with --temperature"),
    "no times": (("layers", "untimed.json"), "need a GPU"),
    "a damaged document": (("budgets", "damaged.json"), "not in the form that plot budgets reads"),
    "another model": (("tree", "trace.jsonl", "--model", "no/such"), "no/such"),
}


@pytest.fixture
def folder(recorded, tmp_path, monkeypatch):
    """A folder of good and bad files, the working folder of the test."""
    lines = (recorded / "trace.jsonl").read_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    plain = [json.dumps({name: v for name, v in record.items() if name != "table"}) for record in parsed]
    first = next(
        i for i, record in enumerate(parsed) if record["type"] == "run" and record["method"] == "tree"
    )
    rows = [json.loads(line) for line in (recorded / "routing.jsonl").read_text().splitlines()]
    other = [row | {"target_sha256": "other", "budget": 9} for row in rows]
    files = {
        "two_models.jsonl": "\n".join(map(json.dumps, rows + other)),
        "no_experts.jsonl": "\n".join(json.dumps(row | {"experts": 0}) for row in rows),
        "text.json": "not JSON",
        "number.json": "3",
        "plain.jsonl": "\n".join(plain),
        "short.jsonl": "\n".join([lines[0], *lines[first : first + 2]]),
        "cut.jsonl": "\n".join(lines[:2]) + "\n" + lines[2][:100],
        "cut_rows.jsonl": (recorded / "routing.jsonl").read_text()[:-20],
        "untimed.json": json.dumps({"kind": "ddtree layer bench", "times": None, "parity": None}),
        "damaged.json": json.dumps({"rows": [{"method": "tree", "temperature": 0}]}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for path in recorded.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_and_nothing_is_written(run, folder, case):
    arguments, said = WRONG[case]
    before = sorted(os.listdir(folder))
    code, out, err = run(*arguments, "-o", "figure.png")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and said in err and "Traceback" not in err
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (("-o", "figure.gif"), "one of png, svg, pdf"),
        (("-o", "figure"), "one of png, svg, pdf"),
        ((), "with -o"),
        (("-o", "no/such/figure.png"), "cannot write the figure"),
    ],
)
def test_an_output_that_cannot_be(run, folder, output, said):
    code, _, err = run("budgets", "compare.json", *output)
    assert code == 2 and said in err and len(err.splitlines()) == 1


def test_tables_want_a_trace(command):
    code, _, err = command("compare", "--limit", "1", "--tables")
    assert code == 2 and "name one with --trace" in err


def test_compare_keeps_the_rounds_of_every_row(command, tmp_path):
    trace = tmp_path / "trace.jsonl"
    words = ("--limit", "1", "--max-new-tokens", "6", "--budget", "4", "--json")
    code, out, _ = command("compare", *words, "--trace", trace, "--tables")
    rows = json.loads(out)["rows"]
    _, runs = read_trace(trace)
    assert code == 0 and len(runs) == len(rows) == 5
    for each, row in zip(runs, rows, strict=True):
        assert (each.settings["method"], each.settings["budget"]) == (row["method"], row["budget"])
        assert len(each.rounds) == row["rounds"] + 1
        assert ("table" in each.rounds[1]) == (row["method"] != "ar")


def test_a_device_keeps_no_table():
    with (
        pytest.raises(UsageError, match="use --backend numpy"),
        keep_rounds(SimpleNamespace(runner=object()), [], "trace.jsonl", tables=True),
    ):
        pass
