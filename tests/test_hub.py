"""Models of the Hub: which files are fetched, from which commit, what is refused before the weights, and every fault as a CheckpointError."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lily
from lily.errors import CheckpointError, RequestError
from lily.model_files import resolve
from lily.safetensors_file import INDEX_NAME
from tests.checkpoint_tools import MODEL_DIR, mini_config, mini_tensors, write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A client with one model, `org/tiny`, whose files lie in `repo`; its cache is a folder as the real client's."""

    def __init__(self, root: Path) -> None:
        self.repo, self.cache = root / "repo", root / "cache"
        self.repo.mkdir()
        self.revisions: list[str | None] = []
        self.fault: Exception | None = None

    def snapshot_download(self, name: str, *, revision: str | None = None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        self.revisions.append(revision)
        if self.fault is not None:
            raise self.fault
        assert name == "org/tiny"
        folder = self.cache / "models--org--tiny" / "snapshots" / COMMIT
        for path in self.repo.rglob("*"):
            inside = path.relative_to(self.repo).as_posix()
            if path.is_file() and any(fnmatch.fnmatch(inside, p) for p in allow_patterns) and not any(fnmatch.fnmatch(inside, p) for p in ignore_patterns):
                (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / inside)
        return str(folder)

    @property
    def fetched(self) -> set[str]:
        return {path.relative_to(self.cache / "models--org--tiny" / "snapshots" / COMMIT).as_posix() for path in self.cache.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=found.snapshot_download))
    monkeypatch.chdir(tmp_path)  # no folder org/tiny here
    yield found


def fill(hub: Hub, folder: Path) -> set[str]:
    """Copies a model into the repository beside what models of the Hub also hold; the names of the model's own files."""
    for path in folder.iterdir():
        shutil.copyfile(path, hub.repo / path.name)
    for name in ("README.md", ".gitattributes", "pytorch_model.bin", "vocab.json", "preprocessor_config.json", "onnx/config.json", "original/model.safetensors",
                 "fp16.safetensors"):
        (hub.repo / name).parent.mkdir(exist_ok=True)
        (hub.repo / name).write_text("not wanted")
    return {path.name for path in folder.iterdir()}


def test_a_model_of_the_hub_is_loaded_by_its_id_with_the_needed_files_of_one_commit(hub: Hub) -> None:
    wanted = fill(hub, MODEL_DIR) - {"README.md", "LICENSE", "NOTICE"}
    with lily.Model.load("org/tiny", device=os.environ.get("LILY_TEST_DEVICE"), revision="v2") as model:
        assert model.name == "org/tiny"
        assert model.generate("What is the capital of France?", temperature=0, enable_thinking=False).text == "The capital of France is Paris."
    assert hub.fetched == wanted
    assert hub.revisions == ["v2", COMMIT]


def test_shards_are_those_that_the_index_names(hub: Hub, tmp_path: Path) -> None:
    config = mini_config()
    folder = write_checkpoint(tmp_path / "m", config, mini_tensors(config), 3)
    index = json.loads((folder / INDEX_NAME).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    (folder / first).rename(folder / "odd[1].safetensors")
    index["weight_map"] = {tensor: "odd[1].safetensors" if file == first else file for tensor, file in index["weight_map"].items()}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    wanted = fill(hub, folder)
    assert {path.name for path in resolve("org/tiny").iterdir()} == wanted == hub.fetched and "odd[1].safetensors" in wanted
    assert hub.revisions == [None, COMMIT]


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def unquantised(folder: Path) -> None:
    edited(lambda config: [config.pop("quantization", None), config.pop("quantization_config", None)])(folder)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}))


@pytest.mark.parametrize("change, says", [
    (edited(lambda config: config.update(architectures=["LlamaForCausalLM"], model_type="llama")), "LlamaForCausalLM"),
    (unquantised, "mlx_lm.convert --hf-path org/tiny --mlx-path tiny-4bit -q"),
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (lambda folder: (folder / INDEX_NAME).write_text('{"weight_map": {"a": "../../etc/x.safetensors"}}'), "not a safetensors file of this folder"),
])
def test_what_lily_does_not_run_is_refused_before_its_weights_are_fetched(hub: Hub, change: Callable[[Path], None], says: str) -> None:
    fill(hub, MODEL_DIR)
    change(hub.repo)
    with pytest.raises(CheckpointError) as caught:
        resolve("org/tiny")
    assert says in str(caught.value)
    assert len(hub.revisions) == 1 and not any(name.endswith(".safetensors") for name in hub.fetched)


def kind(name: str, *bases: type[Exception]) -> Exception:
    return type(name, bases or (Exception,), {})("what the client says\nover two lines")


@pytest.mark.parametrize("fault, says", [
    (kind("RepositoryNotFoundError", OSError), "check the name; for a private model log in"),
    (kind("GatedRepoError", type("RepositoryNotFoundError", (OSError,), {})), "accept its licence"),
    (kind("RevisionNotFoundError"), "check the revision"),
    (kind("LocalEntryNotFoundError", type("EntryNotFoundError", (OSError,), {})), "connect to the network once"),
    (ConnectionError("refused"), "check the connection"), (OSError(28, "No space left on device"), "No space left"), (kind("SomethingNew"), "SomethingNew"),
])
def test_every_fault_of_the_client_says_what_to_do(hub: Hub, fault: Exception, says: str) -> None:
    hub.fault = fault
    with pytest.raises(CheckpointError) as caught:
        resolve("org/tiny", "v2")
    assert says in str(caught.value) and "org/tiny at v2" in str(caught.value) and "\n" not in str(caught.value)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"org/tiny: .*lily-metal\[hub\]"):
        lily.Model.load("org/tiny")


@pytest.mark.parametrize("model, revision", [("lily-tiny", "main"), (MODEL_DIR, "main"), ("org/tiny", ""), ("org/tiny", 5)])
def test_a_revision_of_anything_else_is_a_request_error(model: Any, revision: Any) -> None:
    with pytest.raises(RequestError, match="revision"):
        lily.Model.load(model, revision=revision)


def test_a_folder_of_that_name_comes_before_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert resolve("org/tiny") == Path("org/tiny") and hub.revisions == []


def offline(cache: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`resolve` with the real client and no network."""
    code = ("from lily.errors import CheckpointError; from lily.model_files import resolve\n"
            "try: print(resolve('org/tiny'))\nexcept CheckpointError as error: print(error)")
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=cwd,
                          env={**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"})


def test_the_real_client_finds_its_cache_without_network(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    result = offline(tmp_path / "hf", tmp_path)
    assert result.returncode == 0 and "connect to the network once" in result.stdout, result.stdout + result.stderr
    stored = tmp_path / "hf" / "hub" / "models--org--tiny"
    shutil.copytree(MODEL_DIR, stored / "snapshots" / COMMIT)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(COMMIT)
    result = offline(tmp_path / "hf", tmp_path)
    assert result.stdout.strip() == str(stored / "snapshots" / COMMIT), result.stdout + result.stderr
