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
_HOST = frozenset({"token_mask", "logprobs"})  # changes hands at every step: a copy would cost more than slow memory does


class ChoiceBuffers:
    """Buffers of one session by name, put into its `state`: sample_params and stop_ids always; token_counts, logit_bias,
    token_mask and logprobs when a request first needs them. Written only while nothing runs."""

    def __init__(self, gpu: Gpu, vocab_size: int, state: MutableMapping[str, Any]) -> None:
        self._gpu, self._vocab_size, self._state = gpu, vocab_size, state
        layout = structs()["SampleParams"]
        self._adjust = layout.field("adjust").offset // 4
        self._params = np.zeros(layout.size // 4, np.uint32)
        self.sizes = {"sample_params": layout.size, "stop_ids": 4 * MAX_STOP_IDS, "token_counts": 4 * vocab_size, "logit_bias": 4 * vocab_size,
                      "token_mask": 4 * -(-vocab_size // 32), "logprobs": ring_bytes()}
        for name in ("sample_params", "stop_ids"):
            self._ensure(name)

    def write(self, sampling: SamplingParams, stop_ids: Sequence[int], adjusted: bool) -> None:
        """A request's parameters. adjusted: its plans change logits before the choice."""
        for name in (*(("token_counts", "logit_bias", "token_mask") if adjusted else ()), *(("logprobs",) if sampling.logprobs else ())):
            self._ensure(name)
        self._params = np.frombuffer(sampling.pack(), np.uint32).copy()
        self._put("sample_params", self._params)
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
        masked = steering.fill(self._view("token_mask").view(np.uint32))
        bit = np.uint32(constant("LILY_ADJUST_MASK"))
        before = self._params[self._adjust]
        self._params[self._adjust] = before | bit if masked else before & ~bit
        if self._params[self._adjust] != before:
            self._put("sample_params", self._params)
        return masked

    def logprobs(self, step: int) -> StepLogprobs:
        """Of a step that has completed, one of the last LILY_HISTORY."""
        return read_ring(self._view("logprobs"), step)

    def _ensure(self, name: str) -> None:
        if name not in self._state:
            make = self._gpu.host_buffer if name in _HOST else self._gpu.buffer
            self._state[name] = make(self.sizes[name], name)
            self._put(name, np.zeros(self.sizes[name], np.uint8))

    def _put(self, name: str, data: np.ndarray) -> None:
        if name in _HOST:
            self._view(name)[:] = data
        else:
            self._gpu.write(self._state[name], data)

    def _view(self, name: str) -> np.ndarray:
        view: np.ndarray = self._state[name].view()[: self.sizes[name]]
        return view
