"""From what a user calls a model (a name, a folder, a Hub id) to the folder that holds it."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import CheckpointError

BUILT_IN = "lily-tiny"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "model*.safetensors"]


def resolve(model: str | Path) -> Path:
    """The folder of ``model``: the built-in `lily-tiny`, an existing folder, or a Hub id (downloaded or from its cache).

    Raises CheckpointError when there is no such thing.
    """
    if not isinstance(model, (str, Path)):
        raise CheckpointError(f"a model is a name or a path, got {type(model).__name__}")
    if str(model) == BUILT_IN:
        return Path(__file__).parent / "data" / BUILT_IN
    try:
        folder = Path(model).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:  # a name too long, an unknown user
        raise CheckpointError(f"not a usable path ({error})", where=str(model)[:80]) from error
    if is_folder:
        return folder
    if exists:
        raise CheckpointError("is a file, not a folder", where=str(model), fix="give the folder that holds config.json and the weights")
    if isinstance(model, str) and _HUB_ID.fullmatch(model):
        return _from_hub(model)
    raise CheckpointError("no such folder", where=str(model), fix=f"give a folder, a Hub id such as org/name, or {BUILT_IN}")


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError("no such folder, and no Hub client is installed", where=name, fix="pip install 'lily-metal[hub]'") from error
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the client has no common base for network, cache and permission faults
        raise CheckpointError(f"no such folder, and the Hub gave no such model ({type(error).__name__}: {error})", where=name,
                              fix="check the name, or the connection") from error
