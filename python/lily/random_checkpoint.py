"""`lily random-checkpoint`: a valid checkpoint of any dims with random 4-bit weights, for tests and benchmarks.

Weights are scaled so that activations stay finite at any depth, scales have both signs, the router's rows differ in length
so that experts are unevenly loaded, and gates lie where trained ones do.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import TensorSpec, serialize_file

from .config import FULL, LINEAR, ModelConfig
from .errors import RequestError
from .plan_inputs import default_formats
from .weight_layout import Format
from .weight_map import Module, modules, plain_tensors

SHARD_BYTES = 2 << 30
GROUP = 64
Entry = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


def _bf16(x: np.ndarray) -> bytes:
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype("<u2").tobytes()


def _quantised(rng: np.random.Generator, module: Module, form: Format) -> dict[str, Entry]:
    """Uniform integers with scale s of either sign and bias -s * (2^bits - 1) / 2: zero mean, variance 1 / k."""
    lead = (module.experts, module.n) if module.experts else (module.n,)
    words = module.k * form.bits // 32
    count = int(np.prod(lead)) * words
    top = 2**form.bits - 1
    spread = np.sqrt((top * (top + 2)) / 12)  # standard deviation of the integers
    groups = (*lead, module.k // form.group_size)
    scale = rng.uniform(0.5, 1.5, groups).astype(np.float32) * rng.choice(np.array([-1, 1], np.float32), groups)
    scale *= np.float32(1 / (spread * np.sqrt(module.k)))
    if module.path.endswith(".mlp.gate"):  # log-normal row lengths: some experts are chosen far more often
        scale *= rng.lognormal(0.7, 0.35, (module.n, 1)).astype(np.float32)
    return {
        "weight": ("uint32", (*lead, words), rng.bytes(4 * count)),
        "scales": ("bfloat16", groups, _bf16(scale)),
        "biases": ("bfloat16", groups, _bf16(scale * np.float32(-top / 2))),
    }


def plain_values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 values of a small tensor by its short name (`weight_map.Plain`), in its logical shape."""
    kind = name.rsplit(".", 1)[-1]
    if kind == "conv1d":
        return rng.normal(0, 0.5, shape).astype(np.float32)
    if kind == "A_log":
        return np.log(rng.uniform(0.5, 8, shape)).astype(np.float32)
    if kind == "dt_bias":  # softplus(dt_bias) between 0.001 and 0.1: decays of real models
        return np.log(np.expm1(rng.uniform(0.001, 0.1, shape))).astype(np.float32)
    return rng.normal(1, 0.1, shape).astype(np.float32)


def _plain(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Entry:
    values = plain_values(rng, name, shape)
    if name.endswith(".A_log"):
        return "float32", shape, values.astype("<f4").tobytes()
    return "bfloat16", (*shape, 1) if name.endswith(".conv1d") else shape, _bf16(values)


def _tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, Entry]]:
    formats = default_formats(config)
    rng = np.random.default_rng(seed)
    for path, module in modules(config).items():
        for part, entry in _quantised(rng, module, formats[path]).items():
            yield f"{path}.{part}", entry
    for name, spec in plain_tensors(config).items():
        yield spec.tensor, _plain(rng, name, spec.shape)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """A config.json for dims, as `mlx_lm.convert -q` leaves it."""
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    quantization |= {path: {"group_size": f.group_size, "bits": f.bits} for path, f in default_formats(config).items() if f.bits != 4}
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers, "layer_types": list(config.layer_types), "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position, "linear_conv_kernel_dim": config.conv_taps, "linear_key_head_dim": config.dk,
        "linear_value_head_dim": config.dv, "linear_num_key_heads": config.k_heads, "linear_num_value_heads": config.v_heads,
        "num_experts": config.num_experts, "num_experts_per_tok": config.top_k, "moe_intermediate_size": config.expert_width,
        "shared_expert_intermediate_size": config.shared_width, "norm_topk_prob": config.norm_topk_prob,
        "rope_parameters": {"rope_theta": config.rope_theta, "partial_rotary_factor": config.rotary_dim / config.head_dim},
        "tie_word_embeddings": False,
    }
    return {"architectures": [config.architecture], "model_type": "qwen3_5_moe", "eos_token_id": list(config.eos_ids),
            "quantization": quantization, "text_config": text}


def with_layers(config: ModelConfig, layers: int | None) -> ModelConfig:
    """The same dims with another number of layers; the pattern of attention layers goes on."""
    if layers is None:
        return config
    if layers < 1:
        raise RequestError(f"layers must be at least 1, got {layers}")
    interval = config.layer_types.index(FULL) + 1 if FULL in config.layer_types else 0
    types = tuple(FULL if interval and i % interval == interval - 1 else LINEAR for i in range(layers))
    return dataclasses.replace(config, layer_types=types)


def write_random_checkpoint(
    out: str | Path, config: ModelConfig, *, seed: int = 0, tokenizer: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Writes `config`'s dims with random weights into the new or empty folder `out`, in shards of about 2 GiB.

    tokenizer: a folder whose tokenizer files are copied. progress(bytes): called per tensor. Raises RequestError when the
    folder holds files already.
    """
    for module in modules(config).values():
        if module.k % GROUP:
            raise RequestError(f"{module.path} would have {module.k} inputs, which groups of {GROUP} do not divide")
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()):
        raise RequestError(f"{folder} is not empty", fix="give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(config), indent=2), encoding="utf-8")
    if tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (Path(tokenizer) / name).is_file():
                shutil.copyfile(Path(tokenizer) / name, folder / name)
    shards: list[str] = []
    where: dict[str, str] = {}
    pending: dict[str, tuple[str, tuple[int, ...], np.ndarray]] = {}
    size = total = 0

    def flush() -> None:
        nonlocal pending, size
        name = f"model-{len(shards) + 1:05d}.safetensors"
        specs = {n: TensorSpec(dtype=d, shape=list(s), data_ptr=data.ctypes.data, data_len=data.nbytes) for n, (d, s, data) in pending.items()}
        serialize_file(specs, str(folder / name), {"format": "mlx"})
        shards.append(name)
        where.update(dict.fromkeys(pending, name))
        pending, size = {}, 0

    for name, (dtype, shape, data) in _tensors(config, seed):
        pending[name] = (dtype, shape, np.frombuffer(data, np.uint8))
        size, total = size + len(data), total + len(data)
        if progress is not None:
            progress(len(data))
        if size >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    final = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for old, new in zip(shards, final, strict=True):
        (folder / old).rename(folder / new)
    rename = dict(zip(shards, final, strict=True))
    index = {"metadata": {"total_size": total}, "weight_map": {n: rename[s] for n, s in sorted(where.items())}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
