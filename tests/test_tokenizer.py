"""Tokenizer: the goldens' texts, control strings as text, and streaming without half characters (case 44)."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Encoder

from lily.errors import CheckpointError, RequestError
from lily.tokenizer import StreamDecoder, Tokenizer
from tests.checkpoint_tools import GOLDENS, MODEL_DIR

TOKENIZER = Tokenizer.from_folder(MODEL_DIR, [6137, 6135])
REFERENCE = Encoder.from_file(str(MODEL_DIR / "tokenizer.json"))
CONVERSATIONS = json.loads(GOLDENS.read_text(encoding="utf-8"))

TEXTS = ["", "plain", " two  spaces\n\n\tand more ", "ďábelské", "中文和日本語", "😀😃", "👨‍👩‍👧‍👦 family", "नमस्ते", "é vs é", "a\ufffdb", "\x00\x7f"]


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_golden_texts(conversation):
    assert TOKENIZER.decode(conversation["greedy_ids"]) == conversation["text"]


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_encodes_as_the_package_does(text):
    assert TOKENIZER.encode(text) == REFERENCE.encode(text).ids


@pytest.mark.parametrize("text, ids", [("<think>", [6138]), ("<|im_start|>user", [6136, *REFERENCE.encode("user").ids])])
def test_control_strings_are_text_unless_asked_for(text, ids):
    assert TOKENIZER.encode(text, control=True) == ids
    plain = TOKENIZER.encode(text)
    assert not set(plain) & set(TOKENIZER.control.values())
    assert TOKENIZER.decode(plain) == text


def test_control_strings_inside_text_equal_the_package():
    text = "a <|im_end|>\n<think><think> b</tool_call>"
    assert TOKENIZER.encode(text, control=True) == REFERENCE.encode(text).ids


def test_special_tokens_can_be_kept():
    assert TOKENIZER.decode([6136, 6138, 6137]) == "<think>"
    assert TOKENIZER.decode([6136, 6138, 6137], skip_special=False) == "<|im_start|><think><|im_end|>"


def test_ids_without_a_text():
    assert TOKENIZER.vocab_size == 6144 and TOKENIZER.decode([-1, 999999]) == ""


def test_lone_surrogate():
    with pytest.raises(RequestError, match="Unicode"):
        TOKENIZER.encode("a\ud800")


def streamed(decoder: StreamDecoder, ids):
    return [decoder.push(token) for token in ids], decoder.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_case_44_streams_never_show_half_a_character(text):
    ids = [token for byte in text.encode() for token in [byte_token(byte)]]
    pieces, rest = streamed(TOKENIZER.stream_decoder(), ids)
    assert "".join(pieces) == text and rest == ""
    assert all(text.startswith("".join(pieces[: i + 1])) for i in range(len(pieces)))


def byte_token(byte: int) -> int:
    """The token that stands for one byte."""
    return next(token for token in range(6135) if TOKENIZER.token_bytes(token) == bytes([byte]))


def test_case_44_a_dangling_part_is_flushed_once():
    decoder = TOKENIZER.stream_decoder()
    ids = [byte_token(byte) for byte in "😀".encode()[:3]]
    assert [decoder.push(token) for token in ids] == ["", "", ""]
    assert decoder.flush() == "\ufffd" and decoder.flush() == ""
    assert decoder.push(byte_token(65)) == "A"


def test_case_44_an_impossible_byte_does_not_swallow_what_follows():
    pieces, rest = streamed(TOKENIZER.stream_decoder(), [byte_token(0xF0), byte_token(65), byte_token(0xFF), byte_token(66)])
    assert "".join(pieces) + rest == "\ufffdA\ufffdB"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 6143) | st.integers(0, 255), max_size=30), st.booleans())
def test_any_ids_decode_as_the_package_does_and_stream_the_same(ids, skip):
    whole = TOKENIZER.decode(ids, skip_special=skip)
    assert whole == REFERENCE.decode(ids, skip_special_tokens=skip)
    pieces, rest = streamed(TOKENIZER.stream_decoder(skip_special=skip), ids)
    assert "".join(pieces) + rest == whole


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_any_text_comes_back(text):
    import unicodedata

    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == unicodedata.normalize("NFC", text)
    assert not set(ids) & set(TOKENIZER.control.values())


@pytest.mark.parametrize("content, says", [(None, "no tokenizer.json"), ("{", "JSON"), ("{}", "tokenizer"),
                                           ('{"added_tokens": [{"id": 1}]}', "tokenizer")])
def test_a_missing_or_broken_file(tmp_path, content, says):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_folder(tmp_path)


def test_another_kind_of_decoder_is_refused():
    spec = json.loads((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    with pytest.raises(CheckpointError, match="byte-level"):
        Tokenizer({**spec, "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}})
