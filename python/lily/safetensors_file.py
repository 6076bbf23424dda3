"""A strict reader of safetensors headers: where each tensor lies, and one documented error per way a file can be bad.

The format: 8 bytes little-endian header length N, N bytes of JSON mapping a tensor's name to its dtype, shape and byte
range, then the data. The ranges must cover the data exactly: no overlap, no hole, nothing after the last.
Data is never read here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}
INDEX_NAME = "model.safetensors.index.json"
_DAMAGED = "download the file again"
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor. ``offset`` is its first byte counted from the start of ``file``; ``nbytes`` its length."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """One file's tensors in the order of their data, and the raw header (for fingerprints)."""

    path: Path
    nbytes: int
    header: bytes
    tensors: Mapping[str, TensorEntry]


def read_file(path: Path) -> SafetensorsFile:
    """Read and check the header of one file. Raises CheckpointError naming the file, and the tensor at fault."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            header = _read_header(path, stream.read(8), size, stream.read)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path)) from error
    raw = _parse(path, header)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(path, "__metadata__ must map strings to strings")
    start = 8 + len(header)
    entries = [_entry(path, name, value, start, size - start) for name, value in raw.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_cover(path, entries, start, size)
    return SafetensorsFile(path, size, header, {entry.name: entry for entry in entries})


def open_folder(folder: Path) -> tuple[list[SafetensorsFile], dict[str, TensorEntry]]:
    """All weight files of a checkpoint folder and the union of their tensors.

    With an index, exactly the files it names; otherwise ``model.safetensors``, otherwise a complete numbered set.
    Raises CheckpointError for a missing shard, a tensor that the index places in a shard without it, and a tensor in
    two shards.
    """
    index_path = folder / INDEX_NAME
    placed = read_index(index_path) if index_path.is_file() else {}
    names = sorted(set(placed.values())) if index_path.is_file() else _file_names(folder)
    files: list[SafetensorsFile] = []
    tensors: dict[str, TensorEntry] = {}
    for name in names:
        path = folder / name
        if len(os.fsencode(name)) > 255 or not path.is_file():
            example = next((tensor for tensor, shard in placed.items() if shard == name), None)
            what = "shard is missing" + (f"; the index places tensor {example} in it" if example else "")
            raise CheckpointError(what, where=str(path), fix="download the missing file")
        file = read_file(path)
        for tensor, entry in file.tensors.items():
            if tensor in tensors:
                raise CheckpointError(f"tensor {tensor} is also in {tensors[tensor].file.name}", where=str(path), fix=_DAMAGED)
            tensors[tensor] = entry
        files.append(file)
    for tensor, shard in placed.items():
        if tensor not in tensors or tensors[tensor].file.name != shard:
            raise CheckpointError(f"the index places tensor {tensor} in {shard}, which lacks it", where=str(index_path), fix=_DAMAGED)
    return files, tensors


def _bad(path: Path, what: str, tensor: str | None = None) -> CheckpointError:
    return CheckpointError(f"tensor {tensor} {what}" if tensor is not None else what, where=str(path), fix=_DAMAGED)


def _read_header(path: Path, prefix: bytes, size: int, read: Any) -> bytes:
    if len(prefix) < 8:
        raise _bad(path, f"the file has {size} bytes, too few for a safetensors header")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise _bad(path, f"the header claims {length} bytes, over the limit of {MAX_HEADER_BYTES}")
    if length > size - 8:
        raise _bad(path, f"the header claims {length} bytes, but only {size - 8} follow in the file")
    header: bytes = read(length)
    if len(header) != length:
        raise _bad(path, f"the file ended inside the header ({len(header)} of {length} bytes)")
    return header


def _parse(path: Path, header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _bad(path, f"the header holds the key {key!r} twice")
            found[key] = value
        return found

    if not header.startswith(b"{"):
        raise _bad(path, "the header does not begin with '{'")
    try:
        raw = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"the header is not valid JSON ({error})") from error
    if not isinstance(raw, dict):  # pragma: no cover - text that begins with '{' parses to an object
        raise _bad(path, "the header must be a JSON object")
    return raw


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(path: Path, name: str, raw: Any, start: int, data_bytes: int) -> TensorEntry:
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, "must have exactly dtype, shape and data_offsets", name)
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _bad(path, f"has the unknown dtype {dtype!r}", name)
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise _bad(path, f"has the shape {shape!r}, expected a list of sizes", name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise _bad(path, f"has data_offsets {offsets!r}, expected two byte positions", name)
    begin, end = offsets
    if begin > end:
        raise _bad(path, f"begins at byte {begin} and ends before, at {end}", name)
    if end > data_bytes:
        raise _bad(path, f"ends at byte {end} of the data, but the file holds {data_bytes} (truncated file?)", name)
    bits = DTYPE_BITS[dtype]
    for dimension in shape:
        bits *= dimension
        if bits > 2**70:  # larger than any file; stops a hostile shape from growing a huge product
            break
    if bits != (end - begin) * 8:
        raise _bad(path, f"has {end - begin} bytes, but dtype {dtype} x shape {shape} needs {-(-bits // 8)}", name)
    return TensorEntry(name, dtype, tuple(shape), path, start + begin, end - begin)


def _check_cover(path: Path, entries: list[TensorEntry], start: int, size: int) -> None:
    """The byte ranges, in order, must touch without overlap or hole, from the end of the header to the end of the file."""
    position = start
    for entry in entries:
        if entry.offset < position:
            raise _bad(path, f"overlaps the tensor before it by {position - entry.offset} bytes", entry.name)
        if entry.offset > position:
            raise _bad(path, f"leaves a hole of {entry.offset - position} bytes before it", entry.name)
        position = entry.offset + entry.nbytes
    if position != size:
        last = f" (the last is {entries[-1].name})" if entries else ""
        raise _bad(path, f"{size - position} bytes follow the last tensor{last}")


def read_index(path: Path) -> dict[str, str]:
    """Tensor names to file names of an index. Raises CheckpointError for anything but plain names of the same folder."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path)) from error
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise _bad(path, "is not valid JSON with a weight_map") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(path, "weight_map must map tensor names to file names")
    for tensor, name in weight_map.items():
        # A plain name inside the folder: an index must not make us read elsewhere.
        if not isinstance(name, str) or not name.endswith(".safetensors") or name != os.path.basename(name) or "\\" in name:
            raise _bad(path, f"is placed in {name!r}, which is not a safetensors file of this folder", tensor)
    return dict(weight_map)


def _file_names(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    shards = [match for match in map(_SHARD.fullmatch, sorted(os.listdir(folder))) if match]
    if not shards:
        raise CheckpointError("the folder has no model.safetensors and no numbered shards", where=str(folder),
                              fix="give the folder of a model converted with mlx_lm.convert")
    count = max(int(match[2]) for match in shards)
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
