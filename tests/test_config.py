"""ModelConfig: where keys are found, what is refused by name, the union of end ids, generation defaults."""

import json

import pytest

from lily.config import FULL, LINEAR, ModelConfig
from lily.errors import CheckpointError
from lily.presets import PRESETS
from lily.weight_map import modules, plain_tensors
from tests.checkpoint_tools import MODEL_DIR, mini_config


def test_lily_tiny_equals_its_preset():
    config = ModelConfig.from_folder(MODEL_DIR)
    assert config == PRESETS["lily-tiny"]
    assert config.eos_ids == (6137, 6135)
    assert config.attention_layers == (3, 7) and config.gdn_layers == (0, 1, 2, 4, 5, 6)
    assert (config.rotary_dim, config.conv_channels, config.q_width) == (64, 1024, 2048)
    assert config.generation.temperature == 0


def test_35b_preset_has_the_published_size():
    config = PRESETS["qwen3.6-35b-a3b"]
    assert config.kv_bytes_per_token == 20480 and config.gdn_state_bytes == 30 * 32 * 128 * 128 * 4
    total = 0
    for path, module in modules(config).items():
        bits = config.quantization.overrides[path].bits if path in config.quantization.overrides else 4
        rows = max(1, module.experts) * module.n
        total += rows * (module.k * bits // 8 + module.k // 64 * 4)
    for spec in plain_tensors(config).values():
        count = 1
        for dim in spec.shape:
            count *= dim
        total += 2 * count
    assert total == 19_508_787_456


def test_flat_dims_equal_nested_ones():
    nested = mini_config()
    flat = {**nested.pop("text_config"), **nested}
    assert ModelConfig.from_dict(flat) == ModelConfig.from_dict(mini_config())


@pytest.mark.parametrize("count, interval, expected", [
    (4, 4, (LINEAR, LINEAR, LINEAR, FULL)), (3, 1, (FULL,) * 3), (3, 2, (LINEAR, FULL, LINEAR)),
])
def test_layer_types_from_interval(count, interval, expected):
    config = ModelConfig.from_dict(mini_config(num_hidden_layers=count, full_attention_interval=interval))
    assert config.layer_types == expected


def test_layer_types_win_over_interval():
    config = ModelConfig.from_dict(mini_config(layer_types=[FULL, LINEAR]))
    assert config.is_attention(0) and not config.is_attention(1)


@pytest.mark.parametrize("text, top, key", [
    ({"hidden_size": None}, {}, "hidden_size"),
    ({"hidden_size": "big"}, {}, "hidden_size"),
    ({"hidden_size": 100}, {}, "hidden_size"),
    ({"hidden_size": True}, {}, "hidden_size"),
    ({"hidden_size": 0}, {}, "hidden_size"),
    ({"vocab_size": -1}, {}, "vocab_size"),
    ({"num_hidden_layers": 0}, {}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**9}, {}, "num_hidden_layers"),
    ({"full_attention_interval": 0}, {}, "full_attention_interval"),
    ({"layer_types": [LINEAR]}, {}, "layer_types"),
    ({"layer_types": [LINEAR, "sliding_attention"]}, {}, "layer_types"),
    ({"head_dim": 48}, {}, "head_dim"),
    ({"head_dim": 512}, {}, "head_dim"),
    ({"num_key_value_heads": 3}, {}, "num_attention_heads"),
    ({"num_key_value_heads": 0}, {}, "num_key_value_heads"),
    ({"linear_key_head_dim": 32}, {}, "linear_key_head_dim"),
    ({"linear_value_head_dim": 96}, {}, "linear_value_head_dim"),
    ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, {}, "linear_num_value_heads"),
    ({"linear_conv_kernel_dim": 9}, {}, "linear_conv_kernel_dim"),
    ({"num_experts": 513}, {}, "num_experts"),
    ({"num_experts_per_tok": 5}, {}, "num_experts_per_tok"),
    ({"num_experts": 64, "num_experts_per_tok": 17}, {}, "num_experts_per_tok"),
    ({"moe_intermediate_size": 96}, {}, "moe_intermediate_size"),
    ({"shared_expert_intermediate_size": 0}, {}, "shared_expert_intermediate_size"),
    ({"hidden_act": "gelu"}, {}, "hidden_act"),
    ({"attention_bias": True}, {}, "attention_bias"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "yarn"}}, {}, "rope_type"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, {}, "rope_theta"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.01}}, {}, "partial_rotary_factor"),
    ({"rms_norm_eps": float("nan")}, {}, "rms_norm_eps"),
    ({}, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({}, {"eos_token_id": "three"}, "eos_token_id"),
    ({}, {"eos_token_id": 96}, "eos_token_id"),
    ({}, {"quantization": {"bits": 3, "group_size": 64}}, "bits"),
    ({}, {"quantization": {"bits": 4, "group_size": 48}}, "group_size"),
    ({}, {"quantization": {"bits": 4, "group_size": 64, "mode": "mxfp4"}}, "mxfp4"),
    ({}, {"quantization": {"bits": 4, "group_size": 64, "x": {"bits": 6, "group_size": 64}}}, "quantization.x.bits"),
    ({}, {"quantization": None, "quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ({}, {"text_config": [1]}, "text_config"),
])
def test_a_bad_key_is_named(text, top, key):
    raw = mini_config(top, **text) if "text_config" not in top else {**mini_config(), **top}
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(raw)
    assert key in str(caught.value) and "config.json" in str(caught.value)


def test_formats_of_ignored_modules_do_not_matter():
    config = ModelConfig.from_dict(mini_config({"quantization": {"bits": 4, "group_size": 64, "vision_tower.x": {"bits": 6}, "mtp.fc": False}}))
    assert config.quantization.overrides == {}


@pytest.mark.parametrize("top, name", [
    ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ({"architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM"),
    ({"architectures": None, "model_type": "gemma4"}, "gemma4"),
])
def test_a_wrong_architecture_is_named(top, name):
    with pytest.raises(CheckpointError, match=name):
        ModelConfig.from_dict(mini_config(top))


def test_model_type_stands_in_for_missing_architectures():
    ModelConfig.from_dict(mini_config({"architectures": None}))


@pytest.mark.parametrize("generation, config, extra, expected", [
    (None, 3, (), (3,)),
    ([5, 4], 3, (), (5, 4, 3)),
    (4, [3, 4], (7,), (4, 3, 7)),
    (None, None, (), ()),
])
def test_end_ids_are_a_union(generation, config, extra, expected):
    raw = mini_config({"eos_token_id": config})
    found = ModelConfig.from_dict(raw, generation={"eos_token_id": generation}, extra_eos=extra)
    assert found.eos_ids == expected


def test_end_id_of_the_tokenizer_is_found(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(mini_config()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9, "content": "<end>"}]}))
    assert ModelConfig.from_folder(tmp_path).eos_ids == (3, 9)


@pytest.mark.parametrize("generation, temperature, top_k", [
    ({}, 0.0, 0),
    ({"do_sample": False, "temperature": 0.7}, 0.0, 0),
    ({"do_sample": True}, 1.0, 0),
    ({"do_sample": True, "temperature": 0.6, "top_k": 20}, 0.6, 20),
])
def test_generation_defaults(generation, temperature, top_k):
    found = ModelConfig.from_dict(mini_config(), generation=generation).generation
    assert (found.temperature, found.top_k) == (temperature, top_k)


@pytest.mark.parametrize("generation, key", [
    ({"do_sample": "yes"}, "do_sample"), ({"top_p": 0}, "top_p"), ({"do_sample": True, "temperature": -1}, "temperature"),
])
def test_a_bad_generation_default_is_named(generation, key):
    with pytest.raises(CheckpointError, match=key):
        ModelConfig.from_dict(mini_config(), generation=generation)


def test_missing_folder_and_config(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="config.json"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '{"a":' * 100000])
def test_a_broken_config_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="config.json"):
        ModelConfig.from_folder(tmp_path)
