"""Trained weights -> bundles: a checkpoint in Hugging Face's layout, f16, which `ddtree.checkpoint` converts.

The branch head's tensors stand beside the drafter's in a file of their own, `drafter_branch.kdtr`:
`branch.parent.weight`, `branch.gate.weight`, `branch.child.weight`, f16 [R, H] each, and `dflash_config.branch` =
{"rank": R, "candidates": K} in its config.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from ddtree.checkpoint import convert_to_kdtr
from ddtree.checkpoint_names import BIAS
from ddtree.checkpoint_rotary import KEY, QUERIES, to_pairs
from ddtree.config import ModelConfig
from ddtree.errors import NumericsError
from ddtree.kdtr import KdtrFile, save
from ddtree.train.branch import CANDIDATES, BranchHead
from ddtree.train.drafter import Drafter
from ddtree.train.names import drafter_views, target_views, to_checkpoint
from ddtree.train.target import Target


def export_target(model: Target, hf: dict[str, Any], tokenizer: Tokenizer, path: Path) -> None:
    """Round to f16 (routing bias: f32), write the target and its tokenizer to one KDTR file."""
    arrays = {name: _rounded(name, to_checkpoint(name, view)) for name, view in target_views(model).items()}
    for name in arrays:
        if name.endswith((KEY, *QUERIES)):
            to_pairs(arrays[name], name, model.config)
    _convert(arrays, hf, path, tokenizer)


def export_drafter(model: Drafter, hf: dict[str, Any], path: Path) -> None:
    """Round to f16 and write the drafter to one KDTR file."""
    _convert(
        {name: _rounded(name, to_checkpoint(name, view)) for name, view in drafter_views(model).items()},
        hf,
        path,
    )


def export_branch(branch: BranchHead, drafter: Path, path: Path) -> None:
    """The drafter's file with the branch head's tensors and config fields added."""
    file = KdtrFile(drafter)
    views = branch_arrays(branch)
    meta = json.loads(json.dumps(dict(file.meta)))
    rank = len(branch.parent)
    meta["config"]["dflash_config"]["branch"] = {"rank": rank, "candidates": CANDIDATES}
    text = np.frombuffer(json.dumps(meta["config"], indent=1).encode(), np.uint8)
    meta["shards"][0]["count"] += len(views.keys() - file.arrays.keys())
    weights = {name: file[name] for name in file if name != "config.json"}
    save(path, weights | views | {"config.json": text}, meta)


def branch_arrays(branch: BranchHead) -> dict[str, np.ndarray]:
    """The head's tensors by their names in the file, f16 [R, H]."""
    names = {name: f"branch.{name}.weight" for name in ("parent", "gate", "child")}
    return {full: _rounded(full, to_checkpoint(full, getattr(branch, name))) for name, full in names.items()}


def _rounded(name: str, values: np.ndarray) -> np.ndarray:
    """f16, but a routing bias as it is; NumericsError for what f16 cannot hold."""
    if name.endswith(BIAS):
        return values
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise NumericsError(f"{name}: f16 cannot hold {np.abs(values).max():g}; lower the learning rate")
    return rounded


def _convert(
    arrays: dict[str, np.ndarray], hf: dict[str, Any], path: Path, tokenizer: Tokenizer | None = None
) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".checkpoint.") as folder:
        directory = Path(folder)
        save_file(arrays, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(hf, indent=1), "utf-8")
        if tokenizer is not None:
            (directory / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
        convert_to_kdtr(directory, path, progress=False)


def parameters(target: KdtrFile, config: ModelConfig) -> dict[str, int]:
    """Parameters of a target's file: in all, and those that one token uses, embedding and head aside."""
    sizes = {name: info.nbytes // np.dtype(np.float16).itemsize for name, info in target.arrays.items()}
    sizes = {name: size for name, size in sizes.items() if name.endswith(".weight")}
    apart = sum(sizes[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in sizes)
    experts = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    total = sum(sizes.values())
    used = experts * config.num_experts_per_tok // config.n_routed_experts
    return {"total": total, "active": total - apart - experts + used}
