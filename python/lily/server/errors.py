"""Errors as HTTP answers: status, headers, and the bodies that OpenAI's and Anthropic's clients understand."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..errors import ContextLengthError, LilyError, RequestError

log = logging.getLogger("lily.server")

_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than success. ``param`` names the field of the request at fault, ``code`` is for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def openai_body(self) -> dict[str, Any]:
        kind = _OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(self.status, "api_error"), "message": self.message}}


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of any error: the caller's fault is 400, a faulty device or model 503, a bug 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=error.where, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.where, code="invalid_value")
    if isinstance(error, LilyError):
        log.error("a request failed: %s", error)
        return ApiError(503, str(error), code=type(error).__name__)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log says more", code="internal_error")
