"""Fixtures shared by all tests: the embedded model on the default device, and the goldens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def goldens() -> list[dict[str, Any]]:
    """Conversations of goldens/public.json (MLX-LM, float32)."""
    conversations: list[dict[str, Any]] = json.loads((GOLDENS / "public.json").read_text(encoding="utf-8"))
    return conversations


@pytest.fixture(scope="session")
def golden_arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "public.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}


def chosen_device() -> str | None:
    """LILY_TEST_DEVICE, or None for the default device. Skips the test, with the reason, where that device is absent."""
    from lily.errors import DeviceError
    from lily.gpu import Gpu

    kind = os.environ.get("LILY_TEST_DEVICE")
    try:
        Gpu(kind)
    except DeviceError as error:
        pytest.skip(f"LILY_TEST_DEVICE={kind}: {error}")
    return kind


@pytest.fixture(scope="session")
def model() -> Any:
    """lily-tiny on the default device, or on the one named by LILY_TEST_DEVICE."""
    import lily

    return lily.Model.load("lily-tiny", device=chosen_device())
