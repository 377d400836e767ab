"""Record once: the autoregressive continuation of each prompt, and the drafter's table at every position of it.

With a branch head, what it says of the table's first columns below each parent is kept too.

Decoding is lossless and sampling keyed by position, so these two decide what a tree of any shape would have had
accepted: `study_replay` needs no model. A table is what a real round sees that starts at that root, bit for bit: its
context is the features of the committed rows, and a row's bits depend neither on its round nor on its batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ddtree import kdtr
from ddtree.bundle import DATA
from ddtree.config import MAX_BUDGET, DecodeConfig
from ddtree.decode import checked_prompt
from ddtree.engine import Engine
from ddtree.errors import NumericsError, UsageError
from ddtree.prompts import Prompt
from ddtree.rounds import HostRounds
from ddtree.study_recordings import (
    CONDITIONAL,
    INDEX,
    KIND,
    SCHEMA,
    Recording,
    open_recording,
    open_recordings,
    read_index,
    sha256_of,
    write_index,
)
from ddtree.trace import PACKAGES
from ddtree.versions import package_version

__all__ = ["DEFAULT_K", "Recording", "check_folder", "open_recordings", "record"]

DEFAULT_K = 64  # columns of a table: the largest budget that can be replayed


def check_folder(directory: Path | str) -> Path:
    """The folder to record into; UsageError for one inside the package's data/, whose files are all accounted for."""
    directory = Path(directory)
    resolved = directory.resolve()
    if resolved == DATA.resolve() or DATA.resolve() in resolved.parents:
        raise UsageError(
            f"{directory}: recordings do not go into the package's data/; name a folder outside it"
        )
    return directory


def record(
    engine: Engine,
    prompts: Sequence[Prompt],
    directory: Path | str,
    config: DecodeConfig,
    temperatures: Sequence[float] = (0.0,),
    k: int = DEFAULT_K,
    progress: Callable[[int], None] | None = None,
) -> list[Recording]:
    """Record every prompt at every temperature into a folder; what it already holds is kept, not done again.

    `config` gives the tokens wanted, top-k, top-p, seed and stop tokens; a prompt's sequence index is its place in
    `prompts`. `progress(total)` hears of each recording, done or found. Raises UsageError for another backend than
    numpy, a bundle without drafter, k out of range, or a folder of other settings or prompts.
    """
    directory = check_folder(directory)
    header = _header(engine, config, k)
    encoded = [_encode(engine, prompt) for prompt in prompts]
    done = {(line["sequence"], line["temperature"]): line for line in _lines_of(directory, header)}
    samplings = [replace(config.sampling, temperature=t) for t in dict.fromkeys(map(float, temperatures))]
    plan = [(sampling, sequence) for sampling in samplings for sequence in range(len(prompts))]
    found = []
    for sampling, sequence in plan:
        prompt, prompt_ids = prompts[sequence], encoded[sequence]
        identity = {"prompt": prompt.id, "prompt_sha256": _digest(prompt_ids)}
        key = (sequence, sampling.temperature)
        line = done.get(key, identity)
        if any(line[name] != value for name, value in identity.items()):
            raise UsageError(
                f"{directory}: prompt {sequence} was {line['prompt']} of other text; use another folder"
            )
        if "sha256" not in line or sha256_of(directory / line["file"]) != line["sha256"]:
            own = replace(config, method="ar", sampling=sampling)
            about = identity | {
                "kind": prompt.kind,
                "sequence": sequence,
                "temperature": sampling.temperature,
            }
            line = _record_one(engine, prompt_ids, own, directory, header, about)
            done[key] = line
            write_index(directory, header, done.values())
        found.append(open_recording(directory, line))
        if progress:
            progress(len(plan))
    return found


