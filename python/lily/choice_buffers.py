"""What the choice of a token reads on the GPU: a request's parameters, and what only some requests need."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np

from .gpu import Gpu
from .kernel_args import constant, structs
from .logprobs import StepLogprobs, read_ring, ring_bytes
from .sampling import SamplingParams
from .steering import Steering

MAX_STOP_IDS = 64


class ChoiceBuffers:
    """Buffers of one session by name, put into its `state`: sample_params and stop_ids always; token_counts, logit_bias,
    token_mask and logprobs when a request first needs them. Written only while nothing runs."""

    def __init__(self, gpu: Gpu, vocab_size: int, state: MutableMapping[str, Any]) -> None:
        self._gpu, self._vocab_size, self._state = gpu, vocab_size, state
        self._params = structs()["SampleParams"]
        self.sizes = {"sample_params": self._params.size, "stop_ids": 4 * MAX_STOP_IDS, "token_counts": 4 * vocab_size, "logit_bias": 4 * vocab_size,
                      "token_mask": 4 * -(-vocab_size // 32), "logprobs": ring_bytes()}
        for name in ("sample_params", "stop_ids"):
            self._ensure(name)

    def write(self, sampling: SamplingParams, stop_ids: Sequence[int], adjusted: bool) -> None:
        """A request's parameters. adjusted: its plans change logits before the choice."""
        for name in (*(("token_counts", "logit_bias", "token_mask") if adjusted else ()), *(("logprobs",) if sampling.logprobs else ())):
            self._ensure(name)
        self._words("sample_params", np.uint8)[:] = np.frombuffer(sampling.pack(), np.uint8)
        self._words("stop_ids")[: len(stop_ids)] = stop_ids
        if sampling.logit_bias:
            self._words("logit_bias", np.float32)[:] = sampling.bias_array(self._vocab_size)
        if sampling.penalised:
            self.write_counts(())

    def write_counts(self, tokens: Sequence[int]) -> None:
        """The tokens that penalties count, without the one that the next step is fed."""
        self._words("token_counts")[:] = np.bincount(np.asarray(tokens, np.int64), minlength=self._vocab_size)

    def write_mask(self, steering: Steering | None) -> bool:
        """Whether the next choice is masked; says so to the kernel."""
        if steering is None or not steering.masks:
            return False
        masked = steering.fill(self._words("token_mask"))
        bit = constant("LILY_ADJUST_MASK")
        adjust = self._words("sample_params")[self._params.field("adjust").offset // 4 :]
        adjust[0] = adjust[0] | bit if masked else adjust[0] & ~np.uint32(bit)
        return masked

    def logprobs(self, step: int) -> StepLogprobs:
        """Of a step that has completed, one of the last LILY_HISTORY."""
        return read_ring(self._words("logprobs", np.uint8), step)

    def _ensure(self, name: str) -> None:
        if name not in self._state:
            self._state[name] = self._gpu.buffer(self.sizes[name], name)
            self._state[name].view()[:] = 0

    def _words(self, name: str, dtype: type = np.uint32) -> np.ndarray:
        words: np.ndarray = self._state[name].view()[: self.sizes[name]].view(dtype)
        return words
