"""Structured output and forced calls: what a grammar allows, when it begins, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lily
from lily.checkpoint import Checkpoint
from lily.errors import RequestError
from lily.guidance import guided, response_schema
from lily.model_files import resolve
from lily.random_checkpoint import with_layers, write_random_checkpoint
from lily.session import Session
from lily.tokenizer import Tokenizer
from lily.tool_grammar import answer_grammar
from tests.test_generation import run_on
from tests.test_session import assert_state_is_its_tokens

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

MAYA = "Give a JSON object with the name Maya and the age 31."
PET = {
    "type": "object", "additionalProperties": False, "required": ["kind", "age", "weight", "tags", "owner"],
    "properties": {
        "kind": {"enum": ["cat", "dog", 3, None]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "weight": {"type": "number", "exclusiveMinimum": 0, "maximum": 99.5},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "minItems": 1, "maxItems": 3},
        "owner": {"$ref": "#/$defs/owner"},
    },
    "$defs": {"owner": {
        "type": "object", "additionalProperties": False, "required": ["name", "active"],
        "properties": {"name": {"type": "string", "maxLength": 6}, "active": {"type": "boolean"}, "phone": {"type": ["string", "null"], "maxLength": 4},
                       "pets": {"type": "array", "items": {"type": "object", "additionalProperties": False, "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}},
                                "maxItems": 2}},
    }},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {
    "type": "object", "required": ["city", "days"],
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", "F"]},
                   "where": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}}}}}
NOW = {"type": "function", "function": {"name": "now"}}
LIMA = [{"role": "user", "content": "What is the weather in Lima?"}]


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve("lily-tiny"), (6135, 6137))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One layer of random weights: at temperature 1 it writes whatever the grammar lets it."""
    with Checkpoint.open(resolve("lily-tiny")) as tiny:
        config = tiny.config
    folder = Path(tmp_path_factory.mktemp("random")) / "model"
    return lily.Model.load(write_random_checkpoint(folder, with_layers(config, 1), tokenizer=resolve("lily-tiny")))


def walk(tokenizer: Tokenizer, lark: str, text: str) -> str:
    """How much of a text a grammar lets through, and "." if the answer may end there."""
    grammar, mask, ids = guided(tokenizer, 6144, lark), np.zeros(192, np.uint32), tokenizer.encode(text, control=True)
    for at, token in enumerate(ids):
        grammar.fill(mask)
        if not mask[token // 32] >> np.uint32(token % 32) & 1:
            return tokenizer.decode(ids[:at], skip_special=False)
        grammar.accept(token)
    grammar.fill(mask)
    return text + "." if mask[6137 // 32] >> np.uint32(6137 % 32) & 1 else text


# -- grammars ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "passes"), [
    ('{"a": 1, "b": "x"}', True), ('{"a":1,"b":"y"}', True), ('{\n  "a": 1,\n  "b": "x"\n}', True), ('{"b": "x", "a": 1}', False), ('{"a": 1.5', False),
    ('{"a": 1, "b": "z"}', False), ('{"a":\n\n\n1', False), ("{" + " " * 40, False), ("Sure", False),
])
def test_case_46_a_schema_and_bounded_white_space(tokenizer: Tokenizer, text: str, passes: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"], "additionalProperties": False}
    assert (walk(tokenizer, answer_grammar(tokenizer, schema=schema), text) == text + ".") == passes


CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBrno </parameter>\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
NOW_CALL = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("text", "passes"), [
    (CALL, True), (NOW_CALL, True), (f"{CALL}\n{NOW_CALL}", True), (CALL.replace("3", "three"), False), (CALL.replace("3", "12"), False), (CALL.replace("get_weather", "get_time"), False),
    (NOW_CALL.replace("now", "get_weather"), False), ("It is", False), (CALL.replace("</function>", "<parameter=unit>\nF\n</parameter>\n</function>"), True),
    (CALL.replace("</function>", "<parameter=unit>\nK\n</parameter>\n</function>"), False),
    (CALL.replace("</function>", '<parameter=where>\n{"x": 1.5}\n</parameter>\n</function>'), True),
])
def test_calls_follow_the_offered_tools(tokenizer: Tokenizer, text: str, passes: bool) -> None:
    assert (walk(tokenizer, answer_grammar(tokenizer, schema=None, tools=[WEATHER, NOW]), text) == text + ".") == passes


