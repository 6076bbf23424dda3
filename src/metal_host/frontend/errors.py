"""Errors of the front end, reported in terms of the .metal file."""
from __future__ import annotations


class SourceError(Exception):
    """One or more faults of the Metal source; str() has one `file:line: error: text` per line."""

    def __init__(self, messages: list[str]):
        super().__init__("\n".join(messages))
        self.messages = messages


class ToolError(Exception):
    """The compiler could not be run."""
