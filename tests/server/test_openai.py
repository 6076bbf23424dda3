"""OpenAI's API, driven by the official client."""

import json

import pytest

from lily.messages import normal_messages

USER = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nBrno\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"


def create(client, **keywords):
    return client.chat.completions.create(**{"model": "lily-tiny", "messages": USER, **keywords})


def test_chat(openai_client, fake):
    reply = create(openai_client, temperature=0, max_tokens=7, top_p=0.5, seed=3, stop="x", extra_body={"top_k": 4, "min_p": 0.1})
    assert reply.choices[0].message.content == "Hello, world."
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == 3
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 3
    assert reply.usage.prompt_tokens_details.cached_tokens == 1
    call = fake.calls[0]
    assert {name: call[name] for name in ("temperature", "max_tokens", "top_p", "seed", "stop", "top_k", "min_p")} == {
        "temperature": 0, "max_tokens": 7, "top_p": 0.5, "seed": 3, "stop": ["x"], "top_k": 4, "min_p": 0.1}
    assert call["prompt"] == USER


def test_case_48_an_explicit_zero_reaches_the_model_and_so_does_every_other_setting(openai_client, fake):
    create(openai_client, presence_penalty=0, frequency_penalty=0.5, logit_bias={"5": -3}, logprobs=True, top_logprobs=2, parallel_tool_calls=False,
           response_format={"type": "json_object"}, extra_body={"repetition_penalty": 1.2, "thinking_budget": 7})
    call = fake.calls[0]
    assert {name: call[name] for name in ("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "parallel_tool_calls", "response_format",
                                          "repetition_penalty", "thinking_budget")} == {
        "presence_penalty": 0, "frequency_penalty": 0.5, "logit_bias": {"5": -3}, "logprobs": True, "top_logprobs": 2, "parallel_tool_calls": False,
        "response_format": {"type": "json_object"}, "repetition_penalty": 1.2, "thinking_budget": 7}


def test_chat_stream_equals_the_whole(openai_client):
    chunks = list(create(openai_client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, world."
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in create(openai_client, stream=True))


def test_thought_is_apart_from_the_answer(openai_client, fake):
    fake.thinks, fake.script = True, lambda call: ["Let me", " see.\n</th", "ink>\n\nYes", "."]
    message = create(openai_client).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "Yes.")
    deltas = [chunk.choices[0].delta for chunk in create(openai_client, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Let me see."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    create(openai_client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    create(openai_client, extra_body={"enable_thinking": True})
    create(openai_client, reasoning_effort="none")
    assert [call.get("enable_thinking") for call in fake.calls] == [None, None, False, True, False]


def test_case_20_a_run_cut_inside_the_thought_is_all_reasoning(openai_client, fake):
    fake.thinks, fake.reason, fake.script = True, "length", lambda call: ["Let me", " see.</th"]
    choice = create(openai_client).choices[0]
    assert (choice.message.reasoning_content, choice.message.content, choice.finish_reason) == ("Let me see.</th", "", "length")
    chunks = [chunk.choices[0] for chunk in create(openai_client, stream=True)]
    assert "".join(getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks) == "Let me see.</th"
    assert not any(chunk.delta.content for chunk in chunks) and chunks[-1].finish_reason == "length"


def test_case_12_calls_streamed_one_character_at_a_time(openai_client, fake):
    fake.script = lambda call: list(f"I look.\n\n{CALL}\n<tool_call>\n<function=now>\n</function>\n</tool_call>")
    whole = create(openai_client, tools=[WEATHER, NOW]).choices[0]
    assert whole.message.content == "I look." and whole.finish_reason == "tool_calls"
    expected = [("weather", {"city": "Brno", "days": 3}), ("now", {})]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in whole.message.tool_calls] == expected
    assert len({call.id for call in whole.message.tool_calls}) == 2

    content, calls, reason = "", {}, None
    for chunk in create(openai_client, tools=[WEATHER, NOW], stream=True):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason or reason
        content += delta.content or ""
        for part in delta.tool_calls or []:
            if part.id is not None:
                calls[part.index] = [part.id, part.function.name, ""]
            calls[part.index][2] += part.function.arguments
    assert content == "I look." and reason == "tool_calls" and sorted(calls) == [0, 1]
    assert [(name, json.loads(arguments)) for _, name, arguments in calls.values()] == expected


def test_clients_stream_helper_understands_calls(openai_client, fake):
    fake.script = lambda call: list(CALL)
    with openai_client.chat.completions.stream(model="lily-tiny", messages=USER, tools=[WEATHER]) as stream:
        final = stream.get_final_completion()
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"city": "Brno", "days": 3}


