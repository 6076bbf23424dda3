"""Saved sessions: what is restored, what is refused, and that a file is whole or untouched."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
from lily import session_file
from lily.errors import LilyError, SessionFileError
from lily.options import ExecutionOptions
from lily.sampling import SamplingParams
from lily.session import Session

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def model() -> Any:
    return lily.Model.load("lily-tiny", device=os.environ.get("LILY_TEST_DEVICE"))


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(path, the session that was saved) after two turns."""
    session = model.session()
    session.chat("Who are you?", temperature=0, max_tokens=40)
    session.chat(QUESTION, temperature=0, max_tokens=40)
    path = tmp_path_factory.mktemp("sessions") / "talk.safetensors"
    session.save(path)
    return path, session


def test_a_restored_session_has_the_same_tokens_state_and_messages(model: Any, saved: Any) -> None:
    path, session = saved
    restored = model.restore(path)
    assert restored.tokens == session.tokens and restored.messages == session.messages
    before, after = session._session.state_arrays(), restored._session.state_arrays()
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


@pytest.mark.parametrize("keywords", [{}, {"enable_thinking": False}], ids=["thinking", "no-thinking"])
def test_a_restored_session_continues_with_the_same_tokens_in_a_model_that_never_saw_it(model: Any, tmp_path: Path, keywords: dict[str, Any]) -> None:
    model.clear_cache()
    session = model.session()
    session.chat(QUESTION, temperature=0, max_tokens=30, **keywords)
    session.save(tmp_path / "x")
    fresh = lily.Model.load("lily-tiny", device=os.environ.get("LILY_TEST_DEVICE"))
    restored = fresh.restore(tmp_path / "x")
    for question in ("And 5 + 9?", "Who are you?"):
        expected, got = (s.chat(question, temperature=0, max_tokens=24, **keywords) for s in (session, restored))
        assert got.token_ids == expected.token_ids and got.usage.cached_tokens == expected.usage.cached_tokens > 0


def test_the_restored_state_itself_continues_with_the_same_tokens(model: Any, saved: Any) -> None:
    path, session = saved
    prompt = [*session.tokens, 17, 23]
    keywords = (SamplingParams(), 12, (), ExecutionOptions())
    lone, restored = Session(model.engine), model.restore(path)._session
    session_file.restore(lone, path)
    expected = [s.token for s in lone.generate(prompt, *keywords)]
    assert [s.token for s in restored.generate(prompt, *keywords)] == expected
    assert restored.prefilled == lone.prefilled == 2


def test_any_safetensors_reader_can_open_the_file(saved: Any) -> None:
    from safetensors import safe_open

    path, session = saved
    with safe_open(path, "np") as file:
        assert tuple(file.get_tensor("tokens")) == session.tokens
        assert file.metadata()["format"] == "lily-session"


def test_an_empty_session_can_be_saved(model: Any, tmp_path: Path) -> None:
    model.session().save(tmp_path / "empty")
    restored = model.restore(tmp_path / "empty")
    assert restored.tokens == () and restored.messages == []
    assert restored.chat(QUESTION, temperature=0, enable_thinking=False).text


