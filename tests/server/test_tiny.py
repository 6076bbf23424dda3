"""The server around the embedded model: goldens, tools, parallel clients and cancels, and `lily serve` itself."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.fake_model import live

openai = pytest.importorskip("openai")
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tiny(model) -> Iterator[str]:
    with live(model) as address:
        yield address


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


def test_serve_command_answers_and_ends_on_an_interrupt():
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
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(20) in (0, 1, 130, -signal.SIGINT)  # by an interrupt, which is what it was
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        process.stderr.close()
