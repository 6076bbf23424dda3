"""A fake model with a live server around it, and the official clients."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("starlette", "sse_starlette", "uvicorn", "prometheus_client", "httpx", "openai", "anthropic")):
    collect_ignore_glob = ["test_*.py"]  # the extra `test` is not installed
else:
    import httpx

    from tests.server.fake_model import FakeModel, live


@pytest.fixture(scope="session")
def served() -> Iterator[tuple[FakeModel, str]]:
    """One server for all tests that leave it whole."""
    model = FakeModel()
    with live(model) as address:
        yield model, address


@pytest.fixture
def fake(served: tuple[FakeModel, str]) -> FakeModel:
    served[0].reset()
    return served[0]


@pytest.fixture
def url(served: tuple[FakeModel, str], fake: FakeModel) -> str:
    return served[1]


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture(scope="session")
def tiny(model: Any) -> Iterator[str]:
    """A server around the embedded model."""
    with live(model) as address:
        yield address


@pytest.fixture
def openai_client(url):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def anthropic_client(url):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client
