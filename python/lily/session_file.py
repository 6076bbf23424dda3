"""A session as a safetensors file: its tokens, KV rows and recurrent state, and the conversation's messages.

Tensors: `tokens` int32 [n]; `kv_k.<layer>` and `kv_v.<layer>` bfloat16 [n, KV width]; for each state i `state.<i>.conv.<layer>`
bfloat16 [taps - 1, channels] and `state.<i>.gdn.<layer>` float32 [value heads, key dim * value dim]. The last state is that of
all tokens; one before it is the prefix cache's longest snapshot below, where the next turn resumes when it drops a thought.
Metadata: format, version, fingerprint of the checkpoint, hash of the config, positions of the states, messages, and a SHA-256
over the header (its own digits as zeros) and the data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .config import ModelConfig
from .errors import CheckpointError, ContextLengthError, SessionFileError
from .safetensors_file import SafetensorsFile, TensorEntry, read_file
from .session import Session
from .snapshot_store import SnapshotStore

FORMAT, VERSION = "lily-session", "1"
STAGING_BYTES = 4 << 20
_KEYS = ("format", "version", "fingerprint", "config", "positions", "messages", "sha256")
_NO_SUM = "0" * 64
_AGAIN = "save the session again"
_SIZES = {"I32": 4, "BF16": 2, "F32": 4}

Shape = tuple[str, tuple[int, ...]]  # dtype, shape


def config_hash(config: ModelConfig) -> str:
    """Hex SHA-256 of every dimension and default."""
    return hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True, default=str).encode()).hexdigest()


def tensor_shapes(config: ModelConfig, tokens: int, states: int) -> dict[str, Shape]:
    """Every tensor of a file, in the order of the data."""
    out: dict[str, Shape] = {"tokens": ("I32", (tokens,))}
    full = [i for i in range(config.num_layers) if config.is_attention(i)]
    out.update({f"kv_{part}.{i}": ("BF16", (tokens, config.kv_width)) for i in full for part in "kv"})
    for s in range(states):
        for i in range(config.num_layers):
            if i not in full:
                out[f"state.{s}.conv.{i}"] = "BF16", (config.conv_taps - 1, config.conv_channels)
                out[f"state.{s}.gdn.{i}"] = "F32", (config.v_heads, config.dv * config.dk)
    return out


def _nbytes(shape: Shape) -> int:
    n = _SIZES[shape[0]]
    for d in shape[1]:
        n *= d
    return n


class Staging:
    """A small shared buffer through which GPU memory, private or not, is read and written."""

    def __init__(self, gpu: Any) -> None:
        self._native = gpu.native
        self._buffer = self._native.buffer(STAGING_BYTES, "shared", "staging", True)
        self._view = self._buffer.view()

    def read(self, buffer: Any, offset: int, nbytes: int) -> Iterator[memoryview]:
        """The bytes in pieces; each is valid until the next is asked for."""
        for at in range(0, nbytes, STAGING_BYTES):
            size = min(STAGING_BYTES, nbytes - at)
            self._native.blit([(buffer, offset + at, self._buffer, 0, size)])
            yield memoryview(self._view)[:size]

    def write(self, stream: BinaryIO, buffer: Any, offset: int, nbytes: int) -> None:
        """Fills a range from a stream; EOFError when it ends early."""
        for at in range(0, nbytes, STAGING_BYTES):
            size = min(STAGING_BYTES, nbytes - at)
            if stream.readinto(memoryview(self._view)[:size]) != size:  # type: ignore[attr-defined]
                raise EOFError
            self._native.blit([(self._buffer, 0, buffer, offset + at, size)])


# ---- saving ----

def save(session: Session, path: str | Path, messages: Sequence[dict[str, Any]] = ()) -> None:
    """Writes the session's state and the messages, atomically: the file is whole or what it was before.

    Raises SessionFileError when it cannot be written, DeviceError when the state cannot be read.
    """
    path = _checked_path(path)
    engine = session.engine
    store = SnapshotStore(engine.gpu, engine.config)
    tokens = list(session.tokens)
    states: list[tuple[int, Any]] = [(len(tokens), None)] if tokens else []
    snapshot, _ = engine.cache.match(tokens)
    if snapshot is not None:
        states.insert(0, (snapshot.length, snapshot.state))
    shapes = tensor_shapes(engine.config, len(tokens), len(states))
    metadata = {
        "format": FORMAT, "version": VERSION, "fingerprint": engine.fingerprint, "config": config_hash(engine.config),
        "positions": json.dumps([n for n, _ in states]), "sha256": _NO_SUM,
    }
    try:
        metadata["messages"] = json.dumps(list(messages))
    except (TypeError, ValueError, RecursionError) as error:
        raise SessionFileError(f"cannot be written: a message is not JSON ({error})", where=str(path)) from error
    header = _header(shapes, metadata)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(handle, "wb") as stream:
            digest = hashlib.sha256(header)
            stream.write(len(header).to_bytes(8, "little") + header)
            for piece in _data(session, store, tokens, [state for _, state in states]):
                digest.update(piece)
                stream.write(piece)
            stream.seek(8)
            stream.write(header.replace(_NO_SUM.encode(), digest.hexdigest().encode(), 1))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
        _sync_folder(path.parent)
    except OSError as error:
        _remove(name)
        raise _unwritable(path, error) from error
    except BaseException:
        _remove(name)
        raise


def _header(shapes: dict[str, Shape], metadata: dict[str, str]) -> bytes:
    # The checksum comes first, so that its digits are the first run of zeros of that length.
    entries: dict[str, Any] = {"__metadata__": {"sha256": metadata["sha256"], **metadata}}
    at = 0
    for name, shape in shapes.items():
        entries[name] = {"dtype": shape[0], "shape": list(shape[1]), "data_offsets": [at, at + _nbytes(shape)]}
        at += _nbytes(shape)
    raw = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return raw + b" " * (-len(raw) % 8)


def _data(session: Session, store: SnapshotStore, tokens: list[int], states: list[Any]) -> Iterator[Any]:
    yield np.asarray(tokens, "<i4").tobytes()
    if not tokens:
        return
    staging = Staging(session.engine.gpu)
    for name in store.kv:
        yield from staging.read(session.buffers[name], 0, len(tokens) * store.kv_row)
    for state in states:
        at = 0
        for name, nbytes in store.slots.items():
            source, offset = (session.buffers[name], session.slot * nbytes) if state is None else (state, at)
            yield from staging.read(source, offset, nbytes)
            at += nbytes


def _checked_path(path: object) -> Path:
    """Raises SessionFileError for what no file can be called."""
    try:
        if b"\0" not in os.fsencode(path):  # type: ignore[arg-type]
            return Path(os.fsdecode(path))  # type: ignore[arg-type]
    except (TypeError, UnicodeEncodeError):
        pass
    raise SessionFileError("is not the path of a file", where=ascii(path)[:80], fix="give a string or a pathlib.Path")


def _sync_folder(folder: Path) -> None:
    """Makes the new name durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(name: str) -> None:
    try:
        os.unlink(name)
    except OSError:
        pass