def test_one_call_or_several_or_an_answer(tokenizer: Tokenizer) -> None:
    one = answer_grammar(tokenizer, schema=None, tools=[NOW], several=False)
    assert walk(tokenizer, one, NOW_CALL) == NOW_CALL + "." and walk(tokenizer, one, NOW_CALL + "\n" + NOW_CALL) == NOW_CALL
    either = answer_grammar(tokenizer, schema={"type": "object"}, tools=[NOW])
    assert walk(tokenizer, either, NOW_CALL) == NOW_CALL + "." and walk(tokenizer, either, '{"a": []}') == '{"a": []}.'


def test_names_of_any_script_are_literal(tokenizer: Tokenizer) -> None:
    tool = {"name": 'zjisti_počasí"\\', "parameters": {"properties": {"město": {"type": "string"}}}}
    text = '<tool_call>\n<function=zjisti_počasí"\\>\n<parameter=město>\nx\n</parameter>\n</function>\n</tool_call>'
    assert walk(tokenizer, answer_grammar(tokenizer, schema=None, tools=[tool]), text) == text + "."


# -- refusals ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrong", ["json", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": "x"}}, {"type": ["text"]}])
def test_wrong_response_formats(wrong: Any) -> None:
    with pytest.raises(RequestError, match="response_format"):
        response_schema(wrong)


@pytest.mark.parametrize("schema", [
    {"type": "strin"}, {"not": {"type": "string"}}, {"type": "array", "uniqueItems": True}, {"$ref": "http://example.com/x"}, {"type": "string", "pattern": "("},
    {"type": "integer", "minimum": 3, "maximum": 2}, {"enum": []}, {"properties": 5}, {"a": object()}, {"a": float("nan")}, {"description": "x" * (2 << 20)},
])
def test_case_46_an_unsupported_schema_is_refused_at_once(model: Any, schema: Any) -> None:
    with pytest.raises(RequestError, match="schema"):
        model.stream("x", response_format=form(schema))


def test_without_the_extra_the_error_says_what_to_install(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"lily-metal\[guidance\]"):
        model.stream("x", response_format={"type": "json_object"})
    reply = model.chat(LIMA, tools=[WEATHER, NOW], tool_choice={"type": "function", "function": {"name": "now"}}, temperature=0, max_tokens=30)
    assert [call["function"]["name"] for call in reply.tool_calls] == ["now"]  # begun in the prompt
    with pytest.raises(RequestError, match="guidance"):
        model.chat(LIMA, tools=[NOW], tool_choice="required", enable_thinking=True)


# -- generations ---------------------------------------------------------------------------------------------------------
def test_json_that_the_model_writes_anyway_is_left_as_it_is(model: Any, goldens: list[dict[str, Any]]) -> None:
    golden = next(g for g in goldens if g["text"].startswith('{"name"'))
    keywords = {"temperature": 0, "max_tokens": golden["max_tokens"], **golden["template_kwargs"]}
    assert model.chat(golden["messages"], **keywords, response_format={"type": "json_object"}).text == model.chat(golden["messages"], **keywords).text


def test_case_46_the_grammar_begins_after_the_thought(model: Any) -> None:
    schema = {"type": "object", "properties": {"capital": {"enum": ["Rome", "Oslo"]}}, "required": ["capital"], "additionalProperties": False}
    keywords: dict[str, Any] = {"temperature": 0, "max_tokens": 120}
    free = model.generate("What is the capital of France?", **keywords)
    session = Session(model.engine)
    ids, pieces = run_on(model, session, "What is the capital of France?", response_format=form(schema), **keywords)
    assert "".join(p.reasoning for p in pieces) == free.reasoning != ""
    assert json.loads("".join(p.text for p in pieces))["capital"] in ("Rome", "Oslo") and pieces[-1].finish_reason == "stop"
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert session.tokens == ids + tokens[:-1]
    assert_state_is_its_tokens(model, session, tokens[-1:])
    short = model.generate("What is the capital of France?", response_format=form(schema), thinking_budget=3, **keywords)
    assert json.loads(short.text) and len(short.reasoning) < len(free.reasoning)


def test_case_46_a_cut_is_length(model: Any) -> None:
    reply = model.generate(MAYA, response_format={"type": "json_object"}, enable_thinking=False, temperature=0, max_tokens=4)
    assert reply.finish_reason == "length" and reply.usage.completion_tokens == 4
    with pytest.raises(ValueError):
        json.loads(reply.text)


