"""Tool calls in generated text (cases 12 to 15): typed by schema, independent of how the text was cut, no markup in content."""

import itertools
import json
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.errors import RequestError
from lily.reasoning import ReasoningSplitter
from lily.tool_arguments import convert
from lily.tool_calls import ArgumentDelta, CallCut, CallFinished, CallStarted, TextDelta, ToolCallParser, split_tool_calls
from lily.tool_choice import plan_tools


def function(name, properties=None, **schema):
    parameters = {"type": "object", "properties": properties or {}, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    function("weather", {"city": {"type": "string"}, "days": {"type": "integer"}, "detail": {"type": "object"}}),
    function("now"),
    function("write", {"path": {"type": "string"}, "content": {"type": "string"}}),
]
MARKUP = ("<tool_call", "</tool_call", "<function=", "</function", "<parameter=", "</parameter")


def call(name, **arguments):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def parse(pieces: Iterable[str], tools=TOOLS, cut=False):
    """(content, finished calls as (name, arguments), events), with every promise about the events checked."""
    ids = (f"call_{number}" for number in itertools.count())
    parser = ToolCallParser(tools, new_id=lambda: next(ids))
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush(cut)
    content = "".join(event.text for event in events if isinstance(event, TextDelta))
    started = [event for event in events if isinstance(event, CallStarted)]
    finished = [event for event in events if isinstance(event, CallFinished)]
    lost = [event.index for event in events if isinstance(event, CallCut)]
    assert [event.index for event in started] == list(range(len(started)))
    assert sorted([event.index for event in finished] + lost) == list(range(len(started)))
    for event in started:
        streamed = "".join(delta.text for delta in events if isinstance(delta, ArgumentDelta) and delta.index == event.index)
        if event.index in lost:
            with pytest.raises(ValueError):
                json.loads(streamed)
        else:
            assert streamed == finished[event.index].arguments
    return content, [(event.name, json.loads(event.arguments)) for event in finished], events


