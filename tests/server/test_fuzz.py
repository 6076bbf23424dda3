"""Any request body at all gets an answer or a documented error, from the real model behind all three endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from lily.reply import Piece
from tests.fuzzing import attempts, good_messages, good_tools, json_values, mutated, runs, texts
from tests.server.fake_model import live


class Brief:
    """A model whose answers have two tokens at most; every check of the request is the model's own."""

    def __init__(self, model: Any) -> None:
        self._model, self.template, self.tokenizer = model, model.template, model.tokenizer

    def stream(self, prompt: Any = None, **keywords: Any) -> Iterator[Piece]:
        if type(asked := keywords.get("max_tokens", 2)) is int and asked > 2:
            keywords["max_tokens"] = 2
        return self._model.stream(prompt, **{"max_tokens": 2, **keywords})


@pytest.fixture(scope="module")
def http(model: Any) -> Iterator[httpx.Client]:
    with live(Brief(model)) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


schemas = st.dictionaries(st.sampled_from(["type", "properties", "items", "enum", "required"]), json_values, max_size=3)
fields = {
    "model": st.just("lily-tiny"), "max_tokens": st.integers(0, 3), "max_completion_tokens": st.integers(1, 3), "temperature": st.floats(0, 3) | st.floats(), "top_p": st.floats(0.01, 1) | st.floats(),
    "top_k": st.integers(0, 10) | st.integers(), "min_p": st.floats(0, 1), "seed": st.integers(-(2**70), 2**70), "stop": st.lists(texts, max_size=3) | texts, "stream": st.booleans(),
    "logprobs": st.booleans() | st.integers(-1, 30), "top_logprobs": st.integers(-1, 30), "logit_bias": st.dictionaries(st.sampled_from(["5", "-1", "99999", "x"]), st.floats(-200, 200)),
    "presence_penalty": st.floats(-3, 3), "repetition_penalty": st.floats(0.01, 3) | st.floats(), "thinking_budget": st.integers(-1, 3), "enable_thinking": st.booleans(),
    "stream_options": st.just({"include_usage": True}), "tool_choice": st.sampled_from(["auto", "required", "none", {"type": "function", "function": {"name": "f"}}, {"type": "any"}]),
    "response_format": st.just({"type": "json_object"}) | schemas.map(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}),
    "system": texts | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2), "thinking": st.just({"type": "enabled", "budget_tokens": 2}),
    "stop_sequences": st.lists(texts, max_size=2), "n": st.sampled_from([1, 1, 1, 2]), "unknown": json_values,
}
blocks = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}), st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts, "signature": texts}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "id": texts, "name": texts, "input": st.dictionaries(texts, json_values, max_size=2)}),
    st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": texts, "content": texts}),
)
anthropic_messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": texts | st.lists(blocks, max_size=3)}), min_size=1, max_size=4)
endpoints = {
    "/v1/chat/completions": {"messages": good_messages | st.just([{"role": "user", "content": "Hi"}]), "tools": good_tools},
    "/v1/completions": {"prompt": st.just("Hi") | texts | st.lists(st.integers(-1, 7000), max_size=4)},
    "/v1/messages": {"messages": anthropic_messages | st.just([{"role": "user", "content": "Hi"}]), "max_tokens": st.integers(1, 3),
                     "tools": st.just([]) | st.just([{"name": "f", "input_schema": {"type": "object"}}])},
}


@st.composite
def requests(draw: Any) -> tuple[str, Any]:
    """An endpoint, and a body for it with a few of the fields, whole or with changed places."""
    path = draw(st.sampled_from(sorted(endpoints)))
    body = {name: draw(value) for name, value in endpoints[path].items()}
    body.update({name: draw(fields[name]) for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True))})
    if "stream_options" in body and draw(st.integers(0, 7)):
        body["stream"] = True
    return path, draw(mutated(st.just(body)))


@runs(60)
def test_any_request_body(http: httpx.Client, run: settings) -> None:
    seen: set[int] = set()

    def body(request: tuple[str, Any], cut: int, tail: bytes) -> None:
        path, content = request
        raw = json.dumps(content).encode("utf-8", "surrogatepass")
        response = http.post(path, content=raw[: len(raw) - cut] + tail)
        assert response.status_code in (200, 400, 404), (response.status_code, response.text)
        seen.add(response.status_code)
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
        elif response.headers["content-type"].startswith("text/event-stream"):
            # What a stream could not say with its status, such as a grammar that outgrew its limits, is the client's fault too.
            errors = [json.loads(line[6:])["error"] for line in response.text.splitlines() if line.startswith("data: {") and '"error"' in line and "choices" not in line]
            assert all(error["type"] == "invalid_request_error" for error in errors), errors
        else:
            response.json()

    attempts(run, requests(), st.sampled_from([0] * 8 + [1, 9]), st.sampled_from([b""] * 8 + [b"\xff", b"{}", b" "]), body=body)
    assert {200, 400} <= seen and http.get("/health").json()["status"] == "ok"
