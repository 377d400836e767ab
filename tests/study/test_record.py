"""Recordings: tables are those of real rounds, finished prompts are not done again, wrong folders are refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from support import assert_one_line, run, tokens_of

from ddtree.bundle import DATA
from ddtree.errors import UsageError
from ddtree.kdtr import KdtrFile, save
from ddtree.prompts import Prompt
from ddtree.study_record import open_recordings, record
from ddtree.study_recordings import INDEX, read_recording, sha256_of


def own_config(recorded, recording, method, budget):
    """The settings of a real decode that the recording stands for."""
    sampling = replace(recorded.config.sampling, temperature=recording.temperature)
    return replace(recorded.config, method=method, budget=budget, sampling=sampling)


def test_the_continuation_is_autoregressive_decoding(engine, recorded):
    assert len(recorded.recordings) == 6
    for recording in recorded.recordings:
        rounds = run(
            engine, recording.prompt_ids, own_config(recorded, recording, "ar", 0), recording.sequence
        )
        assert recording.tokens.tolist() == tokens_of(rounds) and recording.finish == rounds[-1].finish
        assert recording.token_ids.shape == recording.log_probs.shape == (24, 15, 64)


@pytest.mark.parametrize(("method", "budget"), [("chain", 3), ("tree", 5), ("tree", 64)])
def test_a_table_is_what_a_real_round_at_that_root_sees(engine, recorded, method, budget):
    """Bit for bit, though here rows were committed one by one and there by paths out of trees."""
    seen, by_path = 0, 0
    for recording in recorded.recordings:
        config = own_config(recorded, recording, method, budget)
        for this in run(engine, recording.prompt_ids, config, recording.sequence)[1:]:
            by_path += len(this.tokens) > 1
            if this.table is None:
                continue
            root = this.context_len - len(recording.prompt_ids)
            assert recording.tokens[root] == this.tree.token_ids[0]
            for mine, theirs in zip(recording.table(root, budget), this.table, strict=True):
                assert_same_bits(np.ascontiguousarray(mine), theirs, f"{recording.prompt}, root {root}")
            seen += 1
    assert seen >= 30 and by_path >= 20


def test_what_is_recorded_is_read_back(recorded):
    again = open_recordings(recorded.directory)
    header, *lines = map(json.loads, (recorded.directory / INDEX).read_text().splitlines())
    assert len(again) == len(lines) == len(recorded.recordings)
    for mine, theirs, line in zip(again, recorded.recordings, lines, strict=True):
        assert (mine.prompt, mine.temperature) == (theirs.prompt, theirs.temperature)
        assert mine.sha256 == line["sha256"] == sha256_of(recorded.directory / line["file"])
        for name in ("prompt_ids", "tokens", "token_ids", "log_probs"):
            assert_same_bits(getattr(mine, name), getattr(theirs, name), name)
    assert set(header["model_sha256"]) == {"target", "drafter"} and header["packages"]["numpy"]
    assert (header["k"], header["max_new_tokens"], header["seed"], header["top_p"]) == (64, 24, 7, 0.95)


def test_a_branch_head_is_recorded_as_a_round_hears_it(branch_engine, branch_recorded, recorded):
    """And all else is the plain drafter's, bit for bit."""
    seen = 0
    for mine, plain in zip(branch_recorded.recordings, recorded.recordings, strict=True):
        assert mine.conditional.shape == (24, 15, 16, 16) and plain.conditional is None
        for name in ("prompt_ids", "tokens", "token_ids", "log_probs"):
            assert_same_bits(getattr(mine, name), getattr(plain, name), name)
        config = replace(own_config(branch_recorded, mine, "tree", 16), shape="branch_aware")
        for this in run(branch_engine, mine.prompt_ids, config, mine.sequence)[1:]:
            if this.table is not None:
                root = this.context_len - len(mine.prompt_ids)
                assert_same_bits(np.array(mine.conditional[root]), this.conditional, f"root {root}")
                seen += 1
    assert seen >= 30
    again = open_recordings(branch_recorded.directory)
    for mine, theirs in zip(again, branch_recorded.recordings, strict=True):
        assert_same_bits(mine.conditional, theirs.conditional, "read back")
        assert mine.header["branch"] == {"rank": 8, "candidates": 16} and "branch" not in plain.header


