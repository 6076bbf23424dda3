"""`lily chat`: commands, several lines, history, and Ctrl-C, with a model of straw and with the embedded one on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import lily
from lily import terminal_chat
from lily.errors import LilyError, RequestError, SessionFileError
from lily.reply import Piece, Usage
from lily.terminal_chat import TerminalChat, chat
from lily.terminal_input import _history, typed_messages


class Straw:
    """A model and its session in one. `answers` are lists of texts; an exception is raised in its place, a function is called."""

    def __init__(self) -> None:
        self.turns: list[tuple[Any, dict[str, Any]]] = []
        self.answers: list[Any] = []
        self.messages: list[dict[str, Any]] = []
        self.tokens: tuple[int, ...] = (1, 2, 3)
        self.saved: list[Path] = []

    def session(self) -> Straw:
        return self

    def restore(self, path: Path) -> Straw:
        if path not in self.saved:
            raise SessionFileError("no such file", where=str(path))
        return self

    def save(self, path: Path) -> None:
        self.saved.append(path)

    def reset(self) -> None:
        self.messages.clear()

    def stream(self, turn: list[dict[str, Any]], *, progress: Any, **keywords: Any) -> Iterator[Piece]:
        self.turns.append((turn, keywords))
        answer = self.answers.pop(0) if self.answers else ["Par", "is"]
        if isinstance(answer, Exception):
            raise answer
        return self._pieces(turn, answer, progress)

    def _pieces(self, turn: list[dict[str, Any]], answer: list[Any], progress: Any) -> Iterator[Piece]:
        progress(5, 10)
        progress(10, 10)
        self.messages += turn
        for text in answer:
            if callable(text):
                text()
            elif isinstance(text, Exception):
                raise text
            else:
                yield Piece(text, token_ids=(1,))
        yield Piece(finish_reason="stop", usage=Usage(10, len(answer), 4, 0.1, 0.2))


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def straw(monkeypatch: pytest.MonkeyPatch) -> Straw:
    model = Straw()
    monkeypatch.setattr(lily, "Model", SimpleNamespace(load=lambda *more, **keywords: model))
    return model


def piped(*lines: str, arguments: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `lily chat` at the end of a pipe."""
    result = CliRunner().invoke(chat, list(arguments), input="".join(line + "\n" for line in lines))
    assert result.exception is None or isinstance(result.exception, (SystemExit, LilyError)), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_piped_messages_are_answered_in_turn(straw: Straw) -> None:
    assert piped("one", "", "  two  ", "/quit", "never", arguments=("--system", "Be brief.", "--temperature", "0")) == (0, "Paris\nParis\n", "")
    opening = {"role": "system", "content": "Be brief."}
    assert straw.turns == [([opening, {"role": "user", "content": "one"}], {"temperature": 0.0}), ([{"role": "user", "content": "two"}], {"temperature": 0.0})]


def test_commands(straw: Straw, tmp_path: Path) -> None:
    path = tmp_path / "talk of today"
    code, out, err = piped("one", f"/save {path}", "/reset", "two", f"/load {path}", "/think on", "three", "/think off", "four", "//etc", "/help",
                           arguments=("--system", "s"))
    assert code == 0 and out == "Paris\n" * 5
    assert straw.saved == [path] and f"[saved to {path}]" in err and "2 turns" not in err and "1 turn, 3 tokens" in err
    said = [turn[-1]["content"] for turn, _ in straw.turns]
    assert said == ["one", "two", "three", "four", "/etc"]
    assert [len(turn) for turn, _ in straw.turns] == [2, 2, 1, 1, 1]  # the system message opens a conversation, also a forgotten one
    assert [keywords.get("enable_thinking") for _, keywords in straw.turns] == [None, None, True, False, False]
    assert all(f"/{name} " in err for name in ("reset", "save", "load", "think", "help", "quit")) and "Alt-Enter" in err


