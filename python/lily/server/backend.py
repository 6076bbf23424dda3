"""What the server needs of a model; `lily.Model` is one, tests bring their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ..reply import Piece


class Backend(Protocol):
    """The part of `lily.Model` that is used here.

    `stream` checks the request before it returns (RequestError, TemplateError), may be called from any thread, and gives an
    iterator that another thread runs; closing that ends the generation. It calls the keyword `progress` between prefill
    chunks with (done, total), and an exception raised in there ends the generation too.
    """

    @property
    def template(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...

    def stream(self, prompt: Any = None, **keywords: Any) -> Iterator[Piece]: ...
