"""How a model's memory is planned before anything is allocated (case 38): pure functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import DeviceError, RequestError

GIB = 1 << 30
_SESSION_SHARE = 8192  # tokens of context that the default cache leaves room for; a longer session evicts snapshots
_CACHE_FLOOR = 256 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on a device. weights: with small tensors; scratch: of the largest pass; state: recurrent state of a session;
    row: KV of one token; limit: the device's working set."""

    device: str
    limit: int
    weights: int
    scratch: int
    state: int
    row: int

    def needed(self, context: int, cache: int = 0, sessions: int = 0) -> int:
        """Bytes with one session of `context` tokens, `cache` bytes of snapshots and `sessions` bytes of other sessions."""
        return self.weights + self.scratch + self.state + self.row * context + cache + sessions

    def context(self, asked: int | None, most: int, cache: int | None) -> int:
        """The context to offer: `most` clamped to what fits, or exactly the one asked for.

        Raises DeviceError with the numbers when not even one token fits or the one asked for does not, RequestError for one
        that the model does not have.
        """
        if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) or not 2 <= asked <= most):
            raise RequestError(f"context must be an integer between 2 and {most}, the model's limit, got {asked!r}")
        reserved = cache or 0
        room = self.limit - self.needed(0, reserved)
        fits = most if self.row == 0 and room >= 0 else room // max(1, self.row)
        if fits < (asked or 2):
            raise self.refusal(asked or 2, reserved)
        return asked or min(most, fits)

    def cache(self, asked: int | None, context: int) -> int:
        """Bytes for the prefix cache: those asked for, else half of what is left beside a session of moderate length, at
        most a quarter of the weights or 256 MiB, whichever is more."""
        if asked is not None:
            return asked
        spare = self.limit - self.needed(min(context, _SESSION_SHARE))
        return max(0, min(spare // 2, max(self.weights // 4, _CACHE_FLOOR)))

    def refusal(self, context: int, cache: int = 0, sessions: int = 0) -> DeviceError:
        """What does not fit, in numbers."""
        parts = [("weights", self.weights), ("state", self.state + self.row * context), ("scratch", self.scratch), ("prefix cache", cache),
                 ("other sessions", sessions)]
        numbers = ", ".join(f"{name} {nbytes / GIB:.2f}" for name, nbytes in parts if nbytes)
        return DeviceError(
            f"a context of {context} tokens needs {self.needed(context, cache, sessions) / GIB:.2f} GiB ({numbers}), "
            f"{self.device} offers {self.limit / GIB:.2f} GiB",
            fix="use a shorter context, prompt or max_tokens, or raise the limit (sysctl iogpu.wired_limit_mb on a Mac)",
        )


def checked_cache_bytes(asked: object) -> int | None:
    """The keyword of `Model.load`; RequestError for anything but None or bytes."""
    if asked is None or (isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0):
        return asked
    raise RequestError(f"cache_bytes must be an integer >= 0 (0 = off), got {asked!r}")
