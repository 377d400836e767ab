"""`ddtree convert` of what is neither a checkpoint's folder nor a file made of one: one line, and nothing written."""

import os

import numpy as np
import pytest

from ddtree.bundle import DEFAULT_MODEL
from ddtree.kdtr import save

TAKES = "convert takes a Hugging Face folder with config.json, or a .kdtr file made of one"
NEITHER = {
    "no/such": "no such file or folder",
    "text/below": "no such file or folder",
    "text": "not a .kdtr file",
    "empty": "not a .kdtr file",
    "/dev/null": "not a regular file",
    "folder": "a folder without config.json",
    str(DEFAULT_MODEL): "a folder without config.json",
    "ids.kdtr": "a .kdtr file without a model's config",
}


@pytest.mark.parametrize("source", NEITHER)
def test_what_is_missing_and_what_convert_takes(command, tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    save("ids.kdtr", {"ids": np.arange(4, dtype=np.uint16)}, {"rows": 1})
    before = sorted(os.listdir())
    assert command("convert", source, "out") == (2, "", f"ddtree: {source}: {NEITHER[source]}; {TAKES}\n")
    assert sorted(os.listdir()) == before