def test_saving_over_a_file_is_all_or_nothing(model: Any, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"before")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session_file.os, "fsync", full)
    with pytest.raises(SessionFileError, match="No space left"):
        saved[1].save(path)
    assert path.read_bytes() == b"before" and [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("path", ["/no/such/folder/x", "/proc/nowhere"])
def test_a_path_that_cannot_be_written_or_read_is_an_error_with_the_path(model: Any, saved: Any, path: str) -> None:
    with pytest.raises(SessionFileError, match=path):
        saved[1].save(path)
    with pytest.raises(SessionFileError, match=path):
        model.restore(path)


@pytest.mark.parametrize("path", ["a\0b", "\ud800", 5, None, ["x"]])
def test_what_is_no_path_is_refused(model: Any, saved: Any, path: Any) -> None:
    with pytest.raises(SessionFileError, match="not the path"):
        saved[1].save(path)
    with pytest.raises(SessionFileError, match="not the path"):
        model.restore(path)


def rewritten(path: Path, target: Path, **metadata: str | None) -> Path:
    """A copy with other metadata; None removes a key. The checksum is made right."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    for key, value in {"sha256": "0" * 64, **metadata}.items():
        header["__metadata__"].pop(key, None)
        if value is not None:
            header["__metadata__"][key] = value
    if "sha256" in header["__metadata__"]:
        header["__metadata__"] = {"sha256": header["__metadata__"].pop("sha256"), **header["__metadata__"]}
    text = json.dumps(header).encode()
    if "sha256" not in metadata:
        text = text.replace(b"0" * 64, hashlib.sha256(text + data).hexdigest().encode(), 1)
    target.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return target


@pytest.mark.parametrize("metadata,names", [
    ({"format": None}, "no saved session"), ({"format": "pt"}, "no saved session"), ({"version": "99"}, "'99'"), ({"version": None}, "None"),
    ({"fingerprint": "f" * 64}, "another checkpoint"), ({"config": "0"}, "another configuration"), ({"messages": None}, "messages"),
    ({"messages": "["}, "not JSON"), ({"messages": "[1]"}, "list of messages"), ({"messages": "[" * 100_000}, "not JSON"),
    ({"positions": "[3, 2]"}, "positions"),
    ({"positions": "[]"}, "state"), ({"positions": "[true]"}, "positions"), ({"positions": "{}"}, "positions"), ({"sha256": "1" * 64}, "checksum"),
    ({"sha256": ""}, "checksum"), ({"sha256": None}, "sha256"),
])
def test_a_file_of_another_kind_model_or_version_is_refused(
    model: Any, saved: Any, tmp_path: Path, metadata: dict[str, str | None], names: str,
) -> None:
    with pytest.raises(SessionFileError, match=names):
        model.restore(rewritten(saved[0], tmp_path / "x", **metadata))


def test_a_rewritten_file_that_is_right_is_read(model: Any, saved: Any, tmp_path: Path) -> None:
    assert model.restore(rewritten(saved[0], tmp_path / "x")).tokens == saved[1].tokens


def test_random_damage_is_always_noticed(model: Any, saved: Any, tmp_path: Path) -> None:
    rng = random.Random(5)
    raw = saved[0].read_bytes()
    for i in range(60):
        broken = bytearray(raw)
        if i % 3 == 0:
            broken = broken[: rng.randrange(len(raw))]
        else:
            at = rng.randrange(8 + int.from_bytes(raw[:8], "little") if i % 3 == 1 else len(raw))
            broken[at] ^= 1 << rng.randrange(8)
        (tmp_path / "x").write_bytes(broken)
        with pytest.raises(LilyError) as caught:
            model.restore(tmp_path / "x")
        assert str(tmp_path / "x") in str(caught.value)
    assert model.restore(saved[0]).tokens == saved[1].tokens


def test_a_session_longer_than_the_context_is_refused(saved: Any) -> None:
    small = lily.Model.load("lily-tiny", device=os.environ.get("LILY_TEST_DEVICE"), context=16)
    with pytest.raises(lily.ContextLengthError, match="16"):
        small.restore(saved[0])


def test_saving_needs_no_view_of_private_buffers(model: Any, tmp_path: Path) -> None:
    session = Session(model.engine, model.engine.cache)
    list(session.generate([5, 6, 7, 8], SamplingParams(), 3, (), ExecutionOptions()))
    private = {name: model.engine.gpu.native.buffer(b.nbytes, "private", name, True) for name, b in session.buffers.items()}
    model.engine.gpu.native.blit([(b, 0, private[name], 0, b.nbytes) for name, b in session.buffers.items()])
    session_file.save(session, tmp_path / "shared")
    session._state = private
    session_file.save(session, tmp_path / "private")
    assert (tmp_path / "shared").read_bytes() == (tmp_path / "private").read_bytes()