@pytest.mark.parametrize("line, says", [
    ("/nonsense", "no command /nonsense; /help"), ("/save", "/save: needs the path"), ("/load", "/load: needs the path"),
    ("/load /no/such/file", "/no/such/file: no such file"), ("/think", "say on or off"), ("/think maybe", "say on or off"), ("/", "no command /"), ("/save ~no_such_user_here/x", "no_such_user_here"),
])
def test_a_wrong_command_costs_nothing(straw: Straw, line: str, says: str) -> None:
    code, out, err = piped("one", line, "two")
    assert code == 0 and out == "Paris\nParis\n" and says in err and len(straw.turns) == 2 == len(straw.messages)


@pytest.mark.parametrize("fault", [RequestError("too long"), [RequestError("too long")], ["Pa", lily.DeviceError("the GPU timed out")]])
def test_a_failed_turn_costs_that_turn_only(straw: Straw, fault: Any) -> None:
    straw.answers = [fault, ["fine"]]
    code, out, err = piped("one", "two")
    assert code == 0 and out.endswith("fine\n") and err.startswith("lily: error: ") and err.count("\n") == 1


def test_ctrl_c_stops_the_answer_only(straw: Straw) -> None:
    handler = signal.getsignal(signal.SIGINT)
    straw.answers = [["Par", interrupt, "is", " and", " more"], ["fine"]]
    code, out, err = piped("one", "two")
    assert (code, out) == (0, "Paris\nfine\n") and "[stopped; 2 tokens" in err  # the token that was being made is kept
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_in_the_prompt_forgets_the_message(straw: Straw, monkeypatch: pytest.MonkeyPatch) -> None:
    real, once = Straw._pieces, [True]

    def interrupted(self: Straw, turn: Any, answer: Any, progress: Any) -> Iterator[Piece]:
        if once.pop() if once else False:
            interrupt()
        yield from real(self, turn, answer, progress)

    monkeypatch.setattr(Straw, "_pieces", interrupted)
    code, out, err = piped("one", "two")
    assert (code, out) == (0, "\nParis\n") and "forgotten" in err and [m["content"] for m in straw.messages] == ["two"]


def test_a_terminal_shows_speed_and_obeys_no_answer(straw: Straw, capsys: pytest.CaptureFixture[str]) -> None:
    straw.answers = [["a\x1b[2Jb\n", "\tc\x07\x9b"]]
    TerminalChat(straw, {}, None, interactive=True).handle("one")
    out, err = capsys.readouterr()
    assert out == "a[2Jb\n\tc\n"
    assert re.fullmatch(r"\[2 tokens, [\d.]+ tok/s; prompt 10 tokens, 4 of them cached, 0\.10 s\]\n", err), err


