"""Lily: local inference for Qwen3.6-35B-A3B on Metal.

    import lily
    model = lily.Model.load("lily-tiny")
    print(model.generate("What is the capital of France?").text)
"""

from .chat_session import ChatSession
from .errors import CheckpointError, ContextLengthError, DeviceError, LilyError, RequestError, SessionFileError, TemplateError
from .logprobs import TokenLogprob, TopLogprob
from .model import Model
from .options import ExecutionOptions
from .reply import Piece, Reply, Usage

__version__ = "0.1.0"

__all__ = [
    "ChatSession",
    "CheckpointError",
    "ContextLengthError",
    "DeviceError",
    "ExecutionOptions",
    "LilyError",
    "Model",
    "Piece",
    "Reply",
    "RequestError",
    "SessionFileError",
    "TemplateError",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
]
