"""The prefix cache: a tree that knows no device, and the cases of CASES.md on lily-tiny."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import lily
from lily import _native
from lily.errors import DeviceError
from lily.gpu import Gpu
from lily.options import ExecutionOptions
from lily.prefix_cache import Block, PrefixCache, Segment
from lily.sampling import SamplingParams
from lily.session import Session
from lily.turns import turn_marks

STATE, ROW = 1000, 10


class Holder:
    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.rows: list[int] = list(tokens)  # what a KV row holds: its token
        self.state: tuple[int, ...] = tuple(tokens)


class FakeStore:
    """Copies of tokens stand for copies of memory. `fail`: the next so many calls raise."""

    state_bytes, row_bytes = STATE, ROW

    def __init__(self) -> None:
        self.fail = 0

    def _check(self) -> None:
        if self.fail:
            self.fail -= 1
            raise DeviceError("injected")

    def capture(self, holder: Holder, first: int) -> tuple[Block | None, Any]:
        self._check()
        rows = holder.tokens[first:]
        return (Block(len(rows), ROW * len(rows), rows) if rows else None), tuple(holder.tokens)

    def merge(self, segments: Sequence[Segment]) -> Block:
        self._check()
        rows = [t for s in segments for t in s.block.data[s.first : s.first + s.rows]]
        return Block(len(rows), ROW * len(rows), rows)

    def restore(self, holder: Holder, segments: Sequence[Segment], skip: int, state: Any) -> None:
        self._check()
        rows = [t for s in segments for t in s.block.data[s.first : s.first + s.rows]]
        holder.rows[:] = holder.rows[:skip] + rows[skip:]
        holder.state = state


def new_cache(limit: int = 10**9) -> PrefixCache:
    return PrefixCache(FakeStore(), limit)


def assert_consistent(cache: PrefixCache) -> None:
    blocks, states = {}, 0
    for node in cache.nodes():
        assert node.length == (node.parent.length if node.parent else 0) + len(node.edge)
        assert [t for s in node.segments for t in s.block.data[s.first : s.first + s.rows]] == node.edge
        assert node.state is not None or node.children
        states += node.state is not None
        for s in node.segments:
            blocks.setdefault(id(s.block), [s.block, 0])[1] += 1
    assert all(block.users == users for block, users in blocks.values())
    assert cache.nbytes == states * STATE + sum(b.nbytes for b, _ in blocks.values())
    assert cache.info().snapshots == states


def test_a_chain_of_snapshots_stores_every_row_once() -> None:
    cache = new_cache()
    for n in (4, 9, 20):
        cache.insert(Holder(range(n)))
    assert cache.nbytes == 3 * STATE + 20 * ROW
    assert_consistent(cache)


def test_branches_share_the_rows_of_their_head_and_resume_before_the_divergence() -> None:
    cache = new_cache()
    cache.insert(Holder([1, 1, 1, 1, 2, 2, 2, 2]))
    cache.insert(Holder([1, 1, 1, 1, 3, 2, 2, 2, 2]))
    assert cache.nbytes == 2 * STATE + 13 * ROW
    assert cache.match([1, 1, 1, 1, 4, 4]) == (None, 4)  # no snapshot at the fork yet
    cache.insert(Holder([1, 1, 1, 1]))
    node, known = cache.match([1, 1, 1, 1, 4, 4])
    assert node is not None and (node.length, known) == (4, 4)
    assert_consistent(cache)


def test_an_exact_repeat_resumes_before_its_last_token() -> None:
    cache = new_cache()
    for n in (5, 8):
        cache.insert(Holder(range(n)))
    node, known = cache.match(range(8))
    assert node is not None and (node.length, known) == (5, 8)


@pytest.mark.parametrize("seed", range(8))
def test_random_use_keeps_the_bound_the_counts_and_the_contents(seed: int) -> None:
    rng = random.Random(seed)
    cache = new_cache(rng.choice([3000, 6000, 20000]))
    store: Any = cache._store
    for _ in range(400):
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        holder = Holder([rng.randrange(2) for _ in range(rng.randrange(0, 20))])
        node, known = cache.match(ids)
        store.fail = rng.random() < 0.05
        if node is not None:
            assert known >= node.length < len(ids)
            shared = next((i for i, (a, b) in enumerate(zip(holder.tokens, ids)) if a != b), min(len(holder.tokens), len(ids)))
            if cache.resume(holder, node, min(shared, node.length)):
                assert holder.rows[: node.length] == ids[: node.length] and holder.state == tuple(ids[: node.length])
        store.fail = rng.random() < 0.05
        taken = cache.insert(Holder(ids))
        assert taken is None or taken.length == len(ids)
        store.fail = 0
        assert cache.nbytes <= cache.limit
        assert_consistent(cache)
    cache.clear()
    assert cache.nbytes == 0 and not list(cache.nodes())


def test_a_sequence_that_grows_by_single_tokens_does_not_hold_a_block_for_each() -> None:
    cache = new_cache(4 * STATE + 1000 * ROW)
    for n in range(1, 200):
        assert cache.insert(Holder(range(n))) is not None
        assert cache.nbytes <= cache.limit
    assert_consistent(cache)
    assert sum(len(node.segments) for node in cache.nodes()) < 24


def test_the_least_recently_used_snapshot_goes_first() -> None:
    cache = new_cache(3 * STATE + 12 * ROW)
    heads = [Holder([i] * 4) for i in range(4)]
    for holder in heads[:3]:
        cache.insert(holder)
    first, _ = cache.match([0] * 5)
    assert first is not None and cache.resume(Holder(), first, 0)
    cache.insert(heads[3])
    assert [cache.match([i] * 5)[0] is not None for i in range(4)] == [True, False, True, True]
    assert cache.info().evictions == 1


def test_a_failed_copy_drops_the_snapshot_only() -> None:
    cache = new_cache()
    cache.insert(Holder(range(4)))
    store: Any = cache._store
    store.fail = 1
    assert cache.insert(Holder(range(8))) is None
    node, _ = cache.match(range(9))
    assert node is not None and node.length == 4
    store.fail = 1
    assert not cache.resume(Holder(), node, 0)
    assert cache.match(range(9)) == (None, 0) and cache.info().dropped == 2
    assert_consistent(cache)


# ---- on the device ----

TEXT = "The quick brown fox jumps over the lazy dog, then counts 17 stones by the river and asks who put them there. "


@pytest.fixture(scope="module")
def model() -> Any:
    """A model of its own: what other tests have cached must not count here."""
    return lily.Model.load("lily-tiny", device=os.environ.get("LILY_TEST_DEVICE"))


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same without a cache."""
    return lily.Model.load("lily-tiny", device=os.environ.get("LILY_TEST_DEVICE"), cache_bytes=0)


