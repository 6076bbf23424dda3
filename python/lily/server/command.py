"""`lily serve`."""

from __future__ import annotations

import ipaddress
from typing import Any

import click


@click.command()
@click.option("--model", default="lily-tiny", show_default=True, metavar="M", help="lily-tiny, a folder, or a Hub id.")
@click.option("--device", default=None, metavar="D", help="metal, cpu or cuda; default: the best there is.")
@click.option("--name", default=None, metavar="NAME", help="The name that clients ask for; default: the model's own.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on.")
@click.option("--api-key", default=None, envvar="LILY_API_KEY", metavar="KEY", help="Required from clients; also LILY_API_KEY.")
@click.option("--queue-size", default=32, show_default=True, type=click.IntRange(0), help="Requests that may wait; then 429.")
@click.option("--body-limit", default=16 << 20, show_default=True, type=click.IntRange(1), metavar="BYTES", help="Largest request body.")
@click.option("--context", default=None, type=click.IntRange(1), metavar="TOKENS", help="Tokens of prompt and answer; default: what fits.")
@click.option("--cache-bytes", default=None, type=click.IntRange(0), metavar="BYTES", help="Memory of the prefix cache, 0 = none; default: a share of what is left.")
@click.option("--log-level", default="info", show_default=True, type=click.Choice(["critical", "error", "warning", "info", "debug"]))
def serve(model: str, device: str | None, name: str | None, host: str, port: int, api_key: str | None, queue_size: int, body_limit: int,
          context: int | None, cache_bytes: int | None, log_level: str) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, one generation at a time.

    Ctrl-C lets running answers finish for half a minute; a second one ends at once.
    """
    try:
        from . import create_app
        from .serving import Server
    except ImportError as error:
        raise click.ClickException(f"the server needs the extra ({error.name} is missing): pip install 'lily-metal[server]'") from error
    if not api_key and not _is_local(host):
        click.echo(f"lily: warning: {host} can be reached by others and no --api-key is set", err=True)
    loaded = _load(model, device, context, cache_bytes)
    app = create_app(loaded, name=name or loaded.name, api_key=api_key or None, queue_size=queue_size, body_limit=body_limit)
    server = Server(app, host=host, port=port, log_level=log_level)
    try:
        server.run()
    except KeyboardInterrupt:  # uvicorn ends in order, then raises again what ended it
        pass
    if not server.started:
        raise SystemExit(1)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _load(model: str, device: str | None, context: int | None, cache_bytes: int | None) -> Any:
    import lily

    return lily.Model.load(model, device=device, context=context, cache_bytes=cache_bytes)
