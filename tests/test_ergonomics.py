"""Around the generation: asyncio, threads, the context manager, notebooks, the progress of a long prompt."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
from typing import Any

import pytest

import lily
from lily.progress import TerminalBar

ASK = dict(max_tokens=16, temperature=0, enable_thinking=False)
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def settled() -> None:
    """Until no asynchronous generation runs."""
    end = time.monotonic() + 10
    while any(thread.name == "lily-async" for thread in threading.enumerate()):
        assert time.monotonic() < end, "an asynchronous generation did not end"
        time.sleep(0.01)


def test_async_twins_equal_the_others(model: Any) -> None:
    async def run() -> tuple[Any, Any, list[Any]]:
        return (await model.agenerate(FRANCE[0]["content"], **ASK), await model.achat(FRANCE, **ASK), [piece async for piece in model.astream(FRANCE, **ASK)])

    one, two, pieces = asyncio.run(run())
    expected = model.chat(FRANCE, **ASK)
    assert one.token_ids == two.token_ids == expected.token_ids and one.text == two.text == expected.text
    assert "".join(piece.text for piece in pieces) == expected.text and pieces[-1].finish_reason == expected.finish_reason
    settled()


def test_many_async_generations_take_turns_and_do_not_block_the_loop(model: Any) -> None:
    expected = model.chat(FRANCE, **ASK).token_ids

    async def run() -> tuple[list[Any], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        replies = await asyncio.gather(*(model.achat(FRANCE, **ASK) for _ in range(6)))
        ticking.cancel()
        return [reply.token_ids for reply in replies], ticks

    tokens, ticks = asyncio.run(run())
    assert tokens == [expected] * 6 and ticks > 10
    settled()


def test_a_bad_request_is_raised_in_the_task(model: Any) -> None:
    with pytest.raises(lily.RequestError, match="max_tokens"):
        asyncio.run(model.agenerate("x", max_tokens=-1))
    with pytest.raises(lily.RequestError, match="agenerate"):
        asyncio.run(model.achat("x"))
    settled()


def test_cancelling_a_task_stops_the_decode_within_a_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model.chat(FRANCE, **ASK).token_ids
    steps = counted_tokens(model, monkeypatch)

    async def run() -> None:
        task = asyncio.create_task(model.agenerate("Repeat: one two three", max_tokens=2000, temperature=1, seed=1, logit_bias={i: -100 for i in model.engine.config.eos_ids}))
        while len(steps) < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        at = len(steps)
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(settled)
        assert len(steps) <= at + 2

    asyncio.run(run())
    assert model.chat(FRANCE, **ASK).token_ids == expected


def counted_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that the model's session really gives, as it gives them."""
    generate, steps = model._session.generate, []

    def counting(*arguments: Any) -> Any:
        inner = generate(*arguments)
        try:
            for sampled in inner:
                steps.append(sampled.token)
                yield sampled
        finally:
            inner.close()

    monkeypatch.setattr(model._session, "generate", counting)
    return steps


def test_closing_an_async_stream_and_cancelling_a_prefill_stop_the_work(model: Any) -> None:
    chunks: list[int] = []
    ids = [(7 * i) % 500 + 40 for i in range(3000)]
    options = lily.ExecutionOptions(chunk_size=64)

    async def run() -> None:
        stream = model.astream("Repeat: one two three", max_tokens=2000)
        async for _ in stream:
            break
        await stream.aclose()
        task = asyncio.create_task(model.agenerate(prompt_ids=ids, max_tokens=5, options=options, progress=lambda done, total: chunks.append(done)))
        while not chunks:
            await asyncio.sleep(0.001)
        task.cancel()
        at = len(chunks)
        await asyncio.to_thread(settled)
        assert len(chunks) <= at + 2 < 3000 // 64

    asyncio.run(run())
    assert model.chat(FRANCE, **ASK).text == "The capital of France is Paris."