def test_a_branch_head_wants_its_columns(branch_engine, recorded, tmp_path):
    with pytest.raises(
        UsageError, match=r"branch head scores 16 columns, found 15; record with --k 16"
    ) as caught:
        record(branch_engine, recorded.prompts, tmp_path, recorded.config, k=15)
    assert_one_line(caught.value)
    config = replace(recorded.config, max_new_tokens=2)
    (found,) = record(branch_engine, recorded.prompts[:1], tmp_path, config, k=16)
    assert found.token_ids.shape[2] == 16 and found.conditional.shape[2:] == (16, 16)


def test_conditionals_that_do_not_fit_their_tables_are_refused(branch_recorded, tmp_path):
    path = branch_recorded.recordings[0].path
    file = KdtrFile(path)
    whole = file["conditional"]
    for wrong in (whole[:-1], whole[..., :8], whole[0], whole.view(np.int32), whole[..., :0, :0]):
        save(
            tmp_path / path.name,
            {name: file[name] for name in file} | {"conditional": wrong},
            dict(file.meta),
        )
        with pytest.raises(UsageError, match=r"expected conditional f32 \[T, L, C, C\]") as caught:
            read_recording(tmp_path / path.name, "")
        assert_one_line(caught.value)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("harm", [None, "deleted", "damaged"])
def test_an_interrupted_recording_goes_on_where_it_stopped(engine, recorded, tmp_path, monkeypatch, harm):
    """Finished prompts are not decoded again, unless their file is gone or broken; the folder ends the same."""
    config = replace(recorded.config, max_new_tokens=3)
    started, reset = [], engine.reset
    monkeypatch.setattr(engine, "reset", lambda drafting: started.append(drafting) or reset(drafting))

    def stop_after_two(total):
        assert total == 4
        if len(started) == 2:
            raise Interrupted

    def folder(name):
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    with pytest.raises(Interrupted):
        record(engine, recorded.prompts[:2], tmp_path / "a", config, (0.6, 0.0), 4, stop_after_two)
    assert len(open_recordings(tmp_path / "a")) == 2
    first = tmp_path / "a" / "t0.6_0000.kdtr"
    if harm == "deleted":
        first.unlink()
    elif harm == "damaged":
        first.write_bytes(first.read_bytes()[:-1] + b"\xff")
    if harm:
        with pytest.raises(UsageError, match=r"t0\.6_0000\.kdtr: is"):
            open_recordings(tmp_path / "a")
    started.clear()
    steps = []
    record(engine, recorded.prompts[:2], tmp_path / "a", config, (0.6, 0.0), 4, steps.append)
    assert started == [True] * (3 if harm else 2) and steps == [4] * 4
    record(engine, recorded.prompts[:2], tmp_path / "b", config, (0.0, 0.6), 4)
    assert folder("a") == folder("b") and len(folder("a")) == 5


def test_wrong_folders_and_settings_are_refused(engine, recorded, tmp_path, monkeypatch):
    def refused(
        match, *, prompts=recorded.prompts, directory=recorded.directory, config=recorded.config, **more
    ):
        with pytest.raises(UsageError, match=match) as caught:
            record(engine, prompts, directory, config, **more)
        assert_one_line(caught.value)

    inside = tmp_path / "link"
    inside.symlink_to(DATA / "prompts")
    for directory in (DATA, DATA / "recordings", inside / "deeper"):
        refused("outside it", directory=directory)
    refused("k: expected 1 to 65536", k=0)
    refused("recorded with k 64, asked for 32", k=32)
    refused(
        "recorded with max_new_tokens 24, asked for 25", config=replace(recorded.config, max_new_tokens=25)
    )
    changed = [Prompt(recorded.prompts[0].id, "other", "x = 1\n")]
    refused("prompt 0 was .* of other text", prompts=changed)
    refused("prompt long: .* do not fit", prompts=[Prompt("long", "x", "x = 1\n" * 2000)])
    monkeypatch.setattr(engine, "runner", object())
    refused("--backend numpy")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "cannot read the recordings' index"),
        ("", "line 1: expected the header"),
        ("{", "line 1: no line of an index"),
        ('{"kind": "other", "schema": 1}', "line 1: expected the header"),
        ('{"kind": "ddtree recordings", "schema": 1}', "holds no recording yet"),
        ('{"kind": "ddtree recordings", "schema": 1}\n[]', "line 2: no line of an index"),
    ],
)
def test_a_folder_that_is_no_recording_is_refused(tmp_path, content, match):
    if content is not None:
        (tmp_path / INDEX).write_text(content)
    with pytest.raises(UsageError, match=match) as caught:
        open_recordings(tmp_path)
    assert_one_line(caught.value)
