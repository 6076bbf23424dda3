"""A model that says what a test tells it to, with the embedded model's template and tokenizer, and a live server around it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lily
from lily import Piece, Usage
from lily.chat import ChatTemplate
from lily.config import GenerationDefaults
from lily.guidance import response_schema
from lily.reasoning import ReasoningSplitter
from lily.reply import CallReader
from lily.sampling import SAMPLING_KEYWORDS, with_defaults
from lily.server import create_app
from lily.server.serving import Server
from lily.stop_strings import normal_stops
from lily.tokenizer import Tokenizer
from lily.tool_choice import plan_tools

TINY = Path(lily.__file__).parent / "data" / "lily-tiny"


class FakeModel:
    """`script(call)` gives the generated pieces of text for a call's keywords (``prompt`` and ``prompt_ids`` included).

    chunks and chunk_seconds: prefill chunks and their time. step_seconds: time before each piece. A finish reason other than
    "stop" can be set by ``reason``. ``steps`` and ``chunks_run`` count what really ran.
    """

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_folder(TINY)
        self.template = ChatTemplate.from_folder(TINY, self.tokenizer)
        self.running = 0
        self.reset()

    def reset(self) -> None:
        """As new, once nothing runs any more."""
        wait_until(lambda: self.running == 0)
        self.script: Callable[[dict[str, Any]], Iterable[str]] = lambda call: ["Hello", ", ", "world."]
        self.chunks, self.chunk_seconds, self.step_seconds = 1, 0.0, 0.0
        self.reason = "stop"
        self.thinks = False
        self.calls: list[dict[str, Any]] = []
        self.steps = self.chunks_run = self.most_running = self.closed = 0
        self.threads: set[str] = set()
        self.ended = threading.Event()

    def stream(self, prompt: Any = None, **keywords: Any) -> Iterator[Piece]:
        call = {"prompt": prompt, "prompt_ids": None, **keywords}
        self.calls.append(call)
        normal_stops(keywords.get("stop"))
        with_defaults(GenerationDefaults(), 6144, {name: value for name, value in keywords.items() if name in SAMPLING_KEYWORDS})
        response_schema(keywords.get("response_format"))
        if keywords.get("prompt_ids") is not None:
            count = len(keywords["prompt_ids"])
        elif keywords.get("raw"):
            count = len(self.tokenizer.encode(prompt))
        else:
            plan = plan_tools(keywords.get("tools"), keywords.get("tool_choice"))
            call["tools"] = plan.tools
            call["prompt_ids"] = plan.prompt_ids(self.template, self.tokenizer, prompt, enable_thinking=keywords.get("enable_thinking"))
            count = len(call["prompt_ids"])
        return self._pieces(call, count, keywords["progress"])

    def _pieces(self, call: dict[str, Any], count: int, progress: Callable[[int, int], None]) -> Iterator[Piece]:
        self.threads.add(threading.current_thread().name)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        splitter = ReasoningSplitter(self.thinks)
        plan = plan_tools(call.get("tools"), call.get("tool_choice"))
        calls = CallReader(plan.tools or (), prefix=plan.prefix, several=call.get("parallel_tool_calls") is not False)
        begun = time.perf_counter()
        done = 0
        try:
            for chunk in range(self.chunks):
                time.sleep(self.chunk_seconds)
                self.chunks_run += 1
                progress((chunk + 1) * count // self.chunks, count)
            for text in self.script(call):
                time.sleep(self.step_seconds)
                self.steps += 1
                done += 1
                split = splitter.push(text)
                yield calls.read(Piece(split.text, split.reasoning, (done,)))
                if calls.ended:
                    break
            split = splitter.flush()
            yield calls.read(Piece(split.text, split.reasoning, (), self.reason, Usage(count, done, 1, time.perf_counter() - begun, 0.0)))
        except GeneratorExit:
            self.closed += 1
            raise
        finally:
            self.running -= 1
            self.ended.set()


@contextlib.contextmanager
def live(model: Any, *, grace: float = 5, **settings: Any) -> Iterator[str]:
    """The address of a server on 127.0.0.1 around the model. `grace`: seconds in which answers may finish at its end."""
    app = create_app(model, **{"name": "lily-tiny", **settings})
    server = Server(app, grace=grace, host="127.0.0.1", port=0, log_level="warning")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
