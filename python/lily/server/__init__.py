"""An OpenAI- and Anthropic-compatible HTTP server for one model (the `server` extra)."""

from .app import create_app

__all__ = ["create_app"]
