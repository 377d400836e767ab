"""What `quantization_config` of a config.json says of the weights: fp8 blocks, INT4 groups, or nothing.

Two schemes are read, those of DeepSeek-V3 and of Kimi K2.5/K2.6. Which modules are quantised is decided by the tensors
that are there, not by lists of names; activations stay in the matmul format, whatever `activation_scheme` says.
"""

from __future__ import annotations

from typing import Any

from ddtree.errors import ConfigError
from ddtree.fields import FieldReader
from ddtree.quantised import BLOCK, GROUP

KEY = "quantization_config"
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def read_scheme(hf: dict[str, Any], where: str = "config.json") -> str | None:
    """`fp8`, `int4` or None; the object may stand beside `text_config` or in it. ConfigError for any other scheme."""
    found = [part[KEY] for part in (hf, hf.get("text_config")) if isinstance(part, dict) and part.get(KEY)]
    if not found:
        return None
    if any(other != found[0] for other in found):
        raise ConfigError(f"{where}: {KEY}: text_config has another than the top level: keep one of them")
    where = f"{where}: {KEY}"
    read = FieldReader(found[0], where)
    method = read.choice("quant_method", ("fp8", "compressed-tensors"))
    if method == "fp8":
        read.choice("fmt", ("e4m3",), "e4m3")
        if read.integers("weight_block_size") != (BLOCK, BLOCK):
            raise ConfigError(
                f"{where}: weight_block_size: expected [{BLOCK}, {BLOCK}], found {found[0]['weight_block_size']}"
            )
        return "fp8"
    read.choice("format", ("pack-quantized",))
    groups = read.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"{where}: config_groups: expected an object with a group, found {groups!r}")
    for name, group in groups.items():
        _check_group(group, f"{where}: config_groups: {name}")
    return "int4"


def _check_group(group: Any, where: str) -> None:
    """ConfigError unless a group of compressed-tensors is INT4, symmetric, in groups of 32, its activations plain."""
    read = FieldReader(group, where)
    read.choice("format", ("pack-quantized",), "pack-quantized")
    if read.get("input_activations", None) is not None:
        raise ConfigError(f"{where}: input_activations: expected null, found {group['input_activations']!r}")
    weights = FieldReader(read.get("weights"), f"{where}: weights")
    for name, wanted in INT4_WEIGHTS.items():
        value = weights.get(name)
        if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
            raise ConfigError(f"{where}: weights: {name}: expected {wanted!r}, found {value!r}")
    if weights.get("actorder", False):
        raise ConfigError(f"{where}: weights: actorder: expected null, found {weights.get('actorder')!r}")
