"""--shape where a tree is decoded: the shape is used, named in tables and JSON, and no token changes."""

import json

import pytest
from support import branched

from ddtree.trace import read_trace

SHORT = ("--max-new-tokens", 12)
BRANCHED = ("--shape", "branch_aware")


def test_generate_builds_the_shape(command, tmp_path):
    texts = {}
    for name in ("best_first", "beam:2", "branch_aware"):
        more = ("--trace", tmp_path / "trace.jsonl", "--drafter", branched().drafter.path)
        code, out, _ = command("generate", "class Stack:\n", "--shape", name, "--json", *SHORT, *more)
        (decoded,) = read_trace(tmp_path / "trace.jsonl")[1]
        assert code == 0 and decoded.settings["shape"] == name
        assert ("conditional" in decoded.rounds[1]["table"]) == (name == "branch_aware")
        texts[name] = json.loads(out)["text"], [this["tree"] for this in decoded.rounds[1:]]
    (text, trees), *others = texts.values()
    assert all(each[0] == text and each[1] != trees for each in others)


def test_compare_names_the_shape(command):
    arguments = ("compare", "--limit", 1, "--budget", 4, "--drafter", branched().drafter.path, *SHORT)
    code, out, _ = command(*arguments, *BRANCHED, "--json")
    document = json.loads(out)
    assert code == 0 and document["tokens_equal"] is True and document["shape"] == "branch_aware"
    shapes = {row["method"]: row["shape"] for row in document["rows"]}
    assert shapes == {"ar": None, "chain": None, "tree": "branch_aware"}
    code, out, _ = command(*arguments, *BRANCHED)
    assert code == 0 and out.count("tree branch_aware") == 4, "two budgets, the fair pair, the best"
    plain = command(*arguments)[1]
    assert "branch_aware" not in plain and plain.count(" tree ") == 4


def test_bench_decode_names_the_shape(command):
    arguments = ("bench", "decode", "--limit", 1, "--budget", 4, "--drafter", branched().drafter.path)
    code, out, _ = command(*arguments, *SHORT, *BRANCHED)
    assert code == 0 and out.count("tree branch_aware") == 2


def test_record_and_replay(command, tmp_path):
    drafter = ("--drafter", branched().drafter.path)
    code, out, _ = command(
        "study", "record", "--out", tmp_path / "rec", "--limit", 1, *drafter, *SHORT, "--json"
    )
    size = sum(path.stat().st_size for path in (tmp_path / "rec").glob("*.kdtr"))
    assert code == 0 and json.loads(out)["bytes"] == size > 12 * 15 * 16 * 16 * 4
    code, out, _ = command(
        "study", "replay", tmp_path / "rec", *BRANCHED, "--shape", "best_first", "--budget", 16
    )
    assert code == 0 and [line.split()[1] for line in out.splitlines()[1:3]] == ["branch_aware", "best_first"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", *BRANCHED], "branch_aware needs a drafter with a branch head"),
        (["compare", "--limit", "1", *BRANCHED], "branch_aware needs a drafter with a branch head"),
        (["bench", "decode", "--limit", "1", *BRANCHED], "branch_aware needs a drafter with a branch head"),
        (["generate", "x", "--shape", "star"], "shape: expected one of beam, best_first, branch_aware"),
        (["generate", "x", "--shape", "oracle"], "oracle needs continuation"),
    ],
)
def test_what_cannot_be_built_is_one_line(command, arguments, said):
    code, out, err = command(*arguments)
    lines = [line for line in err.splitlines() if not line.startswith("backend ")]  # which bench says first
    assert (code, out) == (2, "") and len(lines) == 1 and said in lines[0]


def test_recordings_without_a_head_are_told_in_one_line(command, tmp_path):
    command("study", "record", "--out", tmp_path / "rec", "--limit", 1, *SHORT)
    code, out, err = command("study", "replay", tmp_path / "rec", *BRANCHED)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert "branch_aware needs the scores of a branch head" in err and str(tmp_path / "rec") in err
