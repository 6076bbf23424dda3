"""The command line: `lily generate`, `chat`, `info`, `doctor`.

Every LilyError becomes one line on standard error and exit code 1; wrong usage is exit code 2. Answers go to standard
output, everything else to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import click

from .bench.command import bench
from .cli_options import device_option, generation_keywords, generation_options, json_option, load_model, model_option
from .errors import LilyError
from .server.command import serve
from .terminal_chat import chat


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lily-metal", prog_name="lily")
def cli() -> None:
    """Local inference for Qwen3.6-35B-A3B and models of its family."""


@cli.command()
@click.argument("prompt")
@generation_options
@click.option("--system", default=None, metavar="TEXT", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="Plain completion, without the chat template.")
@json_option
def generate(prompt: str, model: str, device: str | None, system: str | None, raw: bool, as_json: bool, **settings: Any) -> None:
    """Answer PROMPT (`-` reads it from standard input)."""
    if prompt == "-":
        prompt = sys.stdin.read()
    if system is not None and raw:
        raise click.UsageError("--system needs the chat template; leave --raw out")
    keywords = generation_keywords(settings)
    if raw:
        keywords["raw"] = True
    request: Any = prompt
    if system is not None:
        request = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
    loaded = load_model(model, device)
    if as_json:
        reply = loaded.generate(request, **keywords)
        fields = ("text", "reasoning", "tool_calls", "finish_reason", "usage", "token_ids")
        _print_json({name: _jsonable(getattr(reply, name)) for name in fields})
        return
    for piece in loaded.stream(request, **keywords):
        click.echo(piece.text, nl=False)
    click.echo()


@cli.command()
@model_option
@json_option
def info(model: str, as_json: bool) -> None:
    """Describe a model's checkpoint and the devices of this machine, without loading the weights."""
    from .checkpoint import Checkpoint
    from .model_files import resolve

    with Checkpoint.open(resolve(model)) as checkpoint:
        config = checkpoint.config
        kinds: dict[str, int] = {}
        for group in checkpoint.layout():
            kinds[group.suffix] = kinds.get(group.suffix, 0) + group.weight_bytes + 2 * group.scale_bytes
        facts: dict[str, Any] = {
            "folder": str(checkpoint.folder),
            "architecture": config.architecture,
            "layers": {"gated_deltanet": len(config.gdn_layers), "attention": len(config.attention_layers)},
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "context": config.max_position,
            "heads": {"query": config.q_heads, "kv": config.kv_heads, "head_dim": config.head_dim},
            "experts": {"count": config.num_experts, "top_k": config.top_k, "width": config.expert_width, "shared_width": config.shared_width},
            "bytes": {"total": checkpoint.total_bytes, **kinds},
            "kv_bytes_per_token": config.kv_bytes_per_token,
            "eos_ids": list(config.eos_ids),
            "generation": dataclasses.asdict(config.generation),
            "fingerprint": checkpoint.fingerprint(),
            "devices": _devices(),
        }
    if as_json:
        _print_json(facts)
        return
    for name, value in facts.items():
        click.echo(f"{name:20} {_plain_text(value)}")


@cli.command()
@device_option
@json_option
@click.option("--save", default=None, metavar="FILE", type=click.File("w", encoding="utf-8", lazy=False), help="Also write the JSON to FILE.")
def doctor(device: str | None, as_json: bool, save: TextIO | None) -> None:
    """Compile every kernel, run the self-tests and the built-in goldens, and report on this machine.

    The exit code is 1 when anything is wrong.
    """
    from . import doctor as checks

    report = checks.run(device)
    click.echo(report.to_json() if as_json else report.page())
    if save is not None:
        save.write(report.to_json() + "\n")
    if report.problems:
        raise SystemExit(1)


@cli.command()
@click.option("--dims", default="qwen3.6-35b-a3b", show_default=True, metavar="D", help="A preset, a config.json or a model folder.")
@click.option("--phase", type=click.Choice(["prefill", "decode"]), default="decode", show_default=True)
@click.option("--context", type=int, default=4096, show_default=True, metavar="N", help="Tokens that attention sees, or of the prompt.")
@click.option("--chunk", type=int, default=None, metavar="N", help="Prompt rows per chunk.")
@click.option("--option", "switches", multiple=True, metavar="NAME=off", help="Switch an optimisation (ExecutionOptions).")
@click.option("--svg", default=None, metavar="FILE", type=click.File("w", encoding="utf-8"), help="Also draw the timeline.")
@json_option
def plan(dims: str, phase: str, context: int, chunk: int | None, switches: tuple[str, ...], svg: TextIO | None, as_json: bool) -> None:
    """Show what a pass launches, reads and writes; needs no weights and no GPU."""
    from .options import ExecutionOptions
    from .plan_report import load_dims, make_report

    config, groups = load_dims(dims)
    report = make_report(config, groups, phase, context, chunk, ExecutionOptions.from_pairs(list(switches)))
    click.echo(report.to_json() if as_json else report.table())
    if svg is not None:
        svg.write(report.svg())


@cli.command("random-checkpoint")
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--dims", default="qwen3.6-35b-a3b", show_default=True, metavar="D", help="A preset, a config.json or a model folder.")
@click.option("--layers", type=int, default=None, metavar="N", help="Another number of layers.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--tokenizer", default="lily-tiny", show_default=True, metavar="M", help="Model whose tokenizer files are copied.")
def random_checkpoint(out: str, dims: str, layers: int | None, seed: int, tokenizer: str) -> None:
    """Write a valid checkpoint with random 4-bit weights into the new folder OUT."""
    from .model_files import resolve
    from .plan_report import load_dims
    from .random_checkpoint import with_layers, write_random_checkpoint

    config = with_layers(load_dims(dims)[0], layers)
    click.echo(write_random_checkpoint(out, config, seed=seed, tokenizer=resolve(tokenizer)))


cli.add_command(bench)
cli.add_command(chat)
cli.add_command(serve)


def _devices() -> list[Any]:
    try:
        from . import _native
    except ImportError:
        return []
    return list(_native.devices())


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value


def _plain_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return "; ".join(map(_plain_text, value)) or "none"
    return str(value)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


def main() -> None:
    """Entry point of the `lily` command."""
    try:
        code = cli.main(standalone_mode=False)
    except LilyError as error:
        click.echo(f"lily: error: {error}", err=True)
        code = 1
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo(err=True)
        code = 130
    except BrokenPipeError:
        # The reader (head, less) went away: say nothing, also not when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
