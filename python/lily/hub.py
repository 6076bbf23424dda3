"""Models from the Hugging Face Hub (extra `hub`): the files that Lily reads and no others, the small ones first."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .checkpoint import refuse_unquantised
from .config import ModelConfig
from .errors import CheckpointError
from .safetensors_file import INDEX_NAME, read_index

_SMALL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", INDEX_NAME]
_WEIGHTS_WITHOUT_INDEX = ["model.safetensors", "model-*-of-*.safetensors"]

# What to do about the client's errors, by the names of their classes; the first that fits.
_FIXES = {
    "GatedRepoError": "accept its licence on the Hub, then log in with `hf auth login`",
    "RepositoryNotFoundError": "check the name; for a private model log in with `hf auth login`",
    "RevisionNotFoundError": "check the revision: a branch, a tag or a commit",
    "HFValidationError": "check the name",
    "EntryNotFoundError": "connect to the network once; what was downloaded before is found without it",
    "OfflineModeIsEnabled": "connect to the network once; what was downloaded before is found without it",
    "ConnectionError": "check the connection",
}


def download(name: str, revision: str | None = None) -> Path:
    """The local folder of the Hub's model ``name`` (org/repo) at a branch, tag or commit; from the client's cache where it can.

    A model that Lily does not run is refused before its weights are fetched. Without network the cache is enough.
    Raises CheckpointError with what to do.
    """
    snapshot = _client(name)
    small = _call(snapshot, name, revision, _SMALL_FILES)
    config = ModelConfig.from_folder(small)
    weights = _WEIGHTS_WITHOUT_INDEX
    if (small / INDEX_NAME).is_file():
        placed = read_index(small / INDEX_NAME)
        refuse_unquantised(name, config, placed)
        weights = [glob.escape(file) for file in sorted(set(placed.values()))]
    # The folder is named after the commit: the weights come from the same one, also if a branch moved in between.
    return _call(snapshot, name, small.name if len(small.name) == 40 else revision, weights)


def _client(name: str) -> Callable[..., Any]:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError("no such folder, and no Hub client is installed", where=name, fix="pip install 'lily-metal[hub]'") from error
    return snapshot_download


def _call(snapshot: Callable[..., Any], name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    try:
        return Path(snapshot(name, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]))
    except Exception as error:  # the client has no common base for faults of the network, the cache, the disk and permissions
        kinds = {kind.__name__ for kind in type(error).__mro__}
        fix = next((fix for kind, fix in _FIXES.items() if kind in kinds), "check the name, the connection and the disk")
        at = f"{name} at {revision}" if revision else name
        raise CheckpointError(f"no such folder, and the Hub gave no such model ({type(error).__name__}: {error})", where=at, fix=fix) from error
