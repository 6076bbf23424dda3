"""Keywords of a generation on the embedded model: penalties, bias, logprobs, stops, the thinking budget, and what the state holds after each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lily import ExecutionOptions
from lily.config import GenerationDefaults
from lily.errors import RequestError
from lily.sampling import with_defaults
from lily.session import Session
from tests.test_session import assert_state_is_its_tokens

FRANCE = "What is the capital of France?"
PLAIN: dict[str, Any] = {"temperature": 0, "enable_thinking": False}
DEFAULTS = GenerationDefaults(temperature=0.7, top_k=20, presence_penalty=1.5, frequency_penalty=0.5)


def run_on(model: Any, session: Session, prompt: Any, **keywords: Any) -> tuple[list[int], list[Any]]:
    """(prompt's ids, pieces) of a generation on a session of the test's own."""
    request, _ = model._request(prompt, **keywords)
    return list(request.prompt_ids), list(model._stream(session, request, None))


# -- sampling ------------------------------------------------------------------------------------------------------------
def test_case_48_an_explicit_zero_is_honoured() -> None:
    left = with_defaults(DEFAULTS, 100, {"presence_penalty": None, "temperature": None})
    assert (left.presence_penalty, left.frequency_penalty, left.temperature, left.top_k) == (1.5, 0.5, 0.7, 20)
    zero = with_defaults(DEFAULTS, 100, {"presence_penalty": 0, "frequency_penalty": 0.0, "temperature": 0, "top_k": 0})
    assert (zero.presence_penalty, zero.frequency_penalty, zero.temperature, zero.top_k) == (0, 0, 0, 0)
    assert zero.greedy and not zero.adjusts and left.adjusts


@pytest.mark.parametrize("wrong", [
    {"repetition_penalty": 0}, {"repetition_penalty": "1"}, {"presence_penalty": float("nan")}, {"frequency_penalty": 101}, {"logit_bias": [1]},
    {"logit_bias": {"x": 1}}, {"logit_bias": {100: 1}}, {"logit_bias": {-1: 1}}, {"logit_bias": {5: 101}}, {"logit_bias": {5: True}}, {"logprobs": 3},
    {"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}, {"top_k": -1}, {"top_p": 0},
])
def test_wrong_sampling_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(reversed(wrong))):
        with_defaults(GenerationDefaults(), 100, wrong)


def test_case_48_penalties_count_generated_tokens_only(model: Any, goldens: list[dict[str, Any]]) -> None:
    """What a numpy model of the penalties chooses from teacher-forced logits, whether steps run ahead or not."""
    ids, settings = goldens[4]["prompt_ids"], {"repetition_penalty": 1.4, "presence_penalty": 0.8, "frequency_penalty": 20.0}
    tokens = model.generate(prompt_ids=ids, max_tokens=20, temperature=0, **settings).token_ids
    assert tokens[0] == goldens[4]["greedy_ids"][0]  # also found in the prompt, which does not count
    assert model.generate(prompt_ids=ids, max_tokens=20, temperature=0, **settings, options=ExecutionOptions(gpu_token_handoff=False)).token_ids == tokens
    logits = model.logits([*ids, *tokens[:-1]])[len(ids) - 1 :]
    for step, token in enumerate(tokens):
        counts = np.bincount(tokens[:step], minlength=logits.shape[1])
        x = logits[step]
        x = np.where(counts > 0, np.where(x > 0, x / 1.4, x * 1.4) - 0.8 - 20.0 * counts, x)
        assert x[token] > x.max() - 0.05
    assert tokens != model.generate(prompt_ids=ids, max_tokens=20, temperature=0).token_ids


def test_a_request_without_penalties_follows_one_with_them_untouched(model: Any, goldens: list[dict[str, Any]]) -> None:
    session = Session(model.engine)
    for settings in ({"presence_penalty": 3.0}, {"logit_bias": {7: 100}}, {}):
        tokens = [t for piece in run_on(model, session, None, prompt_ids=goldens[0]["prompt_ids"], max_tokens=9, temperature=0, **settings)[1] for t in piece.token_ids]
    assert tokens == goldens[0]["greedy_ids"]


def test_logit_bias_forces_and_forbids(model: Any, goldens: list[dict[str, Any]]) -> None:
    ids, greedy = goldens[0]["prompt_ids"], goldens[0]["greedy_ids"]
    assert model.generate(prompt_ids=ids, max_tokens=3, temperature=0, logit_bias={"77": 100}).token_ids == (77, 77, 77)
    assert greedy[1] not in model.generate(prompt_ids=ids, max_tokens=6, temperature=0.5, seed=1, logit_bias={greedy[1]: -100}).token_ids


@pytest.mark.parametrize("temperature", [0, 8.0])
def test_logprobs_are_those_after_temperature(model: Any, goldens: list[dict[str, Any]], temperature: float) -> None:
    ids = goldens[1]["prompt_ids"]
    reply = model.generate(prompt_ids=ids, max_tokens=6, temperature=temperature, seed=4, top_k=3, logprobs=True, top_logprobs=5)
    assert [entry.token_id for entry in reply.logprobs] == list(reply.token_ids)
    x = model.logits([*ids, *reply.token_ids[:-1]])[len(ids) - 1 :].astype(np.float64) / (temperature or 1)
    expected = x - x.max(1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(1, keepdims=True))
    for row, entry in zip(expected, reply.logprobs, strict=True):
        np.testing.assert_allclose(entry.logprob, row[entry.token_id], atol=0.1)
        found, wanted = np.array([top.logprob for top in entry.top]), np.sort(row)[::-1][:5]
        np.testing.assert_allclose(found, wanted, atol=0.1) if temperature else np.testing.assert_allclose(np.exp(found), np.exp(wanted), atol=0.02)
        assert entry.bytes == model.tokenizer.token_bytes(entry.token_id, skip_special=False)
    if not temperature:
        assert all(entry.top[0].token_id == entry.token_id for entry in reply.logprobs)
        assert list(reply.token_ids) == goldens[1]["greedy_ids"][:6]


def test_logprobs_say_where_a_token_belongs(model: Any) -> None:
    reply = model.generate(FRANCE, temperature=0, logprobs=True, max_tokens=30)
    answer = b"".join(entry.bytes for entry in reply.logprobs if entry.place == "answer").decode()
    assert reply.reasoning and answer == reply.text and [entry.place for entry in reply.logprobs][-1] == "stop"
    assert model.generate(FRANCE, temperature=0, max_tokens=30).logprobs == ()


# -- stops ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stops", [["l of Fr"], ["zzz", "Paris", "of France is P"], "capital"])
def test_stop_strings_across_tokens_never_leak_and_leave_the_state_exact(model: Any, stops: Any) -> None:
    whole = model.generate(FRANCE, **PLAIN).text
    session = Session(model.engine)
    ids, pieces = run_on(model, session, FRANCE, stop=stops, **PLAIN)
    at = min((whole.find(s) + len(s), whole.find(s)) for s in ([stops] if isinstance(stops, str) else stops) if s in whole)[1]
    assert "".join(piece.text for piece in pieces) == whole[:at]
    assert pieces[-1].finish_reason == "stop" and pieces[-1].stop_string is not None
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert session.tokens == ids + tokens[:-1]
    assert_state_is_its_tokens(model, session, tokens[-1:])


# -- thinking ------------------------------------------------------------------------------------------------------------
def test_case_20_a_run_cut_inside_the_thought_is_all_reasoning(model: Any) -> None:
    reply = model.generate(FRANCE, temperature=0, max_tokens=5)
    assert (reply.text, reply.finish_reason) == ("", "length") and reply.reasoning
    pieces = list(model.stream(FRANCE, temperature=0, max_tokens=5))
    assert "".join(piece.reasoning for piece in pieces) == reply.reasoning


def test_case_20_the_stream_equals_the_whole_and_a_users_tag_is_text(model: Any) -> None:
    for prompt in (FRANCE, "<think> Who are you?"):
        whole = model.generate(prompt, temperature=0, max_tokens=30)
        pieces = list(model.stream(prompt, temperature=0, max_tokens=30))
        assert ("".join(p.text for p in pieces), "".join(p.reasoning for p in pieces)) == (whole.text, whole.reasoning)
    assert model.tokenizer.control["<think>"] not in model._request("<think> x", enable_thinking=False)[0].prompt_ids[:8]


@pytest.mark.parametrize(("budget", "settings"), [(1, {}), (9, {}), (5, {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.3, "logprobs": True})],
                         ids=["one", "nine", "penalised"])
def test_a_spent_budget_closes_the_thought(model: Any, budget: int, settings: dict[str, Any]) -> None:
    settings = {"temperature": 0, "max_tokens": 30, **settings}
    free = model.generate(FRANCE, **{**settings, "max_tokens": budget})
    session = Session(model.engine)
    ids, pieces = run_on(model, session, FRANCE, thinking_budget=budget, **settings)
    tokens = [token for piece in pieces for token in piece.token_ids]
    close = model.tokenizer.encode("\n</think>\n\n", control=True)
    assert tokens[:budget] == list(free.token_ids) and tokens[budget : budget + len(close)] == close
    assert "".join(p.reasoning for p in pieces) == model.tokenizer.decode(tokens[:budget])
    assert "".join(p.text for p in pieces)
    assert pieces[-1].usage.completion_tokens == len(tokens) and session.tokens == ids + tokens[:-1]
    stepwise = model.generate(FRANCE, thinking_budget=budget, options=ExecutionOptions(gpu_token_handoff=False), **settings)
    assert list(stepwise.token_ids) == tokens
    if "logprobs" in settings:
        assert [entry.logprob for piece in pieces for entry in piece.logprobs][budget : budget + len(close)] == [0.0] * len(close)
    assert_state_is_its_tokens(model, session, tokens[-1:])


def test_budgets_that_change_nothing_or_leave_no_thought(model: Any) -> None:
    free = model.generate(FRANCE, temperature=0, max_tokens=30)
    assert model.generate(FRANCE, temperature=0, max_tokens=60, thinking_budget=500).token_ids == free.token_ids
    none = model.generate(FRANCE, temperature=0, max_tokens=60, thinking_budget=0)
    assert none.reasoning == "" and none.text
    assert model.generate(FRANCE, **PLAIN, thinking_budget=3).text == model.generate(FRANCE, **PLAIN).text


def test_max_tokens_inside_the_closing_of_a_thought(model: Any) -> None:
    session = Session(model.engine)
    ids, pieces = run_on(model, session, FRANCE, temperature=0, thinking_budget=4, max_tokens=6)
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert len(tokens) == 6 and pieces[-1].finish_reason == "length" and "".join(p.text for p in pieces) == ""
    assert session.tokens == (ids + tokens)[: len(session.tokens)] and len(session.tokens) >= len(ids) + 3
    assert_state_is_its_tokens(model, session, (ids + tokens)[len(session.tokens) :])


@pytest.mark.parametrize("wrong", [{"thinking_budget": -1}, {"thinking_budget": 1.5}, {"thinking_budget": True}, {"no_such": 1}, {"parallel_tool_calls": 1}])
def test_wrong_keywords(model: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        model.stream(FRANCE, **wrong)
