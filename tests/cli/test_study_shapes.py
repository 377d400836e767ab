"""`ddtree study --shapes`: every shape with its line, as text and as JSON."""

import json
import sys

import pytest

from ddtree import cli
from ddtree.shapes import SHAPES


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process; returns (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ddtree", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code, *capsys.readouterr())

    return call


def test_the_shapes_are_listed(run):
    code, out, err = run("study", "--shapes")
    assert (code, err) == (0, "")
    assert [line.split(maxsplit=1) for line in out.splitlines()] == [list(item) for item in SHAPES.items()]
    code, out, err = run("study", "--shapes", "--json")
    assert (code, err) == (0, "") and json.loads(out) == {"shapes": dict(SHAPES)}


def test_a_study_of_nothing_is_refused(run):
    code, out, err = run("study")
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and "--shapes" in err
