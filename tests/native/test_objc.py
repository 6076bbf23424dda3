"""The Objective-C runtime subset (tests/metal_host/probe/objc_scenarios.mm)."""

from __future__ import annotations

import pytest

from tests.metal_host.probing import run


@pytest.mark.parametrize("scenario", ["messages", "counts", "weak", "blocks", "exceptions", "threads", "collections"])
def test_scenario(scenario: str) -> None:
    result = run(scenario)
    assert result.returncode == 0, result.stderr
    assert "live 0" in result.stdout


def test_unknown_selector_is_named() -> None:
    result = run("unknown_selector")
    assert result.returncode == -6
    assert "unrecognized selector -[Animal count]" in result.stderr
