"""A sweep that is interrupted goes on where it stopped, repeats nothing, and ends with the same bytes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain

import psutil
import pytest
from study.shapes_of_tests import install
from support import assert_one_line

from ddtree import study_replay
from ddtree.errors import UsageError
from ddtree.shapes import cost_aware
from ddtree.shapes.cost_aware import DEFAULT_COST
from ddtree.study_journal import Journal
from ddtree.study_replay import replay

SWEEP = (["best_first", "chain"], [2, 8], [15])  # 6 recordings x 4 settings


@pytest.fixture
def counted(monkeypatch):
    """The cells that this process computes from here on."""
    cells, honest = [], study_replay.count

    def count(given, *others, **options):
        for cell, counts in zip(given, honest(given, *others, **options), strict=True):
            cells.append(cell)
            yield counts

    monkeypatch.setattr(study_replay, "count", count)
    return cells


@pytest.fixture
def whole(recorded, tmp_path):
    """The bytes of the sweep's file when nothing interrupts it."""
    with_journal(recorded, tmp_path / "whole.jsonl")
    assert [each.name for each in tmp_path.iterdir()] == ["whole.jsonl"]
    return (tmp_path / "whole.jsonl").read_bytes()


def with_journal(recorded, path, stop_at=None, sweep=SWEEP, said=None):
    """Run the sweep into a file; it stops, as by Ctrl-C, once so many rows are done."""
    done = []

    def progress(number, total):
        done.append(number)
        assert lines_of(path.with_name(f"{path.name}.part")) >= sum(done[1:]), (
            "a row was told before it was kept"
        )
        if stop_at is not None and sum(done) >= stop_at:
            raise KeyboardInterrupt

    try:
        return replay(recorded.recordings, *sweep, progress=progress, journal=Journal(path, said))
    except KeyboardInterrupt:
        assert stop_at is not None


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def refused(recorded, path, match, sweep=SWEEP):
    before = {each: each.read_bytes() for each in path.parent.iterdir()}
    with pytest.raises(UsageError, match=match) as caught:
        with_journal(recorded, path, sweep=sweep)
    assert_one_line(caught.value)
    assert {each: each.read_bytes() for each in path.parent.iterdir()} == before, "nothing is lost"


def test_an_interrupted_sweep_goes_on(recorded, tmp_path, whole, counted):
    path, said = tmp_path / "rows.jsonl", []
    with_journal(recorded, path, stop_at=7)
    assert len(counted) == 7 and not path.exists()
    with_journal(recorded, path, stop_at=15)
    assert len(counted) == 15
    rows = with_journal(recorded, path, said=said.append)
    assert len(counted) == 24 and said == [f"15 of 24 rows are there already: {path}"]
    assert path.read_bytes() == whole and rows == [json.loads(line) for line in whole.splitlines()]
    assert not path.with_name("rows.jsonl.part").exists()
    assert with_journal(recorded, path) == rows and len(counted) == 24
    assert path.read_bytes() == whole


@pytest.mark.parametrize("cut", [1, 2, 100, -2])
def test_a_torn_last_line_is_dropped(recorded, tmp_path, whole, counted, cut):
    """As a kill in the middle of a write leaves it: here after its first bytes, and before its last."""
    lines = whole.splitlines(keepends=True)
    part = tmp_path / "rows.jsonl.part"
    part.write_bytes(b"".join(lines[5:9]) + lines[9][:cut])
    with_journal(recorded, tmp_path / "rows.jsonl", stop_at=5)
    assert len(counted) == 1 and part.read_bytes() == b"".join(lines[5:9]) + lines[0]
    with_journal(recorded, tmp_path / "rows.jsonl")
    assert len(counted) == 20 and (tmp_path / "rows.jsonl").read_bytes() == whole


def test_a_larger_sweep_takes_the_rows_of_a_smaller(recorded, tmp_path, whole, counted):
    (tmp_path / "rows.jsonl").write_bytes(whole)
    larger = (["best_first", "chain"], [1, 2, 8], [15])
    rows = with_journal(recorded, tmp_path / "rows.jsonl", sweep=larger)
    assert len(counted) == 12 and rows == replay(recorded.recordings, *larger)
    refused(
        recorded,
        tmp_path / "rows.jsonl",
        "line 1: this sweep has no shape best_first of budget 1 and depth 15",
    )


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.part"])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": "0.0.9"}, "line 3: made by ddtree 0.0.9, this is"),
        ({"shape_sha256": "0" * 64}, "line 3: the code of shape chain, or its file, was another"),
        ({"trace_sha256": "0" * 64}, "line 3: a row of another recording"),
        ({"depth": 14}, "line 3: this sweep has no shape chain of budget 2 and depth 14"),
        ({"budget": []}, "line 3: no row of study replay"),
        ({"rounds": "5"}, "line 3: no row of study replay"),
        ({"tokens": None}, "line 3: no row of study replay"),
    ],
)
def test_rows_of_another_sweep_are_not_mixed_in(recorded, tmp_path, whole, name, change, match):
    (tmp_path / "mixed").mkdir()
    lines = whole.splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | change).encode()
    (tmp_path / "mixed" / name).write_bytes(b"\n".join(lines) + b"\n")
    refused(recorded, tmp_path / "mixed" / "rows.jsonl", match)