def _unwritable(path: Path, error: OSError) -> SessionFileError:
    return SessionFileError(f"cannot be written ({error.strerror})", where=str(path))


# ---- restoring ----

def restore(session: Session, path: str | Path) -> list[dict[str, Any]]:
    """Puts a saved state into a fresh session and returns the saved messages.

    Raises SessionFileError when the file is missing or damaged, or was saved with another checkpoint, config or version;
    ContextLengthError when it is longer than the model's context; DeviceError as for a prompt of that length.
    """
    path = _checked_path(path)
    engine = session.engine
    try:
        file = read_file(path)
    except CheckpointError as error:
        raise SessionFileError(error.what, where=str(path), fix=_AGAIN) from error
    metadata, positions, messages = _checked_metadata(path, file, session)
    try:
        tokens = _checked_tensors(path, file, engine.config, positions)
        if len(tokens) >= engine.context_length:
            raise ContextLengthError(f"the saved session has {len(tokens)} tokens, the model's context is {engine.context_length}", where=str(path),
                                     tokens=len(tokens), limit=engine.context_length)
        _check_sum(path, file, metadata["sha256"])
        if tokens:
            session.ensure_capacity(len(tokens))
            _load(session, file, tokens, positions)
    except OSError as error:
        raise SessionFileError(f"cannot be read ({error.strerror})", where=str(path)) from error
    return messages


