"""A conversation: history and state that are kept between turns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import session_file
from .async_stream import Cancelled, Check, async_pieces, gathered
from .errors import RequestError
from .generation import Request
from .progress import Progress
from .reply import Piece, Reply, joined
from .session import Session

if TYPE_CHECKING:
    from .model import Model


class ChatSession:
    """A conversation. Each turn renders the whole history; what the session's state already holds is not computed again."""

    def __init__(self, model: Model, session: Session) -> None:
        self._model = model
        self._session = session
        self.messages: list[dict[str, Any]] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that the state holds: all but the last sampled one, which is pending."""
        return tuple(self._session.tokens)

    def chat(self, content: str | Sequence[dict[str, Any]], **keywords: Any) -> Reply:
        """Says something (a user's text, or messages to append) and returns the answer, which joins the history.

        Keywords as `Model.generate`. A turn that fails leaves the history as it was.
        """
        return joined(self.stream(content, **keywords))

    def stream(self, content: str | Sequence[dict[str, Any]], **keywords: Any) -> Iterator[Piece]:
        """As `chat`, in pieces. If the iterator is closed early, the partial answer joins the history."""
        return self._turn(*self._prepared(content, keywords))

    async def achat(self, content: str | Sequence[dict[str, Any]], **keywords: Any) -> Reply:
        """`chat` for asyncio. Cancelling the task ends the answer within one prefill chunk or one token; what there is of it
        joins the history."""
        return joined(await gathered(self.astream(content, **keywords)))

    def astream(self, content: str | Sequence[dict[str, Any]], **keywords: Any) -> AsyncGenerator[Piece, None]:
        """`stream` for asyncio; `aclose()` ends the answer as a cancel of the task does."""
        return async_pieces(lambda check: self._turn(*self._prepared(content, keywords), check))

    def _prepared(self, content: str | Sequence[dict[str, Any]], keywords: dict[str, Any]) -> tuple[list[dict[str, Any]], Request, Progress | None]:
        if not isinstance(content, (str, list, tuple)):
            raise RequestError(f"a turn is a string or a list of messages, got {type(content).__name__}")
        added = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        request, progress = self._model._request([*self.messages, *added], **keywords)
        return added, request, progress

    def _turn(self, added: list[dict[str, Any]], request: Request, progress: Progress | None, check: Check | None = None) -> Iterator[Piece]:
        text, reasoning, begun, failed = "", "", False, False
        calls: list[dict[str, Any]] = []
        try:
            for piece in self._model._stream(self._session, request, progress, check):
                text, reasoning, begun = text + piece.text, reasoning + piece.reasoning, True
                calls += piece.finished_calls
                yield piece
        except (Cancelled, KeyboardInterrupt):
            failed = not begun
            raise
        except Exception:
            failed = True
            raise
        finally:
            if not failed:
                # Calls are kept as calls: as text, their tags would be a user's words and not what the model wrote.
                answer: dict[str, Any] = {"role": "assistant", "content": text}
                if reasoning:
                    answer["reasoning_content"] = reasoning
                if calls:
                    answer["tool_calls"] = calls
                self.messages += [*added, answer]

    def save(self, path: str | Path) -> None:
        """Writes history and state to a safetensors file, atomically; `Model.restore` reads it.

        Raises SessionFileError when it cannot be written, DeviceError when the state cannot be read.
        """
        with self._model._lock:
            session_file.save(self._session, path, self.messages)

    def reset(self) -> None:
        """Forgets history and state."""
        with self._model._lock:
            self.messages = []
            self._session.reset()
