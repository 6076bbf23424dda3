"""Small checkpoints for tests: random tensors in MLX-LM's layout, written by hand so that they can be made wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lily.config import ModelConfig
from lily.weight_map import modules, plain_tensors

MODEL_DIR = Path(__file__).parents[1] / "python/lily/data/lily-tiny"
GOLDENS = Path(__file__).parent / "goldens/public.json"

Stored = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data
SIZES = {"U32": 4, "BF16": 2, "F32": 4, "F16": 2, "U8": 1}

MINI: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "eos_token_id": 3,
    "quantization": {"group_size": 64, "bits": 4, "mode": "affine"},
    "text_config": {
        "vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 2, "full_attention_interval": 2, "max_position_embeddings": 512,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}


def mini_config(top: dict[str, Any] | None = None, **text: Any) -> dict[str, Any]:
    """MINI with changed keys; a value of None removes the key."""
    config = copy.deepcopy(MINI)
    for target, changes in ((config, top or {}), (config["text_config"], text)):
        for key, value in changes.items():
            target.pop(key, None)
            if value is not None:
                target[key] = value
    return config


def bf16(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """float32 to bfloat16 bit patterns, by truncation (the inputs of these tests need no rounding)."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def f32(raw: bytes) -> npt.NDArray[np.float32]:
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


def dequantise(weight: bytes, scales: bytes, biases: bytes, bits: int, group: int, k: int) -> npt.NDArray[np.float32]:
    """Rows of ``k`` inputs as float32: w = scale * q + bias per group, lowest bits first."""
    words = np.frombuffer(weight, "<u4")
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    q = ((words[:, None] >> shifts) & np.uint32(2**bits - 1)).reshape(-1, k // group, group).astype(np.float32)
    return (q * f32(scales).reshape(-1, k // group, 1) + f32(biases).reshape(-1, k // group, 1)).reshape(-1, k)


def quantised(rng: np.random.Generator, lead: tuple[int, ...], k: int, bits: int = 4, group: int = 64) -> dict[str, Stored]:
    words, groups = (*lead, k * bits // 32), (*lead, k // group)
    return {
        "weight": ("U32", words, rng.integers(0, 2**32, words, np.uint32).tobytes()),
        "scales": ("BF16", groups, bf16(rng.normal(0, 0.1, groups)).tobytes()),
        "biases": ("BF16", groups, bf16(rng.normal(0, 0.1, groups)).tobytes()),
    }


def mini_tensors(raw_config: dict[str, Any], *, formats: dict[str, tuple[int, int]] | None = None, plain: tuple[str, ...] = (),
                 raw: bool = False, seed: int = 0) -> dict[str, Stored]:
    """Random tensors for a config. ``formats``: (bits, group) of modules whose path ends so; ``plain``: bfloat16 modules;
    ``raw``: the convolution in raw Hugging Face layout."""
    config = ModelConfig.from_dict(raw_config)
    rng = np.random.default_rng(seed)
    found: dict[str, Stored] = {}
    for path, module in modules(config).items():
        lead = (module.experts, module.n) if module.experts else (module.n,)
        if path.endswith(plain) and plain:
            shape = (*lead, module.k)
            found[f"{path}.weight"] = ("BF16", shape, bf16(rng.normal(0, 1, shape)).tobytes())
            continue
        form = next((value for suffix, value in (formats or {}).items() if path.endswith(suffix)), (4, 64))
        found |= {f"{path}.{part}": stored for part, stored in quantised(rng, lead, module.k, *form).items()}
    for spec in plain_tensors(config).values():
        values = rng.normal(0, 1, spec.shape)
        shape = spec.shape
        if len(shape) == 2:
            shape = (shape[0], 1, shape[1]) if raw else (*shape, 1)
        if spec.tensor.endswith("A_log"):
            found[spec.tensor] = ("F32", shape, values.astype(np.float32).tobytes())
        else:
            found[spec.tensor] = ("BF16", shape, bf16(values).tobytes())
    return found


def safetensors_bytes(tensors: dict[str, Stored]) -> bytes:
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Stored], shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return folder
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        (folder / file).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def mini_checkpoint(folder: Path, **changes: Any) -> Path:
    """A good checkpoint of MINI."""
    config = mini_config()
    return write_checkpoint(folder, config, mini_tensors(config, **changes))
