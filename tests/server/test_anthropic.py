"""Anthropic's API, driven by the official client."""

import pytest

anthropic = pytest.importorskip("anthropic")

USER = [{"role": "user", "content": "Hi"}]
WEATHER = {"name": "weather", "description": "Weather", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nBrno\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"


def create(client, **keywords):
    return client.messages.create(**{"model": "lily-tiny", "max_tokens": 50, "messages": USER, **keywords})


def final(client, **keywords):
    with client.messages.stream(**{"model": "lily-tiny", "max_tokens": 50, "messages": USER, **keywords}) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


def shape(message):
    """What a message says, without ids."""
    blocks = [block.model_dump(exclude={"id", "citations"}, exclude_none=True) for block in message.content]
    return blocks, message.stop_reason, message.usage.input_tokens, message.usage.output_tokens, message.usage.cache_read_input_tokens


def test_message_and_its_stream(anthropic_client, fake):
    whole = create(anthropic_client, system="Be brief.", stop_sequences=["x"], extra_body={"temperature": 0, "top_k": 5})
    assert whole.content[0].text == "Hello, world." and whole.stop_reason == "end_turn" and whole.role == "assistant"
    assert whole.usage.output_tokens == 3 and whole.usage.cache_read_input_tokens == 1
    call = fake.calls[0]
    assert call["prompt"] == [{"role": "system", "content": "Be brief."}, *USER]
    assert (call["max_tokens"], call["temperature"], call["top_k"], call["stop"], call["enable_thinking"]) == (50, 0, 5, ["x"], False)
    assert shape(final(anthropic_client, system="Be brief.")) == shape(whole)
    with anthropic_client.messages.stream(model="lily-tiny", max_tokens=9, messages=USER) as stream:
        assert "".join(stream.text_stream) == "Hello, world."


def test_thinking(anthropic_client, fake):
    fake.thinks, fake.script = True, lambda call: ["Let me", " see.\n</think>\n\nYes."]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    whole = create(anthropic_client, max_tokens=2048, thinking=thinking)
    assert [(block.type, getattr(block, "thinking", getattr(block, "text", None))) for block in whole.content] == [("thinking", "Let me see."), ("text", "Yes.")]
    assert fake.calls[0]["enable_thinking"] is True and fake.calls[0]["thinking_budget"] == 1024
    assert shape(final(anthropic_client, max_tokens=2048, thinking=thinking)) == shape(whole)


def test_case_20_a_run_cut_inside_the_thought_is_all_thinking(anthropic_client, fake):
    fake.thinks, fake.reason, fake.script = True, "length", lambda call: ["Let me", " see.</th"]
    asked = {"max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = create(anthropic_client, **asked)
    assert [(block.type, block.thinking) for block in whole.content] == [("thinking", "Let me see.</th")] and whole.stop_reason == "max_tokens"
    assert shape(final(anthropic_client, **asked)) == shape(whole)


def test_case_22_no_user_message_is_a_400(anthropic_client):
    history = [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}]},
               {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "sunny"}]}]
    with pytest.raises(anthropic.BadRequestError, match="no user message"):
        create(anthropic_client, messages=history, tools=[WEATHER])
    with pytest.raises(anthropic.BadRequestError, match="no user message"):
        final(anthropic_client, messages=history, tools=[WEATHER])


def test_case_12_tools_round_trip(anthropic_client, fake):
    fake.script = lambda call: list(f"I look.\n\n{CALL}\n{CALL}\n")
    whole = create(anthropic_client, tools=[WEATHER])
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"] and whole.stop_reason == "tool_use"
    assert whole.content[0].text == "I look." and whole.content[1].input == {"city": "Brno", "days": 3}
    assert whole.content[1].id != whole.content[2].id
    assert shape(final(anthropic_client, tools=[WEATHER])) == shape(whole)
    fake.script = lambda call: ["Sunny."]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]} for block in whole.content[1:]]
    history = [*USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]}]
    assert create(anthropic_client, tools=[WEATHER], messages=history).content[0].text == "Sunny."
    rendered = fake.template.render(fake.calls[-1]["prompt"], tools=fake.calls[-1]["tools"])
    assert CALL in rendered and rendered.count("<tool_response>\nsunny\n</tool_response>") == 2 and "So?" in rendered


def test_case_14_a_cut_call(anthropic_client, fake):
    fake.reason, fake.script = "length", lambda call: ["Hm.\n\n", CALL[:60]]
    whole = create(anthropic_client, tools=[WEATHER])
    assert [block.type for block in whole.content] == ["text"] and whole.stop_reason == "max_tokens"
    assert final(anthropic_client, tools=[WEATHER]).stop_reason == "max_tokens"


def test_forced_call(anthropic_client, fake):
    fake.script = lambda call: ["<parameter=city>\nBrno\n</parameter>\n</function>\n</tool_call>"]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        whole = create(anthropic_client, tools=[WEATHER], tool_choice=choice)
        assert [block.input for block in whole.content] == [{"city": "Brno"}]
    create(anthropic_client, tools=[WEATHER], tool_choice={"type": "none"})
    assert fake.calls[-1]["tools"] is None
    fake.script = lambda call: [CALL, CALL]
    one = create(anthropic_client, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["tool_use"] and one.stop_reason == "tool_use"
    create(anthropic_client, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert fake.calls[-1]["response_format"] == {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


@pytest.mark.parametrize("wrong", [
    {"temperature": "hot"}, {"messages": "Hi"}, {"messages": []}, {"messages": [{"role": "system", "content": "x"}]}, {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": 1}]}, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [*USER, {"role": "assistant", "content": "The"}]}, {"tools": [{"name": "x"}]}, {"tools": [{"type": "web_search_20250305", "name": "x"}]},
    {"tools": 1}, {"tool_choice": {"type": "tool", "name": "x"}}, {"tool_choice": {"type": "sometimes"}}, {"tool_choice": "auto"},
    {"thinking": {"type": "maybe"}}, {"output_config": {"format": {"type": "xml"}}}, {"output_config": {"format": {"type": "json_schema"}}}, {"system": 5}, {"stop_sequences": [1]}, {"max_tokens": 0}, {"max_tokens": 1.5}, {"stream": "yes"},
    {"thinking": {"type": "enabled", "budget_tokens": 9}, "tools": [WEATHER], "tool_choice": {"type": "any"}},
])
def test_error_shape(http, wrong):
    response = http.post("/v1/messages", json={"model": "lily-tiny", "max_tokens": 5, "messages": USER, **wrong})
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error" and body["error"]["message"]


def test_errors_reach_the_client(anthropic_client, fake):
    with pytest.raises(anthropic.BadRequestError):
        create(anthropic_client, messages=[])
    with pytest.raises(anthropic.NotFoundError):
        create(anthropic_client, model="other")

    def fails(call):
        yield "Hm"
        raise RuntimeError("boom")

    fake.script = fails
    with pytest.raises(anthropic.InternalServerError):
        create(anthropic_client)
    with pytest.raises(anthropic.APIStatusError):
        final(anthropic_client)
    fake.script = lambda call: ["Yes."]
    assert create(anthropic_client).content[0].text == "Yes."
