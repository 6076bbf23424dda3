"""Text to token ids and back: safe encoding of user text, and streaming decoding that never shows half a character."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Encoder

from .config_fields import added_tokens, read_json
from .errors import CheckpointError, RequestError


class Tokenizer:
    """A byte-level BPE tokenizer of a checkpoint.

    ``control`` maps the text of every added token (special or not, `<think>` included) to its id; ``special_ids`` are those
    that :meth:`decode` leaves out; ``eos_ids`` end a generation; ``spec`` is the text of tokenizer.json.
    """

    def __init__(self, spec: Mapping[str, Any], eos_ids: Iterable[int] = (), where: str = "tokenizer.json") -> None:
        try:
            added = [entry for entry in added_tokens(spec, where) if entry[0]]
            self.spec = json.dumps(dict(spec))
            self._bytes = {token: text.encode() for text, token, _ in added}
            # Without its added tokens the encoder cannot produce a control token, whatever the text says. Cutting or padding
            # a prompt is nobody's business here.
            self._encoder = Encoder.from_str(json.dumps({**spec, "added_tokens": [], "truncation": None, "padding": None}))
        except CheckpointError:
            raise
        except Exception as error:  # the tokenizers package raises plain Exception
            raise CheckpointError(f"is not a tokenizer that the tokenizers package can read ({error})", where=where) from error
        if not _is_byte_level(spec.get("decoder")):
            raise CheckpointError("the decoder is not byte-level, the only kind supported", where=where)
        self.control: dict[str, int] = {text: token for text, token, _ in added}
        self.special_ids = frozenset(token for _, token, special in added if special)
        self.eos_ids = frozenset(eos_ids)
        longest_first = sorted(self.control, key=len, reverse=True)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if added else None

    @classmethod
    def from_folder(cls, folder: str | Path, eos_ids: Iterable[int] = ()) -> Tokenizer:
        """Read ``tokenizer.json``. Raises CheckpointError when it is missing or cannot be used."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError("the folder has no tokenizer.json", where=str(folder), fix="copy it from the original model")
        return cls(read_json(path), eos_ids, str(path))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a text; the model's own vocabulary may be padded beyond it."""
        return max(self._encoder.get_vocab_size(), max(self.control.values(), default=-1) + 1)

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Token ids of a text. With ``control`` the texts of added tokens become those tokens, else they stay ordinary text.

        Raises RequestError for text that is not valid Unicode (lone surrogates).
        """
        if not control:
            return self._encode_plain(text)
        ids: list[int] = []
        for piece in self.split_control(text):
            ids += [piece] if isinstance(piece, int) else self._encode_plain(piece)
        return ids

    def split_control(self, text: str) -> Iterator[str | int]:
        """The text cut at its control strings, which come as ids."""
        pieces = self._control_pattern.split(text) if self._control_pattern else [text]
        for index, piece in enumerate(pieces):
            if index % 2:
                yield self.control[piece]
            elif piece:
                yield piece

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD, unknown ids nothing, special tokens nothing if skipped."""
        return b"".join(self.token_bytes(token, skip_special=skip_special) for token in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """UTF-8 bytes of one token, which may be a part of a character."""
        if skip_special and token in self.special_ids:
            return b""
        known = self._bytes.get(token)
        if known is None:
            text = self._encoder.id_to_token(token) if token >= 0 else None
            known = self._bytes[token] = b"" if text is None else _token_to_bytes(text)
        return known

    def stream_decoder(self, *, skip_special: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special=skip_special)

    def _encode_plain(self, text: str) -> list[int]:
        try:
            return list(self._encoder.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("the text is not valid Unicode (it holds a lone surrogate)") from error


class StreamDecoder:
    """Decodes ids one at a time: a piece holds only whole characters, and joined pieces equal the full decode."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # The standard decoder keeps an unfinished sequence back, and replaces only what can no longer complete.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes (often all of it, sometimes nothing)."""
        return self._decoder.decode(self._tokenizer.token_bytes(token, skip_special=self._skip_special))

    @property
    def pending(self) -> bool:
        """Whether the bytes so far end inside a character."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """What is left at the end: U+FFFD if a character was cut, else nothing. Once flushed, nothing is left."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, Mapping):
        return False
    if decoder.get("type") == "Sequence":
        steps: Sequence[Any] = decoder.get("decoders") or []
        return len(steps) == 1 and _is_byte_level(steps[0])
    return decoder.get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _token_to_bytes(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in text)
    except KeyError:
        return text.encode()
