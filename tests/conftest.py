"""What every test shares: the project root, Hypothesis profiles, and skips that say why."""

import functools
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Deadlines are off everywhere: the first call of a compiled function takes seconds.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Numba reads this when it is first imported, so one process either simulates or does not.
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root folder."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line in this process: command("inspect", ..) returns (exit code, stdout, stderr)."""
    from ddtree import cli

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ddtree", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code, *capsys.readouterr())

    return call


@functools.cache
def why_no_gpu() -> str:
    """Return why tests marked `gpu` cannot run in this process; empty when they can."""
    if SIMULATED:
        return "the CUDA simulator is on (NUMBA_ENABLE_CUDASIM)"
    from numba import cuda

    return "" if cuda.is_available() else "no CUDA GPU: numba.cuda.is_available() is false"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a marked test that this process cannot run."""
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)
    if item.get_closest_marker("simulator") and not SIMULATED:
        pytest.skip("needs NUMBA_ENABLE_CUDASIM=1; `make test` runs these in processes of their own")