def text_ids(model: Any, count: int, seed: int = 0) -> list[int]:
    """`count` ids of varied text."""
    words = TEXT.split()
    rng = random.Random(seed)
    return list(model.tokenizer.encode(" ".join(rng.choice(words) for _ in range(count))))[:count]


def chat_prompt(model: Any, tokens: int, seed: int = 0, **keywords: Any) -> list[int]:
    """A conversation prompt of about `tokens` ids."""
    text = model.tokenizer.decode(text_ids(model, tokens, seed))
    return list(model.template.encode([{"role": "user", "content": text}], **keywords))


TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city",
                                           "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


def greedy(model: Any, ids: Sequence[int], count: int = 16) -> Any:
    return model.generate(prompt_ids=ids, max_tokens=count, temperature=0)


def uncached(model: Any, ids: Sequence[int], count: int = 16) -> list[int]:
    return [s.token for s in Session(model.engine).generate(ids, SamplingParams(), count, sorted(model.engine.config.eos_ids), ExecutionOptions())]


def test_case_01_an_exact_repeat_hits_and_gives_the_same_tokens(model: Any) -> None:
    ids = chat_prompt(model, 3000, seed=1)
    first, second = greedy(model, ids), greedy(model, ids)
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens >= 0.95 * len(ids)
    assert second.token_ids == first.token_ids
    assert second.usage.prefill_seconds <= 0.1 * first.usage.prefill_seconds


