"""The command line as a user meets it: results on stdout, one line on stderr and exit code 2 for bad input."""

import errno
import json
import os
import sys

import pytest

from ddtree import cli
from ddtree.bundle import DEFAULT_MODEL
from ddtree.kdtr import KdtrFile, save
from ddtree.prompts import load_prompts
from ddtree.trace import read_trace

PROMPT = "def read_lines(path):\n"


def test_generate_streams_the_prompt_and_its_continuation(command):
    code, out, err = command("generate", PROMPT, "--max-new-tokens", 24)
    plain = command("generate", PROMPT, "--max-new-tokens", 24, "--json")
    result = json.loads(plain[1])
    assert code == plain[0] == 0
    assert out == PROMPT + result["text"] + "\n"
    assert len(err.splitlines()) == 1 and "24 tokens, ended by length" in err and "backend numpy" in err
    assert len(result["token_ids"]) == 24 and result["prompt"] == PROMPT


@pytest.mark.parametrize("method", ["ar", "chain", "tree"])
def test_every_method_generates_the_same_text(command, method):
    text = json.loads(command("generate", PROMPT, "--method", "ar", "--max-new-tokens", 16, "--json")[1])[
        "text"
    ]
    assert (
        json.loads(command("generate", PROMPT, "--method", method, "--max-new-tokens", 16, "--json")[1])[
            "text"
        ]
        == text
    )


def test_auto_says_which_backend_it_took(command):
    code, _, err = command("generate", PROMPT, "--max-new-tokens", 2, "--backend", "auto")
    assert code == 0 and ("backend numpy" in err or "backend cuda" in err)


