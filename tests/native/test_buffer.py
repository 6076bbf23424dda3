"""lily._native.Buffer: views, fills, copies, lifetime."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from tests.native.tools import native

PAGES = 1 << 20


def test_view_is_the_memory_and_keeps_it_alive(kernels: Any) -> None:
    buffer = kernels.device.buffer(PAGES, label="weights", tracked=False)
    assert (buffer.nbytes, buffer.label) == (PAGES, "weights")
    view = buffer.view()
    assert view.dtype == np.uint8 and view.shape == (PAGES,)
    assert view.ctypes.data % 256 == 0
    view[:] = np.arange(PAGES) % 251
    again = buffer.view()
    del buffer, view
    gc.collect()
    assert again[1000] == 1000 % 251


def test_fill_and_copy(kernels: Any) -> None:
    source, target = kernels.device.buffer(256), kernels.device.buffer(128, storage="private")
    back = kernels.device.buffer(128)
    source.fill(0)
    source.fill(7, 4, 8)
    target.fill(1)
    source.copy_to(target, 0, 64, 16)
    target.copy_to(back, 0, 0, 128)
    expected = np.full(128, 1, np.uint8)
    expected[64:80] = [0] * 4 + [7] * 8 + [0] * 4
    np.testing.assert_array_equal(back.view(), expected)


def test_blit_runs_a_batch_of_copies_and_fills(kernels: Any) -> None:
    device = kernels.device
    source, private, back = device.buffer(256), device.buffer(256, storage="private"), device.buffer(256)
    source.view()[:] = np.arange(256)
    device.blit([(source, 128, private, 0, 64), (source, 0, private, 64, 64), (source, 0, private, 200, 0)], [(private, 128, 128, 9)])
    device.blit([(private, 0, back, 0, 256)])
    np.testing.assert_array_equal(back.view(), [*range(128, 192), *range(64), *[9] * 128])
    device.blit([])


@pytest.mark.parametrize("batch, match", [
    (lambda a, b: ([(a, 0, b, 0, 64), (a, 64, b, 60, 8)], []), "used twice"),
    (lambda a, b: ([(a, 0, b, 0, 64)], [(b, 32, 4, 0)]), "used twice"),
    (lambda a, b: ([(a, 0, b, 0, 64)], [(a, 0, 4, 0)]), "used twice"),
    (lambda a, b: ([(a, 0, a, 32, 64)], []), "used twice"),
    (lambda a, b: ([(a, 0, b, 0, 512)], []), "beyond"),
    (lambda a, b: ([(a, 2, b, 0, 4)], []), "multiples of 4"),
    (lambda a, b: ([], [(a, 0, 4, 256)]), "0 to 255"),
])
def test_a_batch_whose_ranges_collide_is_refused_whole(kernels: Any, batch: Any, match: str) -> None:
    a, b = kernels.device.buffer(256), kernels.device.buffer(256)
    b.fill(7)
    with pytest.raises(ValueError, match=match):
        kernels.device.blit(*batch(a, b))
    assert (b.view() == 7).all()


def test_private_storage_has_no_view(kernels: Any) -> None:
    with pytest.raises(ValueError, match="private"):
        kernels.device.buffer(64, storage="private").view()


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda d: d.buffer(0), "0 bytes"),
        (lambda d: d.buffer(64, storage="managed"), "shared or private"),
        (lambda d: d.buffer(64).fill(300), "0 to 255"),
        (lambda d: d.buffer(64).fill(1, 2, 4), "multiples of 4"),
        (lambda d: d.buffer(64).fill(1, 60, 8), "beyond"),
        (lambda d: d.buffer(64, label="a").copy_to(d.buffer(32), 0, 0, 64), "beyond"),
    ],
)
def test_wrong_use_is_a_value_error(kernels: Any, make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(kernels.device)


def test_overlapping_copy(kernels: Any) -> None:
    buffer = kernels.device.buffer(64)
    with pytest.raises(ValueError, match="overlap"):
        buffer.copy_to(buffer, 0, 16, 32)


def test_a_buffer_over_the_limit_is_a_device_error(kernels: Any) -> None:
    from lily.errors import DeviceError

    with pytest.raises(DeviceError, match="exceeds"):
        kernels.device.buffer(kernels.device.info()["max_buffer_length"] + 1, label="too big")


def test_counters(kernels: Any) -> None:
    before, live = native.buffers_created(), native.live_objects()
    buffers = [kernels.device.buffer(64) for _ in range(10)]
    assert native.buffers_created() == before + 10
    del buffers
    gc.collect()
    if live is not None:
        assert native.live_objects() <= live


def test_devices() -> None:
    devices = native.devices()
    assert devices and devices[0]["index"] == 0
    info = native.Device(0).info()
    assert info["name"] == devices[0]["name"] == native.default_device_name()
    assert info["simd_width"] == 32 and info["threadgroup_memory"] >= 32768 and info["max_threads"] >= 1024
    from lily.errors import DeviceError

    with pytest.raises(DeviceError, match="no Metal device 99"):
        native.Device(99)


def test_large_buffers_are_not_touched(kernels: Any) -> None:
    """Weights are resident once: allocating must not make pages resident."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    buffer = kernels.device.buffer(1 << 30, tracked=False)
    assert buffer.nbytes == 1 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
