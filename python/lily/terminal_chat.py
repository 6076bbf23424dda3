"""`lily chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import click

from .async_stream import Cancelled
from .cli_options import generation_keywords, generation_options, load_model
from .errors import LilyError
from .progress import TerminalBar
from .reply import Usage
from .terminal_input import KEYS_HELP, is_terminal, piped_messages, typed_messages

# What a terminal would obey: a model's answer is text to be read.
_OBEYED = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@click.command()
@generation_options
@click.option("--system", default=None, metavar="TEXT", help="A system message for the whole conversation.")
def chat(model: str, device: str | None, system: str | None, **settings: Any) -> None:
    """Talk to the model. Ctrl-C stops an answer, `/help` lists the commands, Ctrl-D or `/quit` ends it.

    Messages can also be piped in, one a line; answers go to standard output.
    """
    keywords = generation_keywords(settings)
    interactive = is_terminal()
    messages = typed_messages() if interactive else piped_messages()
    conversation = TerminalChat(load_model(model, device), keywords, system, interactive)
    if interactive:
        _say("/help lists the commands.")
    for text in messages:
        if not conversation.handle(text):
            break


class StopRequest:
    """Ctrl-C inside the block does not interrupt but is kept in `asked`: an answer ends between two tokens or prefill chunks."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler if self._before is None else self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


class TerminalChat:
    """The conversation behind the prompt: answers and the commands that begin with a slash."""

    def __init__(self, model: Any, keywords: dict[str, Any], system: str | None, interactive: bool) -> None:
        self._model, self._keywords, self._interactive = model, dict(keywords), interactive
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._session = model.session()

    def handle(self, text: str) -> bool:
        """A message or a command; False when it ends the conversation. `//` begins a message that begins with a slash."""
        if not text.startswith("/") or text.startswith("//"):
            self._answer(text.removeprefix("/"))
            return True
        name, _, argument = text[1:].partition(" ")
        if name == "quit":
            return False
        command = _COMMANDS.get(name)
        if command is None:
            _say(f"lily: no command /{name}; /help lists them, // begins a message with a slash")
            return True
        try:
            command[0](self, argument.strip())
        except LilyError as error:
            _say(f"lily: error: {error}")
        return True

    # -- an answer -------------------------------------------------------------------------------------------------------
    def _answer(self, text: str) -> None:
        """Prints the answer as it comes. A failed or early stopped turn costs that turn only."""
        turn = [*([] if self._session.messages else self._opening), {"role": "user", "content": text}]
        bar = TerminalBar("reading the prompt", "tok")
        with StopRequest() as stop:
            def progress(done: int, total: int) -> None:
                bar(done, total)
                if stop.asked:
                    raise Cancelled

            try:
                self._show(self._session.stream(turn, progress=progress, **self._keywords), stop)
            except Cancelled:
                _say("[stopped before the answer began; the message is forgotten]")
            except LilyError as error:
                _say(f"lily: error: {error}")
            finally:
                bar.close()

    def _show(self, pieces: Any, stop: StopRequest) -> None:
        count, first, thinking, usage = 0, 0.0, False, None
        try:
            for piece in pieces:
                first = first or time.perf_counter()
                count += len(piece.token_ids)
                usage = piece.usage
                if self._interactive and piece.reasoning and not thinking:
                    thinking = True
                    _say("[thinking]")
                click.echo(piece.text.translate(_OBEYED) if self._interactive else piece.text, nl=False)
                if stop.asked:
                    break
        finally:
            pieces.close()
            click.echo()
        if stop.asked and usage is None:
            _say(f"[stopped; {_rate(count, first)}]")
        elif self._interactive:
            _say(f"[{_rate(count, first)}{_prompt_part(usage)}]")

    # -- commands --------------------------------------------------------------------------------------------------------
    def _help(self, argument: str) -> None:
        for name, (_, usage, what) in _COMMANDS.items():
            _say(f"/{name + ' ' + usage:14} {what}")
        _say(f"{'/quit':15} end\n{KEYS_HELP}")

    def _reset(self, argument: str) -> None:
        self._session.reset()
        _say("[the conversation is forgotten]")

    def _save(self, argument: str) -> None:
        self._session.save(_path(argument, "save"))
        _say(f"[saved to {argument}]")

    def _load(self, argument: str) -> None:
        self._session = self._model.restore(_path(argument, "load"))
        turns = sum(message["role"] == "user" for message in self._session.messages)
        _say(f"[{argument}: {turns} {'turn' if turns == 1 else 'turns'}, {len(self._session.tokens)} tokens]")

    def _think(self, argument: str) -> None:
        if argument not in ("on", "off"):
            raise LilyError("say on or off", where="/think")
        self._keywords["enable_thinking"] = argument == "on"
        _say(f"[thinking is {argument}]")


# name: what it does, its argument, and the line of /help
_COMMANDS: dict[str, tuple[Any, str, str]] = {
    "reset": (TerminalChat._reset, "", "forget the conversation"),
    "save": (TerminalChat._save, "PATH", "write the conversation and its state to a file"),
    "load": (TerminalChat._load, "PATH", "go on with a saved conversation"),
    "think": (TerminalChat._think, "on|off", "whether the model thinks before it answers"),
    "help": (TerminalChat._help, "", "this list"),
}


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise LilyError("needs the path of a file", where=f"/{command}")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:  # an unknown user behind the tilde
        raise LilyError(str(error), where=argument) from error


def _rate(count: int, first: float) -> str:
    """Tokens, and tokens per second after the first."""
    seconds = time.perf_counter() - first
    return f"{count} tokens" + (f", {(count - 1) / seconds:.1f} tok/s" if count > 1 and seconds > 0 else "")


def _prompt_part(usage: Usage | None) -> str:
    if usage is None:
        return ""
    cached = f", {usage.cached_tokens} of them cached" if usage.cached_tokens else ""
    return f"; prompt {usage.prompt_tokens} tokens{cached}, {usage.prefill_seconds:.2f} s"


def _say(text: str) -> None:
    """To the user, beside the answers."""
    click.echo(text, err=True)
