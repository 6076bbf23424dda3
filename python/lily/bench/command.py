"""`lily bench`: the command line."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, fields
from typing import Any, TextIO

import click

from ..errors import RequestError
from ..options import ExecutionOptions

LENGTHS = "256,512,1024,2048,4096,8192,16384,32768,65536,131072"
SWITCHES = [f.name for f in fields(ExecutionOptions) if f.name != "chunk_size"]


@click.command()
@click.option("--model", default="lily-tiny", show_default=True, metavar="M", help="lily-tiny, a folder, or a Hub id.")
@click.option("--dims", default=None, metavar="D", help="Random weights of a preset, a config.json or a model folder instead of a model.")
@click.option("--layers-limit", type=int, default=None, metavar="N", help="With --dims: only N layers, for quick runs.")
@click.option("--device", default=None, metavar="D", help="metal, cpu or cuda; default: the best there is.")
@click.option("--phase", type=click.Choice(["prefill", "decode", "both"]), default="both", show_default=True)
@click.option("--lengths", default=LENGTHS, show_default=True, metavar="N,N", help="Prompt tokens, or tokens of context that decode starts from.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Timed rounds after one that warms up.")
@click.option("--steps", type=int, default=64, show_default=True, help="Decode steps per sample.")
@click.option("--option", "switches", multiple=True, metavar="NAME=off", help="Switch an optimisation (ExecutionOptions) for all.")
@click.option("--ablate", default=None, metavar="NAMES", help="Also each of these switches off, in turn within a round; `all` for every one.")
@click.option("--probe", is_flag=True, help="Each kernel alone against the device's own limits instead of whole passes.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "out", default=None, metavar="OUT", type=click.File("w", encoding="utf-8", lazy=False), help="Write every sample to OUT.")
def bench(
    model: str, dims: str | None, layers_limit: int | None, device: str | None, phase: str, lengths: str, rounds: int, steps: int,
    switches: tuple[str, ...], ablate: str | None, probe: bool, seed: int, out: TextIO | None,
) -> None:
    """Time prefill and decode, as tokens per second and as shares of what the device can do at best."""
    from .kernels import measure_kernels
    from .limits import Probe
    from .report import kernel_table, limits_line, speed_line
    from .speed import Speed

    wanted = _lengths(lengths)
    if rounds < 1 or steps < 1:
        raise RequestError("--rounds and --steps must be at least 1")
    phases = ["prefill", "decode"] if phase == "both" else [phase]
    variants = _variants(switches, ablate)
    engine = _engine(model, dims, layers_limit, device, seed, max(wanted) + 2 * steps + 8)
    limit = engine.context_length
    if max(wanted) + steps > limit:
        raise RequestError(f"length {max(wanted)} and {steps} steps exceed the context of {limit} tokens", fix="give shorter --lengths")
    limits = Probe(engine.gpu).limits()
    click.echo(f"{engine.gpu.name}: {limits_line(limits)}")
    speed = Speed(engine, limits, steps=steps, seed=seed)
    found: dict[str, Any] = {
        "command": ["lily", *sys.argv[1:]], "device": engine.gpu.name, "host": platform.platform(), "limits": asdict(limits),
        "layers": engine.config.num_layers, "hidden_size": engine.config.hidden_size, "memory_bytes": engine.memory_bytes(), "rows": [], "kernels": [],
    }
    if probe:
        for length in wanted:
            for one in phases:
                rows, seconds = measure_kernels(speed, one, length, limits)
                click.echo(kernel_table(one, length, rows, seconds))
                found["kernels"].append({"phase": one, "length": length, "seconds": seconds, "rows": [r.to_json() for r in rows]})
    else:
        found["rows"] = [r.to_json() for r in speed.measure(phases, wanted, rounds, variants, lambda r: click.echo(speed_line(r)))]
    if out is not None:
        json.dump(found, out, indent=1)
        out.write("\n")


def _engine(model: str, dims: str | None, layers: int | None, device: str | None, seed: int, context: int) -> Any:
    from ..engine import Engine
    from ..gpu import Gpu
    from ..plan_report import load_dims
    from ..random_checkpoint import with_layers
    from .random_weights import RandomWeights

    if dims is None:
        if layers is not None:
            raise RequestError("--layers-limit needs --dims: a trained model is measured whole")
        import lily

        return lily.Model.load(model, device=device, cache_bytes=0).engine
    config = with_layers(load_dims(dims)[0], layers)
    return Engine(RandomWeights(config, seed), Gpu(device), context=min(context, config.max_position), cache_bytes=0)


def _lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 1 for part in parts):
        raise RequestError(f"--lengths is a list of numbers above 1 such as 512,4096, got {text!r}")
    return [int(part) for part in parts]


def _variants(switches: tuple[str, ...], ablate: str | None) -> dict[str, ExecutionOptions]:
    """The default first, then one variant a switch."""
    base = list(switches)
    out = {"default": ExecutionOptions.from_pairs(base)}
    names = [] if ablate is None else SWITCHES if ablate == "all" else [n.strip() for n in ablate.split(",")]
    for name in names:
        out[f"{name}=off"] = ExecutionOptions.from_pairs([*base, f"{name}=off"])
    return out
