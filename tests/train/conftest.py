"""What training's tests share: text to train on, a short preset, one trained folder, and one thread."""

import dataclasses
import shutil
from types import SimpleNamespace

import pytest

from ddtree.train.presets import TINY


@pytest.fixture(scope="session")
def torch():
    """PyTorch on one thread; skips where it is not installed."""
    module = pytest.importorskip("torch", reason="PyTorch is not installed: the extra `train` brings it")
    module.set_num_threads(1)
    return module


@pytest.fixture(scope="session")
def text(root, tmp_path_factory):
    """A folder of text: a copy of this project's own package, so that nobody edits it meanwhile."""
    folder = tmp_path_factory.mktemp("text") / "ddtree"
    return shutil.copytree(root / "ddtree", folder, ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture(scope="session")
def short():
    """The preset tiny with fewer steps and a smaller bank."""
    return dataclasses.replace(
        TINY,
        target=dataclasses.replace(TINY.target, steps=60),
        drafter=dataclasses.replace(TINY.drafter, steps=60),
        bank=dataclasses.replace(TINY.bank, tokens=6000),
    )


@pytest.fixture(scope="session")
def trained_folder(torch, text, short, tmp_path_factory):
    """A folder after `train all` of the preset short on a CPU, and what it said."""
    from ddtree.train import stages

    said, folder = [], tmp_path_factory.mktemp("trained")
    work = stages.start(str(text), str(folder), short, 0, "cpu", None, said.append)
    assert all(stage(work) for stage in stages.ALL)
    return SimpleNamespace(path=folder, said="\n".join(said), preset=short)
