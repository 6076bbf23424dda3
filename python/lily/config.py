"""The model's dimensions and defaults, read from a checkpoint folder and checked against what the kernels support.

Nothing else in lily reads ``config.json``: every size used by a plan, a kernel or the checkpoint reader is a field
or a property of :class:`ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config_fields import Fields, eos_ids, read_json, tokenizer_eos_ids
from .errors import CheckpointError

ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")

LINEAR, FULL = "linear_attention", "full_attention"

# Limits of the kernels; each is checked by name so that the message can quote it.
WIDTH_MULTIPLE = 64                    # GEMM tiles step K by 64
MAX_TOP_K = 16                         # one simdgroup keeps a row's choices in registers
MAX_VOCAB = 1 << 18                    # the sampler's radix selection
MAX_EXPERTS = 512                      # 32 lanes x 16 logits
HEAD_DIMS = range(64, 257, 32)         # attention tiles
GDN_HEAD_DIMS = (64, 128)              # gdn_scan_d64, gdn_scan_d128
CONV_TAPS = range(2, 9)                # window kept per channel
GROUP_SIZES = (32, 64, 128)            # affine quantisation groups
BITS = (4, 8)

IGNORED_PREFIXES = ("vision_tower.", "mtp.", "language_model.mtp.")  # image input and the draft head: not used for text


@dataclass(frozen=True)
class QuantizationFormat:
    """How one module is quantised. ``bits`` None means it is stored as plain bfloat16."""

    bits: int | None
    group_size: int | None


@dataclass(frozen=True)
class Quantization:
    """The ``quantization`` entry of a config: a default format, and overrides by module path."""

    bits: int | None = None
    group_size: int | None = None
    overrides: Mapping[str, QuantizationFormat] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of ``generation_config.json``. Without ``do_sample: true`` generation is greedy.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off; penalties are off at 1, 0, 0.
    """

    do_sample: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of one model. Counts are elements, ``layer_types[i]`` is LINEAR (Gated DeltaNet) or FULL (attention)."""

    architecture: str
    hidden_size: int
    vocab_size: int
    layer_types: tuple[str, ...]
    max_position: int
    rms_norm_eps: float
    # attention
    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    # Gated DeltaNet
    k_heads: int
    v_heads: int
    dk: int
    dv: int
    conv_taps: int
    # mixture of experts
    num_experts: int
    top_k: int
    expert_width: int
    shared_width: int
    norm_topk_prob: bool
    # defaults
    quantization: Quantization | None
    eos_ids: tuple[int, ...]
    generation: GenerationDefaults

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read ``config.json`` (and ``generation_config.json``, ``tokenizer_config.json`` where present).

        Raises CheckpointError for a missing folder or config, a wrong architecture, a missing or bad key.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError("no such folder", where=str(folder), fix="give the folder that holds config.json and the weights")
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError("the folder has no config.json", where=str(folder),
                                  fix="give the folder of a model converted with mlx_lm.convert")
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        return cls.from_dict(read_json(path), generation=generation, extra_eos=tokenizer_eos_ids(folder), where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None,
                  extra_eos: Sequence[int] = (), where: str = "config.json") -> ModelConfig:
        """Build from a parsed ``config.json``; the dims may lie under ``text_config`` or flat.

        ``generation`` is a parsed ``generation_config.json``; ``extra_eos`` are ids known from elsewhere (the tokenizer).
        """
        architecture = _architecture(raw, where)
        nested = raw.get("text_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise CheckpointError("text_config must be an object", where=where)
        keys = Fields(nested if nested is not None else raw, where, "text_config." if nested is not None else "")
        outer = Fields(raw, where)
        generation = generation or {}
        _refuse_variants(keys)
        if keys.flag("tie_word_embeddings", False) or outer.flag("tie_word_embeddings", False):
            raise outer.error("tie_word_embeddings", "is true, but only a separate lm_head is supported")
        head_dim = keys.integer("head_dim")
        rope_theta, rotary_dim = _rope(keys, head_dim)
        config = cls(
            architecture=architecture,
            hidden_size=keys.integer("hidden_size"),
            vocab_size=keys.integer("vocab_size"),
            layer_types=_layer_types(keys),
            max_position=keys.integer("max_position_embeddings"),
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            q_heads=keys.integer("num_attention_heads"),
            kv_heads=keys.integer("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=rope_theta,
            k_heads=keys.integer("linear_num_key_heads"),
            v_heads=keys.integer("linear_num_value_heads"),
            dk=keys.integer("linear_key_head_dim"),
            dv=keys.integer("linear_value_head_dim"),
            conv_taps=keys.integer("linear_conv_kernel_dim", 4),
            num_experts=keys.integer("num_experts"),
            top_k=keys.integer("num_experts_per_tok"),
            expert_width=keys.integer("moe_intermediate_size"),
            shared_width=keys.integer("shared_expert_intermediate_size"),
            norm_topk_prob=keys.flag("norm_topk_prob", True),
            quantization=_quantization(raw, keys, where),
            eos_ids=_eos_union(keys, outer, generation, extra_eos),
            generation=_generation(generation),
        )
        _check_limits(config, keys)
        return config

    # ---- derived sizes, in elements unless the name says bytes ----

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    def is_attention(self, layer: int) -> bool:
        return self.layer_types[layer] == FULL

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def q_width(self) -> int:
        """Columns of the attention output (query heads x head_dim); q_proj has twice as many rows."""
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.k_heads * self.dk

    @property
    def value_width(self) -> int:
        return self.v_heads * self.dv

    @property
    def conv_channels(self) -> int:
        """Channels of the GDN convolution: query, key and value side by side."""
        return 2 * self.key_width + self.value_width

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of bfloat16 KV cache per token, all attention layers together."""
        return len(self.attention_layers) * 2 * self.kv_width * 2

    @property
    def gdn_state_bytes(self) -> int:
        """Bytes of the float32 recurrent state of one sequence, all GDN layers together."""
        return len(self.gdn_layers) * self.v_heads * self.dv * self.dk * 4


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    named = raw.get("architectures")
    model_type = raw.get("model_type")
    if isinstance(named, list) and named:
        if named[0] in ARCHITECTURES:
            return str(named[0])
        found = str(named[0])
    elif model_type in MODEL_TYPES:
        return ARCHITECTURES[0]
    else:
        found = str(model_type)
    raise CheckpointError(f"architecture {found} is not supported", where=where,
                          fix=f"use a model of architecture {ARCHITECTURES[0]} (Qwen3.5/3.6 mixture of experts)")


