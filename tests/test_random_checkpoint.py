"""Random checkpoints of any dims load, run and agree with the numpy reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
from lily.config import ModelConfig
from lily.errors import RequestError
from lily.model_files import resolve
from lily.presets import PRESETS
from lily.random_checkpoint import with_layers, write_random_checkpoint
from lily.sampling import SamplingParams
from lily.session import Session
from tests.reference.model import ReferenceModel

TINY = PRESETS["lily-tiny"]
ODD_DIMS = {
    "small heads": dict(head_dim=64, rotary_dim=16, q_heads=6, kv_heads=2, hidden_size=192),
    "one GDN head": dict(k_heads=1, v_heads=1, dk=64, dv=64),
    "three value heads a key head": dict(k_heads=1, v_heads=3, dk=64, dv=128),
    "wide shared expert": dict(shared_width=192),
    "few experts": dict(num_experts=5, top_k=3, expert_width=128, shared_width=128),
    "unnormalised routing": dict(head_dim=96, rotary_dim=24, q_heads=4, kv_heads=4),
}


def relative(ours: np.ndarray, reference: np.ndarray) -> float:
    """Median over rows of the relative RMS error: random routers have near ties, and a row whose experts flip is another row."""
    rows = np.sqrt(((ours - reference) ** 2).mean(-1) / (reference**2).mean(-1))
    return float(np.median(rows))


def write(folder: Path, config: ModelConfig, seed: int = 1) -> Path:
    return write_random_checkpoint(folder, config, seed=seed, tokenizer=resolve("lily-tiny"))


@pytest.mark.parametrize("name", ODD_DIMS)
def test_odd_dims_agree_with_the_reference(name: str, tmp_path: Path) -> None:
    config = dataclasses.replace(with_layers(TINY, 4), **ODD_DIMS[name])  # type: ignore[arg-type]
    model = lily.Model.load(write(tmp_path / "m", config))
    ids = np.random.default_rng(2).integers(0, config.vocab_size, 40).tolist()
    reference = ReferenceModel(tmp_path / "m").logits(ids)
    assert relative(model.logits(ids), reference) < 5e-2  # bf16 activations through four random layers
    session = Session(model.engine)
    tokens = [s.token for s in session.generate(ids, SamplingParams(), 6, (), lily.ExecutionOptions())]
    full = ReferenceModel(tmp_path / "m").logits([*ids, *tokens[:-1]])[len(ids) - 1 :]
    for row, token in zip(full, tokens, strict=True):  # greedy unless the reference itself is undecided
        assert row.max() - row[token] < 0.2


def test_experts_are_unevenly_loaded_and_activations_stay_finite(tmp_path: Path) -> None:
    config = with_layers(TINY, 2)
    model = lily.Model.load(write(tmp_path / "m", config))
    logits = model.logits(list(range(64)))
    assert np.isfinite(logits).all() and 0.1 < logits.std() < 30


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(RequestError, match="not empty"):
        write_random_checkpoint(tmp_path, TINY)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    config = with_layers(TINY, 1)
    files = [next(write(tmp_path / name, config, seed).glob("*.safetensors")).read_bytes() for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    assert files[0] == files[1] != files[2]


@pytest.mark.slow
def test_four_full_width_layers_agree_with_the_reference(tmp_path: Path) -> None:
    config = with_layers(PRESETS["qwen3.6-35b-a3b"], 4)
    model: Any = lily.Model.load(write(tmp_path / "m", config))
    ids = np.random.default_rng(3).integers(0, 6000, 300).tolist()
    session = Session(model.engine)
    tokens = [s.token for s in session.generate(ids, SamplingParams(), 21, (), lily.ExecutionOptions())]
    reference = ReferenceModel(tmp_path / "m").logits([*ids, *tokens[:-1]])
    assert relative(model.logits(ids), reference[:300]) < 5e-2
    chunked = model.logits(ids, options=lily.ExecutionOptions(chunk_size=64))
    assert relative(chunked, reference[:300]) < 5e-2
    for row, token in zip(reference[299:], tokens, strict=True):
        assert row.max() - row[token] < 0.2
