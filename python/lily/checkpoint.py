"""Opening a checkpoint: every tensor accounted for and checked against the config, then read into the caller's memory.

Nothing is kept resident here: :meth:`Checkpoint.load_group` reads the file straight into the destination regions, which
belong to GPU buffers, so exactly one copy of the weights exists.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from .config import BITS, GROUP_SIZES, IGNORED_PREFIXES, ModelConfig, Quantization, QuantizationFormat
from .errors import CheckpointError
from .reading import Bytes, Reader
from .safetensors_file import SafetensorsFile, TensorEntry, open_folder
from .weight_layout import Format, Group, Part, build_layout
from .weight_map import Module, Plain, modules, plain_tensors

Progress = Callable[[int, int], None]
Floats = npt.NDArray[np.float32]

_PLAIN_DTYPES = ("BF16", "F32")
_SAMPLE_BYTES = 512


class Checkpoint:
    """A validated checkpoint folder. Use :meth:`open`; close it (or use ``with``) when the weights are loaded.

    ``config``: the ModelConfig; ``folder``: the path; ``raw_norms``: whether the norms are stored minus one.
    """

    def __init__(self, folder: Path, config: ModelConfig, files: list[SafetensorsFile], tensors: Mapping[str, TensorEntry],
                 progress: Progress | None = None) -> None:
        self.folder = folder
        self.config: ModelConfig = config
        self._files = files
        self._plain = plain_tensors(config)
        expected = modules(config)
        refuse_unquantised(str(folder), config, tensors)
        formats = {path: _module_format(module, tensors, config.quantization) for path, module in expected.items()}
        self.raw_norms = _check_plain(self._plain, tensors)
        self._tensors = _accounted(tensors, formats, self._plain)
        self._groups = build_layout(config, expected, formats)
        self._reader = Reader()
        self._progress = progress
        self._done: dict[str, int] = {}

    @classmethod
    def open(cls, folder: str | Path, progress: Progress | None = None) -> Checkpoint:
        """Check the folder's config and every tensor of its weight files; reads headers only.

        ``progress(bytes_done, total)`` is called while groups and plain tensors are read. Raises CheckpointError naming
        the file, key or tensor at fault.
        """
        folder = Path(folder)
        config = ModelConfig.from_folder(folder)
        return cls(folder, config, *open_folder(folder), progress)

    def layout(self) -> list[Group]:
        """The weight groups, in the order of the model."""
        return list(self._groups)

    @property
    def shared_slots(self) -> int:
        """Pseudo experts that the shared expert became behind the routed ones; 0 when it has groups of its own."""
        group = next(g for g in self._groups if g.name.endswith(".experts_gate_up"))
        return group.experts - self.config.num_experts

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all tensors that are used (weights and plain tensors)."""
        return sum(entry.nbytes for entry in self._tensors.values())

    def plain_names(self) -> list[str]:
        """Names that :meth:`plain` accepts, in the order of the model."""
        return list(self._plain)

    def load_group(self, group: Group, weights: Bytes, scales: Bytes | None = None, biases: Bytes | None = None) -> None:
        """Read a group into uint8 views of ``weight_bytes``, ``scale_bytes`` and ``scale_bytes`` bytes.

        bfloat16 groups take no scales and biases. Raises CheckpointError when the file cannot be read to the end,
        ValueError for a view of a wrong size.
        """
        views: dict[Part, Bytes | None] = {"weight": weights, "scales": scales, "biases": biases}
        for part, view in views.items():
            size = group.weight_bytes if part == "weight" else group.scale_bytes
            if (0 if view is None else view.nbytes) != size:
                raise ValueError(f"{group.name}: the view of the {part} must have {size} bytes")
        self._reader.read_pieces(group.pieces, self._tensors, views, lambda nbytes: self._advance(group.name, nbytes))

    def plain(self, name: str) -> Floats:
        """A plain tensor as float32 in its logical shape: norms with the 1 included, `conv1d` as [channels, taps].

        Raises KeyError for a name that is not in :meth:`plain_names`.
        """
        spec = self._plain[name]
        entry = self._tensors[spec.tensor]
        data = np.empty(entry.nbytes, np.uint8)
        self._reader.read(entry, data)
        self._done.pop(name, None)
        self._advance(name, entry.nbytes)
        values = bf16_to_f32(data.view("<u2")) if entry.dtype == "BF16" else data.view("<f4").astype(np.float32)
        if spec.offset_norm and self.raw_norms:
            values += np.float32(1)
        return values.reshape(spec.shape)

    def fingerprint(self) -> str:
        """Hex SHA-256 of the config, the headers, the file sizes and the first bytes of every tensor that is used: equal for
        copies of one checkpoint, different for another training of the same layout."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for file in self._files:
            digest.update(file.nbytes.to_bytes(8, "little") + len(file.header).to_bytes(8, "little") + file.header)
        for entry in self._tensors.values():
            sample = np.empty(min(entry.nbytes, _SAMPLE_BYTES), np.uint8)
            self._reader.read(entry, sample)
            digest.update(sample.data)
        return digest.hexdigest()

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _advance(self, name: str, nbytes: int) -> None:
        self._done[name] = self._done.get(name, 0) + nbytes
        if self._progress is not None:
            total = self.total_bytes
            self._progress(min(sum(self._done.values()), total), total)


def bf16_to_f32(raw: npt.NDArray[np.uint16]) -> Floats:
    """bfloat16 bit patterns to float32, exactly."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def refuse_unquantised(source: str, config: ModelConfig, tensors: Iterable[str]) -> None:
    """Raises CheckpointError with the command that converts it. source: a folder or a Hub id."""
    if config.quantization is None and not any(name.endswith(".scales") for name in tensors):
        raise CheckpointError("the checkpoint is not quantised", where=source,
                              fix=f"convert it: mlx_lm.convert --hf-path {source} --mlx-path {Path(source).name}-4bit -q")


