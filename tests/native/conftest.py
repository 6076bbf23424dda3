from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def kernels() -> Any:
    from tests.native.tools import Kernels

    return Kernels()
