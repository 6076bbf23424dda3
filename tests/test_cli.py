"""The command line with a model of straw: what it prints, where, and with which exit code."""

import json
from types import SimpleNamespace

import pytest

import lily
from lily import cli
from lily.errors import CheckpointError

REPLY = SimpleNamespace(text="Paris", reasoning="hm", tool_calls=(), finish_reason="stop", usage={"prompt_tokens": 3}, token_ids=(1, 2))


class Straw:
    """Records what it was asked; answers with the pieces of `answer`."""

    def __init__(self):
        self.calls, self.answer = [], ["Par", "is"]

    def load(self, model, device=None):
        self.calls.append(("load", model, device))
        if model == "absent":
            raise CheckpointError("no such folder", where="absent", fix="give\nanother")
        return self

    def generate(self, prompt, **keywords):
        self.calls.append(("generate", prompt, keywords))
        return REPLY

    def stream(self, prompt, **keywords):
        self.calls.append(("stream", prompt, keywords))
        return self._pieces()

    def _pieces(self):
        for text in self.answer:
            if text is KeyboardInterrupt:
                raise KeyboardInterrupt
            yield SimpleNamespace(text=text)


@pytest.fixture
def straw(monkeypatch):
    model = Straw()
    monkeypatch.setattr(lily, "Model", model, raising=False)
    return model


def run(monkeypatch, capsys, *arguments):
    """Exit code, standard output and standard error of `lily ARGUMENTS`."""
    monkeypatch.setattr("sys.argv", ["lily", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    captured = capsys.readouterr()
    return exit.value.code, captured.out, captured.err


def test_generate(monkeypatch, capsys, straw):
    assert run(monkeypatch, capsys, "generate", "What?") == (0, "Paris\n", "")
    assert straw.calls == [("load", "lily-tiny", None), ("stream", "What?", {})]


def test_generate_passes_what_was_given_and_nothing_else(monkeypatch, capsys, straw):
    code, _, _ = run(monkeypatch, capsys, "generate", "x", "--model", "m", "--device", "cpu", "--max-tokens", "5", "--temperature", "0", "--top-p", "0.5",
                     "--top-k", "3", "--min-p", "0.1", "--seed", "7", "--stop", "a", "--stop", "b", "--no-thinking", "--raw", "--presence-penalty", "0",
                     "--frequency-penalty", "0.5", "--repetition-penalty", "1.1", "--thinking-budget", "9")
    assert code == 0 and straw.calls == [("load", "m", "cpu"), ("stream", "x", {
        "max_tokens": 5, "temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "stop": ["a", "b"], "enable_thinking": False, "raw": True,
        "presence_penalty": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "thinking_budget": 9})]


def test_switches(monkeypatch, capsys, straw):
    assert run(monkeypatch, capsys, "generate", "x", "--option", "tile_by_load=off", "--option", "chunk_size=64")[0] == 0
    options = straw.calls[1][2]["options"]
    assert options.tile_by_load is False and options.chunk_size == 64


def test_system_message(monkeypatch, capsys, straw):
    run(monkeypatch, capsys, "generate", "x", "--system", "s")
    assert straw.calls[1][1] == [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]


def test_json(monkeypatch, capsys, straw):
    code, out, err = run(monkeypatch, capsys, "generate", "x", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"text": "Paris", "reasoning": "hm", "tool_calls": [], "finish_reason": "stop", "usage": {"prompt_tokens": 3}, "token_ids": [1, 2]}


def test_prompt_from_standard_input(monkeypatch, capsys, straw):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert run(monkeypatch, capsys, "generate", "-")[0] == 0 and straw.calls[1][1] == "from a pipe"


def test_an_error_is_one_line(monkeypatch, capsys, straw):
    assert run(monkeypatch, capsys, "generate", "x", "--model", "absent") == (1, "", "lily: error: absent: no such folder; give another\n")


@pytest.mark.parametrize("arguments", [
    ["generate"], ["generate", "x", "--max-tokens", "many"], ["nonsense"], ["generate", "x", "--option", "nonsense=off"],
    ["generate", "x", "--raw", "--system", "s"], ["generate", "x", "--unknown"],
])
def test_wrong_usage(monkeypatch, capsys, straw, arguments):
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "") and "Error" in err and "Traceback" not in err


def test_interrupt_of_a_generation(monkeypatch, capsys, straw):
    straw.answer = ["Par", KeyboardInterrupt]
    code, out, err = run(monkeypatch, capsys, "generate", "x")
    assert code == 130 and out == "Par" and "Traceback" not in err


def test_info(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_devices", lambda: [{"name": "a device"}])
    code, out, _ = run(monkeypatch, capsys, "info", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["bytes"]["total"] == 12_895_248 and facts["layers"] == {"gated_deltanet": 6, "attention": 2}
    code, out, _ = run(monkeypatch, capsys, "info")
    assert code == 0 and "Qwen3_5MoeForConditionalGeneration" in out and "a device" in out


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere"])
def test_info_of_a_missing_model(monkeypatch, capsys, model):
    code, out, err = run(monkeypatch, capsys, "info", "--model", model)
    assert (code, out) == (1, "") and err.startswith(f"lily: error: {model}: no such folder") and err.count("\n") == 1


@pytest.mark.parametrize("problems, expected", [([], 0), (["a fault"], 1)])
def test_doctor(monkeypatch, capsys, tmp_path, problems, expected):
    from lily import doctor

    report = SimpleNamespace(problems=problems, page=lambda: "one page", to_json=lambda: '{"device": 1}')
    monkeypatch.setattr(doctor, "run", lambda device: report)
    saved = tmp_path / "report.json"
    assert run(monkeypatch, capsys, "doctor", "--save", str(saved)) == (expected, "one page\n", "")
    assert json.loads(saved.read_text()) == {"device": 1}
    assert run(monkeypatch, capsys, "doctor", "--json")[:2] == (expected, '{"device": 1}\n')


def test_help(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "--help")
    assert code == 0 and all(name in out for name in ("generate", "chat", "info", "doctor"))
