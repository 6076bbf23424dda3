"""The whole model in float32 numpy, straight from a checkpoint's files (docs/model.md). Independent of lily's own reader and layout."""

from __future__ import annotations

import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

PREFIX = "language_model.model."


class Tensors:
    """Tensors of all `*.safetensors` of a folder as float32; quantised modules dequantised on demand."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.quantization: dict[str, Any] = config["quantization"]
        self.text: dict[str, Any] = config["text_config"]
        self.entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                size = struct.unpack("<Q", file.read(8))[0]
                header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            self.entries |= {name: (path, 8 + size, entry) for name, entry in header.items()}

    def raw(self, name: str, index: int | None = None) -> np.ndarray:
        """One tensor, or slice `index` of its first axis."""
        path, start, entry = self.entries[name]
        dtype = {"U32": np.uint32, "BF16": np.uint16, "F32": np.float32}[entry["dtype"]]
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        if index is not None:
            step = (end - begin) // shape[0]
            begin, shape = begin + index * step, shape[1:]
            end = begin + step
        data = np.fromfile(path, np.uint8, end - begin, offset=start + begin).view(dtype).reshape(shape)
        return (data.astype(np.uint32) << 16).view(np.float32) if dtype is np.uint16 else data

    def matrix(self, module: str, index: int | None = None) -> np.ndarray:
        """Rows of a module: w = scale * q + bias per group of inputs."""
        words, scales, biases = (self.raw(f"{module}.{part}", index) for part in ("weight", "scales", "biases"))
        bits = self.quantization.get(module, self.quantization)["bits"]
        q = np.stack([(words >> (bits * j)) & ((1 << bits) - 1) for j in range(32 // bits)], -1).reshape(words.shape[0], -1).astype(np.float32)
        group = q.shape[1] // scales.shape[1]
        return q * np.repeat(scales, group, 1) + np.repeat(biases, group, 1)


def rms(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    out: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w
    return out


def sigmoid(x: np.ndarray) -> np.ndarray:
    out: np.ndarray = 1 / (1 + np.exp(-x))
    return out


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


class ReferenceModel:
    """`logits(ids)`: float32 [len(ids), vocab], teacher forced. Norms as stored by a converted checkpoint (with their 1)."""

    def __init__(self, folder: str | Path) -> None:
        self.t = Tensors(Path(folder))
        self.c = self.t.text
        self.eps = float(self.c["rms_norm_eps"])

    def logits(self, ids: list[int]) -> np.ndarray:
        x = self._rows("embed_tokens")[ids]
        for i, kind in enumerate(self.c["layer_types"]):
            p = f"{PREFIX}layers.{i}."
            mixed = rms(x, self.t.raw(p + "input_layernorm.weight"), self.eps)
            x = x + (self._attention(p + "self_attn.", mixed) if kind == "full_attention" else self._gdn(p + "linear_attn.", mixed))
            x = x + self._moe(p + "mlp.", rms(x, self.t.raw(p + "post_attention_layernorm.weight"), self.eps))
        out: np.ndarray = rms(x, self.t.raw(PREFIX + "norm.weight"), self.eps) @ self.t.matrix("language_model.lm_head").T
        return out

    @lru_cache(maxsize=1)
    def _rows(self, name: str) -> np.ndarray:
        return self.t.matrix(PREFIX + name)

    def _attention(self, p: str, x: np.ndarray) -> np.ndarray:
        n, dim, heads, kv = len(x), self.c["head_dim"], self.c["num_attention_heads"], self.c["num_key_value_heads"]
        query_gate = (x @ self.t.matrix(p + "q_proj").T).reshape(n, heads, 2 * dim)
        q = rms(query_gate[..., :dim], self.t.raw(p + "q_norm.weight"), self.eps)
        k = rms((x @ self.t.matrix(p + "k_proj").T).reshape(n, kv, dim), self.t.raw(p + "k_norm.weight"), self.eps)
        v = (x @ self.t.matrix(p + "v_proj").T).reshape(n, kv, dim)
        rope = self.c["rope_parameters"]
        rotary = int(dim * rope["partial_rotary_factor"])
        angle = np.arange(n)[:, None] * rope["rope_theta"] ** (-2.0 * np.arange(rotary // 2) / rotary)
        cos, sin = np.cos(angle)[:, None].astype(np.float32), np.sin(angle)[:, None].astype(np.float32)

        def rotate(t: np.ndarray) -> np.ndarray:
            a, b = t[..., : rotary // 2], t[..., rotary // 2 : rotary]
            return np.concatenate([a * cos - b * sin, a * sin + b * cos, t[..., rotary:]], -1)

        q, k = rotate(q), np.repeat(rotate(k), heads // kv, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(dim)
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hij,jhd->ihd", weights, np.repeat(v, heads // kv, 1)) * sigmoid(query_gate[..., dim:])
        result: np.ndarray = out.reshape(n, -1) @ self.t.matrix(p + "o_proj").T
        return result

    def _gdn(self, p: str, x: np.ndarray) -> np.ndarray:
        n, c = len(x), self.c
        hk, hv, dk, dv = c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"]
        qkv = x @ self.t.matrix(p + "in_proj_qkv").T
        z, b, a = (x @ self.t.matrix(p + name).T for name in ("in_proj_z", "in_proj_b", "in_proj_a"))
        w = self.t.raw(p + "conv1d.weight")[:, :, 0]
        taps = w.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, qkv.shape[1]), np.float32), qkv])
        y = silu(sum(w[:, j] * padded[j : j + n] for j in range(taps)))
        q, k, v = y[:, : hk * dk].reshape(n, hk, dk), y[:, hk * dk : 2 * hk * dk].reshape(n, hk, dk), y[:, 2 * hk * dk :].reshape(n, hv, dv)
        q = np.repeat(q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(dk), hv // hk, 1)
        k = np.repeat(k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6), hv // hk, 1)
        beta = sigmoid(b)
        decay = np.exp(-np.exp(self.t.raw(p + "A_log")) * np.logaddexp(0, a + self.t.raw(p + "dt_bias")))
        state, out = np.zeros((hv, dv, dk), np.float32), np.zeros((n, hv, dv), np.float32)
        for i in range(n):
            state *= decay[i][:, None, None]
            delta = beta[i][:, None] * (v[i] - np.einsum("hvk,hk->hv", state, k[i]))
            state += delta[..., None] * k[i][:, None]
            out[i] = np.einsum("hvk,hk->hv", state, q[i])
        out = rms(out, self.t.raw(p + "norm.weight"), self.eps) * silu(z.reshape(n, hv, dv))
        result: np.ndarray = out.reshape(n, -1) @ self.t.matrix(p + "out_proj").T
        return result

    def _moe(self, p: str, x: np.ndarray) -> np.ndarray:
        logits = x @ self.t.matrix(p + "gate").T
        share = np.exp(logits - logits.max(-1, keepdims=True))
        top = np.argsort(-share, -1, kind="stable")[:, : self.c["num_experts_per_tok"]]
        weight = np.take_along_axis(share, top, 1)
        weight /= weight.sum(-1, keepdims=True)
        y = np.zeros_like(x)
        for e in np.unique(top):
            rows, slots = np.nonzero(top == e)
            gate, up, down = (self.t.matrix(f"{p}switch_mlp.{name}_proj", int(e)) for name in ("gate", "up", "down"))
            y[rows] += weight[rows, slots][:, None] * ((silu(x[rows] @ gate.T) * (x[rows] @ up.T)) @ down.T)
        gate, up, down = (self.t.matrix(f"{p}shared_expert.{name}_proj") for name in ("gate", "up", "down"))
        shared = (silu(x @ gate.T) * (x @ up.T)) @ down.T
        result: np.ndarray = y + sigmoid(x @ self.t.matrix(p + "shared_expert_gate").T) * shared
        return result
