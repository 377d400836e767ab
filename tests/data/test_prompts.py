"""Checks of the prompts in data/prompts/python.jsonl."""

import collections
import json
import pathlib
import re

import pytest
from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "data" / "prompts" / "python.jsonl"
TARGET = ROOT / "data" / "models" / "py12m" / "target.kdtr"

MIN_TOKENS = 40
MAX_TOKENS = 200


@pytest.fixture(scope="module")
def prompts():
    lines = PROMPTS.read_bytes().decode("utf-8").split("\n")
    assert lines.pop() == "", "the file must end with a newline"
    return [json.loads(line) for line in lines]


def test_count(prompts):
    assert len(prompts) == 64


def test_keys(prompts):
    for prompt in prompts:
        assert list(prompt) == ["id", "kind", "text"]
        assert all(isinstance(value, str) and value for value in prompt.values())


def test_ids(prompts):
    ids = [prompt["id"] for prompt in prompts]
    assert len(set(ids)) == len(ids)
    for name in ids:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name), name


def test_kinds(prompts):
    kinds = collections.Counter(prompt["kind"] for prompt in prompts)
    assert len(kinds) >= 12
    assert min(kinds.values()) >= 2
    for prompt in prompts:
        assert prompt["id"].startswith(prompt["kind"] + "-"), prompt["id"]


def test_texts_are_unique_and_start_differently(prompts):
    texts = [prompt["text"] for prompt in prompts]
    assert len(set(texts)) == len(texts)
    assert len({text[:20] for text in texts}) == len(texts)


def test_texts_are_plain(prompts):
    for prompt in prompts:
        assert re.fullmatch(r"[ -~\n]+", prompt["text"]), prompt["id"]
        assert prompt["text"] == prompt["text"].rstrip(), f"{prompt['id']}: ends in white space"


def test_ends(prompts):
    """A text ends with a newline and an indent, or without white space."""
    for prompt in prompts:
        text = prompt["text"]
        body = text.rstrip()
        assert re.fullmatch(r"(\n+( {4})*)?", text[len(body) :]), prompt["id"]


def test_token_lengths(prompts):
    # Fails, rather than skips, when the model file is absent.
    assert TARGET.is_file(), f"{TARGET.relative_to(ROOT)} is missing"

    from ddtree.kdtr import KdtrFile

    tokenizer = Tokenizer.from_str(KdtrFile(TARGET)["tokenizer.json"].tobytes().decode())
    lengths = {
        prompt["id"]: len(tokenizer.encode(prompt["text"], add_special_tokens=False).ids)
        for prompt in prompts
    }
    wrong = {name: length for name, length in lengths.items() if not MIN_TOKENS <= length <= MAX_TOKENS}
    assert not wrong