def _refuse_variants(keys: Fields) -> None:
    """Keys whose other values would need kernels that do not exist; absent keys mean the supported value."""
    expected = {"hidden_act": "silu", "attention_bias": False, "attn_output_gate": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
    for key, value in expected.items():
        found = keys.raw.get(key, value)
        if found is not None and found != value:
            raise keys.error(key, f"is {found!r}, but only {value!r} is supported")


def _rope(keys: Fields, head_dim: int) -> tuple[float, int]:
    nested = keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise keys.error("rope_parameters", "must be an object")
    rope = Fields({"partial_rotary_factor": keys.raw.get("partial_rotary_factor", 0.25),
                   "rope_theta": keys.raw.get("rope_theta"), **nested}, keys.where, keys.prefix + "rope_parameters.")
    # With text alone the three position axes of mrope are equal, which makes it plain RoPE.
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind not in ("default", "mrope", None):
        raise rope.error("rope_type", f"is {kind!r}, but only 'default' is supported")
    factor = rope.number("partial_rotary_factor")
    return rope.number("rope_theta"), int(head_dim * factor)


def _layer_types(keys: Fields) -> tuple[str, ...]:
    count = keys.integer("num_hidden_layers")
    if not 1 <= count <= 1024:
        raise keys.error("num_hidden_layers", f"is {count}, expected 1 to 1024")
    types = keys.raw.get("layer_types")
    if types is None:
        interval = keys.integer("full_attention_interval", 4)
        if interval < 1:
            raise keys.error("full_attention_interval", f"is {interval}, expected 1 or more")
        return tuple(FULL if i % interval == interval - 1 else LINEAR for i in range(count))
    if not isinstance(types, list) or len(types) != count:
        raise keys.error("layer_types", f"must list num_hidden_layers = {count} entries")
    for kind in types:
        if kind not in (LINEAR, FULL):
            raise keys.error("layer_types", f"holds {kind!r}, expected '{LINEAR}' or '{FULL}'")
    return tuple(types)


def _quantization(raw: Mapping[str, Any], keys: Fields, where: str) -> Quantization | None:
    entry, name = None, ""
    for candidate in ("quantization", "quantization_config"):
        entry = raw.get(candidate, keys.raw.get(candidate))
        if entry is not None:
            name = candidate
            break
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{name} must be an object", where=where)
    fields = Fields(entry, where, name + ".")
    method = entry.get("quant_method")
    if method not in (None, "affine", "mlx") or entry.get("mode", "affine") != "affine":
        raise fields.error("mode" if method is None else "quant_method", f"is {method or entry.get('mode')!r}, but only MLX affine quantisation is supported")
    overrides: dict[str, QuantizationFormat] = {}
    for path, value in entry.items():
        if path.startswith(IGNORED_PREFIXES):
            continue
        if value is False:
            overrides[path] = QuantizationFormat(None, None)
        elif isinstance(value, Mapping):
            inner = Fields(value, where, f"{name}.{path}.")
            if value.get("mode", "affine") != "affine":
                raise inner.error("mode", f"is {value['mode']!r}, but only 'affine' is supported")
            overrides[path] = QuantizationFormat(*_format(inner))
    bits, group_size = _format(fields)
    return Quantization(bits, group_size, overrides)


def _format(fields: Fields) -> tuple[int | None, int | None]:
    bits = fields.integer("bits") if "bits" in fields.raw else None
    group_size = fields.integer("group_size") if "group_size" in fields.raw else None
    if bits is not None and bits not in BITS:
        raise fields.error("bits", f"is {bits}, supported are {BITS}")
    if group_size is not None and group_size not in GROUP_SIZES:
        raise fields.error("group_size", f"is {group_size}, supported are {GROUP_SIZES}")
    return bits, group_size


def _eos_union(keys: Fields, outer: Fields, generation: Mapping[str, Any], extra: Sequence[int]) -> tuple[int, ...]:
    """Every id that ends a generation, in the order found: generation_config, config, text_config, tokenizer."""
    vocab = keys.integer("vocab_size")
    if vocab < 1:
        raise keys.error("vocab_size", f"is {vocab}, expected a positive count")
    sources = [(Fields(generation, "generation_config.json"), generation.get("eos_token_id")),
               (outer, outer.raw.get("eos_token_id")), (keys, keys.raw.get("eos_token_id")), (outer, list(extra))]
    found: dict[int, None] = {}
    for fields, value in sources:
        for token in eos_ids(fields, value):
            if not 0 <= token < vocab:
                raise fields.error("eos_token_id", f"holds {token}, outside the vocabulary of {vocab}")
            found[token] = None
    return tuple(found)


def _generation(raw: Mapping[str, Any]) -> GenerationDefaults:
    fields = Fields(raw, "generation_config.json")
    sample = fields.flag("do_sample", False)
    limit = raw.get("max_new_tokens")
    defaults = GenerationDefaults(
        do_sample=sample,
        temperature=fields.number("temperature", 1.0) if sample else 0.0,
        top_p=fields.number("top_p", 1.0),
        top_k=fields.integer("top_k", 0),
        min_p=fields.number("min_p", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        max_tokens=None if limit is None else fields.integer("max_new_tokens"),
    )
    for key, good in (("temperature", defaults.temperature >= 0), ("top_p", 0 < defaults.top_p <= 1), ("top_k", defaults.top_k >= 0),
                      ("min_p", 0 <= defaults.min_p <= 1), ("repetition_penalty", defaults.repetition_penalty > 0)):
        if not good:
            raise fields.error(key, f"is {raw.get(key)!r}, outside its range")
    return defaults


def _check_limits(config: ModelConfig, keys: Fields) -> None:
    def need(key: str, good: bool, rule: str) -> None:
        if not good:
            raise keys.error(key, f"is {keys.raw.get(key)!r}, {rule}")

    counts = ("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads", "num_key_value_heads",
              "linear_num_key_heads", "linear_num_value_heads", "moe_intermediate_size", "shared_expert_intermediate_size")
    for key in counts:
        need(key, 1 <= keys.integer(key) < 2**31, "expected a positive count")
    for key in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        need(key, keys.integer(key) % WIDTH_MULTIPLE == 0, f"expected a multiple of {WIDTH_MULTIPLE}")
    need("vocab_size", config.vocab_size <= MAX_VOCAB, f"expected at most {MAX_VOCAB}")
    need("head_dim", config.head_dim in HEAD_DIMS, "expected a multiple of 32 from 64 to 256")
    need("linear_key_head_dim", config.dk in GDN_HEAD_DIMS, "expected 64 or 128")
    need("linear_value_head_dim", config.dv in GDN_HEAD_DIMS, "expected 64 or 128")
    need("linear_conv_kernel_dim", config.conv_taps in CONV_TAPS, "expected 2 to 8")
    need("num_experts", 1 <= config.num_experts <= MAX_EXPERTS, f"expected 1 to {MAX_EXPERTS}")
    need("num_experts_per_tok", 1 <= config.top_k <= min(MAX_TOP_K, config.num_experts),
         f"expected 1 to {min(MAX_TOP_K, config.num_experts)}")
    need("num_attention_heads", config.q_heads % config.kv_heads == 0, f"expected a multiple of num_key_value_heads = {config.kv_heads}")
    need("linear_num_value_heads", config.v_heads % config.k_heads == 0, f"expected a multiple of linear_num_key_heads = {config.k_heads}")
    need("partial_rotary_factor", config.rotary_dim % 2 == 0 and 2 <= config.rotary_dim <= config.head_dim,
         f"which rotates {config.rotary_dim} of {config.head_dim} dims; expected an even number of them")
    need("rope_theta", config.rope_theta > 1, "expected a base over 1")
    need("rms_norm_eps", 0 < config.rms_norm_eps < 1, "expected a small positive number")