def test_case_01_plain_text_repeats_too(model: Any) -> None:
    ids = text_ids(model, 1200, seed=2)
    first, second = greedy(model, ids), greedy(model, ids)
    assert second.usage.cached_tokens == len(ids) - 1
    assert second.token_ids == first.token_ids
    assert second.usage.prefill_seconds <= 0.1 * first.usage.prefill_seconds


@pytest.mark.slow
def test_case_01_twelve_thousand_tokens_twice(model: Any) -> None:
    ids = chat_prompt(model, 12_000, seed=3)
    first, second = greedy(model, ids), greedy(model, ids)
    assert second.usage.cached_tokens >= 0.99 * len(ids) and second.token_ids == first.token_ids


def test_case_02_a_changed_tail_reuses_the_head(model: Any) -> None:
    head = text_ids(model, 700, seed=4)
    reused = []
    for i in range(2):
        ids = head + text_ids(model, 40, seed=100 + i)
        reply = greedy(model, ids, 6)
        reused.append(reply.usage.cached_tokens)
        assert list(reply.token_ids) == uncached(model, ids, 6)
    assert reused == [0, 512]


def test_case_02_the_third_prompt_resumes_where_the_first_two_parted(model: Any) -> None:
    head = text_ids(model, 400, seed=15)
    reused = [greedy(model, head + text_ids(model, 500, seed=200 + i), 2).usage.cached_tokens for i in range(3)]
    assert reused == [0, 0, len(head)]


def test_case_02_prompts_with_a_common_system_message_and_tools(model: Any) -> None:
    system = {"role": "system", "content": model.tokenizer.decode(text_ids(model, 600, seed=5))}
    asked = [model.template.encode([system, {"role": "user", "content": q}], tools=TOOLS) for q in ("Who are you?", "What is 24 + 31?")]
    greedy(model, asked[0], 3)
    marks = turn_marks(asked[1], model.tokenizer.control)
    assert greedy(model, asked[1], 3).usage.cached_tokens == marks.message > 600


def test_case_03_reuse_ends_at_a_snapshot_before_the_divergence(model: Any) -> None:
    a, b, c = (text_ids(model, 300, seed=s) for s in (6, 7, 8))
    greedy(model, [*a, *b], 4)
    changed = [*a, *c[:5], *b]
    reply = greedy(model, changed, 8)
    assert reply.usage.cached_tokens <= len(a)
    assert list(reply.token_ids) == uncached(model, changed, 8)


@pytest.mark.parametrize("keywords", [{}, {"tools": TOOLS}, {"enable_thinking": False}], ids=["plain", "tools", "no-thinking"])
def test_case_05_eighty_greedy_tokens_after_a_hit_equal_the_uncached_ones(model: Any, keywords: dict[str, Any]) -> None:
    ids = model.template.encode([{"role": "user", "content": "Tell me about the river. " + TEXT * 8}], **keywords)
    expected = uncached(model, ids, 80)
    greedy(model, ids, 2)
    reply = greedy(model, ids, 80)
    assert reply.usage.cached_tokens > 0.9 * len(ids)
    assert list(reply.token_ids) == expected


def test_case_06_cached_tokens_are_those_really_skipped(model: Any) -> None:
    ids = model.template.encode([{"role": "user", "content": TEXT * 20}], tools=TOOLS)
    for _ in range(2):
        seen: list[tuple[int, int]] = []
        usage = model.generate(prompt_ids=ids, max_tokens=2, progress=lambda done, total: seen.append((done, total))).usage
        assert seen[-1] == (len(ids) - usage.cached_tokens,) * 2
    assert usage.cached_tokens > 0.95 * len(ids)


