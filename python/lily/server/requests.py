"""A checked request in the form that all protocols share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..messages import normal_messages
from ..reply import Piece
from .backend import Backend
from .errors import ApiError
from .fields import Fields


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate and how to answer.

    keywords: of `Model.stream`, beside the prompt's. A request has messages, or a raw prompt.
    """

    stream: bool
    keywords: dict[str, Any]
    messages: Any = None
    raw: str | list[int] | None = None
    include_usage: bool = False

    def open(self, model: Backend, progress: Callable[[int, int], None]) -> Iterator[Piece]:
        """Renders, checks and begins the generation without running it. Slow for long prompts; raises RequestError and others."""
        keywords = {**self.keywords, "progress": progress}
        if isinstance(self.raw, str):
            return model.stream(self.raw, raw=True, **keywords)
        if self.raw is not None:
            return model.stream(prompt_ids=self.raw, raw=True, **keywords)
        return model.stream(normal_messages(self.messages), **keywords)


def check_model(fields: Fields, name: str) -> None:
    """Raises ApiError 404 for another model than the one that is served; leaving it out is fine."""
    asked = fields.text("model")
    if asked is not None and asked != name:
        raise ApiError(404, f"The model {asked!r} does not exist; this server has {name!r}.", param="model", code="model_not_found")
