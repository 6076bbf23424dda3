"""Errors that a caller of lily can meet. Everything else that escapes is a bug.

Each message says what is wrong, where, and what to do about it, in one line.
"""

from __future__ import annotations


class LilyError(Exception):
    """Base of every error that lily raises on purpose.

    ``what`` states the fault, ``where`` names the file, tensor, key or argument, ``fix`` says what to do.
    ``str(error)`` joins the three on one line.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        text = f"{where}: {what}" if where else what
        super().__init__(" ".join(f"{text}; {fix}".split()) if fix else " ".join(text.split()))

    def __reduce__(self) -> tuple[object, ...]:
        # The keyword-only constructor would lose where and fix in a pickle (worker processes send errors back).
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


class CheckpointError(LilyError):
    """A model folder, its config, its tensors or its tokenizer files are missing, damaged or not supported."""


class TemplateError(LilyError):
    """The model's chat template cannot be compiled or rendered (not the caller's fault)."""


class RequestError(LilyError):
    """The request is not acceptable: bad messages, tools, options, or what the template itself refuses."""


class ContextLengthError(RequestError):
    """Prompt and answer do not fit the context. ``tokens`` were asked for, ``limit`` fit (both in tokens)."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None,
                 tokens: int | None = None, limit: int | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.tokens = tokens
        self.limit = limit


class DeviceError(LilyError):
    """The device is missing, too small, or reported a fault while running a command buffer."""


class SessionFileError(LilyError):
    """A saved session is missing or damaged, cannot be written, or was saved with another model or version."""


def _rebuild(kind: type[LilyError], args: tuple[object, ...], state: dict[str, object]) -> LilyError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error