@pytest.mark.slow
def test_case_06_with_9800_tokens_and_tools(model: Any) -> None:
    ids = chat_prompt(model, 9_800, seed=9, tools=TOOLS)
    greedy(model, ids, 2)
    seen: list[int] = []
    usage = model.generate(prompt_ids=ids, max_tokens=2, progress=lambda done, total: seen.append(total)).usage
    assert usage.cached_tokens == len(ids) - seen[-1] > 9_700


def test_case_08_a_request_alone_equals_it_after_others_and_after_a_cancelled_one(model: Any, plain: Any) -> None:
    a, b = chat_prompt(model, 200, seed=10), chat_prompt(model, 150, seed=11)
    alone = greedy(plain, b).token_ids
    greedy(model, a)
    assert greedy(model, b).token_ids == alone
    for steps in (1, 2, 5):
        stream = model.stream(prompt_ids=chat_prompt(model, 200, seed=12 + steps), max_tokens=40)
        for _ in range(steps):
            next(stream)
        stream.close()
        assert greedy(model, b).token_ids == alone
    model.clear_cache()
    with pytest.raises(InterruptedError):
        model.generate(prompt_ids=a, max_tokens=4, progress=_interrupt)
    assert greedy(model, b).token_ids == alone
    assert greedy(model, a).token_ids == greedy(plain, a).token_ids


def _interrupt(done: int, total: int) -> None:
    raise InterruptedError


def test_case_08_random_cuts_leave_a_state_that_is_exactly_its_tokens(model: Any) -> None:
    rng = random.Random(8)
    session = Session(model.engine, model.engine.cache)
    ids = chat_prompt(model, 60, seed=13)
    for round in range(12):
        stream = session.generate(ids, SamplingParams(), rng.randrange(1, 12), (), ExecutionOptions())
        tokens = []
        for _ in range(rng.randrange(1, 12)):
            if (item := next(stream, None)) is None:
                break
            tokens.append(item.token)
        stream.close()
        assert session.tokens == [*ids, *tokens[:-1]]
        ids = [*session.tokens, *text_ids(model, rng.randrange(1, 12), seed=round)]
        if round % 3 == 2:
            state, fresh = session.state_arrays(), Session(model.engine)
            list(fresh.generate([*session.tokens, 5], SamplingParams(), 1, (), ExecutionOptions()))
            list(session.generate([*session.tokens, 5], SamplingParams(), 1, (), ExecutionOptions()))
            state = session.state_arrays()
            for name, expected in fresh.state_arrays().items():
                error = np.sqrt(np.mean((state[name] - expected) ** 2) / np.mean(expected**2))
                assert error < 3e-2, (name, error)
            ids = [*session.tokens, *text_ids(model, 3, seed=50 + round)]


def test_case_08_a_stop_string_leaves_a_state_that_is_exactly_its_tokens(model: Any) -> None:
    session = model.session()
    reply = session.chat("What is the capital of France?", temperature=0, stop=["Par"])
    assert reply.text == "The capital of France is "
    prompt = model.template.encode([{"role": "user", "content": "What is the capital of France?"}])
    assert session.tokens == (*prompt, *reply.token_ids[:-1])


def test_case_09_the_cache_is_keyed_by_tokens_alone(model: Any) -> None:
    ids = chat_prompt(model, 100, seed=14)
    greedy(model, tuple(ids), 2)
    assert greedy(model, np.asarray(ids, np.int64), 2).usage.cached_tokens > 0.9 * len(ids)
    other = [*ids[:-40], ids[-40] ^ 1, *ids[-39:]]
    assert greedy(model, other, 2).usage.cached_tokens <= len(ids) - 40
    assert model.session().chat("Hi", max_tokens=2).usage.cached_tokens <= 1 + len(model.template.encode([{"role": "user", "content": "Hi"}]))


QUESTIONS = ["Who are you?", "What is the capital of France?", "What is 24 + 31?", "Tell me a short story about a fox.", "And its name?",
             "What is 5 + 9?", "What is the capital of Italy?", "Say hello.", "Who wrote it?", "Goodbye!"]


