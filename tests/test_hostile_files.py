"""Files and arguments of the wrong form end in the documented errors, never in another exception (found by attack)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import lily
from lily.chat import ChatTemplate
from lily.config import ModelConfig
from lily.model_files import resolve
from lily.tokenizer import Tokenizer

TINY = resolve("lily-tiny")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The small files of lily-tiny in a folder of their own."""
    for path in TINY.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, tmp_path / path.name)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("added", [5, "x", [1], {"type": "Nope"}, [{"content": "a"}], [{"content": 5, "id": 1}], [{"content": "\ud800", "id": 1}]])
def test_added_tokens_of_a_wrong_form_are_checkpoint_errors(folder: Path, added: Any) -> None:
    edit(folder / "tokenizer.json", added_tokens=added)
    with pytest.raises(lily.CheckpointError, match="tokenizer.json"):
        ModelConfig.from_folder(folder)
        Tokenizer.from_folder(folder)


def test_truncation_and_padding_of_a_tokenizer_never_touch_a_prompt(folder: Path) -> None:
    whole = Tokenizer.from_folder(folder).encode("What is the capital of France?")
    edit(folder / "tokenizer.json", truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5})
    assert Tokenizer.from_folder(folder).encode("What is the capital of France?") == whole


def test_an_empty_added_token_is_no_token(folder: Path) -> None:
    edit(folder / "tokenizer.json", added_tokens=[{"content": "", "id": 3}])
    assert Tokenizer.from_folder(folder).control == {}


@pytest.mark.parametrize("source", ["{% break %}", "{% continue %}", "{{ " + "(" * 400 + "1" + ")" * 400 + " }}", "{% macro f(a, a) %}{% endmacro %}",
                                    "{% if 1 %}" * 900 + "{% endif %}" * 900, "{{ f(a=1, a=2) }}", "{{ " + "9" * 5000 + " }}"])
def test_templates_that_python_refuses_are_template_errors(source: str) -> None:
    with pytest.raises(lily.TemplateError):
        ChatTemplate(source, Tokenizer.from_folder(TINY)).encode([{"role": "user", "content": "x"}])


def test_a_template_that_is_not_text_is_a_template_error(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(lily.TemplateError, match="chat_template.jinja"):
        ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))


@pytest.mark.parametrize("model", [5, None, b"x", ..., "x" * 5000, "~no_such_user_here/x"])
def test_a_model_that_is_no_path_is_a_checkpoint_error(model: Any) -> None:
    with pytest.raises(lily.CheckpointError):
        resolve(model)


@pytest.mark.parametrize("temperature", [1e300, 1e39, 10**400])
def test_temperatures_beyond_a_float_are_refused(model: Any, temperature: float) -> None:
    with pytest.raises(lily.RequestError, match="temperature"):
        model.generate("x", temperature=temperature)


def test_generation_defaults_beyond_a_float_are_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 10**400}))
    with pytest.raises(lily.CheckpointError, match="temperature"):
        lily.Model.load(folder)


def test_unknown_keywords_and_wrong_kinds_are_request_errors(model: Any) -> None:
    for call in (lambda: model.generate("x", wings=2), lambda: model.generate("x", progress=5), lambda: model.session().chat(5), lambda: model.logits(5),
                 lambda: model.logits([None]), lambda: model.logits([float("nan")])):
        with pytest.raises(lily.RequestError):
            call()
