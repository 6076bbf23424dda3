"""What a server must survive: wrong types, unknown fields, keys, limits, any JSON at all."""

import json
import string
import sys

import anthropic
import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.fake_model import FakeModel, live

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def test_unknown_fields_and_null_are_tolerated(http):
    body = {"messages": USER, "user": "u", "metadata": {}, "store": True, "verbosity": "low", "temperature": None, "stop": None, "tools": None, "n": 1,
            "frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "logit_bias": {}, "response_format": {"type": "text"}, "no_such": [1]}
    assert http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize("wrong", [
    {"temperature": "1"}, {"temperature": True}, {"top_p": []}, {"top_k": 1.5}, {"max_tokens": "5"}, {"max_tokens": True}, {"max_tokens": -1},
    {"max_completion_tokens": 0}, {"seed": "x"}, {"stop": 5}, {"stop": [1]}, {"stop": {"a": 1}}, {"stop": ""}, {"stream": 1}, {"stream": "true"},
    {"stream_options": {"include_usage": True}}, {"stream": True, "stream_options": []}, {"n": 2}, {"n": "1"}, {"messages": None}, {"messages": "Hi"},
    {"messages": {}}, {"messages": []}, {"messages": [1]}, {"messages": [{"content": "x"}]}, {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": "\ud800"}]}, {"messages": [{"role": "\ud800", "content": ""}]}, {"messages": [{"role": "assistant"}, *USER]},
    {"tools": "f"}, {"tools": [1]}, {"tools": [{}]}, {"tools": [{"type": "function"}]}, {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
    {"tools": [{"type": "web", "name": "f"}]}, {"tool_choice": "required"}, {"tools": [TOOL], "tool_choice": "always"},
    {"tools": [TOOL], "tool_choice": "required", "enable_thinking": True}, {"enable_thinking": "no"}, {"chat_template_kwargs": 1}, {"logprobs": 1},
    {"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logit_bias": {"x": 1}}, {"logit_bias": [1]}, {"logit_bias": {"5": 101}},
    {"presence_penalty": "0"}, {"repetition_penalty": 0}, {"thinking_budget": "9"}, {"response_format": "json"}, {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "x"}}, {"model": 5}, {"parallel_tool_calls": "no"},
])
def test_wrong_values_are_400_in_openais_shape(http, wrong):
    response = http.post(CHAT, content=json.dumps({"messages": USER, **wrong}))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"1", b"null", b'"x"', b"\xff\xfe", b'{"messages": [NaN]}', b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}", b'{"a":' * 50_000,
])
def test_bodies_that_are_no_json_object(http, body):
    assert http.post(CHAT, content=body).status_code == 400
    assert http.post("/v1/messages", content=body).json()["type"] == "error"


@pytest.mark.parametrize("wrong", [{}, {"prompt": 5}, {"prompt": ["a", "b"]}, {"prompt": [1, "a"]}, {"prompt": [True]}, {"prompt": [[1], [2]]}, {"prompt": "x", "echo": True},
                                   {"prompt": "x", "suffix": "y"}, {"prompt": "x", "best_of": 2}, {"prompt": "x", "logprobs": True}, {"prompt": "x", "logprobs": 21}])
def test_wrong_completions(http, wrong):
    assert http.post("/v1/completions", json=wrong).status_code == 400


def test_unknown_paths_and_methods(http):
    response = http.get("/v1/nothing")
    assert response.status_code == 404 and response.json()["error"]["type"] == "invalid_request_error"
    assert http.get(CHAT).status_code == 405
    assert http.get("/health").json()["status"] == "ok"


def test_metrics():
    with live(FakeModel()) as url, httpx.Client(base_url=url) as client:
        client.post(CHAT, json={"messages": USER})
        client.post(CHAT, json={"messages": 1})
        page = client.get("/metrics").text
    assert 'lily_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in page
    assert 'lily_requests_total{endpoint="/v1/chat/completions",status="400"} 1.0' in page
    assert 'lily_tokens_total{kind="completion"} 3.0' in page and "lily_healthy 1.0" in page


def test_api_key():
    with live(FakeModel(), api_key="sésame") as url, httpx.Client(base_url=url) as client:
        right = "sésame".encode()
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": b"Basic " + right}, {"x-api-key": "x"}):
            response = client.post(CHAT, json={"messages": USER}, headers=headers)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models").status_code == 401
        assert client.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
        assert client.get("/health").status_code == 200
        assert client.post(CHAT, json={"messages": USER}, headers={"Authorization": b"Bearer " + right}).status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": right}).status_code == 200


def test_body_limit():
    with live(FakeModel(), body_limit=1000) as url, httpx.Client(base_url=url) as client:
        for size in (990, 2000):  # drained by the server, so that the client surely sees the answer
            response = client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * size}]})
            assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"
        assert client.post("/v1/messages", content=iter([b"x" * 600] * 3)).json()["error"]["type"] == "request_too_large"
        assert client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 900}]}).status_code == 200
        large = [{"role": "user", "content": "x" * 2000}]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as other, pytest.raises(openai.APIStatusError) as caught:
            other.chat.completions.create(model="lily-tiny", messages=large)
        assert caught.value.status_code == 413 and caught.value.code == "request_too_large"
        with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as other, pytest.raises(anthropic.APIStatusError) as caught:
            other.messages.create(model="lily-tiny", max_tokens=5, messages=large)
        assert caught.value.status_code == 413


JSON = st.recursive(st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | st.text(string.printable, max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name", "function"]), inner, max_size=3),
                    max_leaves=8)
NAMES = ["messages", "prompt", "max_tokens", "temperature", "stop", "tools", "tool_choice", "stream_options", "system", "thinking", "stop_sequences", "n", "model",
         "chat_template_kwargs", "response_format", "seed", "top_k"]


@given(path=st.sampled_from([CHAT, "/v1/completions", "/v1/messages"]), fields=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), usual=st.booleans())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_body_gets_an_answer_or_a_documented_error(http, path, fields, usual):
    body = {"messages": USER, "prompt": "x", "max_tokens": 3, **fields} if usual else fields
    assert http.post(path, json=body).status_code in (200, 400, 404)


def test_the_command_says_which_extra_is_missing(monkeypatch):
    from click.testing import CliRunner

    from lily.server.command import serve

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "lily.server.serving", raising=False)
    result = CliRunner().invoke(serve, [])
    assert result.exit_code == 1 and "lily-metal[server]" in result.output
