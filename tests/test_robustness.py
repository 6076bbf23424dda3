"""What must hold around a generation: object counts, memory, interrupts, scheduling order, bad input."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import lily
from lily import _native


def child(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, **env})


def settled_objects(expected: int | None) -> int | None:
    """Live objects, after the queue's thread has let go of the last command buffer."""
    for _ in range(40):
        if _native.live_objects() == expected:
            break
        time.sleep(0.05)
    return _native.live_objects()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_decode_step_makes_no_buffer_and_keeps_no_python_object(model: Any, goldens: list[dict[str, Any]]) -> None:
    ids = goldens[2]["prompt_ids"]
    model.generate(prompt_ids=ids, max_tokens=4)
    stream = model.stream(prompt_ids=ids, max_tokens=40)
    for _ in range(5):
        next(stream)
    gc.collect()
    buffers, objects = _native.buffers_created(), len(gc.get_objects())
    for _ in range(30):
        next(stream)
    gc.collect()
    assert _native.buffers_created() == buffers
    assert len(gc.get_objects()) <= objects + 5  # nothing that grows with the 30 steps
    stream.close()


@pytest.mark.skipif(_native.live_objects() is None, reason="Objective-C objects are counted by the software Metal only")
def test_generations_leave_no_objective_c_object_and_flat_memory(model: Any, goldens: list[dict[str, Any]]) -> None:
    ids = goldens[1]["prompt_ids"]
    for _ in range(20):
        model.generate(prompt_ids=ids, max_tokens=4)
    live, resident = _native.live_objects(), resident_bytes()
    for _ in range(200):
        model.generate(prompt_ids=ids, max_tokens=4)
    assert settled_objects(live) == live
    assert resident_bytes() - resident < 8 << 20


def test_every_objective_c_object_is_released_when_the_model_goes() -> None:
    result = child("""
        import gc, lily
        from lily import _native
        before = _native.live_objects()
        model = lily.Model.load()
        model.generate("Who are you?", max_tokens=3)
        del model
        gc.collect()
        print(_native.live_objects() - before if before is not None else 0)
    """)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) <= 1, result.stdout  # the system's device itself stays


def test_an_interrupt_in_the_middle_of_a_generation_leaves_a_usable_model(model: Any, goldens: list[dict[str, Any]]) -> None:
    live = _native.live_objects()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with it ignored
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            for _ in range(20):
                model.generate(prompt_ids=goldens[10]["prompt_ids"], max_tokens=30)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    reply = model.generate(prompt_ids=goldens[0]["prompt_ids"], max_tokens=40)
    assert list(reply.token_ids) == goldens[0]["greedy_ids"]
    if live is not None:
        gc.collect()
        assert _native.live_objects() <= live + 16  # programs of the new prompt length, no command buffers


@pytest.mark.parametrize("seed", [1, 2])
def test_random_order_of_everything_unordered_gives_the_same_tokens(goldens: list[dict[str, Any]], seed: int) -> None:
    code = """
        import json, sys, lily
        model = lily.Model.load()
        out = []
        for golden in json.load(open(sys.argv[1] if len(sys.argv) > 1 else {path!r}, encoding="utf-8"))[:9]:
            out.append(list(model.generate(prompt_ids=golden["prompt_ids"], max_tokens=golden["max_tokens"], temperature=0).token_ids))
        print(json.dumps(out))
    """.format(path=str(Path(__file__).parent / "goldens" / "public.json"))
    result = child(code, LILY_METAL_HOST=f"order=random,seed={seed}")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [g["greedy_ids"] for g in goldens[:9]]


def test_stream_yields_before_the_generation_ends(model: Any) -> None:
    stream = model.stream("What is 24 + 31?", max_tokens=200)
    start = time.perf_counter()
    next(stream)
    first = time.perf_counter() - start
    rest = sum(1 for _ in stream)
    assert rest > 20 and first < time.perf_counter() - start - first