def test_a_generation_cancelled_while_it_waits_never_runs(model: Any) -> None:
    chunks: list[int] = []

    async def run() -> None:
        first = model.astream(FRANCE, **ASK)
        await anext(first)
        waiting = asyncio.create_task(model.agenerate("x", max_tokens=2, progress=lambda done, total: chunks.append(done)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        assert "".join([piece.text async for piece in first]) in "The capital of France is Paris."

    with model._lock:  # both wait for it
        stopper = threading.Thread(target=asyncio.run, args=(cancelled_at_once(model, chunks),))
        stopper.start()
        stopper.join()
    settled()
    assert not chunks
    asyncio.run(run())
    settled()


async def cancelled_at_once(model: Any, chunks: list[int]) -> None:
    task = asyncio.create_task(model.agenerate("x", max_tokens=2, progress=lambda done, total: chunks.append(done)))
    await asyncio.sleep(0.01)
    task.cancel()


def test_a_conversation_with_asyncio(model: Any) -> None:
    async def run(session: Any) -> str:
        first = await session.achat(FRANCE[0]["content"], **ASK)
        async for _ in (stream := session.astream("And of Italy?", **ASK)):
            break
        await stream.aclose()
        return str(first.text)

    session = model.session()
    assert asyncio.run(run(session)) == "The capital of France is Paris."
    settled()
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
    assert session.chat("What is the capital of France?", **ASK).text


def test_threads_that_mix_every_method_get_what_they_get_alone(model: Any) -> None:
    """The thread safety that the docstring of `Model` states."""
    ids = model.tokenizer.encode("In the beginning God created")
    logits = model.logits(ids)
    expected = model.chat(FRANCE, **ASK).token_ids
    faults: list[str] = []

    def work(number: int) -> None:
        for turn in range(4):
            kind = (number + turn) % 5
            if kind == 0 and model.chat(FRANCE, **ASK).token_ids != expected:
                faults.append("chat")
            elif kind == 1 and model.session().chat(FRANCE[0]["content"], **ASK).token_ids != expected:
                faults.append("session")
            elif kind == 2 and abs(model.logits(ids) - logits).max() > 1e-3:
                faults.append("logits")
            elif kind == 3:
                stream = model.stream("Repeat: one two", max_tokens=50)
                next(stream)
                stream.close()
            else:
                model.clear_cache()
                repr(model), model.cache_info, model._repr_markdown_()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not faults and not any(thread.is_alive() for thread in threads)


def test_a_context_manager_frees_everything_and_later_calls_are_refused() -> None:
    with lily.Model.load() as model:
        session = model.session()
        assert session.chat(FRANCE[0]["content"], **ASK).text == "The capital of France is Paris."
        engine = model.engine
    assert not engine.buffers and not session._session.buffers
    for call in (lambda: model.generate("x"), lambda: session.chat("x"), lambda: model.logits([1]), session.reset, model.clear_cache, lambda: session.save("x")):
        with pytest.raises(lily.RequestError, match="closed"):
            call()
    with pytest.raises(lily.RequestError, match="closed"):
        asyncio.run(model.agenerate("x"))
    model.close()
    assert "lily-tiny" in repr(model)


def test_closing_with_an_open_stream_lets_it_finish() -> None:
    with lily.Model.load() as model:
        stream = model.stream(FRANCE, **ASK)
        first = next(stream).text
    assert first + "".join(piece.text for piece in stream) == "The capital of France is Paris."
    assert not model.engine.buffers


def test_a_notebook_shows_a_table(model: Any) -> None:
    text = model._repr_markdown_()
    assert text.startswith("**lily.Model** `lily-tiny`") and "| context | " in text and model.engine.gpu.name in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_prompt_shows_a_bar_on_a_terminal_only(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lily.progress._DELAY_SECONDS", 0)
    ids = [(7 * i) % 500 + 40 for i in range(300)]
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        model.generate(prompt_ids=ids, max_tokens=1, options=lily.ExecutionOptions(chunk_size=64))
        assert ("reading the prompt" in stream.getvalue()) == shown
        assert stream.getvalue().rpartition("\r")[2].strip() == ""  # nothing is left on the line


def test_a_bar_survives_a_program_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    bar = TerminalBar("x", "tok")
    bar(1, 2)
    bar.close()
