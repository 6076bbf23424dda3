"""What README and docs show: every Python example runs, every command exists with its options."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from lily.cli import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=[page.name for page in WITH_PYTHON])
def test_python_examples_run(page: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace; what a comment behind a print shows is what is printed."""
    live = pytest.importorskip("tests.server.fake_model").live
    monkeypatch.chdir(tmp_path)
    with live(model) as url:
        namespace: dict[str, Any] = {}
        for source in blocks(page, "python"):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(source.replace("http://127.0.0.1:8080", url), str(page), "exec"), namespace)
            for shown in re.findall(r"^print\(.*\) +# (.+)$", source, re.MULTILINE):
                assert shown in printed.getvalue()
            assert printed.getvalue().strip() or "print" not in source


def commands(page: Path) -> list[list[str]]:
    """The words of each `lily …` line, without comments and continuations."""
    lines = [line for text in blocks(page, "sh", "") for line in text.splitlines()]
    return [shlex.split(re.split(r"  +|…", line)[0].replace("[", " ").replace("]", " "), comments=True) for line in lines if line.startswith("lily ")]


def test_commands_exist_with_their_options() -> None:
    found = [words for page in PAGES for words in commands(page)]
    assert len(found) > 8
    for words in found:
        command = cli.commands[words[1]]
        known = {name for parameter in command.params if isinstance(parameter, click.Option) for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, words


def test_links_inside_the_documentation_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)
