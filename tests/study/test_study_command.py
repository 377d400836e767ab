"""`study record` and `study replay` as a user meets them."""

import json

import pytest

from ddtree.study_replay import replay

HEADINGS = "temp  shape       budget  depth  prompts  rounds  nodes  accept  no loops"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("command") / "new" / "folder"


def record(command, folder, *more):
    """Two prompts of six tokens."""
    return command("study", "record", "--out", folder, "--limit", 2, "--max-new-tokens", 6, "--k", 8, *more)


def test_record_then_replay(command, folder, tmp_path):
    code, out, err = record(command, folder, "--temperature", 0, "--temperature", 0.6, "--json")
    document = json.loads(out)
    assert code == 0 and (document["recordings"], document["tokens"]) == (4, 24)
    assert "backend numpy" in document["backend"] and "record: 100%" in err
    code, out, err = record(command, folder)
    assert code == 0 and "recordings: 2" in out and "100%" in err

    rows = (
        "study",
        "replay",
        folder,
        "--shape",
        "best_first",
        "--shape",
        "chain",
        "--budget",
        4,
        "--budget",
        8,
    )
    code, out, err = command(*rows, "--depth", 3, "--json")
    document = json.loads(out)
    assert code == 0 and "trees/s" in err and len(document["rows"]) == 16
    assert document["settings"]["k"] == 8 and document["settings"]["model_sha256"]["target"]
    code, out, err = command(*rows, "--depth", 3, "--out", tmp_path / "rows.jsonl")
    written = list(map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()))
    assert code == 0 and written == document["rows"]
    assert out.splitlines()[0] == HEADINGS
    assert len(out.splitlines()) == 1 + 8 + 1 and "bonus token included" in out
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("record", "--out", "data/recorded"), "do not go into the package's data/"),
        (("record", "--out", "FOLDER", "--backend", "cuda"), "use --backend numpy"),
        (("record", "--out", "FOLDER", "--temperature", "0", "--temperature", "-1"), "temperature: expected"),
        (("record", "--out", "FOLDER", "--k", "9"), "recorded with"),
        (("record",), "Missing option '--out'"),
        (("replay", "FOLDER", "--budget", "9"), "the 8 likeliest tokens of each position, found budget 9"),
        (("replay", "FOLDER", "--budget", "4", "--depth", "99"), "proposes at most 15 tokens"),
        (("replay", "FOLDER", "--shape", "bush"), "shape: expected one of"),
        (("replay", "FOLDER", "--budget", "4", "--json", "--out", "x.jsonl"), "give one of them"),
        (("replay", "FOLDER", "--budget", "4", "--out", "nowhere/x.jsonl"), "cannot write the rows"),
        (("replay", "FOLDER", "--budget", "4", "--out", ""), "cannot write the rows"),
        (("replay", "FOLDER/.."), "cannot read the recordings' index"),
    ],
)
def test_what_cannot_be_done_is_one_line(command, folder, root, monkeypatch, arguments, said):
    if not (folder / "index.jsonl").exists():
        assert record(command, folder)[0] == 0
    monkeypatch.chdir(root)
    code, out, err = command("study", *(word.replace("FOLDER", str(folder)) for word in arguments))
    last = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("ddtree: ")]
    assert code == 2 and out == "" and len(last) == 1 and said in last[0]
    assert not (root / "data" / "recorded").exists()


def test_replay_runs_no_model(command, folder, monkeypatch):
    from ddtree.engine import Engine

    if not (folder / "index.jsonl").exists():
        assert record(command, folder)[0] == 0
    monkeypatch.setattr(Engine, "__init__", lambda *args, **more: pytest.fail("an engine was opened"))
    assert command("study", "replay", folder, "--budget", 4)[0] == 0 and callable(replay)
