"""Messages that a user types: lines of a pipe, or a prompt with history and several lines on a terminal (extra `chat`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .errors import LilyError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

KEYS_HELP = "Enter sends; Alt-Enter (or Esc, Enter) begins a new line; pasted text keeps its lines; Up recalls; Ctrl-C stops an answer; Ctrl-D ends."


def is_terminal() -> bool:
    """Whether a person sits at both ends."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()


def piped_messages() -> Iterator[str]:
    """One message a line, without empty ones."""
    for line in sys.stdin:
        if text := line.strip():
            yield text


def typed_messages() -> Iterator[str]:
    """Messages from a prompt, without empty ones, until Ctrl-D; Ctrl-C drops what was typed.

    Raises LilyError at once where the extra is not installed.
    """
    try:
        from prompt_toolkit import PromptSession
    except ImportError as error:
        raise LilyError("a conversation on a terminal needs prompt_toolkit", where="lily chat",
                        fix="pip install 'lily-metal[chat]', or pipe the messages in, one a line") from error
    session: PromptSession[str] = PromptSession("> ", multiline=True, prompt_continuation="  ", key_bindings=_keys(), history=_history())
    return _prompted(session)


def _prompted(session: PromptSession[str]) -> Iterator[str]:
    while True:
        try:
            text = session.prompt().strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if text:
            yield text


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """In a file that only its user may read; in memory where there is no place for one."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = Path(click.get_app_dir("lily")) / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError as error:
        click.echo(f"lily: what you type is remembered until the end only ({error})", err=True)
        return InMemoryHistory()
    return FileHistory(str(path))