@pytest.mark.parametrize("end", range(len("<tool_call>"), len(CALL), 7))
def test_case_14_a_cut_call_is_no_call(openai_client, fake, end):
    fake.reason, fake.script = "length", lambda call: [CALL[:end]]
    choice = create(openai_client, tools=[WEATHER]).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", "", None)
    parts = [part for chunk in create(openai_client, tools=[WEATHER], stream=True) for part in chunk.choices[0].delta.tool_calls or []]
    if parts:
        with pytest.raises(ValueError):
            json.loads("".join(part.function.arguments for part in parts))


def test_case_15_no_parameters(openai_client, fake):
    fake.script = lambda call: ["<tool_call>\n<function=now>\n</function>\n</tool_call>"]
    assert create(openai_client, tools=[NOW]).choices[0].message.tool_calls[0].function.arguments == "{}"


def test_markup_without_tools_is_text(openai_client, fake):
    fake.script = lambda call: [CALL]
    assert create(openai_client).choices[0].message.content == CALL
    assert create(openai_client, tools=[WEATHER], tool_choice="none").choices[0].message.content == CALL
    assert fake.calls[-1]["tools"] is None


def test_case_17_history_with_tool_calls_round_trip(openai_client, fake):
    fake.script = lambda call: [CALL]
    message = create(openai_client, tools=[WEATHER]).choices[0].message
    assert message.content is None
    history = [*USER, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
    fake.script = lambda call: ["It is sunny."]
    assert create(openai_client, tools=[WEATHER], messages=history).choices[0].message.content == "It is sunny."
    rendered = fake.template.render(fake.calls[-1]["prompt"], tools=[WEATHER])
    assert CALL in rendered and "<tool_response>\nsunny" in rendered
    bare = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}]}
    create(openai_client, messages=[*USER, bare, {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "noon"}]}], tools=[NOW])
    assert normal_messages(fake.calls[-1]["prompt"])[1]["content"] is None


@pytest.mark.parametrize(("choice", "prefix"), [
    ("required", "<tool_call>\n<function="), ({"type": "function", "function": {"name": "now"}}, "<tool_call>\n<function=now>\n"),
])
def test_forced_calls_open_the_answer(openai_client, fake, choice, prefix):
    rest = ("now>\n" if choice == "required" else "") + "</function>\n</tool_call>"
    fake.script = lambda call: list(rest)
    answer = create(openai_client, tools=[WEATHER, NOW], tool_choice=choice).choices[0]
    assert [call.function.name for call in answer.message.tool_calls] == ["now"] and answer.finish_reason == "tool_calls"
    prompt = fake.tokenizer.decode(fake.calls[0]["prompt_ids"], skip_special=False)
    assert prompt.endswith("</think>\n\n" + prefix)
    chunks = list(create(openai_client, tools=[WEATHER, NOW], tool_choice=choice, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""


def test_one_call_when_parallel_calls_are_off(openai_client, fake):
    fake.script = lambda call: [CALL, CALL]
    assert len(create(openai_client, tools=[WEATHER], parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_completions(openai_client, fake):
    reply = openai_client.completions.create(model="lily-tiny", prompt="Once", max_tokens=5)
    assert reply.choices[0].text == "Hello, world." and reply.choices[0].finish_reason == "stop"
    chunks = list(openai_client.completions.create(model="lily-tiny", prompt=[1, 2, 3], stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "Hello, world."
    assert chunks[-1].usage.prompt_tokens == 3
    openai_client.completions.create(model="lily-tiny", prompt=["only one"])
    assert [(call["prompt"], call["prompt_ids"], call["raw"]) for call in fake.calls] == [("Once", None, True), (None, [1, 2, 3], True), ("only one", None, True)]


def test_models(openai_client):
    import openai

    assert [model.id for model in openai_client.models.list()] == ["lily-tiny"]
    assert openai_client.models.retrieve("lily-tiny").owned_by == "lily"
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        create(openai_client, model="other")


def test_error_shapes_reach_the_client(openai_client):
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        create(openai_client, temperature="hot")
    assert caught.value.param == "temperature" and caught.value.code == "invalid_type" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        create(openai_client, temperature=-1.0, stream=True)


def test_case_22_no_user_message_is_a_400(openai_client):
    import openai

    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="no user message"):
            create(openai_client, messages=[{"role": "system", "content": "Be brief."}], stream=stream)


def test_case_44_whole_characters_and_whole_lines(http, fake):
    """The model's pieces hold whole characters; nothing on the way may break them or end a line inside an event."""
    text = "👩‍👩‍👧 ďábelské 你好 a\u2028b\x85c\r\nd\x1ce"
    fake.script = lambda call: list(text)
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith((":", "data: ")) for line in lines)
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text
