"""Which rows are launched together, and where each stored byte goes: the resident layout of the weights.

A :class:`Group` is one matrix (or one per expert) of rows in one format, made of several stored modules laid next to each
other. Its weights, scales and biases are three destination regions; a :class:`Piece` maps a stored part into one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .config import ModelConfig
from .errors import CheckpointError
from .weight_map import HEAD, PREFIX, Module

Part = Literal["weight", "scales", "biases"]

# A shared expert wider than this many expert widths is launched on its own instead of as pseudo experts.
MAX_SHARED_SLOTS = 8


@dataclass(frozen=True)
class Format:
    """How rows are stored: ``bits`` 4 or 8 in affine groups of ``group_size`` inputs, or bits 16 (bfloat16, group_size 0)."""

    bits: int
    group_size: int

    @property
    def kind(self) -> str:
        return "w16" if self.bits == 16 else f"q{self.bits}"

    def __str__(self) -> str:
        return "bfloat16" if self.bits == 16 else f"{self.bits} bits in groups of {self.group_size}"


@dataclass(frozen=True)
class Piece:
    """``segments`` byte runs of ``nbytes`` each, from ``tensor`` into one part's region of a group.

    Run i starts at byte ``source + i * source_stride`` of the tensor and goes to ``dest + i * dest_stride``.
    """

    tensor: str
    part: Part
    segments: int
    nbytes: int
    source: int
    source_stride: int
    dest: int
    dest_stride: int


@dataclass(frozen=True)
class Group:
    """``n`` rows of ``k`` inputs in one format, for each of ``experts`` matrices if that is not 0.

    Bits 4 and 8: little-endian uint32 words, lowest bits first, with bfloat16 scales and biases per ``group_size`` inputs.
    Bits 16: bfloat16 rows, no scales (group_size 0). ``offsets`` maps a member (`qkv`, `z`, `gate`, …) to its first row.
    """

    name: str
    bits: int
    group_size: int
    n: int
    k: int
    experts: int = 0
    offsets: Mapping[str, int] = field(default_factory=dict, hash=False)
    pieces: tuple[Piece, ...] = field(default=(), repr=False)

    @property
    def kind(self) -> str:
        return Format(self.bits, self.group_size).kind

    @property
    def suffix(self) -> str:
        """How a kernel's name spells the format."""
        return "w16" if self.bits == 16 else f"b{self.bits}_g{self.group_size}"

    @property
    def rows(self) -> int:
        """Rows of all matrices together."""
        return max(1, self.experts) * self.n

    @property
    def weight_bytes(self) -> int:
        return self.rows * self.row_bytes("weight")

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, and again of the biases; 0 for bfloat16 rows."""
        return self.rows * self.row_bytes("scales")

    def row_bytes(self, part: Part) -> int:
        return row_bytes(Format(self.bits, self.group_size), self.k, part)


def row_bytes(form: Format, k: int, part: Part) -> int:
    """Bytes of one row of ``k`` inputs."""
    if part == "weight":
        return k * form.bits // 8
    return 0 if form.bits == 16 else k // form.group_size * 2


def build_layout(config: ModelConfig, modules: Mapping[str, Module], formats: Mapping[str, Format]) -> list[Group]:
    """The groups in the order of the model: `embed`, each layer's, `lm_head`.

    Per layer `gdn_in` (qkv | z | b | a; b | a as `gdn_ba` when their format differs), `gdn_out`, or `attn_in` (q | k | v),
    `attn_out`; then `router` (gate | shared_gate, or `shared_gate` apart), `experts_gate_up` (per expert gate rows, then up
    rows) and `experts_down`. The shared expert follows the routed ones as pseudo experts of their width when every layer
    allows it, else it has `shared_gate_up` and `shared_down`. Raises CheckpointError where rows that must be launched
    together differ in format.
    """
    build = _Builder(modules, formats)
    joined = _shared_joins(config, formats)
    groups = [build.rows("embed", {"embed": PREFIX + "embed_tokens"})]
    for i in range(config.num_layers):
        stored, short = f"{PREFIX}layers.{i}.", f"layers.{i}."
        if config.is_attention(i):
            p = stored + "self_attn."
            groups.append(build.rows(short + "attn_in", {"q": p + "q_proj", "k": p + "k_proj", "v": p + "v_proj"}))
            groups.append(build.rows(short + "attn_out", {"out": p + "o_proj"}))
        else:
            groups += _gdn(build, stored + "linear_attn.", short)
        groups += _moe(build, config, stored + "mlp.", short, joined)
    groups.append(build.rows("lm_head", {"head": HEAD}))
    return groups


def _gdn(build: _Builder, p: str, short: str) -> list[Group]:
    main = {"qkv": p + "in_proj_qkv", "z": p + "in_proj_z"}
    gates = {"b": p + "in_proj_b", "a": p + "in_proj_a"}
    out = build.rows(short + "gdn_out", {"out": p + "out_proj"})
    if len({build.formats[path] for path in (*main.values(), *gates.values())}) == 1:
        return [build.rows(short + "gdn_in", {**main, **gates}), out]
    return [build.rows(short + "gdn_in", main), build.rows(short + "gdn_ba", gates), out]


def _moe(build: _Builder, config: ModelConfig, p: str, short: str, joined: bool) -> list[Group]:
    gate, shared_gate = p + "gate", p + "shared_expert_gate"
    if build.formats[gate] == build.formats[shared_gate]:
        groups = [build.rows(short + "router", {"gate": gate, "shared_gate": shared_gate})]
    else:
        groups = [build.rows(short + "router", {"gate": gate}), build.rows(short + "shared_gate", {"shared_gate": shared_gate})]
    routed, shared = p + "switch_mlp.", p + "shared_expert."
    slots = config.shared_width // config.expert_width if joined else 0
    groups.append(build.experts(short + "experts_gate_up", {"gate": routed + "gate_proj", "up": routed + "up_proj"},
                                {"gate": shared + "gate_proj", "up": shared + "up_proj"}, slots))
    groups.append(build.experts_down(short + "experts_down", routed + "down_proj", shared + "down_proj", slots))
    if not joined:
        groups.append(build.rows(short + "shared_gate_up", {"gate": shared + "gate_proj", "up": shared + "up_proj"}))
        groups.append(build.rows(short + "shared_down", {"down": shared + "down_proj"}))
    return groups


def _shared_joins(config: ModelConfig, formats: Mapping[str, Format]) -> bool:
    """Whether the shared expert can lie behind the routed ones: same formats in every layer, a whole number of widths."""
    if config.shared_width % config.expert_width or config.shared_width // config.expert_width > MAX_SHARED_SLOTS:
        return False
    return all(
        formats[f"{p}shared_expert.{name}"] == formats[f"{p}switch_mlp.{name}"]
        for i in range(config.num_layers)
        for p in [f"{PREFIX}layers.{i}.mlp."]
        for name in ("gate_proj", "up_proj", "down_proj")
    )


@dataclass(frozen=True)
class _Builder:
    modules: Mapping[str, Module]
    formats: Mapping[str, Format]

    def _shared_format(self, name: str, paths: Sequence[str]) -> Format:
        first = self.formats[paths[0]]
        for path in paths[1:]:
            if self.formats[path] != first:
                raise CheckpointError(f"tensor {path}.weight is stored as {self.formats[path]}, but {paths[0]}.weight as {first}; "
                                      f"the rows of {name.split('.')[-1]} are launched together", fix="convert the model with one format for both")
        return first

    @staticmethod
    def _parts(form: Format) -> tuple[Part, ...]:
        return ("weight",) if form.bits == 16 else ("weight", "scales", "biases")

    def rows(self, name: str, members: Mapping[str, str]) -> Group:
        """Modules stacked along their rows."""
        paths = list(members.values())
        form, k = self._shared_format(name, paths), self.modules[paths[0]].k
        offsets, pieces, n = {}, [], 0
        for member, path in members.items():
            offsets[member] = n
            rows = self.modules[path].n
            for part in self._parts(form):
                size = row_bytes(form, k, part)
                pieces.append(_run(f"{path}.{part}", part, rows * size, 0, n * size))
            n += rows
        return Group(name, form.bits, form.group_size, n, k, 0, offsets, tuple(pieces))

    def experts(self, name: str, routed: Mapping[str, str], shared: Mapping[str, str], slots: int) -> Group:
        """Per expert the members' rows one after another; the shared expert's rows cut into ``slots`` further experts."""
        form = self._shared_format(name, list(routed.values()))
        first = self.modules[next(iter(routed.values()))]
        width, count, k = first.n, first.experts, first.k
        n = width * len(routed)
        offsets = {member: index * width for index, member in enumerate(routed)}
        pieces = []
        for member, path in routed.items():
            for part in self._parts(form):
                size = row_bytes(form, k, part)
                run, at = width * size, offsets[member] * size
                pieces.append(Piece(f"{path}.{part}", part, count, run, 0, run, at, n * size))
                for slot in range(slots):
                    pieces.append(_run(f"{shared[member]}.{part}", part, run, slot * run, (count + slot) * n * size + at))
        return Group(name, form.bits, form.group_size, n, k, count + slots, offsets, tuple(pieces))

    def experts_down(self, name: str, routed: str, shared: str, slots: int) -> Group:
        """The shared expert's columns cut into ``slots`` further experts, so that their outputs add up to its own."""
        form, module = self.formats[routed], self.modules[routed]
        n, k, count = module.n, module.k, module.experts
        pieces = []
        for part in self._parts(form):
            size = row_bytes(form, k, part)
            pieces.append(_run(f"{routed}.{part}", part, count * n * size, 0, 0))
            for slot in range(slots):
                at = (count + slot) * n * size
                if slots == 1:
                    pieces.append(_run(f"{shared}.{part}", part, n * size, 0, at))
                else:
                    pieces.append(Piece(f"{shared}.{part}", part, n, size, slot * size, slots * size, at, size))
        return Group(name, form.bits, form.group_size, n, k, count + slots, {"down": 0}, tuple(pieces))


def _run(tensor: str, part: Part, nbytes: int, source: int, dest: int) -> Piece:
    return Piece(tensor, part, 1, nbytes, source, nbytes, dest, nbytes)