def cuts(text):
    """The text whole, by characters, and in some other ways."""
    yield [text]
    yield list(text)
    rng = random.Random(len(text))
    for _ in range(10):
        at = sorted(rng.randrange(len(text) + 1) for _ in range(6))
        yield [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


TABLE = [
    # generated text, content, calls
    ("", "", []),
    ("Hello.\n", "Hello.\n", []),
    ("\n a <b> </tool_call> c < ", "\n a <b> </tool_call> c < ", []),
    (call("weather", city="Brno"), "", [("weather", {"city": "Brno"})]),
    ("\n\n" + call("now") + "\n", "", [("now", {})]),
    ("I look.\n\n" + call("weather", city="Brno", days=3), "I look.", [("weather", {"city": "Brno", "days": 3})]),
    ("Before\n\n" + call("now") + "\n\nafter\n", "Before\n\nafter\n", [("now", {})]),
    ("Before" + call("now") + " after", "Before after", [("now", {})]),
    (call("now") + "\nafter", "after", [("now", {})]),
    ("a\n" + call("now") + "\nb\n\n" + call("now") + "\nc", "a\nb\n\nc", [("now", {}), ("now", {})]),
    (call("now") + "\n" + call("weather", city="Z"), "", [("now", {}), ("weather", {"city": "Z"})]),
    (call("now") + call("now"), "", [("now", {}), ("now", {})]),
    # values: only one line break at each end belongs to the format
    (call("write", path="a", content="\n x\n\ny \n"), "", [("write", {"path": "a", "content": "\n x\n\ny \n"})]),
    (call("write", content=""), "", [("write", {"content": ""})]),
    (call("write", content='"q" \\ \t ďábelské 👩‍👩‍👧 </p> <parameter> </parameter> x'), "",
     [("write", {"content": '"q" \\ \t ďábelské 👩‍👩‍👧 </p> <parameter> </parameter> x'})]),
    (call("write", content="<tool_call>\n<function=now>\n</function>\n</tool_call>\n!"), "",
     [("write", {"content": "<tool_call>\n<function=now>\n</function>\n</tool_call>\n!"})]),
    ("<tool_call><function=write><parameter=content>x</parameter></function></tool_call>", "", [("write", {"content": "x"})]),
    (call("weather", detail='{"a": [1, {"b": "\\n"}]}', more="x\ny"), "", [("weather", {"detail": {"a": [1, {"b": "\n"}]}, "more": "x\ny"})]),
    (call("weather", city="A") .replace("</function>", "<parameter=city>\nB\n</parameter>\n</function>"), "", [("weather", {"city": "A"})]),
    # a call is never dropped: not offered, opening or closing parts left out
    (call("unknown", a=1), "", [("unknown", {"a": "1"})]),
    ("<function=now>\n</function>\n</tool_call>\n", "", [("now", {})]),
    ("x <function=other> y", "x <function=other> y", []),
    ("<tool_call>\n<function=now>\n</function>\n<function=weather>\n<parameter=city>\nB\n</parameter>\n</function>\n</tool_call>", "",
     [("now", {}), ("weather", {"city": "B"})]),
    ("<tool_call>\n<function=now>\n</function>\n", "", [("now", {})]),
    ("<tool_call>\n<function=now>\n</tool_call> ok", "ok", [("now", {})]),
    ("<tool_call>\n<function=weather>\n<parameter=city>\nBrno\n</function>\n</tool_call>", "", [("weather", {"city": "Brno"})]),
    ("<tool_call>\n<function=weather>\n<parameter=city>\nBrno\n</function>\n</tool_call>\n" + call("now"), "",
     [("weather", {"city": "Brno"}), ("now", {})]),
    ("<tool_call>\n<function=weather\n<parameter=city\nBrno\n</parameter>\n</function>\n</tool_call>", "", [("weather", {"city": "Brno"})]),
    # text that speaks of the tags
    ("Write <tool_call> and then the name.", "Write <tool_call> and then the name.", []),
    ("say <tool_call>\n\n" + call("now"), "say <tool_call>", [("now", {})]),
    ("It is <tool_call>", "It is <tool_call>", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), TABLE)
def test_calls_and_text_however_the_text_is_cut(text, content, calls):
    for pieces in cuts(text):
        assert parse(pieces)[:2] == (content, calls)


def test_case_12_two_calls_one_character_at_a_time():
    text = "I check both.\n\n" + call("weather", city="Praha", days="2") + "\n" + call("weather", city="Brno")
    content, calls, events = parse(list(text))
    assert content == "I check both."
    assert calls == [("weather", {"city": "Praha", "days": 2}), ("weather", {"city": "Brno"})]
    started = [event for event in events if isinstance(event, CallStarted)]
    assert [event.index for event in started] == [0, 1]
    assert len({event.id for event in started}) == 2
    assert parse([text])[:2] == (content, calls)


def test_case_12_a_tag_split_over_pieces_never_shows():
    text = "Yes." + call("now")
    for at in range(len(text)):
        first = ToolCallParser(TOOLS).push(text[:at])
        assert "Yes.".startswith("".join(event.text for event in first if isinstance(event, TextDelta)))
        assert parse([text[:at], text[at:]])[:2] == ("Yes.", [("now", {})])


def test_a_whole_answer_at_once():
    content, calls = split_tool_calls("Look.\n\n" + call("weather", days="2"), TOOLS)
    assert content == "Look."
    assert calls == [{"id": calls[0]["id"], "type": "function", "function": {"name": "weather", "arguments": '{"days": 2}'}}]
    assert split_tool_calls("<tool_call>\n<function=now>\n</function>", TOOLS, cut=True) == ("", [])


def test_long_string_values_are_streamed():
    parser = ToolCallParser(TOOLS)
    parser.push("<tool_call>\n<function=write>\n<parameter=content>\n")
    assert parser.push("first line\nsecond") == [ArgumentDelta(0, "first line\\nsecond")]
    assert parser.push("\n</par") == []
    assert parser.push("ty>") == [ArgumentDelta(0, "\\n</party>")]


TYPED = [
    # schema, text, value
    ({"type": "integer"}, "2026-01-15", "2026-01-15"),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, " -7 ", -7),
    ({"type": "integer"}, "+3", 3),
    ({"type": "integer"}, "007", 7),
    ({"type": "integer"}, "1e3", 1000),
    ({"type": "integer"}, "12345678901234567890123", 12345678901234567890123),
    ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ({"type": "integer"}, "1e999999999", "1e999999999"),
    ({"type": "integer"}, "1_000", "1_000"),
    ({"type": "integer"}, "٣", 3),
    ({"type": "integer"}, "five", "five"),
    ({"type": "integer"}, "", ""),
    ({"type": "integer"}, "5.5", 5.5),
    ({"type": "int"}, "5", 5),
    ({"type": "number"}, "5", 5),
    ({"type": "number"}, "5.0", 5.0),
    ({"type": "number"}, "1e5", 100000.0),
    ({"type": "number"}, ".5", 0.5),
    ({"type": "number"}, "nan", "nan"),
    ({"type": "number"}, "Infinity", "Infinity"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "string"}, "02134", "02134"),
    ({"type": "string"}, "1e5", "1e5"),
    ({"type": "string"}, "true", "true"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, '{"a":1}', '{"a":1}'),
    ({"type": "string"}, " spaces ", " spaces "),
    ({"type": "string", "enum": ["1", "2"]}, "1", "1"),
    ({"type": "string", "enum": ["a"]}, "b", "b"),
    ({"type": "str"}, "1", "1"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "FALSE", False),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": "null"}, "null", None),
    ({"type": "object"}, '{"a":1}', {"a": 1}),
    ({"type": "object"}, "{'a': True, 'b': None}", {"a": True, "b": None}),
    ({"type": "object"}, "{broken", "{broken"),
    ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
    ({"type": "object"}, "{1: 2}", "{1: 2}"),
    ({"type": "object"}, '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
    ({"type": "object"}, "{" * 50_000, "{" * 50_000),
    ({"type": "array"}, '[1, "a", {"b": null}]', [1, "a", {"b": None}]),
    ({"type": "array"}, "[" * 50_000, "[" * 50_000),
    ({"type": "array"}, "a, b", "a, b"),
    ({"items": {"type": "string"}}, '["a"]', ["a"]),
    ({"properties": {}}, "{}", {}),
    # no declared type
    (None, '{"a":1}', {"a": 1}),
    ({}, '{"a":1}', {"a": 1}),
    ({}, "[1]", [1]),
    ({}, "5", "5"),
    ({}, "true", "true"),
    ({}, "text", "text"),
    ({"type": "any"}, "[1]", [1]),
    ({"type": 7}, "x", "x"),
    (True, "x", "x"),
    # unions
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "None", "None"),
    ({"type": ["string", "null"]}, "abc", "abc"),
    ({"type": ["string", "null"]}, "5", "5"),
    ({"type": ["string", "null"]}, '{"a":1}', '{"a":1}'),
    ({"type": ["integer", "null"]}, "null", None),
    ({"type": ["integer", "null"]}, "5.0", 5),
    ({"type": ["string", "integer"]}, "5", 5),
    ({"type": ["string", "integer"]}, "02134", "02134"),
    ({"type": ["string", "number"]}, "1e5", "1e5"),
    ({"type": ["string", "boolean"]}, "true", True),
    ({"type": ["string", "boolean"]}, "True", "True"),
    ({"type": "integer", "nullable": True}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "2", "2"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "2", 2),
    ({"oneOf": [{"type": "object"}, {"type": "string"}]}, '{"a":1}', {"a": 1}),
    ({"oneOf": [{"type": "object"}, {"type": "string"}]}, "{a", "{a"),
    ({"allOf": [{"$ref": "#/$defs/Count"}]}, "3", 3),
    ({"$ref": "#/$defs/Count"}, "3", 3),
    ({"$ref": "#/$defs/Loop"}, "3", "3"),
    ({"$ref": "https://example.com/x"}, "3", "3"),
    # enum and const without a type
    ({"enum": [1, 2, "three", None, True]}, "1", 1),
    ({"enum": [1, 2, "three", None, True]}, "three", "three"),
    ({"enum": [1, 2, "three", None, True]}, "null", None),
    ({"enum": [1, 2, "three", None, True]}, "true", True),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": ["1", 1]}, "1", "1"),
    ({"const": 4}, "4", 4),
]
ROOT = {"$defs": {"Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}}


@pytest.mark.parametrize(("schema", "text", "value"), TYPED)
def test_case_13_argument_types_follow_the_schema(schema, text, value):
    result = convert(text, schema, ROOT)
    assert result == value and type(result) is type(value)
    tools = [function("f", {} if schema is None else {"x": schema}, **ROOT)]
    for pieces in ([call("f", x=text)], list(call("f", x=text))) if len(text) < 1000 else ([call("f", x=text)],):
        assert parse(pieces, tools)[:2] == ("", [("f", {"x": value})])


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "integer"}, {"type": "object"}, {}, {"type": ["string", "null"]}])
@given(text=st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_case_13_a_call_is_never_dropped(schema, text):
    content, calls, _ = parse([call("f", x=text, y="1")], [function("f", {"x": schema})])
    if not any(mark in text for mark in MARKUP):
        assert content == "" and [name for name, _ in calls] == ["f"] and set(calls[0][1]) == {"x", "y"}


@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                          lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8))
@settings(max_examples=100, deadline=None)
def test_values_come_back_as_a_template_writes_them(value):
    kind = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}[type(value)]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    assert convert(text, {"type": kind}) == value


