"""Options that several commands share, and what they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from .errors import RequestError

Decorator = Callable[[Any], Any]


def _options(*options: Decorator) -> Decorator:
    def apply(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


model_option: Decorator = click.option("--model", default="lily-tiny", show_default=True, metavar="M", help="lily-tiny, a folder, or a Hub id.")
device_option: Decorator = click.option("--device", default=None, metavar="D", help="metal, cpu or cuda; default: the best there is.")
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
generation_options: Decorator = _options(
    model_option,
    device_option,
    click.option("--max-tokens", type=int, default=None, metavar="N", help="At most N new tokens (2048)."),
    click.option("--temperature", type=float, default=None, metavar="T", help="0 is greedy; default: the model's own."),
    click.option("--top-p", type=float, default=None, metavar="P"),
    click.option("--top-k", type=int, default=None, metavar="K"),
    click.option("--min-p", type=float, default=None, metavar="P"),
    click.option("--seed", type=int, default=None, metavar="S", help="Makes sampling repeatable."),
    click.option("--repetition-penalty", type=float, default=None, metavar="R", help="1 is off."),
    click.option("--presence-penalty", type=float, default=None, metavar="P", help="0 is off."),
    click.option("--frequency-penalty", type=float, default=None, metavar="P", help="0 is off."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before TEXT; may be repeated."),
    click.option("--thinking/--no-thinking", "enable_thinking", default=None, help="Default: what the model's template does."),
    click.option("--thinking-budget", type=int, default=None, metavar="N", help="Close the thought after N tokens."),
    click.option("--option", "switches", multiple=True, metavar="NAME=off", help="Switch an optimisation (ExecutionOptions)."),
)


def load_model(model: str, device: str | None) -> Any:
    import lily

    return lily.Model.load(model, device=device)


def generation_keywords(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `Model.generate` for the options that were given."""
    given = {name: value for name, value in settings.items() if value is not None and name not in ("switches", "stop")}
    if settings["stop"]:
        given["stop"] = list(settings["stop"])
    if settings["switches"]:
        from .options import ExecutionOptions

        try:
            given["options"] = ExecutionOptions.from_pairs(list(settings["switches"]))
        except RequestError as error:
            raise click.UsageError(str(error)) from error
    return given
