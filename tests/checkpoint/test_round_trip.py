"""HF -> KDTR -> HF and KDTR -> HF -> KDTR give every bit back; what changes between is as documented."""

import json

import numpy as np
import pytest
from checkpoint.makers import (
    DRAFTER,
    NUMPY,
    TARGET,
    assert_same_checkpoint,
    random_tensors,
    read_hf,
    write_hf,
)
from fixtures.seeded import CHECKPOINTS, checkpoint_dir

import ddtree.checkpoint
from ddtree.checkpoint import convert_to_hf, convert_to_kdtr, load_config
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.kdtr import KdtrFile

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
Q_B = "model.layers.0.self_attn.q_b_proj.weight"
KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


def there_and_back(tmp_path, source) -> tuple[dict, KdtrFile]:
    """Convert, restore, compare with the source; returns the summary and the KDTR file."""
    summary = convert_to_kdtr(source, tmp_path / "model.kdtr", progress=False)
    convert_to_hf(tmp_path / "model.kdtr", tmp_path / "back", progress=False)
    assert_same_checkpoint(tmp_path / "back", source)
    return summary, KdtrFile(tmp_path / "model.kdtr")


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("hf", [TARGET, DRAFTER], ids=["target", "drafter"])
def test_every_dtype_and_layout_comes_back(tmp_path, hf, dtype, num_shards):
    tensors = random_tensors(hf, dtype)
    summary, file = there_and_back(tmp_path, write_hf(tmp_path / "hf", hf, tensors, num_shards))
    assert summary["tensors"] == len(tensors) and summary["shards"] == num_shards
    assert summary["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {name for name in file if name != "config.json"} == set(tensors)
    for name, tensor in tensors.items():
        assert file[name].shape == tensor.shape
        assert file.info(name).dtype == ("f32" if name.endswith("bias") else dtype)


@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_the_trained_model_comes_back(tmp_path, root, kind):
    committed = root / "data" / "models" / "py12m" / f"{kind}.kdtr"
    convert_to_hf(committed, tmp_path / "hf", progress=False)
    convert_to_kdtr(tmp_path / "hf", tmp_path / "again.kdtr", progress=False)
    with KdtrFile(committed) as wanted, KdtrFile(tmp_path / "again.kdtr") as found:
        assert found.meta == wanted.meta
        assert list(found.arrays.values()) == list(wanted.arrays.values())
    assert (tmp_path / "again.kdtr").read_bytes() == committed.read_bytes()


@pytest.mark.parametrize(("name", "kind"), CHECKPOINTS)
def test_checkpoints_that_transformers_wrote_come_back(tmp_path, name, kind):
    source = tmp_path / "hf"
    source.symlink_to(checkpoint_dir(name, kind))
    convert_to_kdtr(source, tmp_path / "model.kdtr", progress=False)
    convert_to_hf(tmp_path / "model.kdtr", tmp_path / "back", progress=False)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (source / file).read_bytes()


def test_both_spellings_of_a_config_give_one_model(tmp_path):
    configs = []
    for spelling in ("config.json", "config_legacy.json"):
        source = tmp_path / spelling
        source.mkdir()
        for file in ("model.safetensors", "generation_config.json"):
            (source / file).symlink_to(checkpoint_dir("dsv3_yarn", "target") / file)
        text = (checkpoint_dir("dsv3_yarn", "target") / spelling).read_bytes()
        (source / "config.json").write_bytes(text)
        convert_to_kdtr(source, tmp_path / f"{spelling}.kdtr", progress=False)
        with KdtrFile(tmp_path / f"{spelling}.kdtr") as file:
            configs.append(load_config(file))
            assert file["config.json"].tobytes() == text
    assert configs[0] == configs[1] and configs[0].rope.factor == 40.0


def test_meta_and_files_say_where_it_came_from(tmp_path):
    source = write_hf(tmp_path / "hf", TARGET, random_tensors(TARGET), 2)
    (source / "tokenizer.json").write_bytes(b'{"a":  "\xc3\xa9"}\r\n')
    (source / "generation_config.json").write_bytes(b"{}")
    _, file = there_and_back(tmp_path, source)
    assert file["tokenizer.json"].tobytes() == b'{"a":  "\xc3\xa9"}\r\n'
    assert file.meta["kind"] == "target" and file.meta["config"] == TARGET
    assert file.meta["rope_layout"] == "halves" and file.meta["name_prefix"] == ""
    assert file.meta["permuted"] == ["self_attn.q_b_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"]
    assert file.meta["source_dtypes"] == {BIAS: "f16"}
    assert [shard["metadata"] for shard in file.meta["shards"]] == [{"format": "pt"}] * 2
    assert load_config(file) == ModelConfig.from_hf(TARGET)


def test_load_config_of_a_drafter(tmp_path):
    _, file = there_and_back(tmp_path, write_hf(tmp_path / "hf", DRAFTER, random_tensors(DRAFTER)))
    assert load_config(file) == DrafterConfig.from_hf(DRAFTER)
    assert file.meta["kind"] == "drafter" and file.meta["permuted"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"tie_word_embeddings": True},
        {"q_lora_rank": None},
        {"n_shared_experts": 0},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 2},
        {"topk_method": "greedy", "scoring_func": "softmax"},
    ],
    ids=str,
)
def test_every_shape_of_target_comes_back(tmp_path, change):
    hf = TARGET | change
    tensors = random_tensors(hf, "bf16")
    assert ("lm_head.weight" in tensors) == (not change.get("tie_word_embeddings", False))
    assert ("model.layers.0.self_attn.q_proj.weight" in tensors) == ("q_lora_rank" in change)
    assert any("shared" in name for name in tensors) == (
        change.get("n_shared_experts") != 0 and change.get("first_k_dense_replace") != 2
    )
    there_and_back(tmp_path, write_hf(tmp_path / "hf", hf, tensors, 2))