@pytest.mark.parametrize("content", [b"notes\n", b"{}\n", b"\xff\x00\n", b"[1]\n", b"no newline"])
def test_a_file_of_something_else_is_kept(recorded, tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    refused(recorded, tmp_path / "rows.jsonl", "line 1: no row of study replay; name another --out, or move")


def test_another_file_or_code_of_a_shape_is_another_shape(recorded, monkeypatch, tmp_path):
    """A template's content counts, not its name; so does the source of a shape that a package offers."""
    install(monkeypatch, tmp_path)
    template, module = tmp_path / "two.json", tmp_path / "shape_slow.py"
    template.write_text("[[0], [1]]")
    for shape, file, text in (
        (f"fixed:{template}", template, "[[0], [0, 0]]"),
        ("slow", module, "# another\n"),
    ):
        sweep = ([shape], [2], [15])
        (out := tmp_path / f"rows of {file.name}").mkdir()
        with_journal(recorded, out / "rows.jsonl", sweep=sweep)
        file.write_text(text if file is template else file.read_text() + text)
        refused(recorded, out / "rows.jsonl", "the code of shape .*, or its file, was another", sweep)


def test_another_default_file_of_a_shape_is_another_shape(recorded, monkeypatch, tmp_path):
    """cost_aware by another cost of rounds, which is a file unless one is named."""
    cost = tmp_path / "cost.json"
    cost.write_bytes(DEFAULT_COST.read_bytes())
    monkeypatch.setattr(cost_aware.make, "__defaults__", (cost,))
    (out := tmp_path / "rows").mkdir()
    sweep = (["cost_aware"], [2], [15])
    with_journal(recorded, out / "rows.jsonl", sweep=sweep)
    cost.write_text(cost.read_text() + "\n")
    refused(recorded, out / "rows.jsonl", "the code of shape cost_aware, or its file, was another", sweep)


def test_a_journal_and_a_context_do_not_go_together(recorded, tmp_path):
    with pytest.raises(UsageError, match="cannot tell one context from another"):
        replay(recorded.recordings, ["fixed"], context={"template": [[0]]}, journal=Journal(tmp_path / "x"))


def test_a_full_disk_loses_nothing(recorded, tmp_path, whole, monkeypatch):
    path, honest = tmp_path / "rows.jsonl", Journal.add

    def add(journal, rows):
        if journal.added == 5:
            journal.file.close()
            journal.file = open("/dev/full", "ab")  # noqa: SIM115  the journal closes it
        honest(journal, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add)
        with pytest.raises(
            UsageError, match=f"cannot write the rows: {os.strerror(errno.ENOSPC)}; finished rows"
        ):
            with_journal(recorded, path)
    said = []
    with_journal(recorded, path, said=said.append)
    assert said == [f"5 of 24 rows are there already: {path}"] and path.read_bytes() == whole


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sweep_killed_in_the_middle_goes_on(recorded, command, monkeypatch, tmp_path, counted, workers):
    """SIGKILL of the whole command: its workers go with it, and no finished cell is computed again."""
    install(monkeypatch, tmp_path)
    budgets = [budget for budget in (1, 2, 3, 4, 6, 8, 12, 16)]
    out, part = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.part"
    words = ["study", "replay", recorded.directory, "--shape", "slow", "--out"]
    options = [*chain(*(("--budget", budget) for budget in budgets)), "--workers", workers]
    line = [sys.executable, "-m", "ddtree", *map(str, [*words, out, *options])]
    sweep = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while sweep.poll() is None and lines_of(part) < 5:
        time.sleep(0.01)
    children = psutil.Process(sweep.pid).children(recursive=True)
    sweep.send_signal(signal.SIGKILL)
    assert sweep.wait() == -signal.SIGKILL and not out.exists()
    _, alive = psutil.wait_procs(children, 60)
    assert not alive and len(children) >= (workers > 1) * workers
    finished = lines_of(part)
    code, _, err = command(*words, out, *options[:-2])
    assert code == 0 and f"{finished} of 48 rows are there already" in err
    assert 5 <= finished < 48 and len(counted) == 48 - finished
    assert command(*words, tmp_path / "whole.jsonl", *options[:-2])[0] == 0
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
