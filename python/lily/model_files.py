"""From what a user calls a model (a name, a folder, a Hub id) to the folder that holds it."""

from __future__ import annotations

import re
from pathlib import Path

from . import hub
from .errors import CheckpointError, RequestError

BUILT_IN = "lily-tiny"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(model: str | Path, revision: str | None = None) -> Path:
    """The folder of ``model``: the built-in `lily-tiny`, an existing folder, or a Hub id (downloaded or from its cache).

    revision: of a Hub id, a branch, tag or commit. Raises CheckpointError when there is no such thing, RequestError for a
    revision of something else.
    """
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise RequestError("must be the name of a branch or tag, or a commit", where="revision")
    if not isinstance(model, (str, Path)):
        raise CheckpointError(f"a model is a name or a path, got {type(model).__name__}")
    if str(model) == BUILT_IN:
        _no_revision(model, revision)
        return Path(__file__).parent / "data" / BUILT_IN
    try:
        folder = Path(model).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:  # a name too long, an unknown user
        raise CheckpointError(f"not a usable path ({error})", where=str(model)[:80]) from error
    if is_folder:
        _no_revision(model, revision)
        return folder
    if exists:
        raise CheckpointError("is a file, not a folder", where=str(model), fix="give the folder that holds config.json and the weights")
    if isinstance(model, str) and _HUB_ID.fullmatch(model):
        return hub.download(model, revision)
    raise CheckpointError("no such folder", where=str(model), fix=f"give a folder, a Hub id such as org/name, or {BUILT_IN}")


def model_name(model: str | Path, folder: Path) -> str:
    """What to call a model that was found in ``folder``: the folder's name, or the Hub id."""
    if str(model) == BUILT_IN or Path(model).expanduser() == folder:
        return folder.resolve().name
    return str(model)


def _no_revision(model: str | Path, revision: str | None) -> None:
    if revision is not None:
        raise RequestError(f"{model} is no model of the Hub", where="revision", fix="leave the revision out")
