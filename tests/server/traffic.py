"""Requests of every kind with their answers in one form, and `lily serve` in a process of its own, for tests under load."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def requests_of_every_kind() -> list[tuple[str, dict[str, Any]]]:
    """(path, body): short and long prompts, thinking or not, tools, stops, penalties, seeds; without `stream`."""
    plain = {"temperature": 0, "max_tokens": 12, "enable_thinking": False}
    found: list[tuple[str, dict[str, Any]]] = []
    for country in ("France", "Italy", "Peru", "Japan"):
        found.append((CHAT, {**plain, "messages": user(f"What is the capital of {country}?")}))
    found += [
        (CHAT, {**plain, "messages": user("What is the capital of France?"), "enable_thinking": True, "max_tokens": 20}),
        (CHAT, {**plain, "messages": user("What is the weather in Lima?"), "tools": [WEATHER], "max_tokens": 40}),
        (CHAT, {**plain, "messages": user("Repeat: one two three four five"), "stop": "four"}),
        (CHAT, {**plain, "messages": user("Who are you?"), "frequency_penalty": 0.5, "presence_penalty": 0.5}),
        (CHAT, {**plain, "messages": user("Who are you?"), "logit_bias": {"77": 100}, "max_tokens": 4}),
        (CHAT, {**plain, "messages": user("What is the capital of France?"), "temperature": 1, "seed": 5}),
        (CHAT, {**plain, "messages": user("List: " + ", ".join(f"item {n}" for n in range(60))), "max_tokens": 6}),
        (COMPLETIONS, {"prompt": "In the beginning God created the", "temperature": 0, "max_tokens": 10}),
        (COMPLETIONS, {"prompt": "In the beginning God created the heaven and the earth. And", "temperature": 0, "max_tokens": 10}),
        (MESSAGES, {"messages": user("What is the capital of Italy?"), "temperature": 0, "max_tokens": 12}),
        (MESSAGES, {"messages": user("Who are you?"), "system": "Be brief.", "temperature": 0, "max_tokens": 12}),
    ]
    return found


def ask(client: httpx.Client, path: str, body: dict[str, Any], *, stream: bool = False, lines: int | None = None) -> str | None:
    """The answer as one text: content, thought, calls and the reason of its end. `lines`: hang up after so many data lines and
    give what came until then, without an end. None: the server failed the request with an error of its own (503)."""
    if not stream:
        response = client.post(path, json=body)
        if response.status_code == 503:
            return None
        assert response.status_code == 200, response.text
        return _whole(path, response.json())
    parts: dict[str, str] = {}
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        if response.status_code == 503:
            return None
        assert response.status_code == 200, response.read()
        seen = 0
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return None
            _add(path, event, parts)
            seen += 1
            if lines is not None and seen >= lines:
                return parts.get("text", "")
    return json.dumps(parts, sort_keys=True)


def _whole(path: str, answer: dict[str, Any]) -> str:
    parts: dict[str, str] = {}
    if path == MESSAGES:
        for block in answer["content"]:
            if block["type"] == "text":
                parts["text"] = parts.get("text", "") + block["text"]
        parts["reason"] = answer["stop_reason"]
    else:
        choice = answer["choices"][0]
        message = choice.get("message") or {"content": choice.get("text")}
        _join(parts, "text", message.get("content"))
        _join(parts, "thought", message.get("reasoning_content"))
        for call in message.get("tool_calls") or ():
            _join(parts, "calls", call["function"]["name"] + call["function"]["arguments"])
        parts["reason"] = choice["finish_reason"]
    return json.dumps(parts, sort_keys=True)


def _add(path: str, event: dict[str, Any], parts: dict[str, str]) -> None:
    if path == MESSAGES:
        delta = event.get("delta", {})
        if delta.get("type") == "text_delta":
            _join(parts, "text", delta["text"])
        if "stop_reason" in delta:
            parts["reason"] = delta["stop_reason"]
        return
    for choice in event["choices"]:
        delta = choice.get("delta") or {"content": choice.get("text")}
        _join(parts, "text", delta.get("content"))
        _join(parts, "thought", delta.get("reasoning_content"))
        for call in delta.get("tool_calls") or ():
            _join(parts, "calls", (call["function"].get("name") or "") + (call["function"].get("arguments") or ""))
        if choice.get("finish_reason"):
            parts["reason"] = choice["finish_reason"]


def _join(parts: dict[str, str], name: str, text: str | None) -> None:
    if text:
        parts[name] = parts.get(name, "") + text


class ServerProcess:
    """What the system says of a running server."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.address = address
        self._proc = Path("/proc") / str(process.pid)
        self.first_files, self.first_threads = self.files(), self.threads()

    def files(self) -> int:
        return len(os.listdir(self._proc / "fd"))

    def threads(self) -> int:
        return len(os.listdir(self._proc / "task"))

    def resident(self) -> int:
        return int((self._proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def server_process(log: Path, *arguments: str, **environment: str) -> Iterator[ServerProcess]:
    """`lily serve` on a free port, until the end of the block. `log`: where its standard error goes."""
    code = "from lily.server.command import serve; serve()"
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", code, "--port", "0", "--log-level", "info", *arguments], stdout=file, stderr=file,
                                   env={**os.environ, **environment})
    try:
        deadline = time.monotonic() + 60
        while (match := re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.05)
        yield ServerProcess(process, match[1])
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