@pytest.mark.parametrize("keywords", [{}, {"enable_thinking": False}, {"tools": TOOLS}], ids=["thinking", "no-thinking", "tools"])
def test_case_11_every_later_turn_reuses_the_common_prefix(model: Any, keywords: dict[str, Any]) -> None:
    model.clear_cache()
    session = model.session()
    held: list[int] = []
    for question in QUESTIONS:
        added = [*session.messages, {"role": "user", "content": question}]
        prompt = model.template.encode(added, **keywords)
        common = next((i for i, (x, y) in enumerate(zip(held, prompt)) if x != y), min(len(held), len(prompt)))
        reply = session.chat(question, temperature=0, max_tokens=24, **keywords)
        if held:
            assert reply.usage.cached_tokens >= 0.95 * common, (question, reply.usage, common)
        held = [*prompt, *reply.token_ids]


def test_case_11_another_session_and_the_stateless_call_reuse_it_too(model: Any) -> None:
    messages = [{"role": "user", "content": TEXT * 2 + "Who are you?"}]
    first = model.chat(messages, temperature=0, max_tokens=12)
    more = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "What is 5 + 9?"}]
    boundary = turn_marks(model.template.encode(messages), model.tokenizer.control).turn
    assert model.chat(more, temperature=0, max_tokens=4).usage.cached_tokens >= boundary
    session = model.session()
    session.messages = list(more[:2])
    assert session.chat("What is 7 + 2?", max_tokens=2).usage.cached_tokens >= boundary


def test_case_38_what_does_not_fit_is_refused_with_the_numbers_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Gpu.capabilities.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Gpu, "capabilities", property(lambda self: dataclasses.replace(real(self), working_set=96 << 20)))
    before = _native.buffers_created()
    assert Gpu().capabilities  # a device that offers tensor operations is tried on small tiles first (P6)
    tried, before = _native.buffers_created() - before, _native.buffers_created()
    with pytest.raises(DeviceError, match=r"131072 tokens needs .* GiB \(weights .*state .*scratch .*offers 0\.09 GiB"):
        lily.Model.load("lily-tiny", context=131072)
    with pytest.raises(DeviceError, match="prefix cache 0.09"):
        lily.Model.load("lily-tiny", cache_bytes=96 << 20)
    assert _native.buffers_created() == before + 2 * tried
    model = lily.Model.load("lily-tiny")  # the default is what fits
    assert 256 < model.context_length < 131072
    assert greedy(model, chat_prompt(model, 100), 3).usage.completion_tokens == 3
    with pytest.raises(lily.ContextLengthError, match=str(model.context_length)):
        greedy(model, [5] * model.context_length)
    assert lily.Model.load("lily-tiny", context=512).context_length == 512


