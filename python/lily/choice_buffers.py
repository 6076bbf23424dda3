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
        self._values = np.zeros(self._params.size // 4, np.uint32)  # of sample_params, as the GPU has them
        for name in ("sample_params", "stop_ids"):
            self._ensure(name)

    def write(self, sampling: SamplingParams, stop_ids: Sequence[int], adjusted: bool) -> None:
        """A request's parameters. adjusted: its plans change logits before the choice."""
        for name in (*(("token_counts", "logit_bias", "token_mask") if adjusted else ()), *(("logprobs",) if sampling.logprobs else ())):
            self._ensure(name)
        self._values = np.frombuffer(sampling.pack(), np.uint32).copy()
        self._put("sample_params", self._values)
        self._put("stop_ids", np.asarray(stop_ids, np.uint32))
        if sampling.logit_bias:
            self._put("logit_bias", sampling.bias_array(self._vocab_size))
        if sampling.penalised:
            self.write_counts(())

    def write_counts(self, tokens: Sequence[int]) -> None:
        """The tokens that penalties count, without the one that the next step is fed."""
        self._put("token_counts", np.bincount(np.asarray(tokens, np.int64), minlength=self._vocab_size).astype(np.uint32))

    def write_mask(self, steering: Steering | None) -> bool:
        """Whether the next choice is masked; says so to the kernel."""
        if steering is None or not steering.masks:
            return False
        mask = np.zeros(self.sizes["token_mask"] // 4, np.uint32)
        masked = steering.fill(mask)
        if masked:
            self._put("token_mask", mask)
        word, bit = self._params.field("adjust").offset // 4, np.uint32(constant("LILY_ADJUST_MASK"))
        before = self._values[word]
        self._values[word] = before | bit if masked else before & ~bit
        if self._values[word] != before:
            self._put("sample_params", self._values)
        return masked

    def logprobs(self, step: int) -> StepLogprobs:
        """Of a step that has completed, one of the last LILY_HISTORY."""
        return read_ring(self._gpu.read(self._state["logprobs"]), step)

    def _ensure(self, name: str) -> None:
        if name not in self._state:
            self._state[name] = self._gpu.buffer(self.sizes[name], name)
            self._put(name, np.zeros(self._state[name].nbytes, np.uint8))

    def _put(self, name: str, data: np.ndarray) -> None:
        if data.nbytes:
            self._gpu.write(self._state[name], data)
