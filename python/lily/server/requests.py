"""A checked request in the form that all protocols share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..messages import normal_messages
from ..reply import Piece
from ..tool_choice import ToolPlan
from .backend import Backend
from .errors import ApiError
from .fields import Fields


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate and how to answer.

    prompt: keywords and positional prompt of `Model.stream` come from `open`. A request has messages, or a raw prompt.
    """

    stream: bool
    keywords: dict[str, Any]
    messages: Any = None
    raw: str | list[int] | None = None
    plan: ToolPlan = field(default_factory=ToolPlan)
    enable_thinking: bool | None = None
    parallel_calls: bool = True
    include_usage: bool = False

    def open(self, model: Backend, progress: Callable[[int, int], None]) -> Iterator[Piece]:
        """Renders, checks and begins the generation without running it. Slow for long prompts; raises RequestError and others."""
        keywords = {**self.keywords, "progress": progress}
        if isinstance(self.raw, str):
            return model.stream(self.raw, raw=True, **keywords)
        if self.raw is not None:
            return model.stream(prompt_ids=self.raw, raw=True, **keywords)
        messages = normal_messages(self.messages)
        if self.plan.prefix:
            ids = self.plan.prompt_ids(model.template, model.tokenizer, messages, enable_thinking=self.enable_thinking)
            return model.stream(prompt_ids=ids, **keywords)
        if self.enable_thinking is not None:
            keywords["enable_thinking"] = self.enable_thinking
        return model.stream(messages, tools=self.plan.tools, **keywords)


def check_model(fields: Fields, name: str) -> None:
    """Raises ApiError 404 for another model than the one that is served; leaving it out is fine."""
    asked = fields.text("model")
    if asked is not None and asked != name:
        raise ApiError(404, f"The model {asked!r} does not exist; this server has {name!r}.", param="model", code="model_not_found")
