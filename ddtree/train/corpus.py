"""A folder of text files as tokens: which files, which of them are held out, the tokenizer, one file of ids.

Files are told apart by their path relative to the folder, so the split does not change when others come or go.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ddtree.errors import UsageError
from ddtree.kdtr import KdtrFile, save
from ddtree.train.presets import END_OF_TEXT, SPECIAL_TOKENS

MOST_BYTES = 200_000  # of a file: longer ones are tables more often than text
HELD_OUT = 32  # one file in so many
NOT_TEXT = frozenset(("__pycache__", "site-packages", "dist-packages"))


@dataclass(frozen=True)
class Document:
    """One file: its path under the folder, with slashes, and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the first byte of the path's sha256 is a multiple of HELD_OUT."""
        return hashlib.sha256(self.path.encode()).digest()[0] % HELD_OUT == 0


def standard_library() -> Path:
    """The folder of the running interpreter's standard library, tests included where they are installed."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_folder(data: Path | str | None) -> list[Document]:
    """The documents under `data`, by path: UTF-8 files of 1 to MOST_BYTES bytes without NUL; UsageError if too few.

    Hidden files, __pycache__ and site-packages are left out. Without `data` they are the `*.py` files of the
    standard library.
    """
    root = standard_library() if data is None else Path(data)
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder; give --data a folder of text files")
    pattern = "*.py" if data is None else "*"
    documents = [Document(*found) for found in sorted(_texts(root, pattern))]
    if not any(d.held_out for d in documents) or all(d.held_out for d in documents):
        raise UsageError(
            f"{root}: {len(documents)} text files of at most {MOST_BYTES} bytes; one in {HELD_OUT} is held out by its "
            "path's hash, and both parts need one: give a folder of more files"
        )
    return documents


def _texts(root: Path, pattern: str) -> Iterator[tuple[str, str]]:
    for path in root.rglob(pattern):
        parts = path.relative_to(root).parts
        if not NOT_TEXT.isdisjoint(parts) or any(part.startswith(".") for part in parts):
            continue
        if path.is_file() and 0 < path.stat().st_size <= MOST_BYTES:
            content = path.read_bytes()
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                continue
            if "\0" not in text:
                yield "/".join(parts), text


def corpus_sha256(documents: list[Document]) -> str:
    """Over every path and text, in order, each after its length in bytes."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.path.encode(), document.text.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def train_tokenizer(documents: list[Document], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of the documents that are not held out; ids 0..3 are SPECIAL_TOKENS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in documents if not d.held_out), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UsageError(
            f"tokenizer: the text gives {tokenizer.get_vocab_size()} tokens, wanted {vocab_size}: give more text"
        )
    return tokenizer


@dataclass(frozen=True)
class Corpus:
    """Token ids of all documents, each followed by end of text: train i32 [n], held_out i32 [m], and what they are."""

    train: np.ndarray
    held_out: np.ndarray
    meta: dict[str, Any]


def encode(documents: list[Document], tokenizer: Tokenizer) -> Corpus:
    """Tokenize the documents; meta says which they were. Text that spells a special token stays text."""
    before, tokenizer.encode_special_tokens = tokenizer.encode_special_tokens, True
    encodings = tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False)
    tokenizer.encode_special_tokens = before
    parts = {
        held: np.concatenate([[*e.ids, END_OF_TEXT] for d, e in pairs if d.held_out == held]).astype(np.int32)
        for pairs in [list(zip(documents, encodings, strict=True))]
        for held in (False, True)
    }
    meta = {
        "kind": "corpus",
        "sha256": corpus_sha256(documents),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "files": len(documents),
        "bytes": sum(len(d.text.encode()) for d in documents),
        "held_out_bytes": sum(len(d.text.encode()) for d in documents if d.held_out),
        "held_out_files": [d.path for d in documents if d.held_out],
    }
    return Corpus(parts[False], parts[True], meta)


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def save_corpus(corpus: Corpus, path: Path) -> None:
    """Write the ids as u16 (the vocabulary is smaller) and meta to one KDTR file."""
    arrays = {"train": corpus.train.astype(np.uint16), "held_out": corpus.held_out.astype(np.uint16)}
    save(path, arrays, corpus.meta)


def load_corpus(path: Path, tokenizer: Tokenizer) -> Corpus:
    """Read what `save_corpus` wrote; UsageError where it was made with another tokenizer."""
    file = KdtrFile(path)
    if file.meta.get("tokenizer_sha256") != tokenizer_sha256(tokenizer):
        raise UsageError(f"{path}: made with another tokenizer; give another --out")
    return Corpus(file["train"].astype(np.int32), file["held_out"].astype(np.int32), file.meta)