def test_case_43_requests_from_other_threads_wait_for_their_turn(model: Any, goldens: list[dict[str, Any]]) -> None:
    """A first request from a thread other than the loading one; four parallel callers."""
    results: dict[int, list[int]] = {}

    def work(index: int) -> None:
        results[index] = list(model.generate(prompt_ids=goldens[index]["prompt_ids"], max_tokens=40, temperature=0).token_ids)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1, 3, 4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {i: goldens[i]["greedy_ids"] for i in (0, 1, 3, 4)}


def test_a_second_stream_of_the_same_thread_is_refused_instead_of_waiting_for_itself(model: Any) -> None:
    first = model.stream("Who are you?", max_tokens=5)
    next(first)
    with pytest.raises(lily.RequestError, match="still open"):
        model.generate("Who are you?", max_tokens=2)
    first.close()
    assert model.generate("Who are you?", max_tokens=2).usage.completion_tokens == 2


BAD_REQUESTS = [
    (dict(prompt=[]), "message"),
    (dict(prompt=[{"role": "wizard", "content": "x"}]), "wizard"),
    (dict(prompt="x", max_tokens=-1), "max_tokens"),
    (dict(prompt="x", max_tokens=0), "max_tokens"),
    (dict(prompt="x", temperature=-1), "temperature"),
    (dict(prompt="x", temperature=float("nan")), "temperature"),
    (dict(prompt="x", top_p=0), "top_p"),
    (dict(prompt="x", top_k=-3), "top_k"),
    (dict(prompt="x", min_p=2), "min_p"),
    (dict(prompt="x", seed="a"), "seed"),
    (dict(prompt="x", stop=[""]), "stop"),
    (dict(prompt="x", options="fast"), "options"),
    (dict(prompt=None, prompt_ids=[]), "prompt_ids"),
    (dict(prompt=None, prompt_ids=[1.5]), "prompt_ids"),
    (dict(prompt=None, prompt_ids=[10**9]), "vocabulary"),
    (dict(prompt=None, prompt_ids=7), "prompt_ids"),
    (dict(prompt=None, prompt_ids=[True]), "prompt_ids"),
    (dict(prompt=None), "prompt"),
    (dict(prompt="x", prompt_ids=[1]), "prompt"),
    (dict(prompt=None, prompt_ids=[1] * 131072), "context"),
]


@pytest.mark.parametrize("keywords,names", BAD_REQUESTS)
def test_bad_requests_are_request_errors_that_name_the_thing_and_lose_nothing(model: Any, keywords: dict[str, Any], names: str) -> None:
    with pytest.raises(lily.RequestError, match=names):
        model.generate(**keywords)
    assert model.generate("Who are you?", max_tokens=1).usage.completion_tokens == 1


def test_prompt_ids_may_be_a_numpy_array(model: Any, goldens: list[dict[str, Any]]) -> None:
    import numpy as np

    ids = np.array(goldens[0]["prompt_ids"], np.int64)
    assert list(model.generate(prompt_ids=ids, max_tokens=40, temperature=0).token_ids) == goldens[0]["greedy_ids"]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lily", *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments,names", [
    (["generate", "x", "--model", "/no/such/folder"], "/no/such/folder"),
    (["generate", "x", "--model", "EMPTY"], "config.json"),
    (["generate", "x", "--max-tokens", "-1"], "max_tokens"),
    (["generate", "x", "--device", "toaster"], "toaster"),
    (["info", "--model", "/no/such/folder"], "/no/such/folder"),
])
def test_the_command_line_prints_one_line_and_fails(arguments: list[str], names: str, tmp_path: Path) -> None:
    result = command(*[str(tmp_path) if a == "EMPTY" else a for a in arguments])
    assert result.returncode != 0
    assert len(result.stderr.strip().splitlines()) == 1 and names in result.stderr and "Traceback" not in result.stderr


def test_the_command_line_answers(tmp_path: Path) -> None:
    result = command("generate", "What is the capital of France?")
    assert (result.returncode, result.stdout) == (0, "The capital of France is Paris.\n"), result.stderr