def test_streamed_json_equals_the_whole_with_logprobs_of_the_masked_choice(random_model: Any) -> None:
    keywords: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 200, "enable_thinking": False, "presence_penalty": 0.5}
    whole = random_model.generate("x", response_format=form(PET), logprobs=True, top_logprobs=3, **keywords)
    pieces = list(random_model.stream("x", response_format=form(PET), **keywords))
    assert "".join(piece.text for piece in pieces) == whole.text
    jsonschema.validate(json.loads(whole.text), PET)
    for entry in whole.logprobs:
        assert sum(np.exp(top.logprob) for top in entry.top) <= 1.0001
    assert whole.logprobs[0].bytes in (b"{", b'{"') and all(top.bytes.startswith(b"{") for top in whole.logprobs[0].top)


def samples_validate(random_model: Any, count: int) -> None:
    lengths = []
    for seed in range(count):
        reply = random_model.generate("Describe a pet.", response_format=form(PET), temperature=1.0, seed=seed, enable_thinking=False, max_tokens=600)
        assert reply.finish_reason == "stop", reply.text
        jsonschema.validate(json.loads(reply.text), PET)
        lengths.append(len(reply.text))
    assert len(set(lengths)) > 1


def test_sampled_outputs_of_a_nested_schema_validate(random_model: Any) -> None:
    samples_validate(random_model, 6)


@pytest.mark.slow
def test_200_sampled_outputs_of_a_nested_schema_validate(random_model: Any) -> None:
    samples_validate(random_model, 200)


@pytest.mark.parametrize("thinking", [None, True])
def test_forced_calls_are_complete_and_typed(model: Any, thinking: bool | None) -> None:
    reply = model.chat(LIMA, tools=[WEATHER, NOW], tool_choice={"type": "function", "function": {"name": "get_weather"}}, temperature=1.0, seed=2, max_tokens=160,
                       enable_thinking=thinking, thinking_budget=10)
    (call,) = reply.tool_calls
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])  # type: ignore[index]
    assert call["function"]["name"] == "get_weather" and reply.finish_reason == "tool_calls" and reply.text == ""
    assert bool(reply.reasoning) == bool(thinking)


def test_required_calls_one_of_the_offered_whatever_the_model_would_say(random_model: Any) -> None:
    names = set()
    for seed in range(6):
        reply = random_model.chat(LIMA, tools=[{"name": "now"}, {"name": "later"}], tool_choice="required", parallel_tool_calls=False, temperature=1.0, seed=seed)
        assert len(reply.tool_calls) == 1 and reply.finish_reason == "tool_calls"
        names.add(reply.tool_calls[0]["function"]["name"])
    assert names <= {"now", "later"}


def test_tools_beside_a_schema(model: Any) -> None:
    keywords: dict[str, Any] = {"tools": [WEATHER], "response_format": {"type": "json_object"}, "temperature": 0, "enable_thinking": False, "max_tokens": 60}
    called = model.chat(LIMA, **keywords)
    assert [call["function"]["name"] for call in called.tool_calls] == ["get_weather"] and called.text == ""
    answered = model.chat(LIMA, **{**keywords, "tool_choice": "none"}, stop="}")
    assert answered.text.startswith("{") and not answered.tool_calls


# -- any schema at all -----------------------------------------------------------------------------------------------------
_leaf = st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.text(max_size=6) | st.sampled_from(["string", "integer", "object", "array", "#/$defs/a", "^a*$", "(", "date"])
_key = st.sampled_from(["type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "pattern", "format", "minimum", "maximum",
                        "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "prefixItems", "additionalProperties", "patternProperties", "a", "not", "x-guidance"])
_schema = st.recursive(_leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_key, inner, max_size=4), max_leaves=12)


@given(st.dictionaries(_key, _schema, max_size=5))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_schema_works_or_is_refused(tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    mask = np.zeros(192, np.uint32)
    tool = {"name": "f", "parameters": schema}
    for given_schema, tools in ((schema, ()), (None, (tool,))):
        try:
            grammar = guided(tokenizer, 6144, answer_grammar(tokenizer, schema=given_schema, tools=tools))
            for _ in range(4):
                grammar.fill(mask)
                allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
                assert len(allowed)
                if set(allowed) <= {6135, 6137}:
                    break
                grammar.accept(int(allowed[0]))
        except RequestError:
            pass
