"""Every way a checkpoint, a KDTR file or an output can be wrong is one line that names it, and leaves nothing."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from checkpoint.makers import DRAFTER, TARGET, random_tensors, refuses, write_hf
from safetensors.numpy import save_file

from ddtree.checkpoint import convert_to_hf, convert_to_kdtr, load_config
from ddtree.errors import CheckpointError, ConfigError, UsageError
from ddtree.kdtr import KdtrError, KdtrFile, save

NORM, BIAS = "model.norm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
GATE = "model.layers.0.mlp.gate_proj.weight"
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"


TENSOR_FAULTS = {
    "missing": (lambda t: t.pop(NORM), f"1 missing ({NORM})"),
    "bias missing": (lambda t: t.pop(BIAS), f"1 missing ({BIAS})"),
    "extra": (lambda t: t.update(x=np.ones(1, np.float32)), "1 extra (x)"),
    "shape": (lambda t: t.update({NORM: t[NORM][:-1]}), f"{NORM}: expected [24], found [23]"),
    "transposed": (lambda t: t.update({GATE: t[GATE].T.copy()}), "expected [20, 24], found [24, 20]"),
    "dtype": (
        lambda t: t.update({NORM: t[NORM].view(np.int16)}),
        f"{NORM}: expected bf16, f16, f32, found I16",
    ),
    "f64": (lambda t: t.update({BIAS: np.ones(4)}), f"{BIAS}: expected bf16, f16, f32, found F64"),
    "fp8": (
        lambda t: t.update({f"{NORM}_scale_inv": np.ones(1)}),
        "1 extra (model.norm.weight_scale_inv)",
    ),
    "int4": (lambda t: t.update({f"{NORM}_packed": np.ones(1)}), "1 extra (model.norm.weight_packed)"),
    "nan bias": (
        lambda t: t.update({BIAS: np.full(4, 0x7F81, np.uint16).view(ml_dtypes.bfloat16)}),
        f"{BIAS}: expected numbers, found NaN",
    ),
    "half prefixed": (
        lambda t: t.update({f"language_model.{NORM}": t[NORM]}),
        "tensors lack the prefix language_model. (lm_head.weight; ",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_do_not_fit(tmp_path, fault):
    tensors = random_tensors(TARGET)
    change, fragment = TENSOR_FAULTS[fault]
    change(tensors)
    refuses(
        tmp_path, write_hf(tmp_path / "hf", TARGET, tensors), CheckpointError, str(tmp_path / "hf"), fragment
    )


def test_all_faults_are_named_at_once(tmp_path):
    tensors = random_tensors(TARGET)
    for fault in ("missing", "extra", "transposed", "f64"):
        TENSOR_FAULTS[fault][0](tensors)
    fragments = [TENSOR_FAULTS[fault][1] for fault in ("missing", "extra", "transposed", "f64")]
    refuses(tmp_path, write_hf(tmp_path / "hf", TARGET, tensors), CheckpointError, *fragments)


def test_a_drafter_without_fc(tmp_path):
    tensors = random_tensors(DRAFTER)
    del tensors["fc.weight"]
    source = write_hf(tmp_path / "hf", DRAFTER, tensors)
    refuses(tmp_path, source, CheckpointError, "1 missing (fc.weight)")


CONFIGS = {
    "not json": (b'{"vocab_size": ', CheckpointError, "config.json: expected JSON"),
    "empty": (b"", CheckpointError, "config.json: expected JSON"),
    "list": (b"[]", CheckpointError, "config.json: expected a JSON object, found list"),
    "nan": (json.dumps(TARGET | {"rms_norm_eps": float("nan")}).encode(), CheckpointError, "NaN"),
    "key twice": (b'{"a": 1, "a": 2}', CheckpointError, "'a' stands twice"),
    "other model": (b'{"architectures": ["LlamaForCausalLM"]}', CheckpointError, "['LlamaForCausalLM']"),
    "no settings": (b'{"kv_lora_rank": 1}', ConfigError, "config.json: field num_hidden_layers is missing"),
    "dflash": (b'{"architectures": ["DFlashDraftModel"]}', ConfigError, "field dflash_config is missing"),
    "layers": (
        json.dumps(TARGET | {"num_hidden_layers": 3}).encode(),
        CheckpointError,
        "missing (model.layers.2.",
    ),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_configs_that_cannot_be_used(tmp_path, fault):
    source = write_hf(tmp_path / "hf", TARGET, random_tensors(TARGET))
    text, kind, fragment = CONFIGS[fault]
    (source / "config.json").write_bytes(text)
    refuses(tmp_path, source, kind, fragment)


def change_index(source, change) -> None:
    index = json.loads((source / INDEX).read_text())
    change(index["weight_map"])
    (source / INDEX).write_text(json.dumps(index))


def truncate(path, keep) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def hold_twice(source) -> None:
    """The second shard holds a tensor of the first one too."""
    tensors = random_tensors(TARGET)
    part = dict(list(tensors.items())[1::2])
    save_file(
        part | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]},
        source / SHARD.replace("1", "2", 1),
    )


FILES = {
    "no config": (lambda s: (s / "config.json").unlink(), "config.json: cannot be read: No such file"),
    "no directory": (shutil.rmtree, "hf: no such directory"),
    "no index": (lambda s: (s / INDEX).unlink(), "no weights: expected model.safetensors or"),
    "shard missing": (lambda s: (s / SHARD).unlink(), f"lists shard {SHARD}, which is missing"),
    "shard cut": (lambda s: truncate(s / SHARD, -1), f"{SHARD}: not a whole safetensors file"),
    "shard cut in its header": (lambda s: truncate(s / SHARD, 100), f"{SHARD}: not a whole safetensors file"),
    "shard empty": (lambda s: truncate(s / SHARD, 0), f"{SHARD}: not a whole safetensors file"),
    "shard a directory": (
        lambda s: ((s / SHARD).unlink(), (s / SHARD).mkdir()),
        f"{SHARD}: not a whole safetensors file",
    ),
    "shard is text": (
        lambda s: (s / SHARD).write_text("version https://git-lfs"),
        "not a whole safetensors file",
    ),
    "index not json": (lambda s: truncate(s / INDEX, -1), f"{INDEX}: expected JSON"),
    "index without map": (lambda s: (s / INDEX).write_text("{}"), "weight_map: expected tensor names"),
    "index is a list": (lambda s: (s / INDEX).write_text("[]"), "weight_map: expected tensor names"),
    "index leaves": (
        lambda s: change_index(s, lambda m: m.update({NORM: "../x.safetensors"})),
        "weight_map: expected tensor names",
    ),
    "index lists more": (
        lambda s: change_index(s, lambda m: m.update({"y": SHARD})),
        f"lists tensor y in {SHARD}, which does not hold it",
    ),
    "index lists elsewhere": (
        lambda s: change_index(
            s, lambda m: m.update({"model.embed_tokens.weight": SHARD.replace("1", "2", 1)})
        ),
        "lists tensor model.embed_tokens.weight in model-00002",
    ),
    "index lists less": (lambda s: change_index(s, lambda m: m.pop(NORM)), f"does not list tensor {NORM}"),
    "index names a key twice": (
        lambda s: (s / INDEX).write_text('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}'),
        "'a' stands twice",
    ),
    "in two shards": (hold_twice, "tensor model.embed_tokens.weight is both in model-00001"),
}


@pytest.mark.parametrize("fault", FILES)
def test_files_that_are_missing_or_broken(tmp_path, fault):
    source = write_hf(tmp_path / "hf", TARGET, random_tensors(TARGET), 2)
    change, fragment = FILES[fault]
    change(source)
    refuses(tmp_path, source, CheckpointError, fragment)


@pytest.fixture
def kdtr(tmp_path):
    source = write_hf(tmp_path / "hf", TARGET, random_tensors(TARGET), 2)
    convert_to_kdtr(source, tmp_path / "m.kdtr", progress=False)
    return tmp_path / "m.kdtr"


def test_outputs_that_cannot_be_written(tmp_path, kdtr):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    before = sorted(tmp_path.iterdir())
    for out, fragment in {
        "full": "full: already there: give a new or an empty directory",
        "m.kdtr": "m.kdtr: already there",
        "absent/new": "absent/new: cannot be written: No such file or directory",
        "m.kdtr/new": "cannot be written: Not a directory",
    }.items():
        with pytest.raises(UsageError) as caught:
            convert_to_hf(kdtr, tmp_path / out, progress=False)
        assert fragment in str(caught.value) and "\n" not in str(caught.value)
    for out in ("absent/new.kdtr", "full"):
        with pytest.raises(KdtrError) as caught:
            convert_to_kdtr(tmp_path / "hf", tmp_path / out, progress=False)
        assert out in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_fills_up_is_one_line(tmp_path, kdtr):
    resource = pytest.importorskip("resource", reason="file size limits need a POSIX system")
    before, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))  # Python turns the signal into OSError
    try:
        with pytest.raises(UsageError, match=r"out: cannot be written: File too large$"):
            convert_to_hf(kdtr, tmp_path / "out", progress=False)
        with pytest.raises(KdtrError, match="File too large"):
            convert_to_kdtr(tmp_path / "hf", tmp_path / "out.kdtr", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.iterdir()) == before


def resaved(path, change_meta=lambda meta: None, change_arrays=lambda arrays: None):
    """Write the file again with changed meta and arrays."""
    with KdtrFile(path) as file:
        meta, arrays = file.meta, {name: np.array(file[name]) for name in file}
    change_meta(meta)
    change_arrays(arrays)
    save(path, arrays, meta)
    return path


META_FAULTS = {
    "no config": (lambda m: m.pop("config"), "config: expected a JSON object, found NoneType"),
    "no shards": (lambda m: m.pop("shards"), "meta does not say how to restore the shards"),
    "no prefix": (lambda m: m.pop("name_prefix"), "meta does not say how to restore the shards"),
    "shards too short": (lambda m: m["shards"].pop(), "meta does not say how to restore the shards"),
    "shard leaves": (lambda m: m["shards"][0].update(file="../x.safetensors"), "meta does not say how"),
    "another config": (
        lambda m: m["config"].update(vocab_size=41),
        "model.embed_tokens.weight: expected [41, 24]",
    ),
}


@pytest.mark.parametrize("fault", META_FAULTS)
def test_files_that_are_no_checkpoints(tmp_path, kdtr, fault):
    change, fragment = META_FAULTS[fault]
    resaved(kdtr, change_meta=change)
    with pytest.raises(CheckpointError) as caught:
        convert_to_hf(kdtr, tmp_path / "out", progress=False)
    assert fragment in str(caught.value) and str(kdtr) in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m.kdtr"]


def test_a_damaged_weight_is_found_on_the_way_back(tmp_path, kdtr):
    content = bytearray(kdtr.read_bytes())
    with KdtrFile(kdtr) as file:
        start = len(content) - sum(file.arrays[name].nbytes for name in ["config.json"])
    content[start - 200] ^= 1
    kdtr.write_bytes(content)
    with pytest.raises(KdtrError) as caught:
        convert_to_hf(kdtr, tmp_path / "out", progress=False)
    assert "crc32" in str(caught.value) and not (tmp_path / "out").exists()


def test_load_config_of_something_else(tmp_path):
    save(tmp_path / "x.kdtr", {}, {})
    with (
        KdtrFile(tmp_path / "x.kdtr") as file,
        pytest.raises(CheckpointError, match=r"x\.kdtr: config: expected"),
    ):
        load_config(file)
