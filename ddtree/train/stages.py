"""What `ddtree train` does: tokenizer, target, drafter, branch, each going on where an earlier call stopped.

A folder holds: tokenizer.json, corpus.kdtr (ids), target.pt and target.jsonl (checkpoint, log), target.kdtr, bank.kdtr,
drafter.pt and drafter.jsonl, drafter.kdtr, branch_bank.kdtr, rows.kdtr, branch.pt and branch.jsonl,
drafter_branch.kdtr, a PNG of each log, and what was found in target.json, drafter.json and branch.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ddtree.bundle import Bundle, open_bundle
from ddtree.config import DrafterConfig
from ddtree.errors import ConfigError, UsageError
from ddtree.kdtr import KdtrFile
from ddtree.prompts import load_prompts
from ddtree.train import branch_report
from ddtree.train import corpus as corpora
from ddtree.train.bank import open_bank
from ddtree.train.branch_rows import open_rows
from ddtree.train.corpus import Corpus
from ddtree.train.curves import draw_curves
from ddtree.train.device import open_device, repeatable
from ddtree.train.drafter import Drafter
from ddtree.train.evaluate import evaluate, held_out_prompts, lines
from ddtree.train.export import export_branch, export_drafter, export_target, parameters
from ddtree.train.fit_branch import fit_branch
from ddtree.train.fit_drafter import fit_drafter
from ddtree.train.fit_target import fit_target, held_out_loss, loads
from ddtree.train.loop import Clock
from ddtree.train.names import drafter_views, load, target_views
from ddtree.train.presets import Preset
from ddtree.train.target import Target

PROMPT_TOKENS = 128  # of a held-out prompt
BRANCH_TEMPERATURES = (0.0, 0.6)  # that a head is evaluated at
MOST_VOCABULARY = 2**15  # ids are kept in 16 bits


@dataclass(frozen=True)
class Work:
    """One call: where the text is (None: the standard library), where files go, what and how long."""

    data: Path | None
    out: Path
    preset: Preset
    seed: int
    device: torch.device
    clock: Clock
    say: Callable[[str], None]


def start(
    data: str | None,
    out: str,
    preset: Preset,
    seed: int,
    device: str,
    minutes: float | None,
    say: Callable[[str], None],
) -> Work:
    """Check a call's settings and make the folder; UsageError for what cannot be."""
    chosen, folder = open_device(device), Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}") from None
    return Work(Path(data) if data else None, folder, preset, seed, chosen, Clock(minutes), say)


def train_tokenizer(work: Work) -> Tokenizer:
    """tokenizer.json and corpus.kdtr, unless they are there."""
    path, ids = work.out / "tokenizer.json", work.out / "corpus.kdtr"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
        if tokenizer.get_vocab_size() != work.preset.vocab_size:
            raise UsageError(
                f"{path}: {tokenizer.get_vocab_size()} tokens, preset {work.preset.name} has {work.preset.vocab_size}; "
                "give another --out"
            )
        if ids.exists():
            work.say(f"{path} is there already")
            return tokenizer
    else:
        tokenizer = corpora.train_tokenizer(corpora.read_folder(work.data), work.preset.vocab_size)
        tokenizer.save(str(path))
    _corpus(work, tokenizer)
    return tokenizer


def _corpus(work: Work, tokenizer: Tokenizer) -> Corpus:
    """The corpus in that tokenizer's ids: of corpus.kdtr, or made and written there."""
    path = work.out / "corpus.kdtr"
    if not path.exists():
        corpora.save_corpus(corpora.encode(corpora.read_folder(work.data), tokenizer), path)
    corpus = corpora.load_corpus(path, tokenizer)
    meta = corpus.meta
    work.say(
        f"corpus: {meta['files']} files, {meta['bytes']:,} bytes, {len(corpus.train):,} tokens to train on, "
        f"{len(corpus.held_out):,} in {len(meta['held_out_files'])} files held out, sha256 {meta['sha256'][:16]}"
    )
    return corpus


def _about(corpus: Corpus) -> dict[str, Any]:
    """Which text it is, for a record."""
    names = ("sha256", "tokenizer_sha256", "files", "bytes", "held_out_bytes")
    return {name: corpus.meta[name] for name in names} | {"tokens": len(corpus.train)}