def _header(engine: Engine, config: DecodeConfig, k: int) -> dict[str, Any]:
    """What all recordings of a folder share, as the index's first line."""
    if engine.runner:
        raise UsageError(
            "record: a round on the device leaves the drafter's table there; use --backend numpy"
        )
    if engine.drafter is None:
        raise UsageError(
            f"{engine.bundle.path}: the bundle has no drafter to record; name one with --drafter"
        )
    if not 1 <= k <= MAX_BUDGET:
        raise UsageError(f"k: expected 1 to {MAX_BUDGET} columns of a table, found {k}")
    count, branch = engine.drafter.config.candidates, engine.drafter.config.branch
    if k < count:
        raise UsageError(
            f"k: the drafter's branch head scores {count} columns, found {k}; record with --k {count}"
        )
    ops, sampling = engine.ops, config.sampling
    return {
        "type": "header",
        "schema": SCHEMA,
        "kind": KIND,
        "packages": {name: package_version(name) for name in PACKAGES},
        "backend": ops.name,
        "dtype": ops.dtype_name,
        "route": ops.route,
        "model_sha256": engine.bundle.sha256(),
        "k": min(k, engine.config.vocab_size),
        "vocab_size": engine.config.vocab_size,
        "horizon": engine.horizon,
        "max_context": engine.max_context,
        "max_new_tokens": config.max_new_tokens,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "stop_token_ids": list(config.stop_token_ids),
    } | ({"branch": asdict(branch)} if branch else {})


def _lines_of(directory: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a folder that was recorded by the same model, settings and versions; none of a new folder."""
    if not (directory / INDEX).exists():
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{directory}: cannot make the folder: {error.strerror}") from None
        return []
    earlier, lines = read_index(directory)
    for name in header:
        if earlier.get(name) != header[name]:
            raise UsageError(
                f"{directory}: recorded with {name} {earlier.get(name)}, asked for {header[name]}; "
                "use another folder"
            )
    return lines


def _encode(engine: Engine, prompt: Prompt) -> np.ndarray:
    """A prompt's token ids i32[P]; UsageError with its name when it cannot be decoded after."""
    try:
        return checked_prompt(engine, engine.bundle.encode(prompt.text))
    except UsageError as error:
        raise UsageError(f"prompt {prompt.id}: {error}") from None


def _digest(prompt_ids: np.ndarray) -> str:
    return hashlib.sha256(prompt_ids.astype("<i4").tobytes()).hexdigest()


def _record_one(
    engine: Engine,
    prompt_ids: np.ndarray,
    config: DecodeConfig,
    directory: Path,
    header: dict[str, Any],
    about: dict[str, Any],
) -> dict[str, Any]:
    """Decode one prompt, write its file, and return its line of the index."""
    sequence = about["sequence"]
    try:
        tokens, tables, finish = _continue(engine, prompt_ids, config, sequence, header["k"])
    except NumericsError as error:
        raise NumericsError(f"prompt {about['prompt']}: {error}") from None
    shape = (len(tables), engine.horizon, header["k"])
    arrays = {
        "prompt_ids": prompt_ids,
        "tokens": np.array(tokens, np.int32),
        "token_ids": np.array([table[0] for table in tables], np.int32).reshape(shape),
        "log_probs": np.array([table[1] for table in tables], np.float32).reshape(shape),
    }
    if count := engine.drafter.config.candidates:
        conditional = np.array([table[2] for table in tables], np.float32)
        arrays[CONDITIONAL] = conditional.reshape(*shape[:2], count, count)
    about = about | {"prompt_tokens": len(prompt_ids), "num_tokens": len(tokens), "finish": finish}
    name = f"t{about['temperature']!r}_{sequence:04d}.kdtr"
    kdtr.save(directory / name, arrays, {"kind": KIND, "settings": header, "recording": about})
    return {"type": "recording", "file": name, "sha256": sha256_of(directory / name)} | about


def _continue(
    engine: Engine, prompt_ids: np.ndarray, config: DecodeConfig, sequence: int, k: int
) -> tuple[list[int], list[tuple[np.ndarray, ...]], str]:
    """Tokens, the table at each of them that the context leaves room to draft after, and why decoding ended."""
    draft = engine.draft_branches if engine.drafter.config.branch else engine.draft
    engine.reset(drafting=True)
    rounds = HostRounds(engine, config, sequence)
    wanted = min(config.max_new_tokens, engine.max_context - len(prompt_ids) + 1)
    this = rounds.prefill(prompt_ids)
    tokens, tables = list(this.tokens), []
    while True:
        if engine.context_len < engine.max_context - 1:
            tables.append(draft(tokens[-1], k))
        if tokens[-1] in config.stop_token_ids:
            return tokens, tables, "stop"
        if len(tokens) == wanted:
            return tokens, tables, "length" if wanted == config.max_new_tokens else "context"
        this = rounds.next(this, wanted - len(tokens))
        tokens += this.tokens
