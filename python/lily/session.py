"""One sequence on the device: KV cache, recurrent state and the tokens they hold.

The caller hands over the full prompt; the session works out what it already holds. After every generation, however it
ended, the state is exactly `tokens`: a step that was in flight past the end wrote only rows and ring slots that are not
current (DESIGN.md, DecodeLoop). The last sampled token is pending, not part of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _native, policy
from .checkpoint import bf16_to_f32
from .choice_buffers import MAX_STOP_IDS, ChoiceBuffers
from .engine import Engine
from .errors import ContextLengthError, DeviceError, LilyError, RequestError
from .kernel_args import constant, structs
from .logprobs import StepLogprobs
from .options import ExecutionOptions
from .plans.context import session_state_bytes
from .plans.decode import decode_plan
from .plans.prefill import prefill_plan
from .prefix_cache import Node, PrefixCache, common_prefix
from .sampling import SamplingParams
from .schedule import Region
from .snapshot_store import RING
from .steering import Steering
from .turns import Marks

CAPACITY_STEP = 256  # KV rows are added in such steps; a prompt of similar length reuses the recorded programs
IN_FLIGHT = 2  # decode steps; the ring keeps the state before them intact


@dataclass(frozen=True)
class Sampled:
    """One chosen token. `stopped`: it is one of the stop ids. `logprobs`: when they were asked for."""

    token: int
    stopped: bool
    logprobs: StepLogprobs | None = None


class Session:
    """State of one sequence. Not thread-safe; `Model` serialises the use of its sessions."""

    def __init__(self, engine: Engine, cache: PrefixCache | None = None) -> None:
        """`cache`: shared with the other sessions of the model; None computes every prompt that does not continue the state."""
        self.engine = engine
        self._cache = cache
        self._used: list[Node] = []  # snapshots that this request resumed from or took
        self.config = engine.config
        self.tokens: list[int] = []
        self.prefilled = 0  # tokens that the last prefill really computed
        self.gpu_seconds = 0.0  # that all decode steps have taken by the GPU's clock
        self._slot = 0
        self._capacity = 0
        self._state: dict[str, Any] = {}
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._step_layout = structs()["StepState"]
        self._state["step"] = engine.gpu.buffer(self._step_layout.size, "step")
        engine.gpu.write(self._state["step"], np.zeros(self._state["step"].nbytes, np.uint8))
        # The step state as the CPU reads it after a decode step, where it does not see the GPU's.
        self._step_copy = None if engine.gpu.capabilities.unified_memory else engine.gpu.host_buffer(self._step_layout.size, "step copy")
        self._choice = ChoiceBuffers(engine.gpu, self.config.vocab_size, self._state)
        self._fixed = {n: Region(n, 0, nbytes) for n, nbytes in ({"step": self._step_layout.size} | self._choice.sizes).items()}
        engine.register(self)

    # -- state -----------------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Forgets everything; buffers are kept."""
        self.tokens = []
        self._slot = 0
        rings = [b for name, b in self._state.items() if name.startswith(("conv.", "gdn."))]
        self.engine.gpu.native.blit([], [(b, 0, b.nbytes // RING, 0) for b in rings])

    def release(self) -> None:
        """Frees the state and the recorded programs for good."""
        self.tokens = []
        self._programs.clear()
        self._state.clear()
        self._step_copy = None
        self._capacity = 0

    @property
    def buffers(self) -> Mapping[str, Any]:
        """State buffers by name (plans/context.py)."""
        return self._state

    @property
    def fixed_regions(self) -> Mapping[str, Region]:
        """Step state, sampling parameters and stop ids, as plans bind them."""
        return self._fixed

    @property
    def slot(self) -> int:
        """Slot of the convolution and GDN rings that holds the state."""
        return self._slot

    def adopt(self, tokens: Sequence[int]) -> None:
        """The KV buffers and slot 0 of the rings hold the state of `tokens`."""
        self.tokens = list(tokens)
        self._slot = 0

    @property
    def capacity(self) -> int:
        """Tokens that the KV buffers can hold."""
        return self._capacity

    def memory_bytes(self) -> int:
        """Bytes of KV and recurrent state."""
        return sum(b.nbytes for b in self._state.values())

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the state as float32, by buffer name: KV [tokens, kv_width], convolution and GDN state flat."""
        out = {}
        read = self.engine.gpu.read
        for name, buffer in self._state.items():
            slot = buffer.nbytes // RING
            if name.startswith("gdn."):
                out[name] = read(buffer, self._slot * slot, slot).view(np.float32)
            elif name.startswith("conv."):
                out[name] = bf16_to_f32(read(buffer, self._slot * slot, slot).view(np.uint16))
            elif name.startswith("kv_"):
                row = buffer.nbytes // self._capacity
                out[name] = bf16_to_f32(read(buffer, 0, row * len(self.tokens)).view(np.uint16).reshape(-1, row // 2))
        return out

    def ensure_capacity(self, tokens: int) -> None:
        """Grows the KV buffers to hold `tokens` rows and the row of a step in flight; contents are carried over."""
        if tokens + IN_FLIGHT <= self._capacity:
            return
        capacity = -(-(tokens + IN_FLIGHT) // CAPACITY_STEP) * CAPACITY_STEP
        self.engine.check_fits(capacity, self)
        fresh: dict[str, Any] = {}  # swapped in when everything has worked: a failure loses nothing
        copies = []
        for name, nbytes in session_state_bytes(self.config, capacity).items():
            old = self._state.get(name)
            if old is None or name.startswith("kv_"):
                fresh[name] = self.engine.gpu.buffer(nbytes, name)
                if old is not None and self.tokens:
                    copies.append((old, 0, fresh[name], 0, len(self.tokens) * (nbytes // capacity)))
        self.engine.gpu.native.blit(copies)
        first = not self._capacity
        self._state.update(fresh)
        self._capacity = capacity
        self._programs.clear()
        if first:
            self.reset()

    def place_step(self, *, step: int = 0, token: int | None = None) -> None:
        """Puts the step state on the GPU where the host believes it is."""
        words = np.zeros(self._step_layout.size // 4, np.uint32)
        f = self._step_layout.field
        words[f("position").offset // 4] = len(self.tokens)
        words[f("slot").offset // 4] = self._slot
        words[f("step").offset // 4] = step
        words[f("done").offset // 4] = 0
        if token is not None:
            words[f("tokens").offset // 4 + (step & 1)] = token
        self.engine.gpu.write(self._state["step"], words)
        if self._step_copy is not None:
            self._step_copy.view()[: words.nbytes] = words.view(np.uint8)

    # -- programs --------------------------------------------------------------------------------------------------------
    def _prefill_program(
        self, rows: int, *, head_rows: int, choose: bool, sampled: bool, stop_count: int, options: ExecutionOptions, adjusted: bool = False,
        logprobs: bool = False,
    ) -> Any:
        ctx = self.engine.context("prefill", rows, self._capacity, self._capacity, head_rows, options)
        arena = self.engine.arena(ctx.arena_bytes())
        key = ("prefill", rows, head_rows, choose, sampled, stop_count, options, adjusted, logprobs, id(arena))
        if key not in self._programs:
            self._trim_programs()
            plan = prefill_plan(ctx, self._fixed, choose=choose, sampled=sampled, stop_count=stop_count, adjusted=adjusted, logprobs=logprobs)
            self._programs[key] = (ctx, self.engine.record(plan, self._state, options))
        return self._programs[key]

    def _decode_program(
        self, keys: int, *, sampled: bool, stop_count: int, options: ExecutionOptions, adjusted: bool = False, logprobs: bool = False,
    ) -> Any:
        context = policy.context_range(keys)
        ctx = self.engine.context("decode", 1, min(context, self._capacity), self._capacity, 1, options)
        arena = self.engine.arena(ctx.arena_bytes())
        key = ("decode", context, sampled, stop_count, options, adjusted, logprobs, id(arena))
        if key not in self._programs:
            self._trim_programs()
            plan = decode_plan(ctx, self._fixed, sampled=sampled, stop_count=stop_count, adjusted=adjusted, logprobs=logprobs)
            self._programs[key] = (ctx, self.engine.record(plan, self._state, options))
        return self._programs[key]

    def _trim_programs(self, keep: int = 16) -> None:
        while len(self._programs) >= keep:
            self._programs.pop(next(iter(self._programs)))

    # -- passes ----------------------------------------------------------------------------------------------------------
    def reusable(self, ids: Sequence[int]) -> int:
        """Tokens of `ids` that need no computing: all held ones if `ids` continues them, else none."""
        n = len(self.tokens)
        return n if n < len(ids) and self.tokens == list(ids[:n]) else 0

    def generate(
        self, ids: Sequence[int], sampling: SamplingParams, max_tokens: int, stop_ids: Sequence[int], options: ExecutionOptions,
        progress: Callable[[int, int], None] | None = None, marks: Marks = Marks(), steering: Steering | None = None,
    ) -> Generator[Sampled, None, None]:
        """Prefills what is missing of `ids` and yields sampled tokens, at most `max_tokens`, up to and with a stop id.

        `marks`: where the prompt's turns end, for the prefix cache. `steering`: tokens that are put in, and masks. Closing the iterator ends the generation; the state is
        then exactly the prompt and the delivered tokens but the last. Raises ContextLengthError for a prompt that leaves no
        room, DeviceError for a failed command buffer (the state is dropped, the engine lives).
        """
        self._check(ids, max_tokens, stop_ids)
        max_tokens = min(max_tokens, self.engine.context_length - len(ids))
        self.ensure_capacity(len(ids) + max_tokens)
        # Options are switches for measuring: what runs with its own neither takes from the cache nor gives to it.
        cache = self._cache if self._cache is not None and self._cache.enabled and options == ExecutionOptions() else None
        self._used = []
        try:
            adjusted = sampling.adjusts or (steering is not None and steering.masks)
            self._choice.write(sampling, stop_ids, adjusted)
            choice = {"sampled": not sampling.greedy or sampling.logprobs, "stop_count": len(stop_ids), "options": options, "adjusted": adjusted,
                      "logprobs": sampling.logprobs}
            self._choice.write_mask(steering)
            first = self._prefill(ids, progress, choice, cache, marks)
            yield from self._decode(first, max_tokens, choice, steering, len(ids) if sampling.penalised else None)
        except DeviceError:
            self._forget()
            self.reset()
            raise
        finally:
            if cache is not None and len(self.tokens) > len(ids):
                cache.insert(self)

    def _forget(self) -> None:
        """Drops the snapshots of a request that failed: what made it fail may be in them."""
        if self._cache is not None:
            for node in self._used:
                self._cache.forget(node)
        self._used = []

    def _check(self, ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty", fix="give at least one token")
        bad = next((i for i in ids if not 0 <= i < self.config.vocab_size), None)
        if bad is not None:
            raise RequestError(f"prompt id {bad} is outside the vocabulary of {self.config.vocab_size}")
        limit = self.engine.context_length
        if len(ids) >= limit:
            raise ContextLengthError(f"the prompt has {len(ids)} tokens, the model's context is {limit}", fix="shorten the prompt",
                                     tokens=len(ids), limit=limit)
        if max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {max_tokens}")
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(f"at most {MAX_STOP_IDS} stop ids are supported, got {len(stop_ids)}")

    def _prefill(
        self, ids: Sequence[int], progress: Callable[[int, int], None] | None, choice: dict[str, Any], cache: PrefixCache | None, marks: Marks,
    ) -> Sampled:
        """Runs the chunks (P5), taking snapshots on the way, and returns the token chosen after the last row."""
        start, known = self._resume(ids, cache)
        self.prefilled = len(ids) - start
        cuts = [] if cache is None else policy.snapshot_positions(start, len(ids), marks.message, marks.turn, known)
        while (at := len(self.tokens)) < len(ids):
            end = next((cut for cut in cuts if cut > at), len(ids))
            rows = policy.chunk_size(end - at, choice["options"].chunk_size)
            last = at + rows == len(ids)
            ctx, program = self._prefill_program(rows, head_rows=int(last), choose=last, **choice)
            self._run_chunk(ctx, program, ids[at : at + rows])
            if cache is not None and at + rows in cuts and (node := cache.insert(self)) is not None:
                self._used.append(node)
            if progress is not None:
                progress(len(self.tokens) - start, len(ids) - start)
        return self._read_sampled(0, choice["logprobs"])

    def _resume(self, ids: Sequence[int], cache: PrefixCache | None) -> tuple[int, int]:
        """(tokens of `ids` that need no computing, tokens of it that the cache has met): goes on from the own state or the
        longest snapshot, whichever is longer."""
        start, known = self.reusable(ids), 0
        if cache is not None:
            node, known = cache.match(ids)
            if node is not None and node.length > start:
                self._used.append(node)
                if cache.resume(self, node, min(node.length, common_prefix(self.tokens, list(ids)))):
                    start = node.length
                    self.adopt(ids[:start])
                else:
                    start = 0
            cache.count(start)
        if not start:
            self.reset()
        return start, known

    def _run_chunk(self, ctx: Any, program: Any, ids: Sequence[int], *, step: int = 0) -> None:
        self.place_step(step=step, token=ids[-1])
        region = ctx.arena()["ids"]
        self.engine.write(region, np.asarray(ids, np.uint32))
        program.run()
        self.tokens.extend(ids)
        self._slot = (self._slot + 1) % RING

    def _put_in(self, ids: Sequence[int], step: int, choice: dict[str, Any]) -> Sampled:
        """Takes in generated tokens that the state does not hold yet, and returns the one chosen after them, of number `step`."""
        while ids:
            rows = policy.chunk_size(len(ids), choice["options"].chunk_size)
            last = rows == len(ids)
            ctx, program = self._prefill_program(rows, head_rows=int(last), choose=last, **choice)
            self._run_chunk(ctx, program, ids[:rows], step=step)
            ids = ids[rows:]
        return self._read_sampled(step, choice["logprobs"])

    def _read_sampled(self, step: int, logprobs: bool) -> Sampled:
        f, ring = self._step_layout.field, constant("LILY_HISTORY")
        words = self.engine.gpu.read(self._state["step"], 0, self._step_layout.size).view(np.uint32)
        token = int(words[f("history").offset // 4 + step % ring])
        flag = int(words[f("flags").offset // 4 + step % ring])
        return self._sampled(token, flag, step, logprobs)

    def _sampled(self, token: int, flag: int, step: int, logprobs: bool) -> Sampled:
        if flag == constant("LILY_NONFINITE"):
            raise DeviceError("the logits are not finite (NaN or Inf)", fix="check the checkpoint; the session was dropped, other requests are not affected")
        return Sampled(token, flag == constant("LILY_STOPPED"), self._choice.logprobs(step) if logprobs else None)

    def _decode(self, first: Sampled, max_tokens: int, choice: dict[str, Any], steering: Steering | None, count_from: int | None) -> Iterator[Sampled]:
        """Delivers `first`, then decodes; a program serves one context range, the next range's is swapped in at a step.

        `count_from`: where the tokens that penalties count begin, None without penalties. The kernel counts as it goes; after
        steps that were dropped it is told anew. With a mask the host has its say before each step, so nothing runs ahead.
        """
        current, delivered, recount = first, 1, True
        yield current
        if steering is not None:
            steering.accept(current.token)
        while not current.stopped and delivered < max_tokens:
            put_in = [current.token]
            for token in steering.forced() if steering is not None else ():
                if delivered < max_tokens:
                    put_in.append(token)
                    delivered += 1
                    yield Sampled(token, False, StepLogprobs(0.0) if choice["logprobs"] else None)
            if delivered >= max_tokens:
                return
            if count_from is not None and (recount or len(put_in) > 1):
                self._choice.write_counts([*self.tokens[count_from:], *put_in[:-1]])
            masked = self._choice.write_mask(steering)
            if len(put_in) > 1:
                current = self._put_in(put_in, delivered, choice)
                delivered, recount = delivered + 1, False
                yield current
                if steering is not None:
                    steering.accept(current.token)
                continue
            keys = len(self.tokens) + 1
            end = policy.context_range(keys)
            steps = min(max_tokens - delivered, end - len(self.tokens))
            if masked or not choice["options"].gpu_token_handoff:
                steps = 1
            _, program = self._decode_program(keys, **choice)
            self.place_step(step=delivered, token=current.token)
            loop = _native.DecodeLoop(program, self._state["step"], IN_FLIGHT, self._step_copy)
            loop.start(steps)
            recount = steps > 1
            try:
                while (item := loop.next()) is not None:
                    self.tokens.append(current.token)
                    self._slot = (self._slot + 1) % RING
                    current = self._sampled(*item, delivered, choice["logprobs"])
                    delivered += 1
                    yield current
                    if steering is not None and steering.accept(current.token) or current.stopped:
                        break
            finally:
                loop.drain()  # steps in flight past this point touch nothing that is current
                self.gpu_seconds += loop.gpu_ms / 1e3

    def logits(self, ids: Sequence[int], options: ExecutionOptions) -> np.ndarray:
        """Teacher-forced logits of a fresh sequence: float32 [len(ids), vocab]; row i predicts token i + 1."""
        self._check(ids, 1, ())
        out = np.empty((len(ids), self.config.vocab_size), np.float32)
        try:
            self.ensure_capacity(len(ids))
            self.reset()
            while (at := len(self.tokens)) < len(ids):
                rows = policy.logits_chunk(len(ids) - at, self.config.vocab_size, options.chunk_size)
                ctx, program = self._prefill_program(rows, head_rows=rows, choose=False, sampled=False, stop_count=0, options=options)
                self._run_chunk(ctx, program, ids[at : at + rows])
                region = ctx.arena()["logits"]
                out[at : at + rows] = self.engine.read(region).view(np.float32)[: rows * self.config.vocab_size].reshape(rows, -1)
        except LilyError:
            self.reset()
            raise
        return out
