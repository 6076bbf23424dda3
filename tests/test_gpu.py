"""Memory that the CPU does not see: reads, writes and a whole model through the staging window, on whatever device there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lily
from lily import gpu as gpu_module
from lily.errors import DeviceError
from lily.gpu import Gpu
from tests.conftest import chosen_device


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices say that their memory is not unified."""
    made = Gpu.__init__

    def init(self: Gpu, kind: str | None = None) -> None:
        made(self, kind)
        self.info["unified_memory"] = False

    monkeypatch.setattr(Gpu, "__init__", init)


def test_reads_and_writes_go_through_a_window_in_pieces(private: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "_STAGING_BYTES", 4096)
    gpu = Gpu(chosen_device())
    buffer = gpu.buffer(20_000, "b")
    with pytest.raises(ValueError, match="private storage"):
        buffer.view()
    data = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)
    gpu.write(buffer, data)
    np.testing.assert_array_equal(gpu.read(buffer), data)
    gpu.write(buffer, np.arange(3000, dtype=np.uint32), 4000)
    np.testing.assert_array_equal(gpu.read(buffer, 4000, 12_000).view(np.uint32), np.arange(3000))
    np.testing.assert_array_equal(gpu.read(buffer, 0, 4000), data[:4000])
    np.testing.assert_array_equal(gpu.read(buffer, 16_000), data[16_000:])


def test_a_model_in_private_memory_gives_the_same_tokens_and_state(private: None, goldens: list[dict[str, Any]]) -> None:
    model = lily.Model.load("lily-tiny", device=chosen_device())
    with pytest.raises(ValueError, match="private storage"):
        model.engine.buffers["p:final_norm"].view()
    golden = goldens[0]
    for _ in range(2):  # the second time from the prefix cache
        reply = model.generate(prompt_ids=golden["prompt_ids"], max_tokens=golden["max_tokens"], temperature=0)
        assert list(reply.token_ids) == golden["greedy_ids"]
    assert reply.usage.cached_tokens > 0
    off = lily.ExecutionOptions(gpu_token_handoff=False, gpu_routing=False)
    assert list(model.generate(prompt_ids=golden["prompt_ids"], max_tokens=golden["max_tokens"], temperature=0, options=off).token_ids) == golden["greedy_ids"]
    assert all(np.isfinite(a).all() for a in model._session.state_arrays().values())


def test_an_unknown_kind_names_what_is_present() -> None:
    with pytest.raises(DeviceError, match="no device of kind 'abacus'; present: "):
        Gpu("abacus")
