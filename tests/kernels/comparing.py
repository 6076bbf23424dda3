"""How kernel outputs are compared with their float64 references."""

import numpy as np

from tests.reference.quant import to_f32


def assert_close(actual: np.ndarray, expected: np.ndarray, accumulated: float = 1e-5) -> None:
    """f32 or bf16 (np.uint16) `actual`: within `accumulated` of the largest value, plus a bf16 rounding where one was made."""
    rounding = 2.0**-8 if actual.dtype == np.uint16 else 0.0
    values = (to_f32(actual) if actual.dtype == np.uint16 else actual).astype(np.float64)
    assert np.isfinite(values).all(), f"{np.count_nonzero(~np.isfinite(values))} values not written"
    error = np.abs(values - expected) - rounding * np.abs(expected)
    assert error.max() <= accumulated * np.abs(expected).max(), f"error {error.max():.3g} beside {np.abs(expected).max():.3g}"
