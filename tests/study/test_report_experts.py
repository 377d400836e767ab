"""The table of shared experts: by hand, and what it says of the routers that were recorded."""

from dataclasses import replace

import pytest
from study.routed import trees_of_64

from ddtree.bundle import DATA
from ddtree.errors import UsageError
from ddtree.study_models import ROUTERS, recorded_sharing
from ddtree.study_overlap import RELATIONS
from ddtree.study_report_experts import KINSHIP, TREES, sharing_lines


def cells(routers, temperature=0.0):
    """By the first cell of a line, the others; the heading under an empty name."""
    table = [line for line in sharing_lines(routers, temperature) if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in table]
    return {"": rows[0]} | {row[0]: row[1:] for row in rows[1:]}


def made(temperature=0.0, **other):
    """Eight of 32 experts a row; the tree of 64 touches 20 and its layers have 3 and 5 effective rows."""
    first = recorded_sharing()[0]
    shared = {name: 2.0 * (place + 1) for place, name in enumerate(RELATIONS)}
    each = replace(first, experts=32, experts_per_token=8, prompts=7, temperature=temperature, layer=None)
    each = replace(each, touched=20.0, touched_low=19.0, touched_high=21.5, independent=31.96, by_load=30.5)
    ends = {name: (value - 1, value + 1) for name, value in shared.items()}
    mine = {
        "shared": shared,
        "shared_interval": ends,
        "effective": 4.0,
        "effective_low": 3.5,
        "effective_high": 4.5,
    }
    each = replace(each, **mine | other)
    trees = [replace(each, shape=shape, budget=budget, rows=budget + 1) for shape, budget in TREES.values()]
    largest = next(tree for tree in trees if tree.budget == 64)
    return [*trees, *(replace(largest, layer=n, effective=rows) for n, rows in ((1, 5.0), (2, 3.0)))]


def test_a_table_by_hand():
    found = cells(
        {"recorded": made(), "other": made(effective=None, shared_interval=dict.fromkeys(RELATIONS))}
    )
    assert found[""] == [
        "greedy", "recorded: 32 experts, top 8, 7 prompts", "other: 32 experts, top 8, 7 prompts"
    ]  # fmt: skip
    touched = "20.0 (19.0 to 21.5), even 32.0, by load 30.5"
    assert found["tree of 64"] == [
        f"{touched}; 4.0 (3.5 to 4.5) effective of 65",
        f"{touched}; not known effective of 65",
    ]
    assert found["tree of 64, its layers' effective rows"][0] == "3.0 to 5.0"
    assert found["two rows: siblings"] == ["3.0 (2.5 to 3.5)", "3.0"], "6 experts where 8 * 8 / 32 is chance"
    assert len(found) == 1 + len(TREES) + 1 + len(KINSHIP)
    assert cells({"recorded": made(0.6)}, 0.6)[""][0] == "temperature 0.6"
    with pytest.raises(UsageError, match=r"tree of 4 nodes at temperature 0\.6 was not recorded of recorded"):
        sharing_lines({"recorded": made()}, 0.6)


def test_the_readme_shows_the_table():
    table = [
        line for line in sharing_lines({way: recorded_sharing(way) for way in ROUTERS}) if line[:1] == "|"
    ]
    assert len(table) == 12 and "\n".join(table) in (DATA.parent / "README.md").read_text("utf-8")


def test_the_readme_s_prompts_own_preferences():
    tree = trees_of_64("recorded wide")
    said = f"would touch {tree.by_prompt_load:.0f} of the 128, those of a tree touch {tree.touched:.0f}."
    assert said in (DATA.parent / "README.md").read_text("utf-8")


def test_the_recorded_routers():
    found = cells({way: recorded_sharing(way) for way in ROUTERS})
    *of_16, of_128 = found[""][1:]
    assert all("16 experts, top 4" in each for each in of_16) and "128 experts, top 8" in of_128
    for name in KINSHIP:
        *few, many = (float(cell.split(" (")[0]) for cell in found[f"two rows: {name}"])
        assert 1 < min(few) <= max(few) < many, (
            "finer experts are shared by more than chance, many times over"
        )
    largest = [float(cell.split("; ")[1].split()[0]) for cell in found["tree of 64"]]
    assert largest == [pytest.approx(trees_of_64(way).effective, abs=0.05) for way in ROUTERS]
    assert min(largest[:2]) > 9 and max(largest[:2]) < 11 < largest[2] < 20