FULL = "Hm.\n\n" + call("weather", city="Brno", days=3) + "\n" + call("now")


def test_case_14_a_call_cut_by_max_tokens_is_not_executable():
    first = FULL.index("</tool_call>") + len("</tool_call>")
    for end in range(len("Hm."), len(FULL)):
        content, calls, _ = parse([FULL[:end]], cut=True)
        assert len(calls) == (1 if end >= first else 0)
        assert parse(list(FULL[:end]), cut=True)[:2] == (content, calls)
        assert content.rstrip("<toolfunci_\n").startswith("Hm") and not any(mark[:7] in content for mark in MARKUP)


def test_case_14_a_call_inside_a_thought_is_text():
    splitter, parser = ReasoningSplitter(True), ToolCallParser(TOOLS)
    reasoning, events = "", []
    for piece in list(f"I could {call('now')}\n</think>\n\nNo."):
        split = splitter.push(piece)
        reasoning += split.reasoning
        events += parser.push(split.text)
    events += parser.flush()
    assert reasoning == f"I could {call('now')}"
    assert events and all(isinstance(event, TextDelta) for event in events)


def test_case_15_no_parameters_and_kept_parameters():
    assert parse([call("now")])[1] == [("now", {})]
    assert parse(["<tool_call>\n<function=now></function>\n</tool_call>"])[1] == [("now", {})]
    assert parse([call("now", zone="UTC")])[1] == [("now", {"zone": "UTC"})]


