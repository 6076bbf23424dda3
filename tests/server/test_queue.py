"""The queue: order, bound, disconnects, faults (cases 37 and 41 to 43)."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import openai
import pytest

from lily.errors import DeviceError
from lily.server import sse
from lily.server import worker as worker_module
from tests.server.fake_model import FakeModel, live, wait_until

CHAT = "/v1/chat/completions"


def body(text="Hi", **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def endless(call):
    while True:
        yield "x"


def test_case_42_disconnect_during_decode(http, fake):
    fake.script, fake.step_seconds = endless, 0.02
    with http.stream("POST", CHAT, json=body(stream=True)) as response:
        next(line for line in response.iter_lines() if "x" in line)
    wait_until(lambda: fake.closed == 1)
    steps = fake.steps
    time.sleep(0.1)
    assert fake.steps == steps
    fake.script = lambda call: ["clean"]
    assert http.post(CHAT, json=body()).json()["choices"][0]["message"]["content"] == "clean"


def test_case_42_disconnect_during_prefill(http, fake):
    fake.chunks, fake.chunk_seconds = 200, 0.02
    with http.stream("POST", CHAT, json=body(stream=True)) as response:
        line = next(line for line in response.iter_lines() if line.startswith(": prefill"))
        assert line.startswith(": prefill 0/") or line.split()[2].split("/")[1].isdigit()
    assert fake.ended.wait(5)
    assert fake.chunks_run < 100 and fake.steps == 0
    fake.chunks = 1
    assert http.post(CHAT, json=body()).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/completions"])
def test_case_42_disconnect_without_a_stream(http, url, fake, path):
    fake.script, fake.step_seconds = endless, 0.02
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + path, json=body(max_tokens=5, prompt="x"), timeout=0.5)
    wait_until(lambda: fake.closed == 1)
    fake.script = lambda call: ["clean"]
    assert http.post(CHAT, json=body()).status_code == 200


def test_case_42_disconnect_while_waiting(http, url, fake):
    fake.script, fake.step_seconds = endless, 0.02
    with http.stream("POST", CHAT, json=body("first", stream=True)) as response:
        next(line for line in response.iter_lines() if "x" in line)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + CHAT, json=body("second"), timeout=0.3)
        wait_until(lambda: http.get("/health").json()["waiting"] == 0)
    fake.script = lambda call: [str(call["prompt"])]
    assert "third" in http.post(CHAT, json=body("third")).text
    assert fake.running == 0


def test_case_42_clients_close_cancels(openai_client, anthropic_client, fake):
    fake.script, fake.step_seconds = endless, 0.02
    with openai_client.chat.completions.create(model="lily-tiny", messages=body()["messages"], stream=True) as stream:
        next(iter(stream))
    wait_until(lambda: fake.closed == 1)
    with anthropic_client.messages.stream(model="lily-tiny", max_tokens=5, messages=body()["messages"]) as stream:
        next(iter(stream.text_stream))
    wait_until(lambda: fake.closed == 2)


def test_case_43_four_parallel_clients_one_generation_at_a_time(http, fake):
    fake.script, fake.step_seconds = lambda call: list(call["prompt"][-1]["content"]), 0.001
    texts = [f"client {number} says {'abc' * number}" for number in range(12)]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda text: http.post(CHAT, json=body(text)).json()["choices"][0]["message"]["content"], texts))
    assert replies == texts
    assert fake.most_running == 1 and fake.threads == {"lily-generation"}


def test_order_of_arrival(http, fake):
    order, gate = [], threading.Event()

    def script(call):
        order.append(call["prompt"][-1]["content"])
        gate.wait(10)
        yield "ok"

    fake.script = script
    with ThreadPoolExecutor(5) as pool:
        pending = []
        for number in range(5):
            pending.append(pool.submit(http.post, CHAT, json=body(str(number))))
            wait_until(lambda count=number: http.get("/health").json()["waiting"] == count and fake.running == 1)
        gate.set()
        assert all(future.result().status_code == 200 for future in pending)
    assert order == list("01234")


def test_a_full_queue_is_429_with_retry_after():
    fake = FakeModel()
    gate = threading.Event()
    fake.script = lambda call: (gate.wait(10) and "ok" for _ in range(1))
    with live(fake, queue_size=1) as url, httpx.Client(base_url=url, timeout=20) as http, ThreadPoolExecutor(2) as pool:
        running = pool.submit(http.post, CHAT, json=body())
        wait_until(lambda: fake.running == 1)
        waiting = pool.submit(http.post, CHAT, json=body())
        wait_until(lambda: http.get("/health").json()["waiting"] == 1)
        refused = http.post(CHAT, json=body())
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert http.post("/v1/messages", json=body(max_tokens=5)).json()["error"]["type"] == "rate_limit_error"
        gate.set()
        assert running.result().status_code == waiting.result().status_code == 200
        assert http.post(CHAT, json=body()).status_code == 200


def test_a_client_that_is_refused_comes_again_when_it_was_told(monkeypatch):
    """The official clients obey Retry-After."""
    monkeypatch.setattr(worker_module, "_FIRST_GUESS_SECONDS", 0.5)
    fake, gate = FakeModel(), threading.Event()
    fake.script = lambda call: (gate.wait(10) and "ok" for _ in range(1))
    with live(fake, queue_size=0) as url, ThreadPoolExecutor(2) as pool:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as strict, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=5) as patient:
            running = pool.submit(strict.chat.completions.create, model="lily-tiny", messages=body()["messages"])
            wait_until(lambda: fake.running == 1)
            with pytest.raises(openai.RateLimitError) as caught:
                strict.chat.completions.create(model="lily-tiny", messages=body()["messages"])
            assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"] == "1"
            with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as other, pytest.raises(anthropic.RateLimitError):
                other.messages.create(model="lily-tiny", max_tokens=5, messages=body()["messages"])
            again = pool.submit(patient.chat.completions.create, model="lily-tiny", messages=body()["messages"])
            time.sleep(0.2)
            gate.set()
            assert running.result().choices[0].message.content == again.result().choices[0].message.content == "ok"


def test_comments_keep_a_waiting_connection_alive(http, url, fake, monkeypatch):
    """While others run, and inside a long prefill chunk; the official clients read over them."""
    monkeypatch.setattr(sse, "_PING_SECONDS", 0.05)
    fake.chunks, fake.chunk_seconds = 2, 0.3
    with http.stream("POST", CHAT, json=body(stream=True)) as response:
        lines = [line for line in response.iter_lines() if line]
    first = next(number for number, line in enumerate(lines) if line.startswith(": prefill"))
    assert sum(line.startswith(": ping") for line in lines[:first]) >= 2
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        chunks = client.chat.completions.create(model="lily-tiny", messages=body()["messages"], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world."
    with anthropic.Anthropic(base_url=url, api_key="x") as client, client.messages.stream(model="lily-tiny", max_tokens=5, messages=body()["messages"]) as stream:
        assert "".join(stream.text_stream) == "Hello, world."


def test_prefill_progress_comes_as_comments(http, fake):
    fake.chunks = 4
    with http.stream("POST", CHAT, json=body(stream=True)) as response:
        lines = list(response.iter_lines())
    assert response.headers["content-type"].startswith("text/event-stream")
    comments = [line for line in lines if line.startswith(": prefill ")]
    assert len(comments) == 4
    assert lines.index(comments[-1]) < next(number for number, line in enumerate(lines) if line.startswith("data: "))
    assert lines[0].startswith(":") and [line for line in lines if line][-1] == "data: [DONE]"


def fails(error):
    def script(call):
        yield "so far"
        raise error

    return script


@pytest.mark.parametrize(("error", "status"), [(DeviceError("the GPU timed out"), 503), (ZeroDivisionError("a bug"), 500)])
def test_case_37_a_failed_generation_and_a_clean_next_one(http, fake, error, status):
    fake.script = fails(error)
    response = http.post(CHAT, json=body())
    assert response.status_code == status and response.json()["error"]["type"] == "server_error"
    assert ("GPU" in response.text) == (status == 503) and "a bug" not in response.text
    with http.stream("POST", CHAT, json=body(stream=True)) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
    assert '"error"' in lines[-1] and "data: [DONE]" not in lines
    fake.script = lambda call: ["clean"]
    assert http.post(CHAT, json=body()).json()["choices"][0]["message"]["content"] == "clean"
    assert http.get("/health").status_code == 200


def test_case_41_a_dead_worker_fails_everyone_and_health():
    fake, gate = FakeModel(), threading.Event()

    def script(call):
        yield "x"
        gate.wait(10)
        raise SystemExit("a library called exit()")

    fake.script = script
    with live(fake) as url, httpx.Client(base_url=url, timeout=20) as http, ThreadPoolExecutor(5) as pool:
        pending = [pool.submit(http.post, CHAT, json=body(stream=number % 2 == 1)) for number in range(4)]
        wait_until(lambda: fake.running == 1 and http.get("/health").json()["waiting"] == 3)
        gate.set()
        for number, future in enumerate(pending):
            reply = future.result(5)
            # A stream that had begun tells of the error inside, one still being prepared by its status.
            assert reply.status_code in ((200, 503) if number % 2 else (503,)) and '"worker_died"' in reply.text
        health = http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "unhealthy"
        assert "lily_healthy 0.0" in http.get("/metrics").text
        assert http.post(CHAT, json=body()).status_code == 503


def test_many_clients_with_random_disconnects(http, url, fake):
    fake.script, fake.step_seconds = lambda call: list(call["prompt"][-1]["content"]), 0.0005
    before = threading.active_count()

    def client(number):
        text = f"text of {number} " * (1 + number % 3)
        if number % 5 == 0:
            with http.stream("POST", CHAT, json=body(text, stream=True)) as response:
                next(response.iter_lines())
            return True
        return http.post(CHAT, json=body(text)).json()["choices"][0]["message"]["content"] == text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(client, range(150)))
    wait_until(lambda: fake.running == 0 and http.get("/health").json()["waiting"] == 0)
    assert http.get("/health").json()["status"] == "ok"
    assert threading.active_count() <= before + 40  # the pool of the event loop
