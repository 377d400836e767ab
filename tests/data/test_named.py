"""data/README.md names every file that is there."""

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
README = (DATA / "README.md").read_text("utf-8")
FILES = sorted(p.relative_to(DATA) for p in DATA.rglob("*") if p.is_file() and p.suffix != ".md")


def named(path):
    """By its path, or by its name beside another of its folder in one row."""
    rows = [line for line in README.splitlines() if line.startswith("| ") and f"`{path.parent}/" in line]
    return any(f"`{path}`" in row or f"`{path.name}`" in row for row in rows)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_is_named(path):
    assert named(path)


def test_it_can_fail():
    assert (
        len(FILES) > 20
        and not named(Path("results/routing_none.json"))
        and not named(Path("results/decode.json"))
    )
