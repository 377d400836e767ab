"""Every notebook runs from a fresh kernel, and is committed as that run left it; each rule for them can fail."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip(
    "nbformat", reason="nbformat is not installed: the extra `notebooks` brings it"
)
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output  # noqa: E402
from notebooks.execute import main, read, tidy  # noqa: E402
from notebooks.rules import MOST_BYTES, MOST_CELLS, kinds_of_outputs, problems  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_keeps_the_rules(path: Path) -> None:
    assert problems(read(path), path.stat().st_size) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_a_fresh_kernel(path: Path, tmp_path: Path) -> None:
    """What it gives here keeps the rules too, and is of the same kinds, cell by cell, as what is committed."""
    command = [sys.executable, ROOT / "tests/notebooks/execute.py", path, "--into", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    fresh = read(tmp_path / path.name)
    assert problems(fresh, (tmp_path / path.name).stat().st_size) == []
    assert kinds_of_outputs(fresh) == kinds_of_outputs(read(path)), "other outputs than the committed ones"


# --- each rule can fail ---------------------------------------------------------------------------------------------


def good() -> nbformat.NotebookNode:
    """A small notebook that keeps every rule."""
    heading = new_markdown_cell("## A section")
    shown = new_output("execute_result", {"text/plain": "4"}, execution_count=1)
    said = new_output("stream", name="stdout", text="said aloud\n")
    cells = [
        new_markdown_cell("# A title"),
        heading,
        new_code_cell("assert 2 + 2 == 4\n2 + 2", execution_count=1, outputs=[shown]),
        new_code_cell("%matplotlib inline\nprint('said aloud')", execution_count=2, outputs=[said]),
    ]
    return tidy(new_notebook(cells=cells))


def test_a_good_notebook_has_no_problems() -> None:
    assert problems(good(), 1000) == []


def with_code(source: str) -> nbformat.NotebookNode:
    notebook = good()
    notebook.cells[2].source = source
    return tidy(notebook)


def with_output(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    notebook = good()
    notebook.cells[2].outputs = [output]
    return notebook


def with_change(*names: str, to: object) -> nbformat.NotebookNode:
    """The good notebook with an attribute of its code cell 2, or of its metadata, changed."""
    notebook = good()
    place = notebook.metadata if names[0] == "metadata" else notebook.cells[2]
    place[names[-1]] = to
    return notebook


def text(words: str) -> nbformat.NotebookNode:
    return new_output("stream", name="stdout", text=words)


HOME = "/".join(["", "home", "someone", "model.kdtr"])
LONG = "def f():\n" + "    pass\n" * 5 + "assert f"
BROKEN = {
    "25 cells": (
        lambda: tidy(new_notebook(cells=good().cells + [new_markdown_cell("x") for _ in range(MOST_CELLS)])),
        "cells, more",
    ),
    "no title": (lambda: tidy(new_notebook(cells=good().cells[1:])), "no title"),
    "an error": (
        lambda: with_output(new_output("error", ename="ValueError", evalue="bad", traceback=[])),
        "ValueError: bad",
    ),
    "stderr": (lambda: with_output(new_output("stream", name="stderr", text="oh")), "stderr: oh"),
    "a warning": (lambda: with_output(text("x.py:1: UserWarning: oh")), "a warning: UserWarning:"),
    "a machine path": (lambda: with_output(text(f"read {HOME}")), "a path of one machine"),
    "a machine path in a table": (
        lambda: with_output(new_output("display_data", {"text/html": HOME})),
        "a path of one machine",
    ),
    "an interpreter's path": (lambda: with_output(text("/usr/lib/python3/x.py")), "a path of one machine"),
    "svg": (lambda: with_output(new_output("display_data", {"image/svg+xml": ""})), "image/svg+xml"),
    "no outputs": (lambda: with_change("execution_count", to=None), "no outputs"),
    "out of order": (lambda: with_change("execution_count", to=2), "execution count 2, not 1"),
    "older than the code": (lambda: with_change("source", to="assert 3"), "older than the code"),
    "a long function": (lambda: with_code(LONG), "f has 6 lines"),
    "a class": (lambda: with_code("class A: pass\nassert A"), "class A"),
    "no assert": (lambda: with_code("2 + 2"), "section 'A section' asserts nothing"),
    "another kernel": (lambda: with_change("metadata", "kernelspec", to={"name": "julia"}), "another kernel"),
    "an editor's metadata": (lambda: with_change("metadata", "vscode", to={}), "metadata 'vscode'"),
    "a cell's metadata": (lambda: with_change("metadata_of_cell", "metadata", to={"scrolled": 1}), "cell 2"),
}


@pytest.mark.parametrize(("broken", "why"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_found(broken, why: str) -> None:
    found = problems(broken(), 1000)
    assert len(found) == 1
    assert why in found[0]


def test_a_large_notebook_is_found() -> None:
    assert problems(good(), MOST_BYTES) == []
    assert problems(good(), MOST_BYTES + 1) == [f"{MOST_BYTES + 1} bytes, more than {MOST_BYTES}"]


def test_a_short_function_is_not_too_long() -> None:
    assert problems(with_code("def f():\n    return 2\nassert f() == 2"), 1000) == []


def test_outputs_of_other_kinds_are_found() -> None:
    picture = with_output(new_output("display_data", {"image/png": "", "text/plain": "x"}))
    assert kinds_of_outputs(good()) == [["text/plain"], ["stdout"]]
    assert kinds_of_outputs(picture) == [["image/png", "text/plain"], ["stdout"]]


def test_tidy_strips_what_an_editor_and_a_widget_leave() -> None:
    notebook = copy.deepcopy(good())
    data = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "IntSlider()"}
    notebook.cells[2].outputs = [new_output("display_data", data, metadata={"a": 1})]
    notebook.metadata |= {"widgets": {}, "toc": 1}
    notebook.cells[1].metadata = {"scrolled": True}
    assert problems(tidy(notebook), 1000) == []


@pytest.mark.parametrize(("source", "code"), [("print(6 * 7)", 0), ("raise ValueError('no')", 1)])
def test_the_command(tmp_path: Path, source: str, code: int) -> None:
    """It fills outputs in place, or stops with the cell's error and leaves the file as it was."""
    path = tmp_path / "made_up.ipynb"
    nbformat.write(tidy(new_notebook(cells=[new_markdown_cell("# T"), new_code_cell(source)])), path)
    before = path.read_bytes()
    command = [sys.executable, ROOT / "tests/notebooks/execute.py", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if code:
        assert "ValueError: no" in done.stderr
        assert path.read_bytes() == before
    else:
        assert read(path).cells[1].outputs[0].text == "42\n"
        assert problems(read(path), 1000) == []


def test_the_command_wants_a_notebook(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "usage" in capsys.readouterr().err
