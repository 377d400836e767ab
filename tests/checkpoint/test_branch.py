"""A drafter's branch head: its config, its three tensors whole or not at all, there and back in every bit."""

import json

import numpy as np
import pytest
from checkpoint.makers import DRAFTER, assert_same_checkpoint, random_tensors, refuses, write_hf
from support import assert_one_line, branched, trained, write_branch_head

from ddtree.bundle import open_bundle
from ddtree.checkpoint import convert_to_hf, convert_to_kdtr, load_config
from ddtree.checkpoint_names import expected_tensors
from ddtree.config import BranchConfig, DrafterConfig
from ddtree.errors import CheckpointError, ConfigError
from ddtree.inspect import describe, format_table
from ddtree.kdtr import KdtrFile, save

BRANCH = {"rank": 3, "candidates": 16}
NAMES = ("branch.parent.weight", "branch.gate.weight", "branch.child.weight")


def with_branch(branch):
    return DRAFTER | {"dflash_config": DRAFTER["dflash_config"] | {"branch": branch}}


def test_the_config_knows_it():
    config = DrafterConfig.from_hf(with_branch(BRANCH))
    assert config.branch == BranchConfig(3, 16) and config.candidates == 16
    assert DrafterConfig.from_hf(with_branch(BRANCH | {"candidates": 99})).candidates == DRAFTER["vocab_size"]
    for plain in (DRAFTER, with_branch(None)):
        assert (DrafterConfig.from_hf(plain).branch, DrafterConfig.from_hf(plain).candidates) == (None, 0)


@pytest.mark.parametrize(
    ("branch", "said"),
    [
        ({"rank": 3}, "branch: field candidates is missing"),
        ({}, "branch: field rank is missing"),
        (True, "branch: expected a JSON object, found bool"),
        (BRANCH | {"rank": 0}, "branch: rank: expected an integer >= 1, found 0"),
        (BRANCH | {"candidates": "16"}, "branch: candidates: expected an integer >= 1, found '16'"),
    ],
)
def test_a_config_that_cannot_be_is_refused(branch, said):
    with pytest.raises(ConfigError, match=f"dflash_config: {said}") as caught:
        DrafterConfig.from_hf(with_branch(branch))
    assert_one_line(caught.value)


def test_three_tensors_more():
    plain, whole = (expected_tensors(DrafterConfig.from_hf(hf)) for hf in (DRAFTER, with_branch(BRANCH)))
    assert list(whole) == [*plain, *NAMES] and {whole[name] for name in NAMES} == {(3, 24)}


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_there_and_back(tmp_path, dtype, num_shards):
    hf = with_branch(BRANCH)
    source = write_hf(tmp_path / "hf", hf, random_tensors(hf, dtype), num_shards)
    convert_to_kdtr(source, tmp_path / "drafter.kdtr", progress=False)
    assert load_config(KdtrFile(tmp_path / "drafter.kdtr")).branch == BranchConfig(3, 16)
    convert_to_hf(tmp_path / "drafter.kdtr", tmp_path / "back", progress=False)
    assert_same_checkpoint(tmp_path / "back", source)


def test_a_file_whose_head_was_added_later_comes_back(tmp_path):
    """As training writes it: the tensors of the plain drafter, then the head's."""
    file = branched().drafter
    convert_to_hf(file.path, tmp_path / "hf", progress=False)
    convert_to_kdtr(tmp_path / "hf", tmp_path / "again.kdtr", progress=False)
    again = KdtrFile(tmp_path / "again.kdtr")
    assert again.meta == file.meta and set(again) == set(trained().drafter) | set(NAMES)
    for name in again:
        assert again[name].tobytes() == file[name].tobytes(), name


@pytest.mark.parametrize("lacking", [NAMES, NAMES[1:2]])
def test_a_head_that_is_not_there_or_not_whole_is_refused(tmp_path, lacking):
    hf = with_branch(BRANCH)
    tensors = {name: each for name, each in random_tensors(hf).items() if name not in lacking}
    source = write_hf(tmp_path / "hf", hf, tensors)
    refuses(tmp_path, source, CheckpointError, f"{len(lacking)} missing (", *lacking)


def test_a_head_that_the_config_does_not_know_is_refused(tmp_path):
    source = write_hf(tmp_path / "hf", DRAFTER, random_tensors(with_branch(BRANCH)))
    refuses(tmp_path, source, CheckpointError, "3 extra (", *NAMES)


def test_a_head_of_another_rank_is_refused(tmp_path):
    source = write_hf(tmp_path / "hf", with_branch(BRANCH | {"rank": 4}), random_tensors(with_branch(BRANCH)))
    refuses(tmp_path, source, CheckpointError, "3 of the wrong shape", "expected [4, 24], found [3, 24]")


def test_a_converted_file_without_part_of_its_head_is_refused(tmp_path):
    file = branched().drafter
    arrays = {name: file[name] for name in file if name != NAMES[2]}
    save(tmp_path / "drafter.kdtr", arrays, json.loads(json.dumps(dict(file.meta))))
    with pytest.raises(CheckpointError, match=r"1 missing \(branch\.child\.weight\)") as caught:
        convert_to_hf(tmp_path / "drafter.kdtr", tmp_path / "hf", progress=False)
    assert_one_line(caught.value)


def test_inspect_shows_the_head(tmp_path):
    write_branch_head(trained().drafter, tmp_path / "drafter.kdtr", 5)
    found = {each["name"]: each for each in describe(tmp_path / "drafter.kdtr")["arrays"]}
    assert [found[name]["shape"] for name in NAMES] == [[5, 256]] * 3
    assert found[NAMES[0]]["parameters"] == 5 * 256
    assert all(name in format_table(describe(tmp_path / "drafter.kdtr")) for name in NAMES)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_head_that_would_score_nothing_is_refused(tmp_path, name, bad):
    whole = branched().drafter
    arrays = {each: np.array(whole[each]) for each in whole}
    arrays[name][-1, 0] = bad
    save(tmp_path / "bad.kdtr", arrays, dict(whole.meta))
    with pytest.raises(ConfigError, match=f"{name}: expected finite numbers") as caught:
        open_bundle(drafter=tmp_path / "bad.kdtr")
    assert_one_line(caught.value)
