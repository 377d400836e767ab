"""Which files make a corpus, which are held out, the tokenizer, and the file of ids."""

import pytest

from ddtree.errors import UsageError
from ddtree.train.corpus import (
    Document,
    encode,
    load_corpus,
    read_folder,
    save_corpus,
    train_tokenizer,
)
from ddtree.train.presets import END_OF_TEXT, SPECIAL_TOKENS


def test_a_file_is_held_out_by_the_hash_of_its_path_alone():
    held = [f"f{i}" for i in range(320) if Document(f"f{i}", "").held_out]
    # sha256 of the names, first byte a multiple of 32
    assert held == [f"f{i}" for i in (4, 18, 41, 46, 61, 90, 195, 216, 227)]
    assert all(Document(path, "other text").held_out for path in held)


def test_the_split_does_not_change_when_files_come_and_go(text, tmp_path):
    split = {d.path: d.held_out for d in read_folder(text)}
    for path in list(split)[::2]:
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("changed\n")
    (tmp_path / "new.py").write_text("new\n")
    again = {d.path: d.held_out for d in read_folder(tmp_path)}
    assert {path: split[path] for path in again if path in split} == {
        p: h for p, h in again.items() if p in split
    }
    assert sum(again.values()) >= 1


def test_what_is_no_text_is_left_out(text, tmp_path):
    for document in read_folder(text)[:40]:
        target = tmp_path / document.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(document.text)
    before = [d.path for d in read_folder(tmp_path)]
    for name, content in {
        "nul.txt": b"a\0b",
        "latin.txt": "é".encode("latin-1"),
        "empty.txt": b"",
        "long.txt": b"x" * 200_001,
        ".hidden": b"x",
    }.items():
        (tmp_path / name).write_bytes(content)
    for folder in ("__pycache__", "site-packages", ".git"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("x")
    assert [d.path for d in read_folder(tmp_path)] == before
    (tmp_path / "long.txt").write_bytes(b"x" * 200_000)
    assert len(read_folder(tmp_path)) == len(before) + 1


def test_a_folder_without_both_parts_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        read_folder(tmp_path / "none")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UsageError, match="1 text files"):
        read_folder(tmp_path)


def test_the_tokenizer_gives_every_text_back(text, tmp_path):
    documents = read_folder(text)
    tokenizer = train_tokenizer(documents, 512)
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    sample = 'def f(x):\n    return "é \U0001f333\t" + x\n'
    ids = tokenizer.encode(sample, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == sample
    corpus = encode(documents, tokenizer)
    assert (corpus.held_out == END_OF_TEXT).sum() == sum(d.held_out for d in documents)
    assert (corpus.train == END_OF_TEXT).sum() == sum(not d.held_out for d in documents)
    assert tokenizer.decode(corpus.train[: list(corpus.train).index(0)].tolist()) == next(
        d.text for d in documents if not d.held_out
    )
    save_corpus(corpus, tmp_path / "corpus.kdtr")
    again = load_corpus(tmp_path / "corpus.kdtr", tokenizer)
    assert (again.train == corpus.train).all() and (again.held_out == corpus.held_out).all()
    assert again.meta["sha256"] == corpus.meta["sha256"]
    with pytest.raises(UsageError, match="another tokenizer"):
        load_corpus(tmp_path / "corpus.kdtr", train_tokenizer(documents, 500))


def test_too_little_text_for_the_vocabulary_is_refused(text):
    few = [d for d in read_folder(text) if len(d.text) < 500]
    with pytest.raises(UsageError, match="give more text"):
        train_tokenizer(few, 4096)