def _checked_metadata(path: Path, file: SafetensorsFile, session: Session) -> tuple[dict[str, str], list[int], list[dict[str, Any]]]:
    def refuse(what: str, fix: str = _AGAIN) -> SessionFileError:
        return SessionFileError(what, where=str(path), fix=fix)

    metadata: dict[str, str] = json.loads(file.header).get("__metadata__", {})
    if metadata.get("format") != FORMAT:
        raise refuse("is a safetensors file, but no saved session", "give a file that session.save wrote")
    if metadata.get("version") != VERSION:
        raise refuse(f"has the session format {metadata.get('version')!r}, this version of lily reads {VERSION!r}")
    missing = [key for key in _KEYS if key not in metadata]
    if missing:
        raise refuse(f"lacks the metadata {', '.join(missing)}")
    if metadata["fingerprint"] != session.engine.fingerprint:
        prints = f"fingerprint {metadata['fingerprint'][:12]}, this model's is {session.engine.fingerprint[:12]}"
        raise refuse(f"was saved with another checkpoint ({prints})", "restore it with the model that saved it")
    if metadata["config"] != config_hash(session.engine.config):
        raise refuse("was saved with another configuration of the model", "restore it with the model that saved it")
    try:
        positions, messages = json.loads(metadata["positions"]), json.loads(metadata["messages"])
    except (ValueError, RecursionError) as error:
        raise refuse("has metadata that is not JSON") from error
    if not isinstance(positions, list) or len(positions) > 2 or any(type(n) is not int for n in positions) or sorted(set(positions)) != positions:
        raise refuse(f"has positions {positions!r}, expected at most two rising token counts")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise refuse("has messages that are no list of messages")
    return metadata, positions, messages


def _checked_tensors(path: Path, file: SafetensorsFile, config: ModelConfig, positions: list[int]) -> list[int]:
    """The tokens, after a check that every tensor has the name, dtype and shape that the config asks for."""
    entry = file.tensors.get("tokens")
    count = entry.shape[0] if entry is not None and len(entry.shape) == 1 else -1
    expected = tensor_shapes(config, count, len(positions)) if count >= 0 else {"tokens": ("I32", (0,))}
    for name, (dtype, shape) in expected.items():
        found = file.tensors.get(name)
        if found is None or (found.dtype, found.shape) != (dtype, shape):
            what = "is missing" if found is None else f"has {found.dtype} {list(found.shape)}"
            raise SessionFileError(f"tensor {name} {what}, expected {dtype} {list(shape)}", where=str(path), fix=_AGAIN)
    extra = next((name for name in file.tensors if name not in expected), None)
    if extra is not None:
        raise SessionFileError(f"tensor {extra} does not belong to a saved session", where=str(path), fix=_AGAIN)
    if (positions[-1:] != [count] if count else positions != []) or any(n < 1 for n in positions):
        raise SessionFileError(f"has states at {positions}, the last must be at its {count} tokens", where=str(path), fix=_AGAIN)
    assert entry is not None
    raw = np.fromfile(path, "<i4", count, offset=entry.offset)
    if raw.size != count or (count and not 0 <= int(raw.min()) <= int(raw.max()) < config.vocab_size):
        raise SessionFileError(f"holds token ids outside the vocabulary of {config.vocab_size}", where=str(path), fix=_AGAIN)
    return [int(token) for token in raw]


def _check_sum(path: Path, file: SafetensorsFile, expected: str) -> None:
    digest = hashlib.sha256(file.header.replace(expected.encode(), _NO_SUM.encode(), 1))
    with open(path, "rb") as stream:
        stream.seek(8 + len(file.header))
        while piece := stream.read(STAGING_BYTES):
            digest.update(piece)
    if digest.hexdigest() != expected:
        raise SessionFileError("is damaged: its checksum does not match its contents", where=str(path), fix=_AGAIN)


def _load(session: Session, file: SafetensorsFile, tokens: list[int], positions: list[int]) -> None:
    engine = session.engine
    store, staging = SnapshotStore(engine.gpu, engine.config), Staging(engine.gpu)
    with open(file.path, "rb") as stream:
        def put(entry: TensorEntry, name: str) -> None:
            stream.seek(entry.offset)
            try:
                staging.write(stream, session.buffers[name], 0, entry.nbytes)
            except EOFError:
                raise SessionFileError(f"ended inside the tensor {entry.name}", where=str(file.path), fix=_AGAIN) from None

        for name in store.kv:
            put(file.tensors[name], name)
        for i, position in enumerate(positions):
            for name in store.slots:
                put(file.tensors[f"state.{i}.{name}"], name)
            session.adopt(tokens[:position])
            if position < len(tokens):
                engine.cache.insert(session)