def _need(name: str, tensors: Mapping[str, TensorEntry], shape: tuple[int, ...]) -> TensorEntry:
    if name not in tensors:
        raise CheckpointError(f"tensor {name} is missing, expected with shape {list(shape)}", fix="download or convert the model again")
    return tensors[name]


def _bad(entry: TensorEntry, expected: str) -> CheckpointError:
    return CheckpointError(f"tensor {entry.name} has dtype {entry.dtype} and shape {list(entry.shape)}, expected {expected}",
                           where=str(entry.file), fix="convert the model again with mlx_lm.convert, or mend config.json")


def _module_format(module: Module, tensors: Mapping[str, TensorEntry], quantization: Quantization | None) -> Format:
    """Bits and group size from the stored shapes, checked against the config (an override wins over the default)."""
    lead = (module.experts, module.n) if module.experts else (module.n,)
    stated = _stated_format(module, quantization)
    weight = _need(module.path + ".weight", tensors, (*lead, module.k * (stated.bits or 4) // 32))
    if module.path + ".scales" not in tensors:
        return _plain_format(module, weight, (*lead, module.k), stated)
    scales = tensors[module.path + ".scales"]
    biases = _need(module.path + ".biases", tensors, scales.shape)
    if weight.dtype != "U32" or len(weight.shape) != len(lead) + 1 or weight.shape[:-1] != lead:
        raise _bad(weight, f"U32 {[*lead, module.k * (stated.bits or 4) // 32]}")
    bits = next((b for b in BITS if weight.shape[-1] * 32 == module.k * b), None)
    if bits is None or stated.bits not in (None, bits):
        wanted = f"U32 {[*lead, module.k * (stated.bits or 4) // 32]} ({module.k} inputs at "
        wanted += f"{stated.bits} bits, as config.json says)" if stated.bits else f"{' or '.join(map(str, BITS))} bits)"
        raise _bad(weight, wanted)
    sizes = [g for g in GROUP_SIZES if module.k % g == 0 and scales.shape == (*lead, module.k // g)]
    if scales.dtype != "BF16" or not sizes or stated.group_size not in (None, *sizes):
        group = stated.group_size or 64
        raise _bad(scales, f"BF16 {[*lead, math.ceil(module.k / group)]} (groups of {group}; supported are {GROUP_SIZES})")
    if biases.dtype != "BF16" or biases.shape != scales.shape:
        raise _bad(biases, f"BF16 {list(scales.shape)}, like the scales")
    return Format(bits, sizes[0])


def _stated_format(module: Module, quantization: Quantization | None) -> QuantizationFormat:
    if quantization is None:
        return QuantizationFormat(None, None)
    override = quantization.overrides.get(module.path)
    if override is not None:
        return override
    if module.sniffed:
        return QuantizationFormat(None, None)
    return QuantizationFormat(quantization.bits, quantization.group_size)


def _plain_format(module: Module, weight: TensorEntry, shape: tuple[int, ...], stated: QuantizationFormat) -> Format:
    supported = "affine 4 or 8 bits with scales and biases in groups of 32, 64 or 128"
    if not module.plain_allowed:
        raise _bad(weight, supported)
    if weight.dtype != "BF16" or weight.shape != shape:
        raise _bad(weight, f"{supported}, or BF16 {list(shape)}")
    return Format(16, 0)


def _check_plain(plain: Mapping[str, Plain], tensors: Mapping[str, TensorEntry]) -> bool:
    """Check dtypes and shapes; return whether the norms are stored minus one, which the convolution's layout tells.

    MLX-LM stores the convolution as [channels, taps, 1] and adds the 1 to the norms when it converts; raw Hugging Face
    files have [channels, 1, taps] and norms without the 1. Presence of other tensors says nothing.
    """
    raw: dict[bool, str] = {}
    for spec in plain.values():
        entry = _need(spec.tensor, tensors, spec.shape)
        shapes = [spec.shape]
        if len(spec.shape) == 2:
            channels, taps = spec.shape
            shapes = [(channels, taps, 1), (channels, 1, taps)]
            raw.setdefault(entry.shape == shapes[1], entry.name)
        if entry.dtype not in _PLAIN_DTYPES or entry.shape not in shapes:
            raise _bad(entry, f"{' or '.join(_PLAIN_DTYPES)} {' or '.join(str(list(s)) for s in shapes)}")
    if len(raw) == 2:
        raise CheckpointError(f"tensor {raw[True]} has the raw Hugging Face layout, but {raw[False]} the converted one",
                              fix="convert the model again; whether norms lack their 1 cannot be told")
    return True in raw


def _accounted(tensors: Mapping[str, TensorEntry], formats: Mapping[str, Format], plain: Mapping[str, Plain]) -> dict[str, TensorEntry]:
    """The tensors that are used; any other must be one that text generation is known not to need."""
    used = {spec.tensor for spec in plain.values()}
    for path, form in formats.items():
        used |= {f"{path}.{part}" for part in (("weight",) if form.bits == 16 else ("weight", "scales", "biases"))}
    for name, entry in tensors.items():
        if name not in used and not name.startswith(IGNORED_PREFIXES):
            raise CheckpointError(f"tensor {name} of shape {list(entry.shape)} is not part of this architecture as config.json describes it",
                                  where=str(entry.file), fix="check that config.json belongs to these weights")
    return {name: tensors[name] for name in sorted(used)}