def test_snapshots_give_way_to_a_session_that_grows(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.clear_cache()
    greedy(model, chat_prompt(model, 300, seed=20), 2)
    engine = model.engine
    held = engine.cache.nbytes
    session = Session(engine)
    plan = engine._memory_plan(engine.memory_bytes()["weights"], 512)
    limit = plan.needed(512, held - 1, engine._session_bytes(session))
    monkeypatch.setattr(engine, "_memory_plan", lambda *sizes: dataclasses.replace(plan, limit=limit))
    session.ensure_capacity(400)
    assert 0 < engine.cache.nbytes < held
    with pytest.raises(DeviceError, match="other sessions"):
        session.ensure_capacity(1_000_000)


def test_bytes_stay_below_the_limit_with_many_conversations() -> None:
    model = lily.Model.load("lily-tiny", device=os.environ.get("LILY_TEST_DEVICE"), cache_bytes=12 << 20)
    for i in range(12):
        greedy(model, chat_prompt(model, 100, seed=30 + i), 3)
        assert model.cache_info.nbytes <= 12 << 20
    assert model.cache_info.evictions > 0 and model.cache_info.snapshots > 2
    assert greedy(model, chat_prompt(model, 100, seed=41), 3).usage.cached_tokens > 90


def test_merged_rows_are_the_rows(model: Any) -> None:
    store: Any = model.engine.cache._store
    source, target = Session(model.engine), Session(model.engine)
    ids = text_ids(model, 60, seed=70)
    list(source.generate(ids, SamplingParams(), 1, (), ExecutionOptions()))
    target.ensure_capacity(60)
    views = []
    for first in (0, 10, 35):
        source.tokens = ids[: first + 25]
        block, state = store.capture(source, first)
        views.append(Segment(block, 0, 10 if first == 0 else 25))
    store.restore(target, [Segment(store.merge(views), 0, 60)], 0, state)
    target.adopt(ids)
    source.tokens = ids
    for name, rows in source.state_arrays().items():
        np.testing.assert_array_equal(target.state_arrays()[name], rows)


def test_failing_copies_cost_the_snapshot_and_nothing_else(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.clear_cache()
    ids = chat_prompt(model, 120, seed=60)
    store: Any = model.engine.cache._store
    dropped = model.cache_info.dropped

    def fail(*arguments: Any) -> Any:
        raise DeviceError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(store, "capture", fail)
        expected = greedy(model, ids).token_ids
    assert model.cache_info.snapshots == 0 and model.cache_info.dropped > dropped
    assert greedy(model, ids).token_ids == expected
    model._session.reset()
    with monkeypatch.context() as patch:
        patch.setattr(store, "restore", fail)
        reply = greedy(model, ids)
    assert reply.token_ids == expected and reply.usage.cached_tokens == 0
    assert greedy(model, ids).token_ids == expected


def test_a_failed_request_leaves_no_snapshot_behind(model: Any) -> None:
    model.clear_cache()
    gpu, norm = model.engine.gpu, model.engine.buffers["p:final_norm"]
    saved = gpu.read(norm)
    try:
        gpu.write(norm, np.full(norm.nbytes // 4, np.nan, np.float32))
        with pytest.raises(DeviceError, match="not finite"):
            greedy(model, chat_prompt(model, 60, seed=61), 4)
    finally:
        gpu.write(norm, saved)
    assert model.cache_info.snapshots == 0


def test_options_of_their_own_neither_use_nor_fill_the_cache(model: Any) -> None:
    ids = chat_prompt(model, 80, seed=62)
    model.clear_cache()
    for _ in range(2):
        model._session.reset()
        reply = model.generate(prompt_ids=ids, max_tokens=2, options=ExecutionOptions(chunk_size=16))
        assert reply.usage.cached_tokens == 0
    assert model.cache_info.snapshots == 0


def test_no_cache_when_it_is_off(plain: Any) -> None:
    ids = chat_prompt(plain, 80, seed=63)
    assert [greedy(plain, ids, 2).usage.cached_tokens for _ in range(2)] == [0, 0]
    assert plain.cache_info.nbytes == plain.cache_info.snapshots == 0


@pytest.mark.parametrize("keywords,names", [({"cache_bytes": -1}, "cache_bytes"), ({"cache_bytes": "1G"}, "cache_bytes"), ({"context": 0}, "context"),
                                            ({"context": 1 << 20}, "131072")])
def test_bad_keywords_of_load_are_refused(keywords: dict[str, Any], names: str) -> None:
    with pytest.raises(lily.RequestError, match=names):
        lily.Model.load("lily-tiny", **keywords)


def test_case_11_a_tool_call_and_its_result_reuse_the_whole_turn(model: Any, goldens: list[dict[str, Any]]) -> None:
    """The template keeps the turn of a call as it was, so everything up to the call's end is reused."""
    golden = next(g for g in goldens if "tools" in g["template_kwargs"])
    keywords = {**golden["template_kwargs"], "temperature": 0, "max_tokens": 40}
    session = model.session()
    reply = session.chat(golden["messages"][-1]["content"], **keywords)
    assert reply.finish_reason == "tool_calls" and session.messages[-1]["tool_calls"]
    held = session.tokens
    answer = session.chat([{"role": "tool", "content": "Sunny, 21 degrees", "tool_call_id": reply.tool_calls[0]["id"]}], **keywords)
    assert answer.usage.cached_tokens == len(held)