@given(parts=st.lists(st.sampled_from([*MARKUP, ">", "\n", "now", "weather", "city", "x", " ", "{", "<", "</", "<tool_call>", "</tool_call>", "</function>",
                                       "</parameter>", "<function=now>", "<parameter=city>", "<parameter=days>", "5"]), max_size=25),
       at=st.lists(st.integers(0, 200), max_size=8), cut=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_markup_in_any_pieces(parts, at, cut):
    text = "".join(parts)
    bounds = sorted(min(number, len(text)) for number in at)
    pieces = [text[a:b] for a, b in zip([0, *bounds], [*bounds, len(text)], strict=True)]
    whole, cutted, single = parse([text], cut=cut), parse(pieces, cut=cut), parse(list(text), cut=cut)
    assert whole[:2] == cutted[:2] == single[:2]


# -- tool_choice -----------------------------------------------------------------------------------------------------------
def test_tool_choice_auto_and_none():
    assert plan_tools(None).tools is None
    assert plan_tools([], "auto").tools is None
    assert plan_tools(TOOLS).tools == TOOLS
    assert plan_tools(TOOLS, "auto").prefix == ""
    assert plan_tools(TOOLS, "none").tools is None


def test_tool_choice_forces_the_opening():
    assert plan_tools(TOOLS, "required").prefix == "<tool_call>\n<function="
    assert plan_tools(TOOLS[:1], "required").prefix == "<tool_call>\n<function=weather>\n"
    plan = plan_tools(TOOLS, {"type": "function", "function": {"name": "now"}})
    assert plan.prefix == "<tool_call>\n<function=now>\n"
    assert parse([plan.prefix, "</function>\n</tool_call>"])[1] == [("now", {})]


@pytest.mark.parametrize(("tools", "choice"), [
    (TOOLS, "any"), (TOOLS, 1), (TOOLS, ["none"]), (TOOLS, {}), (TOOLS, {"type": "function"}), (TOOLS, {"type": "function", "function": {"name": "x"}}),
    (TOOLS, {"type": "function", "function": {"name": 1}}), (TOOLS, {"type": "custom", "custom": {"name": "now"}}), (None, "required"),
    ([], {"type": "function", "function": {"name": "now"}}), ("now", None), ([1], None), ([{}], None),
])
def test_tool_choice_refusals(tools, choice):
    with pytest.raises(RequestError):
        plan_tools(tools, choice)
