"""The end of the server: what runs may finish, what does not gets an error, in bounded time."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from lily.server.errors import ApiError
from lily.server.worker import Worker
from tests.server.fake_model import FakeModel, live, wait_until
from tests.server.test_queue import CHAT, body, endless


def test_shutdown_lets_a_running_answer_finish_and_then_refuses():
    def workers():
        return sum(thread.name == "lily-generation" for thread in threading.enumerate())

    fake, before = FakeModel(), workers()
    fake.script, fake.step_seconds = lambda call: ["a"] * 20, 0.02
    with ThreadPoolExecutor(1) as pool:
        with live(fake) as url:
            running = pool.submit(httpx.post, url + CHAT, json=body(stream=True))
            wait_until(lambda: fake.steps > 2)
        assert running.result().text.rstrip().endswith("data: [DONE]")
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")
    assert workers() == before


def test_shutdown_ends_what_does_not_finish_with_an_error_of_each_protocol():
    """Streams, whole answers and those in the queue; in bounded time."""
    fake, begun = FakeModel(), 0.0
    fake.script, fake.step_seconds = endless, 0.02
    asked = [(CHAT, {"stream": True}), (CHAT, {}), ("/v1/messages", {"stream": True, "max_tokens": 5}), ("/v1/messages", {"max_tokens": 5}),
             ("/v1/completions", {"prompt": "x", "stream": True})]
    with ThreadPoolExecutor(len(asked)) as pool:
        with live(fake, grace=0.3) as url:
            pending = []
            for number, (path, more) in enumerate(asked):  # the first one runs, the others wait
                pending.append(pool.submit(httpx.post, url + path, json=body(**more), timeout=20))
                wait_until(lambda count=number: fake.running == 1 and httpx.get(url + "/health").json()["waiting"] == count)
            begun = time.monotonic()
        assert time.monotonic() - begun < 4
        for (path, more), future in zip(asked, pending, strict=True):
            reply = future.result(1)
            assert reply.status_code == (200 if "stream" in more else 503), reply.text
            last = json.loads([line for line in reply.text.splitlines() if line][-1].removeprefix("data: "))
            assert last["error"]["message"] == "the server is shutting down"
            assert last["error"]["type"] == ("overloaded_error" if path == "/v1/messages" else "server_error") and "[DONE]" not in reply.text
    assert fake.running == 0


def test_shutdown_cancels_what_does_not_end():
    fake = FakeModel()
    fake.script, fake.step_seconds = endless, 0.02

    async def scenario():
        worker = Worker(4)
        worker.start()
        first, second = worker.admit(), worker.admit()
        worker.enqueue(first, fake.stream("x", raw=True, progress=first.progress))
        worker.enqueue(second, fake.stream("x", raw=True, progress=second.progress))
        async for _ in first.updates():
            if fake.steps > 1:
                break
        await asyncio.to_thread(worker.close)
        with pytest.raises(ApiError) as caught:
            async for _ in second.updates():
                pass
        assert caught.value.status == 503
        with pytest.raises(ApiError):
            worker.admit()

    asyncio.run(scenario())
    assert fake.closed == 1 and fake.running == 0