def test_without_the_extra_a_terminal_is_told_what_to_install(straw: Straw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    with pytest.raises(LilyError, match=r"lily-metal\[chat\]"):
        typed_messages()
    monkeypatch.setattr(terminal_chat, "is_terminal", lambda: True)
    monkeypatch.setattr(lily, "Model", None)  # it is told before a model is loaded
    assert isinstance(CliRunner().invoke(chat, []).exception, LilyError)
    monkeypatch.setattr(terminal_chat, "is_terminal", lambda: False)
    monkeypatch.setattr(lily, "Model", SimpleNamespace(load=lambda *more, **keywords: straw))
    assert piped("one") == (0, "Paris\n", "")


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A keyboard for the prompt, and a home for its history."""
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


ENTER, ALT_ENTER, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x03", "\x04"


def test_typing_several_lines_pasting_and_dropping(keyboard: Any) -> None:
    keyboard.send_text("one" + ENTER)
    keyboard.send_text("a" + ALT_ENTER + "b" + ENTER)
    keyboard.send_text("\x1b[200~pasted\r\nlines\x1b[201~" + ENTER)
    keyboard.send_text("dropped" + CTRL_C + ENTER + "  " + ENTER + "last" + ENTER)
    keyboard.send_text(CTRL_D)
    assert list(typed_messages()) == ["one", "a\nb", "pasted\nlines", "last"]


def test_history_outlives_the_program_and_is_private(keyboard: Any, tmp_path: Path) -> None:
    keyboard.send_text("first\x1b\rmessage" + ENTER + CTRL_D)
    assert list(typed_messages()) == ["first\nmessage"]
    [path] = tmp_path.rglob("chat_history")
    assert path.stat().st_mode & 0o077 == 0
    assert list(_history().load_history_strings()) == ["first\nmessage"]  # what Up recalls the next time


def test_a_history_that_cannot_be_written_is_said(
    keyboard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    keyboard.send_text("one" + ENTER + CTRL_D)
    assert list(typed_messages()) == ["one"]
    assert "until the end only" in capsys.readouterr().err


READY = r"\x1b\[\?2004h"  # the prompt turns bracketed paste on


class Terminal:
    """`lily chat` on a pseudo-terminal of its own, as its controlling one."""

    def __init__(self, home: Path, *arguments: str) -> None:
        code = ("import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); signal.signal(signal.SIGINT, signal.default_int_handler); "
                "from lily.cli import main; main()")
        self.screen, slave = pty.openpty()
        fcntl.ioctl(slave, 0x5414, b"\x18\x00\xc8\x00\x00\x00\x00\x00")  # TIOCSWINSZ: 24 lines of 200 characters
        self.process = subprocess.Popen([sys.executable, "-c", code, "chat", *arguments], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
                                        env={**os.environ, "XDG_CONFIG_HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"})
        os.close(slave)
        self.shown = ""

    def send(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def until(self, pattern: str, seconds: float = 90) -> str:
        """What was shown up to and with the pattern; it is not looked at again."""
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < deadline, f"no {pattern} in {self.shown!r}"
            if select.select([self.screen], [], [], 0.5)[0]:
                try:
                    self.shown += os.read(self.screen, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert re.search(pattern, self.shown), self.shown
        found, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.screen)


@pytest.mark.skipif(sys.platform != "linux", reason="sets up a terminal the way Linux does")
def test_a_conversation_on_a_terminal(tmp_path: Path, model: Any) -> None:
    saved = tmp_path / "talk.safetensors"
    terminal = Terminal(tmp_path, "--no-thinking", "--max-tokens", "3000")
    try:
        terminal.until(READY)
        terminal.send("What is the capital of France?\r")
        assert "The capital of France is Paris." in terminal.until(r"\[\d+ tokens, [\d.]+ tok/s; prompt \d+ tokens, [\d.]+ s\]")
        terminal.until(READY)
        terminal.send("\x03")  # at the prompt it drops what was typed
        terminal.until(READY)
        terminal.send("/quit")
        terminal.send("\x03")
        terminal.until(READY)
        terminal.send(f"/save {saved}\r")
        terminal.until(r"\[saved to")
        terminal.until(READY)
        terminal.send("\x04")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
    assert [message["content"] for message in model.restore(saved).messages] == ["What is the capital of France?", "The capital of France is Paris."]


@pytest.mark.skipif(sys.platform != "linux", reason="sets up a terminal the way Linux does")
def test_ctrl_c_on_a_terminal_leaves_a_session_that_goes_on(tmp_path: Path, model: Any) -> None:
    saved = tmp_path / "talk.safetensors"
    terminal = Terminal(tmp_path, "--no-thinking", "--max-tokens", "3000", "--temperature", "20", "--seed", "1")
    try:
        terminal.until(READY)
        terminal.send("Talk.\r")
        terminal.until(r"(?s)\x1b\[\?2004l.{200}")  # the prompt is over and the answer flows
        terminal.send("\x03")
        terminal.until(r"\[stopped; \d+ tokens")
        terminal.until(READY)
        terminal.send(f"/save {saved}\r")
        terminal.until(r"\[saved to")
        terminal.until(READY)
        terminal.send("\x04")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
    session = model.restore(saved)
    question, answer = session.messages
    assert question["content"] == "Talk." and answer["content"]
    assert session.chat("What is the capital of France?", temperature=0, enable_thinking=False, max_tokens=8).usage.cached_tokens > 0
