"""What a stream's pieces say of tool calls, alone and on the embedded model (cases 12 to 19)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from lily.reply import CallReader, Piece, Reply, Usage, joined
from lily.session import Session
from tests.test_generation import run_on
from tests.test_session import assert_state_is_its_tokens
from tests.test_tool_calls import MARKUP, TOOLS, call

BOTH = "I look.\n\n" + call("weather", city="02134", days="5.0") + "\n" + call("now")
LIMA = "What is the weather in Lima?"


def read(texts: Iterable[str], reason: str = "stop", stop: str | None = None, **settings: Any) -> tuple[list[Piece], Reply]:
    reader = CallReader(TOOLS, **settings)
    pieces = []
    for index, text in enumerate(texts):
        pieces.append(reader.read(Piece(text, "", (index,))))
        if reader.ended:
            break
    pieces.append(reader.read(Piece("", "", (), reason, Usage(1, len(pieces)), stop)))
    return pieces, joined(iter(pieces))


def from_deltas(pieces: Iterable[Piece]) -> list[tuple[str, str]]:
    """(name, arguments) of the calls as a client of the stream puts them together."""
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        for delta in piece.tool_calls:
            if "id" in delta:
                assert delta["type"] == "function" and delta["index"] == len(calls)
                calls[delta["index"]] = [delta["function"]["name"], ""]
            calls[delta["index"]][1] += delta["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls.values()]


def named(reply: Reply) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in reply.tool_calls]


def test_case_12_pieces_of_one_character_give_typed_deltas_and_no_markup() -> None:
    pieces, reply = read(BOTH)
    assert reply.text == "".join(piece.text for piece in pieces) == "I look." and reply.finish_reason == pieces[-1].finish_reason == "tool_calls"
    assert not any(tag in "".join(p.text for p in pieces[:end]) for end in range(len(pieces)) for tag in MARKUP)
    assert named(reply) == [("weather", {"city": "02134", "days": 5}), ("now", {})]  # cases 13 and 15
    assert [(name, json.loads(text)) for name, text in from_deltas(pieces)] == named(reply)
    whole = read([BOTH])[1]
    assert (whole.text, named(whole)) == (reply.text, named(reply))


@pytest.mark.parametrize(("reason", "stop"), [("length", None), ("stop", "</parameter>")])
def test_case_14_a_call_that_a_limit_or_a_stop_string_cut_is_neither_call_nor_text(reason: str, stop: str | None) -> None:
    text = BOTH[: BOTH.index("</parameter>")]
    pieces, reply = read(text, reason, stop)
    assert (reply.text, reply.tool_calls, reply.finish_reason) == ("I look.", (), reason)
    (started,) = from_deltas(pieces)
    with pytest.raises(ValueError):
        json.loads(started[1])


def test_one_call_is_enough_when_calls_are_not_parallel() -> None:
    pieces, reply = read(BOTH, several=False)
    assert named(reply) == [("weather", {"city": "02134", "days": 5})] and reply.finish_reason == "tool_calls"
    assert len(pieces) - 1 == BOTH.index("</tool_call>") + len("</tool_call>")
    assert named(read([BOTH + " more"], several=False)[1]) == named(reply)


def test_a_forced_opening_belongs_to_the_call() -> None:
    prefix = "<tool_call>\n<function=now>\n"
    assert named(read(call("now")[len(prefix) :], prefix=prefix)[1]) == [("now", {})]


def test_without_tools_markup_is_text() -> None:
    reader = CallReader(())
    assert reader.read(Piece(BOTH)).text == BOTH


# -- on the model --------------------------------------------------------------------------------------------------------
@pytest.fixture
def lima(goldens: list[dict[str, Any]]) -> dict[str, Any]:
    golden = next(g for g in goldens if "tools" in g["template_kwargs"])
    return {"prompt": golden["messages"], "temperature": 0, "max_tokens": golden["max_tokens"], **golden["template_kwargs"]}


def test_case_12_a_models_stream_equals_its_chat(model: Any, lima: dict[str, Any]) -> None:
    pieces = list(model.stream(**lima))
    reply = model.generate(**lima)
    assert named(reply) == [("get_weather", {"city": "Lima"})] and reply.finish_reason == "tool_calls"
    assert "".join(p.text for p in pieces) == reply.text == ""
    assert [(name, json.loads(text)) for name, text in from_deltas(pieces)] == named(reply)
    assert sum(len(p.tool_calls) for p in pieces) > 2  # as they come, not at the end
    none = model.generate(**{**lima, "tool_choice": "none"})
    assert none.tool_calls == () and none.usage.prompt_tokens < reply.usage.prompt_tokens


def test_case_14_max_tokens_inside_a_models_call(model: Any, lima: dict[str, Any]) -> None:
    reply = model.generate(**{**lima, "max_tokens": 9})
    assert (reply.text, reply.tool_calls, reply.finish_reason) == ("", (), "length")


def test_a_tools_end_leaves_the_state_exact(model: Any, lima: dict[str, Any]) -> None:
    session = Session(model.engine)
    ids, pieces = run_on(model, session, **lima, parallel_tool_calls=False)
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert pieces[-1].finish_reason == "tool_calls" and tokens[-1] == model.tokenizer.control["</tool_call>"]
    assert session.tokens == ids + tokens[:-1]
    assert_state_is_its_tokens(model, session, tokens[-1:])


def test_case_17_history_with_calls_and_their_results(model: Any, lima: dict[str, Any]) -> None:
    reply = model.generate(**lima)
    answers = set()
    for content in ({"content": None}, {}, {"content": ""}):
        history = [*lima["prompt"], {"role": "assistant", "tool_calls": list(reply.tool_calls), **content},
                   {"role": "tool", "tool_call_id": reply.tool_calls[0]["id"], "content": '{"weather": "sunny"}'}]
        answers.add(model.generate(**{**lima, "prompt": history}).text)
    assert len(answers) == 1 and answers.pop()


@pytest.mark.parametrize("thinks", [False, True])
def test_case_19_tools_that_are_not_needed_do_not_disturb(model: Any, lima: dict[str, Any], thinks: bool) -> None:
    asked = {**lima, "prompt": "What is the capital of France?", "enable_thinking": thinks, "max_tokens": 60}
    reply = model.generate(**asked)
    assert (reply.text, reply.tool_calls, reply.finish_reason) == ("The capital of France is Paris.", (), "stop")
    assert model.generate(**asked, tool_choice="auto").text == reply.text


def test_a_conversation_keeps_calls_as_calls(model: Any, lima: dict[str, Any]) -> None:
    session = model.session()
    settings = {name: value for name, value in lima.items() if name != "prompt"}
    for choice in (None, "required"):
        session.reset()
        reply = session.chat(LIMA, tool_choice=choice, **settings)
        assert session.messages[-1]["tool_calls"] == list(reply.tool_calls) and session.messages[-1]["content"] == ""
        result = {"role": "tool", "tool_call_id": reply.tool_calls[0]["id"], "content": "sunny"}
        again = session.chat([result], **settings)
        assert again.text and again.usage.cached_tokens >= 100