def _refuse_other(folder: Path, name: str) -> None:
    """UsageError where the bundle's file in the folder is not of a run there, so that none is overwritten."""
    if (folder / f"{name}.kdtr").exists() and not (folder / f"{name}.pt").exists():
        raise UsageError(f"{folder}: holds a {name}.kdtr that was not trained there; give another --out")


@repeatable()
def train_target(work: Work) -> bool:
    """target.kdtr; False when the clock stopped it before the last step."""
    _refuse_other(work.out, "target")
    tokenizer = train_tokenizer(work)
    corpus = _corpus(work, tokenizer)
    model, done = fit_target(work.preset, corpus, work.out, work.seed, work.device, work.clock)
    draw_curves(work.out / "target.jsonl", work.out / "target.png")
    if not done:
        work.say("target: stopped by --minutes; the same command goes on")
        return False
    path = work.out / "target.kdtr"
    export_target(model, work.preset.target_hf(), tokenizer, path)
    bundle = open_bundle(path)
    rounded = open_target(bundle, work.device)
    window = work.preset.target.window
    report = held_out_loss(rounded, corpus, window, work.device)
    report |= parameters(bundle.target, bundle.config) | {"corpus": _about(corpus), "seed": work.seed}
    report["run"] = work.preset.settings()["target"]
    tokens = torch.from_numpy(corpus.held_out[: 8 * window]).long().to(work.device)
    shares = loads(
        rounded, tokens.unsqueeze(0)[:, :window] if len(tokens) < 8 * window else tokens.view(8, window)
    )
    report["least_and_most_load"] = [[round(f(share), 3) for f in (min, max)] for share in shares]
    (work.out / "target.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    work.say(f"target: {json.dumps(report)}")
    return True


def open_target(bundle: Bundle, device: torch.device) -> Target:
    """A bundle's target as a PyTorch module; ConfigError for one whose kind is not trained here."""
    config = bundle.config
    if config.tie_word_embeddings or config.topk_method != "noaux_tc" or config.n_group != 1:
        raise ConfigError(f"{bundle.target.path}: training wants an untied head and noaux_tc without groups")
    if config.vocab_size > MOST_VOCABULARY:
        raise ConfigError(
            f"{bundle.target.path}: training wants a vocabulary of at most {MOST_VOCABULARY}, found {config.vocab_size}"
        )
    model = Target(config)
    views = target_views(model)
    if lacking := [name for name in views if name not in bundle.target]:
        raise ConfigError(f"{bundle.target.path}: training wants plain weights, found no {lacking[0]}")
    load(views, bundle.target)
    return model.to(device).eval().requires_grad_(False)


def open_drafter(file: KdtrFile, config: DrafterConfig, positions: int, device: torch.device) -> Drafter:
    """A bundle's drafter as a PyTorch module."""
    model = Drafter(config, positions)
    load(drafter_views(model), file)
    return model.to(device).eval().requires_grad_(False)


@repeatable()
def train_drafter(work: Work, target: Path | None = None) -> bool:
    """drafter.kdtr for `target`, or for the folder's own; False when the clock stopped it."""
    _refuse_other(work.out, "drafter")
    path = target or work.out / "target.kdtr"
    bundle = open_bundle(path)
    if bundle.tokenizer is None:
        raise UsageError(f"{path}: the target has no tokenizer; convert its checkpoint with tokenizer.json")
    hf = work.preset.drafter_hf(bundle.target.meta["config"])
    config = DrafterConfig.from_hf(hf, f"preset {work.preset.name}")
    config.check_target(bundle.config)
    model, corpus = open_target(bundle, work.device), _corpus(work, bundle.tokenizer)
    made_of = {"target": bundle.sha256()["target"], "corpus": corpus.meta["sha256"]}
    bank = open_bank(model, work.preset.bank, corpus.train, work.out / "bank.kdtr", made_of, work.seed)
    drafter, done = fit_drafter(work.preset, config, model, bank, work.out, made_of, work.seed, work.clock)
    draw_curves(work.out / "drafter.jsonl", work.out / "drafter.png")
    if not done:
        work.say("drafter: stopped by --minutes; the same command goes on")
        return False
    export_drafter(drafter, hf, work.out / "drafter.kdtr")
    about = {"made_of": made_of, "seed": work.seed}
    about |= {name: work.preset.settings()[name] for name in ("bank", "drafter")}
    _report(work, bundle, model, corpus, config, about)
    return True


def _prompts(work: Work, bundle: Bundle, corpus: Corpus, config: DrafterConfig) -> dict[str, list[list[int]]]:
    """What is evaluated on: prompts of the files held out, and those that are shipped."""
    positions, most = bundle.config.max_position_embeddings, work.preset.eval_prompts
    shipped = [bundle.encode(prompt.text) for prompt in load_prompts()][:most]
    room = positions - work.preset.eval_tokens - config.block_size
    return {
        "held-out files": held_out_prompts(corpus.held_out, most, min(PROMPT_TOKENS, positions // 2)),
        "shipped prompts": [ids for ids in shipped if len(ids) <= room],
    }


@repeatable()
def train_branch(work: Work, target: Path | None = None, drafter: Path | None = None) -> bool:
    """drafter_branch.kdtr: a head for a drafter that stays as it is; False when the clock stopped it.

    Without `target` and `drafter` they are the folder's own.
    """
    target = target or work.out / "target.kdtr"
    beside = (target if target.is_dir() else target.parent) / "drafter.kdtr"
    bundle = open_bundle(target, drafter or beside)
    if bundle.tokenizer is None:
        raise UsageError(f"{target}: the target has no tokenizer; convert its checkpoint with tokenizer.json")
    path, config = work.out / "drafter_branch.kdtr", bundle.drafter_config
    if path.exists() and not (work.out / "branch.pt").exists():
        raise UsageError(f"{path}: was not made by train branch there; give another --out")
    positions = bundle.config.max_position_embeddings
    model, corpus = open_target(bundle, work.device), _corpus(work, bundle.tokenizer)
    frozen = open_drafter(bundle.drafter, config, positions, work.device)
    made_of = bundle.sha256() | {"corpus": corpus.meta["sha256"]}
    of_bank = {name: made_of[name] for name in ("target", "corpus")}
    run, place = work.preset.branch, work.out / "branch_bank.kdtr"
    bank = open_bank(model, run.bank, corpus.train, place, of_bank, work.seed)["tokens"]
    rows = open_rows(model, frozen, run, bank, work.out / "rows.kdtr", made_of, work.seed)
    branch, done = fit_branch(work.preset, model, rows, work.out, made_of, work.seed, work.clock)
    draw_curves(work.out / "branch.jsonl", work.out / "branch.png")
    if not done:
        work.say("branch: stopped by --minutes; the same command goes on")
        return False
    export_branch(branch, Path(bundle.drafter.path), path)
    branch.half().float()  # as it was written
    found: dict[str, Any] = {"made_of": made_of, "seed": work.seed, "rows": len(rows["labels"])}
    found |= {"run": work.preset.settings()["branch"], "rank": work.preset.branch_rank}
    for name, prompts in _prompts(work, bundle, corpus, config).items():
        for temperature in BRANCH_TEMPERATURES:
            each = (prompts, work.preset.eval_tokens, temperature, work.seed)
            result = branch_report.report(model, frozen, branch, *each)
            found[f"{name}, temperature {temperature:g}"] = result
            work.say("\n".join(branch_report.lines(name, result)))
    (work.out / "branch.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return True


def _report(
    work: Work, bundle: Bundle, model: Target, corpus: Corpus, config: DrafterConfig, about: dict[str, Any]
) -> None:
    """Evaluate what was written, print it and keep it in drafter.json; beside it the target's own drafter, if any."""
    positions, device = bundle.config.max_position_embeddings, work.device
    file = KdtrFile(work.out / "drafter.kdtr")
    ours = open_drafter(file, config, positions, device)
    size = sum(p.numel() for p in ours.parameters())
    work.say(f"drafter: {size:,} parameters")
    report: dict[str, Any] = {"parameters": size} | about
    new = work.preset.eval_tokens
    sets = _prompts(work, bundle, corpus, config)
    beside = bundle.path / "drafter.kdtr" if bundle.path.is_dir() else bundle.path.parent / "drafter.kdtr"
    drafters = {"trained": ours}
    if beside.exists() and beside.resolve() != (work.out / "drafter.kdtr").resolve():
        other = open_bundle(bundle.target.path, beside)
        drafters["the target's own"] = open_drafter(other.drafter, other.drafter_config, positions, device)
    for name, prompts in sets.items():
        for which, drafter in drafters.items():
            result = evaluate(model, drafter, prompts, new)
            report[f"{name}, {which}"] = result
            work.say("\n".join(lines(f"{name}, drafter {which}", result)))
    (work.out / "drafter.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")


ALL = (train_target, train_drafter, train_branch)  # of a bundle, in their order; each says whether it is done
