"""Anything at all as messages, markup, templates and files: an answer or a documented error, never another exception, a crash or a hang."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from lily.chat import ChatTemplate
from lily.errors import CheckpointError, LilyError, RequestError, SessionFileError, TemplateError
from lily.reasoning import ReasoningSplitter
from lily.reply import CallReader, Piece, joined
from lily.reply import Usage as PieceUsage
from lily.safetensors_file import read_file
from lily.stop_strings import StopMatcher
from lily.tokenizer import Tokenizer
from tests.checkpoint_tools import MODEL_DIR
from tests.fuzzing import CONTROL, attempts, good_messages, good_tools, json_values, mutated, runs, texts

TOKENIZER = Tokenizer.from_folder(MODEL_DIR, [6137, 6135])
CHAT = ChatTemplate.from_folder(MODEL_DIR, TOKENIZER)
START = TOKENIZER.control["<|im_start|>"]


@runs(150)
def test_any_chat_messages(run: settings) -> None:
    def body(messages: Any, tools: Any, thinking: bool | None) -> None:
        try:
            ids = CHAT.encode(messages, tools=tools, enable_thinking=thinking)
        except RequestError as error:
            assert "\n" not in str(error)
            return
        # Turns begin where the template begins them, whatever the texts say: tool results in a row share one.
        roles = [message["role"] for message in messages]
        turns = sum(role != "tool" or at == 0 or roles[at - 1] != "tool" for at, role in enumerate(roles))
        assert turns - 1 <= ids.count(START) <= turns + 2  # a system message joins the tools or may be empty; the answer's header follows

    attempts(run, mutated(good_messages), st.none() | mutated(good_tools), st.none() | st.booleans(), body=body)


FRAGMENTS = ["{{", "}}", "{%", "%}", "{#", "#}", " ", "\n", "messages", "tools", "m", "m.content", "m['role']", "[0]", "[-1:]", "|", "tojson", "trim", "length", "join(',')",
             "for m in messages", "endfor", "if m", "elif tools", "else", "endif", "set x = ", "set ns = namespace(a=1)", "ns.a", "macro f(x)", "endmacro", "f(m)", "~", "+", "*",
             "'a'", "99999", "range(9)", "loop.index0", "raise_exception('no')", "strftime_now('%Y')", "is defined", "is string", "not", "break", "continue", "''.__class__",
             "messages.append(1)", "cycler(1)", "(", ")", "{{ m.content }}", "{% for m in messages %}", "{% endfor %}", "{%- if tools -%}", "{%- endif -%}", "add_generation_prompt"]


@runs(200)
def test_any_template(run: settings) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi <think>"}]

    def body(parts: list[str]) -> None:
        try:
            assert all(isinstance(token, int) for token in ChatTemplate("".join(parts), TOKENIZER).encode(messages))
        except (TemplateError, RequestError) as error:
            assert "\n" not in str(error)

    attempts(run, st.lists(st.sampled_from(FRAGMENTS) | texts, max_size=14), body=body)


MARKUP = [*CONTROL, "<function=now>", "<parameter=city>", "<", "</", ">", "\n", "f", "5", "{", '"', " ", "word", "STOP", "ST", "😀"]
OFFERED = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "a": {"type": ["integer", "null"]}}}}} for name in ("f", "now")]


@runs(200)
def test_any_markup_in_any_pieces(run: settings) -> None:
    """Thought, stop string and calls in one chain, as a generation has them: the cut of the pieces does not matter."""

    def read(pieces: list[str], thinks: bool, reason: str) -> tuple[Any, ...]:
        splitter, stop, calls = ReasoningSplitter(thinks), StopMatcher(("STOP",)), CallReader(OFFERED)
        found: list[Piece] = []
        for piece in pieces:
            split = splitter.push(piece)
            found.append(calls.read(Piece(stop.push(split.text), split.reasoning)))
            if stop.matched or calls.ended:
                break
        reasoning, text = "", ""
        if not stop.matched:
            split = splitter.flush()
            reasoning, text = split.reasoning, stop.push(split.text)
            text += "" if stop.matched else stop.flush()
        end = "stop" if stop.matched else reason
        found.append(calls.read(Piece(text, reasoning, finish_reason=end, usage=PieceUsage(1, 1), stop_string=stop.matched)))
        whole = joined(found)
        for call in whole.tool_calls:
            assert isinstance(json.loads(call["function"]["arguments"]), dict) and call["function"]["name"]
        return whole.text, whole.reasoning, whole.finish_reason, [call["function"] for call in whole.tool_calls]

    def body(parts: list[str], cuts: list[int], thinks: bool, reason: str) -> None:
        text = "".join(parts)
        bounds = sorted(min(cut, len(text)) for cut in cuts)
        pieces = [text[a:b] for a, b in zip([0, *bounds], [*bounds, len(text)], strict=True)]
        assert read([text], thinks, reason) == read(pieces, thinks, reason) == read(list(text), thinks, reason)

    attempts(run, st.lists(st.sampled_from(MARKUP) | texts, max_size=20), st.lists(st.integers(0, 120), max_size=8), st.booleans(),
             st.sampled_from(["stop", "length"]), body=body)


def packed(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@runs(150)
def test_any_safetensors_header(run: settings, tmp_path: Path) -> None:
    """A good header of which places are changed, and the bytes behind it."""
    good = {"__metadata__": {"format": "mlx"}, "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]}}

    def body(header: Any, size: int, damage: list[tuple[int, int]]) -> None:
        raw = bytearray(packed(json.dumps(header).encode("utf-8", "replace"), bytes(size)))
        for at, value in damage:
            raw[at % len(raw)] = value
        (tmp_path / "x.safetensors").write_bytes(raw)
        try:
            file = read_file(tmp_path / "x.safetensors")
        except CheckpointError as error:
            assert "x.safetensors" in str(error)
            return
        assert all(8 <= entry.offset <= entry.offset + entry.nbytes <= len(raw) for entry in file.tensors.values())

    attempts(run, mutated(st.just(good)), st.sampled_from([28, 28, 27, 29, 0]), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=2), body=body)


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], bytes]:
    """Header and data of a saved conversation."""
    session = model.session()
    session.chat("Who are you?", temperature=0, max_tokens=4)
    path = tmp_path_factory.mktemp("fuzz") / "talk"
    session.save(path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


@runs(40)
def test_any_session_file(run: settings, model: Any, saved: tuple[dict[str, Any], bytes], tmp_path: Path) -> None:
    """Changed headers whose checksum is right: what is restored can go on, all else is refused by name."""
    good, data = saved
    metadata = good["__metadata__"]
    inside = {name: mutated(st.just(json.loads(metadata[name]))).map(json.dumps) | texts for name in ("messages", "positions")}
    changed_metadata = st.fixed_dictionaries({name: inside.get(name, st.just(value)) for name, value in metadata.items()})
    tensors = mutated(st.just({name: entry for name, entry in good.items() if name in ("tokens", "kv_k.3", "state.0.gdn.0")}))

    def body(metadata: Any, entries: Any, kept: int, damage: list[tuple[int, int]], honest: bool) -> None:
        if isinstance(metadata, dict):
            metadata = {"sha256": "0" * 64, **{name: value for name, value in metadata.items() if name != "sha256"}}
        header = {**good, **(entries if isinstance(entries, dict) else {}), "__metadata__": metadata}
        content = bytearray(data[: len(data) - kept])
        for at, value in damage:
            content[at % len(content)] = value
        text = json.dumps(header).encode("utf-8", "replace")
        if honest:
            text = text.replace(b"0" * 64, hashlib.sha256(text + content).hexdigest().encode(), 1)
        path = tmp_path / "x"
        path.write_bytes(packed(text, bytes(content)))
        try:
            session = model.restore(path)
        except SessionFileError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            return
        try:
            assert session.chat("And you?", max_tokens=2, temperature=0).usage.completion_tokens
        except LilyError:  # messages that a template refuses, state that is not finite
            pass

    try:
        attempts(run, st.just(metadata) | changed_metadata | json_values, st.just({}) | tensors, st.sampled_from([0, 0, 0, 1, 4096]),
                 st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=3), st.sampled_from([True, True, False]), body=body)
    finally:
        model.clear_cache()  # of states that never were
    assert model.generate("What is the capital of France?", temperature=0, enable_thinking=False).text == "The capital of France is Paris."
