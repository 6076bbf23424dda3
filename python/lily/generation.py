"""From a request's keywords to checked values, and from sampled ids to text."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from .config import ModelConfig
from .errors import RequestError
from .guidance import guided
from .logprobs import Place
from .options import ExecutionOptions
from .reasoning import CLOSE, OPEN, ReasoningSplitter, prompt_opens_thought
from .sampling import SamplingParams, with_defaults
from .steering import Steering, thought_end
from .stop_strings import StopMatcher, normal_stops
from .tokenizer import Tokenizer
from .tool_choice import ToolPlan
from .tool_grammar import answer_grammar

DEFAULT_MAX_TOKENS = 2048


@dataclass(frozen=True)
class Request:
    """A checked generation request, to be run once.

    tools: those offered, whose calls are looked for; prefix: how the prompt opened the answer (`ToolPlan.prefix`). several:
    whether calls may follow the first one. steering: None when the host has no say between steps.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    options: ExecutionOptions
    raw: bool
    tools: tuple[dict[str, Any], ...] = ()
    prefix: str = ""
    several: bool = True
    steering: Steering | None = None


def build_request(
    config: ModelConfig, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, raw: bool, max_tokens: int | None, stop: object,
    options: ExecutionOptions | None, sampling: Mapping[str, Any], thinking_budget: int | None = None, plan: ToolPlan = ToolPlan(),
    schema: Mapping[str, Any] | None = None, several: object = None,
) -> Request:
    """Checks every keyword; raises RequestError naming the one at fault. schema: of the answer, None for free text."""
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise RequestError(f"max_tokens must be a positive integer, got {max_tokens!r}")
    if options is not None and not isinstance(options, ExecutionOptions):
        raise RequestError(f"options must be lily.ExecutionOptions, got {type(options).__name__}")
    if thinking_budget is not None and (not isinstance(thinking_budget, int) or isinstance(thinking_budget, bool) or thinking_budget < 0):
        raise RequestError(f"thinking_budget must be a number of tokens, 0 or more, got {thinking_budget!r}")
    if several is not None and not isinstance(several, bool):
        raise RequestError(f"parallel_tool_calls must be True or False, got {several!r}")
    ids = token_ids(prompt_ids)
    thinks = not raw and prompt_opens_thought(ids, tokenizer.control.get(OPEN), tokenizer.control.get(CLOSE))
    if thinks and thinking_budget == 0:
        ids, thinks = (*ids, *thought_end(tokenizer)), False
    grammar = None
    if schema is not None or plan.guided:
        if raw and plan.tools:
            raise RequestError("needs messages, not a raw prompt", where="tools")
        # With a schema, tools that the model may use are the other way to answer.
        lark = answer_grammar(tokenizer, schema=None if plan.guided else schema, tools=plan.callable, several=several is not False and plan.several)
        grammar = guided(tokenizer, config.vocab_size, lark)
    steering = None
    if grammar is not None or thinks and thinking_budget is not None:
        steering = Steering(tokenizer, in_thought=thinks, budget=thinking_budget, grammar=grammar)
    return Request(
        ids,
        max_tokens or config.generation.max_tokens or DEFAULT_MAX_TOKENS,
        with_defaults(config.generation, config.vocab_size, sampling),
        normal_stops(stop),
        options or ExecutionOptions(),
        raw,
        tuple(plan.tools or ()),
        plan.prefix,
        several is not False,
        steering,
    )


def token_ids(ids: object) -> tuple[int, ...]:
    """A request's ids as Python integers; RequestError for anything else."""
    try:
        return tuple(_token_id(token) for token in ids)  # type: ignore[attr-defined]
    except TypeError:
        raise RequestError(f"prompt_ids must be a sequence of integers, got {type(ids).__name__}") from None


def _token_id(token: object) -> int:
    """A Python or NumPy integer."""
    if type(token) is int:  # nearly always; the check of a protocol is slow over a long prompt
        return token
    if isinstance(token, SupportsIndex) and not isinstance(token, bool):
        return operator.index(token)
    raise RequestError(f"prompt_ids must be integers, got {token!r}")


class TextAssembler:
    """Sampled ids → reasoning and answer text, piece by piece. Stop strings are looked for in the answer."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._stop = StopMatcher(request.stops)
        open_id, close_id = tokenizer.control.get(OPEN), tokenizer.control.get(CLOSE)
        self._splitter: ReasoningSplitter | None = None
        if not request.raw:
            self._splitter = ReasoningSplitter(prompt_opens_thought(request.prompt_ids, open_id, close_id), close_id=close_id)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stop.matched

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.matched is not None

    @property
    def place(self) -> Place:
        """Where the last token belongs."""
        return "thought" if self._splitter is not None and not self._splitter.in_answer else "answer"

    def push(self, token: int) -> tuple[str, str]:
        """(reasoning, text) that this token adds and that may be shown."""
        piece = self._decoder.push(token)
        if self._splitter is None:
            return "", self._stop.push(piece)
        split = self._splitter.push(piece, token)
        return split.reasoning, self._stop.push(split.text)

    def flush(self) -> tuple[str, str]:
        """What was held back, at the end; nothing after a stop string."""
        if self.stopped:
            return "", ""
        piece = self._decoder.flush()
        reasoning, text = "", piece
        if self._splitter is not None:
            first, rest = self._splitter.push(piece), self._splitter.flush()
            reasoning, text = first.reasoning + rest.reasoning, first.text + rest.text
        shown = self._stop.push(text)
        return reasoning, shown + ("" if self.stopped else self._stop.flush())