def test_a_bf16_bias_is_kept_exactly_as_f32(tmp_path):
    tensors = random_tensors(TARGET, "bf16")
    _, file = there_and_back(tmp_path, write_hf(tmp_path / "hf", TARGET, tensors))
    assert file[BIAS].dtype == np.float32
    np.testing.assert_array_equal(file[BIAS], tensors[BIAS].astype(np.float64))


def test_halves_in_the_source_stay_as_they_are(tmp_path):
    hf, tensors = TARGET | {"rope_interleave": False}, random_tensors(TARGET)
    summary, file = there_and_back(tmp_path, write_hf(tmp_path / "hf", hf, tensors))
    assert summary["permuted"] == 0 and file.meta["permuted"] == []
    assert file[Q_B].tobytes() == tensors[Q_B].tobytes()


def test_only_rotary_rows_move(tmp_path):
    tensors = random_tensors(TARGET)
    summary, file = there_and_back(tmp_path, write_hf(tmp_path / "hf", TARGET, tensors))
    moved = {name for name in tensors if file[name].tobytes() != tensors[name].tobytes()} - {BIAS}
    layers = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert moved == {
        f"{layer}.{name}.weight" for layer in layers for name in ("q_b_proj", "kv_a_proj_with_mqa")
    }
    assert summary["permuted"] == 4
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    latent, rope = tensors[KV_A][:6], tensors[KV_A][6:]
    assert file[KV_A].tobytes() == np.concatenate([latent, rope[order]]).tobytes()


def test_kimi_names_lose_their_prefix_and_vision_is_left_out(tmp_path):
    hf = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": TARGET,
        "model_type": "kimi_k25",
    }
    tensors = random_tensors(TARGET, "bf16")
    prefixed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    vision = {
        name: np.ones(3, NUMPY["bf16"])
        for name in ("vision_tower.a.weight", "mm_projector.b", "mm_projector.c")
    }
    source = write_hf(tmp_path / "hf", hf, prefixed | vision, 2)
    summary = convert_to_kdtr(source, tmp_path / "k2.kdtr", progress=False)
    assert summary["skipped"]["vision"]["count"] == 3
    assert sorted(summary["skipped"]["vision"]["modules"]) == ["mm_projector", "vision_tower"]
    with KdtrFile(tmp_path / "k2.kdtr") as file:
        assert {name for name in file if name != "config.json"} == set(tensors)
        assert file.meta["name_prefix"] == "language_model."
        assert load_config(file) == ModelConfig.from_hf(TARGET)
    convert_to_hf(tmp_path / "k2.kdtr", tmp_path / "back", progress=False)
    wanted = {name: value for name, value in read_hf(source).items() if name in prefixed}
    assert read_hf(tmp_path / "back") == wanted
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(prefixed)
    assert index["metadata"]["total_size"] == sum(len(value[3]) for value in wanted.values())


def test_prediction_layers_and_stored_frequencies_are_left_out(tmp_path):
    tensors = random_tensors(TARGET)
    extra = {
        "model.layers.2.eh_proj.weight": np.ones((2, 2), np.float32),
        "model.layers.2.self_attn.q_b_proj.weight": np.ones((2, 2), np.float32),
        "model.layers.10.embed_tokens.weight": np.ones(2, np.int64),
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    summary = convert_to_kdtr(
        write_hf(tmp_path / "hf", TARGET, tensors | extra), tmp_path / "m", progress=False
    )
    layers = summary["skipped"]["multi_token_prediction"]
    assert layers["count"] == 3 and sorted(layers["modules"]) == ["model.layers.10", "model.layers.2"]
    assert summary["skipped"]["rotary_frequencies"]["modules"] == ["model.layers.1.self_attn.rotary_emb"]
    assert summary["tensors"] == len(tensors)


def test_progress_goes_to_stderr_alone(tmp_path, capfd):
    source = write_hf(tmp_path / "hf", TARGET, random_tensors(TARGET))
    convert_to_kdtr(source, tmp_path / "a.kdtr", progress=True)
    convert_to_hf(tmp_path / "a.kdtr", tmp_path / "a", progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "to KDTR: 100%" in err and "to safetensors: 100%" in err
    convert_to_kdtr(source, tmp_path / "a.kdtr", progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_failed_conversion_leaves_what_was_there(tmp_path, monkeypatch):
    source = write_hf(tmp_path / "hf", TARGET, random_tensors(TARGET), 2)
    convert_to_kdtr(source, tmp_path / "m.kdtr", progress=False)
    before = (tmp_path / "m.kdtr").read_bytes()
    (tmp_path / "empty").mkdir()
    calls = []

    def fail_late(*_):
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(ddtree.checkpoint, "to_halves", fail_late)
    monkeypatch.setattr(ddtree.checkpoint_restore, "to_pairs", fail_late)
    calls += [1, 1, 1]
    for out in ("fresh", "empty"):
        with pytest.raises(KeyboardInterrupt):
            convert_to_hf(tmp_path / "m.kdtr", tmp_path / out, progress=False)
    with pytest.raises(KeyboardInterrupt):
        convert_to_kdtr(source, tmp_path / "m.kdtr", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "hf", "m.kdtr"]
    assert (tmp_path / "m.kdtr").read_bytes() == before and not any((tmp_path / "empty").iterdir())


def test_an_empty_directory_is_filled(tmp_path):
    source = write_hf(tmp_path / "hf", TARGET, random_tensors(TARGET))
    (tmp_path / "back").mkdir()
    there_and_back(tmp_path, source)
    assert (tmp_path / "back").stat().st_mode & 0o777 == source.stat().st_mode & 0o777