def test_generate_reads_a_file_and_writes_a_trace(command, tmp_path):
    (tmp_path / "prompt.py").write_text(PROMPT)
    trace = tmp_path / "trace.jsonl"
    code, out, _ = command(
        "generate",
        "--prompt-file",
        tmp_path / "prompt.py",
        "--max-new-tokens",
        12,
        "--trace",
        trace,
        "--json",
    )
    header, (only,) = read_trace(trace)
    assert code == 0 and (header["backend"], header["gemm"]) == ("numpy", "invariant")
    assert set(header["model_sha256"]) == {"target", "drafter"}
    assert [token for this in only.rounds for token in this["tokens"]] == json.loads(out)["token_ids"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompt.py", "trace.jsonl"]


def test_compare_reports_equal_tokens_and_the_fair_pair(command):
    code, out, _ = command(
        "compare",
        "--json",
        "--limit",
        2,
        "--max-new-tokens",
        12,
        "--budget",
        4,
        "--temperature",
        0,
        "--temperature",
        0.8,
    )
    document = json.loads(out)
    pairs = {(row["method"], row["budget"]) for row in document["rows"]}
    assert code == 0 and document["tokens_equal"] is True and document["prompts"] == 2
    assert pairs == {("ar", 0), ("chain", 4), ("chain", 15), ("tree", 4), ("tree", 16)}
    assert len(document["rows"]) == 10 and all(row["tokens_equal"] for row in document["rows"])
    assert {"loop_share", "mean_acceptance", "mean_acceptance_outside_loops"} <= set(document["rows"][0])


def test_compare_exits_1_when_tokens_differ(command, monkeypatch):
    """A tree decoder that drops the check of its tokens must be caught: the walk here accepts a wrong bonus token."""
    from ddtree.engine import Engine

    honest = Engine.accept

    def wrong_after_a_draft(self, tree, tokens, bad):
        path, bonus = honest(self, tree, tokens, bad)
        return path, (bonus + 1) % self.config.vocab_size if tree.num_nodes else bonus

    monkeypatch.setattr(Engine, "accept", wrong_after_a_draft)
    code, out, _ = command("compare", "--limit", 1, "--max-new-tokens", 8)
    assert code == 1 and "NO (1)" in out


def test_compare_prints_a_table(command):
    code, out, _ = command("compare", "--limit", 1, "--max-new-tokens", 8)
    assert code == 0 and "bonus token included" in out and out.count("tree") >= 3 and "best budget" in out


def test_inspect_shows_and_verifies(command):
    code, out, _ = command("inspect", DEFAULT_MODEL / "target.kdtr", "--verify")
    assert (
        code == 0
        and "model.embed_tokens.weight" in out
        and "12,052,336 parameters" in out
        and "verified" in out
    )
    document = json.loads(command("inspect", DEFAULT_MODEL / "drafter.kdtr", "--json")[1])
    assert document["meta"]["kind"] == "drafter"


def test_convert_goes_both_ways(command, tmp_path):
    code, _, _ = command("convert", DEFAULT_MODEL / "drafter.kdtr", tmp_path / "hf")
    assert code == 0 and (tmp_path / "hf" / "config.json").exists()
    code, out, _ = command("convert", tmp_path / "hf", tmp_path / "back.kdtr", "--json")
    assert code == 0 and json.loads(out)["kind"] == "drafter"
    assert (tmp_path / "back.kdtr").read_bytes() == (DEFAULT_MODEL / "drafter.kdtr").read_bytes()


@pytest.mark.parametrize("words", [[], ["generate"], ["compare"], ["inspect"], ["convert"], ["demo"]])
def test_help_names_no_machine_path(command, words):
    code, out, _ = command(*words, "--help")
    assert code == 0 and "Usage: ddtree" in out and str(DEFAULT_MODEL.parent) not in out


TARGET_ONLY = DEFAULT_MODEL / "target.kdtr"
BAD = {
    "no prompt": (["generate"], "prompt"),
    "empty prompt": (["generate", ""], "empty"),
    "two prompts": (["generate", "x", "--prompt-file", "y"], "either"),
    "missing prompt file": (["generate", "--prompt-file", "no/such"], "no/such"),
    "prompt longer than the cache": (["generate", "x = 1\n" * 700], "1024 positions"),
    "unknown method": (["generate", "x", "--method", "beam"], "method"),
    "negative budget": (["generate", "x", "--budget", "-1"], "budget"),
    "negative temperature": (["generate", "x", "--temperature", "-0.5"], "temperature"),
    "temperature not a number": (["generate", "x", "--temperature", "warm"], "temperature"),
    "top_p zero": (["generate", "x", "--top-p", "0"], "top_p"),
    "no tokens wanted": (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens"),
    "unknown backend": (["generate", "x", "--backend", "abacus"], "backend"),
    "unknown dtype": (["generate", "x", "--dtype", "f8"], "dtype"),
    "unknown gemm": (["generate", "x", "--gemm", "magic"], "gemm"),
    "cublas on the backend numpy": (["generate", "x", "--gemm", "cublas"], "gemm"),
    "missing model": (["generate", "x", "--model", "no/such"], "no/such"),
    "model that is not KDTR": (["generate", "x", "--model", __file__], "KDTR"),
    "chain without a drafter": (["generate", "x", "--method", "chain", "--model", TARGET_ONLY], "no drafter"),
    "compare without a drafter": (["compare", "--model", TARGET_ONLY], "no drafter"),
    "target given as drafter": (["generate", "x", "--drafter", TARGET_ONLY], "expected a drafter"),
    "drafter given as target": (
        ["generate", "x", "--model", DEFAULT_MODEL / "drafter.kdtr"],
        "expected a target",
    ),
    "unwritable trace": (["generate", "x", "--trace", "no/such/trace.jsonl"], "no/such"),
    "missing prompts": (["compare", "--prompts", "no/such"], "no/such"),
    "prompts that are not JSON Lines": (["compare", "--prompts", __file__], "line 1"),
    "inspect of no file": (["inspect", "no/such"], "no/such"),
    "inspect of a text file": (["inspect", __file__], "KDTR"),
    "convert of no file": (["convert", "no/such", "out.kdtr"], "no/such"),
    "unwritable demo folder": (["demo", "--out", f"{__file__}/demo"], "folder"),
    "bench without a GPU": (["bench", "kernels"], "bench kernels: "),
    "bench layers of a model too large for numpy": (["bench", "layers", "--config", "kimi-k2"], "too many"),
    "bench decode of a model too large for numpy": (
        ["bench", "decode", "--config", "random-4.8b"],
        "too many",
    ),
    "backend cuda without a GPU": (["generate", "x", "--backend", "cuda"], "backend cuda: "),
    "absurd budget": (["generate", "x", "--budget", "1000000000"], "budget"),
    "half a surrogate": (["generate", "\udcff"], "Unicode"),
    "trace on a folder": (["generate", "x", "--trace", "/"], "no regular file"),
    "trace on a device": (["generate", "x", "--trace", "/dev/null"], "no regular file"),
    "trace without a name": (["generate", "x", "--trace", ""], "no regular file"),
    "unknown command": (["dance"], "dance"),
    "unknown option": (["generate", "x", "--dance"], "dance"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(command, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, said = BAD[case]
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and said in err and "Traceback" not in err
    assert os.listdir(tmp_path) == []


def test_a_truncated_checkpoint_is_refused_and_nothing_is_written(command, tmp_path):
    command("convert", DEFAULT_MODEL / "drafter.kdtr", tmp_path / "hf")
    weights = tmp_path / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, out, err = command("convert", tmp_path / "hf", tmp_path / "out.kdtr")
    lines = [line for line in err.splitlines() if line.startswith("ddtree: ")]
    assert (code, out) == (2, "") and len(lines) == 1 and "model.safetensors" in lines[0]
    assert os.listdir(tmp_path) == ["hf"]


def test_a_truncated_bundle_is_refused(command, tmp_path):
    cut = tmp_path / "target.kdtr"
    cut.write_bytes((DEFAULT_MODEL / "target.kdtr").read_bytes()[:-5000])
    code, out, err = command("generate", "x", "--model", cut)
    assert (code, out) == (2, "") and "target.kdtr" in err and len(err.splitlines()) == 1


def test_unwritable_conversion_leaves_nothing(command, tmp_path):
    code, _, err = command("convert", DEFAULT_MODEL / "drafter.kdtr", tmp_path / "no" / "such" / "hf")
    assert code == 2 and "such" in err.splitlines()[-1] and os.listdir(tmp_path) == []


def test_the_shipped_prompts_are_the_default(command):
    assert len(load_prompts()) == 64


PROMPT_LINE = '{"id": "a", "kind": "b", "text": "c"}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PROMPT_LINE + "\n" + PROMPT_LINE, "line 2"),
        ("[" * 100_000, "line 1"),
        (PROMPT_LINE.replace('"c"', "3"), "line 1"),
        ("", "none"),
        (PROMPT_LINE.replace('"c"', json.dumps("x = 1\n" * 700)), "prompt a"),
    ],
)
def test_bad_prompt_files_are_one_line(command, tmp_path, text, said):
    (tmp_path / "prompts.jsonl").write_text(text)
    code, out, err = command("compare", "--prompts", tmp_path / "prompts.jsonl")
    assert (code, out) == (2, "") and said in err and len(err.splitlines()) == 1


def test_prompts_may_hold_any_unicode_and_a_mark_in_front(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\ufeff" + PROMPT_LINE.replace('"c"', '"\u2028\u0085"') + "\n\n")
    assert [prompt.text for prompt in load_prompts(tmp_path / "prompts.jsonl")] == ["\u2028\u0085"]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("drafter", {"intermediate_size": 7}, "wrong shape"),
        ("target", {"num_hidden_layers": 3}, "extra"),
        ("target", {"n_routed_experts": 8}, "wrong shape"),
        ("target", "pairs", "rope_layout"),
    ],
)
def test_a_bundle_whose_arrays_do_not_fit_its_config_is_refused(command, tmp_path, name, change, said):
    with KdtrFile(DEFAULT_MODEL / f"{name}.kdtr") as file:
        meta = file.meta | (
            {"rope_layout": change} if change == "pairs" else {"config": file.meta["config"] | change}
        )
        save(tmp_path / f"{name}.kdtr", {array: file[array] for array in file}, meta)
    model = (
        ["--model", tmp_path / "target.kdtr"]
        if name == "target"
        else ["--drafter", tmp_path / "drafter.kdtr"]
    )
    code, out, err = command("generate", "x", *model)
    assert (code, out) == (2, "") and said in err and len(err.splitlines()) == 1


def test_interrupt_is_one_line(command, monkeypatch):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "generate", interrupted)
    code, out, err = command("generate", "x")
    assert (code, out, err.strip()) == (130, "", "interrupted")


def test_a_closed_output_is_one_line(command, monkeypatch):
    def closed(*arguments, **keywords):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(cli, "generate", closed)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # it is put back afterwards
    code, out, err = command("generate", "x")
    sys.stdout.close()
    assert (code, out, err) == (2, "", "ddtree: the output was closed before all was written\n")


def test_what_a_kernel_refuses_is_one_line(command, monkeypatch):
    """And any other ValueError is a fault of the program, which is not hidden."""
    from kernels_numba.checks import LaunchError

    for error in (LaunchError("linear: x: expected\nrows"), ValueError("a fault")):
        monkeypatch.setattr(cli, "generate", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        if isinstance(error, LaunchError):
            assert command("generate", "x") == (2, "", "ddtree: linear: x: expected rows\n")
        else:
            with pytest.raises(ValueError, match="a fault"):
                command("generate", "x")
