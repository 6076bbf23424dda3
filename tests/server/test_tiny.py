"""The server around the embedded model: goldens, tools, parallel clients and cancels, and `lily serve` itself."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

openai = pytest.importorskip("openai")
CHAT = "/v1/chat/completions"


@pytest.fixture
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def golden_request(golden):
    body = {"model": "lily-tiny", "messages": golden["messages"], "max_tokens": golden["max_tokens"], "temperature": 0}
    kwargs = dict(golden["template_kwargs"])
    if tools := kwargs.pop("tools", None):
        body["tools"] = tools
    return body, {"chat_template_kwargs": kwargs}


def test_goldens_streamed_and_whole(client, goldens):
    plain = [golden for golden in goldens if "tools" not in golden["template_kwargs"]]
    short = sorted(plain, key=lambda golden: len(golden["prompt_ids"]) + len(golden["greedy_ids"]))[:4]
    for golden in short:
        body, extra = golden_request(golden)
        choice = client.chat.completions.create(**body, extra_body=extra).choices[0]
        assert golden["text"].endswith(choice.message.content) and choice.message.content
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, extra_body=extra, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == choice.message.content
        assert chunks[-1].finish_reason == choice.finish_reason == golden["finish_reason"]


def test_a_tool_is_called_and_its_result_understood(client, goldens):
    golden = next(golden for golden in goldens if "tools" in golden["template_kwargs"])
    body, extra = golden_request(golden)
    choice = client.chat.completions.create(**body, extra_body=extra).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls] == [("get_weather", {"city": "Lima"})]
    with client.chat.completions.stream(**body, extra_body=extra) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.tool_calls[0].function.arguments == choice.message.tool_calls[0].function.arguments
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": '{"weather": "sunny", "degrees": 21}'}
    answer = client.chat.completions.create(**{**body, "messages": [*body["messages"], choice.message, result]}, extra_body=extra).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content


def test_a_forced_function_is_called(client, goldens):
    golden = next(golden for golden in goldens if "tools" in golden["template_kwargs"])
    body, _ = golden_request(golden)
    choice = client.chat.completions.create(**body, tool_choice={"type": "function", "function": {"name": "get_time"}}).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["get_time"]


def test_logprobs_streamed_and_whole(client):
    ask = {"model": "lily-tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20, "temperature": 0,
           "logprobs": True, "top_logprobs": 2, "extra_body": {"enable_thinking": False}}
    choice = client.chat.completions.create(**ask).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content == "The capital of France is Paris."
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token and entry.logprob <= 0 for entry in entries)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    assert [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content] == entries
    assert client.chat.completions.create(**{**ask, "logprobs": False, "top_logprobs": None}).choices[0].logprobs is None


def test_logprobs_of_completions(client):
    ask = {"model": "lily-tiny", "prompt": "In the beginning God created the", "max_tokens": 5, "temperature": 0}
    whole = client.completions.create(**ask, logprobs=3).choices[0]
    form = whole.logprobs
    assert "".join(form.tokens) == whole.text and len(form.token_logprobs) == len(form.text_offset) == 5
    assert all(whole.text[at:].startswith(token) for at, token in zip(form.text_offset, form.tokens, strict=True))
    assert all(len(top) == 3 and max(top.values()) == value for top, value in zip(form.top_logprobs, form.token_logprobs, strict=True))
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**ask, logprobs=3, stream=True)]
    assert [token for logprobs in chunks if logprobs for token in logprobs.tokens] == form.tokens
    assert [at for logprobs in chunks if logprobs for at in logprobs.text_offset] == form.text_offset
    assert client.completions.create(**ask, logprobs=0).choices[0].logprobs.top_logprobs is None


CITY = {"type": "object", "properties": {"name": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["name", "size"],
        "additionalProperties": False}
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def test_case_46_json_schema_through_the_clients(client, tiny):
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    ask = {"model": "lily-tiny", "messages": FRANCE, "max_tokens": 200, "temperature": 1, "seed": 3}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    message = client.chat.completions.create(**ask, response_format=form, extra_body={"thinking_budget": 6}).choices[0].message
    jsonschema.validate(json.loads(message.content), CITY)
    assert message.reasoning_content
    cut = client.chat.completions.create(**{**ask, "max_tokens": 4}, response_format=form, extra_body={"enable_thinking": False}).choices[0]
    assert cut.finish_reason == "length" and cut.message.content.startswith("{")
    with client.chat.completions.stream(**ask, response_format=form, extra_body={"thinking_budget": 6}) as stream:
        assert stream.get_final_completion().choices[0].message.content == message.content
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.chat.completions.create(**ask, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}})
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=tiny, api_key="none", max_retries=0) as other:
        answer = other.messages.create(model="lily-tiny", max_tokens=200, messages=FRANCE, output_config={"format": {"type": "json_schema", "schema": CITY}})
        jsonschema.validate(json.loads(answer.content[0].text), CITY)


def test_case_48_penalties_count_generated_tokens_and_bias_reaches_the_model(client):
    ask = {"model": "lily-tiny", "messages": FRANCE, "temperature": 0, "max_tokens": 4, "logit_bias": {"77": 100}, "logprobs": True, "extra_body": {"enable_thinking": False}}

    def tokens(**more):
        return [entry.token for entry in client.chat.completions.create(**ask, **more).choices[0].logprobs.content]

    forced = tokens()
    assert len(set(forced)) == 1
    penalised = tokens(frequency_penalty=100, presence_penalty=100)  # more than the bias gives
    assert penalised[0] == forced[0] and forced[0] not in penalised[1:]


def test_anthropic_message(tiny):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=tiny, api_key="none", max_retries=0) as client:
        ask = {"model": "lily-tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "What is the capital of France?"}], "extra_body": {"temperature": 0}}
        assert client.messages.create(**ask).content[0].text == "The capital of France is Paris."
        with client.messages.stream(**ask) as stream:
            assert "".join(stream.text_stream) == "The capital of France is Paris."


def test_case_43_parallel_clients_get_what_they_get_alone(tiny):
    bodies = [{"messages": [{"role": "user", "content": f"What is the capital of {country}?"}], "max_tokens": 16, "temperature": 0, "enable_thinking": False}
              for country in ("France", "Italy", "Peru", "Japan")]

    def ask(body):
        return httpx.post(tiny + CHAT, json=body, timeout=120).json()["choices"][0]["message"]["content"]

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, bodies * 2)) == alone * 2
    assert "Paris" in alone[0]


def test_case_42_the_request_after_a_cancelled_one_is_clean(tiny):
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16, "temperature": 0, "enable_thinking": False}
    expected = httpx.post(tiny + CHAT, json=body, timeout=120).json()["choices"][0]["message"]["content"]
    for text in ("Repeat: one two three four five six seven eight nine ten", "Who are you?"):
        long = {"messages": [{"role": "user", "content": text}], "max_tokens": 500, "stream": True, "temperature": 1.0, "seed": 1}
        with httpx.stream("POST", tiny + CHAT, json=long, timeout=120) as response:
            next(line for line in response.iter_lines() if line.startswith("data: "))
        assert httpx.post(tiny + CHAT, json=body, timeout=120).json()["choices"][0]["message"]["content"] == expected


def test_case_22_the_templates_own_words(tiny):
    response = httpx.post(tiny + CHAT, json={"messages": [{"role": "system", "content": "x"}]})
    assert response.status_code == 400 and "The conversation has no user message" in response.text


def test_serve_command_answers_and_an_interrupt_lets_it_finish_what_runs():
    code = "from lily.server.command import serve; serve()"
    process = subprocess.Popen([sys.executable, "-c", code, "--port", "0", "--name", "mine", "--api-key", "k"], stderr=subprocess.PIPE, text=True, env=os.environ)
    killer = threading.Timer(60, process.kill)
    killer.start()
    try:
        address = next(match[0] for line in process.stderr if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
        body = {"model": "mine", "prompt": "In the beginning", "max_tokens": 3}
        assert httpx.post(address + "/v1/completions", json=body).status_code == 401
        reply = httpx.post(address + "/v1/completions", json=body, headers={"x-api-key": "k"}, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 3
        with httpx.stream("POST", address + "/v1/completions", json={**body, "max_tokens": 60, "stream": True}, headers={"x-api-key": "k"}, timeout=60) as response:
            lines = response.iter_lines()
            next(line for line in lines if line.startswith("data: {"))
            process.send_signal(signal.SIGINT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        process.stderr.read()
        assert process.wait(20) == 0
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        process.stderr.close()
