"""A session's state is exactly its tokens, however a generation ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lily.errors import ContextLengthError, DeviceError, RequestError
from lily.options import ExecutionOptions
from lily.sampling import SamplingParams
from lily.session import Session

GREEDY = SamplingParams()


def continued(session: Session, ids: list[int], count: int = 8) -> list[int]:
    return [s.token for s in session.generate(ids, GREEDY, count, (), ExecutionOptions())]


def assert_state_is_its_tokens(model: Any, session: Session, extra: list[int]) -> None:
    """Going on from the state gives what a fresh session gives for the same tokens, and equal state bytes within rounding."""
    prompt = [*session.tokens, *extra]
    assert session.reusable(prompt) == len(session.tokens) > 0
    fresh = Session(model.engine)
    expected = continued(fresh, prompt)
    assert continued(session, prompt) == expected


@pytest.mark.parametrize("delivered", [1, 2, 3, 5])
def test_closing_a_stream_leaves_the_prompt_and_the_delivered_tokens_but_the_last(model: Any, goldens: list[dict[str, Any]], delivered: int) -> None:
    ids = goldens[2]["prompt_ids"]
    session = Session(model.engine)
    stream = session.generate(ids, GREEDY, 50, (), ExecutionOptions())
    tokens = [next(stream).token for _ in range(delivered)]
    stream.close()
    assert session.tokens == ids + tokens[:-1]
    assert_state_is_its_tokens(model, session, tokens[-1:])


def test_a_stop_id_leaves_exactly_the_tokens_before_it(model: Any, goldens: list[dict[str, Any]]) -> None:
    golden = goldens[0]
    session = Session(model.engine)
    tokens = [s.token for s in session.generate(golden["prompt_ids"], GREEDY, 40, sorted(model.engine.config.eos_ids), ExecutionOptions())]
    assert tokens == golden["greedy_ids"]
    assert session.tokens == golden["prompt_ids"] + tokens[:-1]
    assert_state_is_its_tokens(model, session, [*tokens[-1:], *goldens[1]["prompt_ids"]])


def test_the_length_limit_leaves_exactly_the_tokens(model: Any, goldens: list[dict[str, Any]]) -> None:
    ids = goldens[2]["prompt_ids"]
    session = Session(model.engine)
    tokens = continued(session, ids, 7)
    assert len(tokens) == 7 and session.tokens == ids + tokens[:-1]
    assert_state_is_its_tokens(model, session, tokens[-1:])


def test_a_continued_prompt_is_not_computed_again(model: Any, goldens: list[dict[str, Any]]) -> None:
    ids = goldens[5]["prompt_ids"]
    session = Session(model.engine)
    continued(session, ids, 3)
    more = [*session.tokens, *goldens[0]["prompt_ids"]]
    continued(session, more, 1)
    assert session.prefilled == len(goldens[0]["prompt_ids"])


def test_a_different_prompt_starts_afresh(model: Any, goldens: list[dict[str, Any]]) -> None:
    session = Session(model.engine)
    continued(session, goldens[5]["prompt_ids"], 3)
    assert continued(session, goldens[0]["prompt_ids"], 8) == goldens[0]["greedy_ids"][:8]
    assert session.prefilled == len(goldens[0]["prompt_ids"])


def test_the_cache_grows_and_keeps_its_contents(model: Any, goldens: list[dict[str, Any]]) -> None:
    ids = goldens[5]["prompt_ids"]
    session = Session(model.engine)
    tokens = continued(session, ids, 3)
    small = session.capacity
    prompt = [*session.tokens, *tokens[-1:], *(goldens[9]["prompt_ids"] * 2)]
    assert continued(session, prompt, 4) == continued(Session(model.engine), prompt, 4)
    assert session.capacity > small


def test_sampling_with_a_seed_is_reproducible_and_the_hand_off_does_not_change_it(model: Any, goldens: list[dict[str, Any]]) -> None:
    keywords = dict(prompt_ids=goldens[1]["prompt_ids"], max_tokens=12, temperature=8.0, seed=7)
    alike = ExecutionOptions(chunk_size=512)  # without the prefix cache, whose snapshots cut chunks and so change rounding
    first = model.generate(**keywords, options=alike).token_ids
    assert model.generate(**keywords, options=alike).token_ids == first
    assert model.generate(**keywords, options=replace(alike, gpu_token_handoff=False)).token_ids == first
    assert any(model.generate(**{**keywords, "seed": s}, options=alike).token_ids != first for s in range(3))


def test_top_k_of_one_is_greedy(model: Any, goldens: list[dict[str, Any]]) -> None:
    reply = model.generate(prompt_ids=goldens[0]["prompt_ids"], max_tokens=40, temperature=1.0, top_k=1, seed=3)
    assert list(reply.token_ids) == goldens[0]["greedy_ids"]


@contextmanager
def final_norm_of(model: Any, value: float) -> Iterator[Callable[[], None]]:
    """A function that fills the final norm's weights with a value, until the end."""
    gpu, buffer, nbytes = model.engine.gpu, model.engine.buffers["p:final_norm"], model.engine.plain_bytes["final_norm"]
    saved = gpu.read(buffer, 0, nbytes)
    try:
        yield lambda: gpu.write(buffer, np.full(nbytes // 4, value, np.float32))
    finally:
        gpu.write(buffer, saved)


def test_case_37_non_finite_logits_end_in_an_error_and_the_next_request_is_clean(model: Any, goldens: list[dict[str, Any]]) -> None:
    session = Session(model.engine)
    with final_norm_of(model, np.nan) as spoil:
        spoil()
        with pytest.raises(DeviceError, match="not finite"):
            continued(session, goldens[0]["prompt_ids"], 4)
        assert session.tokens == []
    assert continued(session, goldens[0]["prompt_ids"], 9) == goldens[0]["greedy_ids"]


def test_logits_that_become_non_finite_during_decode_end_in_an_error(model: Any, goldens: list[dict[str, Any]]) -> None:
    session = Session(model.engine)
    stream = session.generate(goldens[2]["prompt_ids"], GREEDY, 40, (), ExecutionOptions())
    with final_norm_of(model, np.inf) as spoil:
        next(stream)
        spoil()
        with pytest.raises(DeviceError, match="not finite"):
            for _ in range(8):
                next(stream)
    assert session.tokens == []
    assert continued(session, goldens[0]["prompt_ids"], 9) == goldens[0]["greedy_ids"]


@pytest.mark.parametrize("ids,error", [([], RequestError), ([-1], RequestError), ([10**6], RequestError)])
def test_bad_ids_are_refused(model: Any, ids: list[int], error: type[Exception]) -> None:
    with pytest.raises(error):
        continued(Session(model.engine), ids)


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(model: Any) -> None:
    length = model.context_length
    with pytest.raises(ContextLengthError, match=str(length)):
        continued(Session(model.engine), [5] * length)
