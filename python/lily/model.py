"""`lily.Model`: load a checkpoint, generate, stream, chat, and teacher-forced logits."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from . import guidance, session_file
from .async_stream import Check, async_pieces, gathered
from .chat import ChatTemplate
from .chat_session import ChatSession
from .checkpoint import Checkpoint
from .engine import Engine
from .errors import RequestError
from .generation import Request, TextAssembler, build_request, token_ids
from .gpu import Gpu
from .logprobs import TokenLogprob, token_logprob
from .memory import checked_cache_bytes
from .model_files import BUILT_IN, model_name, resolve
from .options import ExecutionOptions
from .prefix_cache import CacheInfo
from .progress import Progress, TerminalBar
from .reply import CallReader, Piece, Reply, Usage, joined
from .sampling import SAMPLING_KEYWORDS
from .session import Sampled, Session
from .tokenizer import Tokenizer
from .tool_choice import plan_tools
from .turns import turn_marks
from .turnstile import Turnstile

Prompt = str | Sequence[dict[str, Any]] | None


class Model:
    """A model on a device. Use `Model.load`, also as a context manager, which frees the memory at its end.

    Thread safety: every method may be called from any thread, also while others run; generations take turns in no promised
    order, and an open stream keeps its turn until it ends or is closed. A second generation in the thread that holds an open
    stream is refused with RequestError instead of waiting for itself. One stream must not be advanced by two threads at once.
    The async twins run in threads of their own (asyncio only).

    All sessions share one prefix cache: a request goes on from the longest snapshot that is a prefix of its prompt. Requests
    with `options` of their own run without it.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, template: ChatTemplate, name: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._session = Session(engine, engine.cache)
        self._lock = Turnstile()
        self.name = name

    @classmethod
    def load(
        cls, model: str | Path = BUILT_IN, *, device: str | None = None, progress: Progress | None = None, context: int | None = None,
        cache_bytes: int | None = None, revision: str | None = None,
    ) -> Model:
        """Loads a checkpoint in MLX 4-bit layout.

        model: "lily-tiny" (embedded), a folder, or a Hub id with the `hub` extra. device: None (the system's default), "metal", "cpu" or "cuda".
        revision: branch, tag or commit of a Hub id; only the files that are needed are fetched, and the cache works offline.
        progress(bytes_done, total): called while weights are read; by default a bar on a terminal.
        context: tokens that prompt and answer may take together; by default the model's limit, or what fits into memory.
        cache_bytes: GPU memory for the prefix cache, 0 = none; by default half of what the weights and a session of moderate
        length leave, at most a quarter of the weights or 256 MiB, whichever is more. It gives way to sessions that grow.
        Raises CheckpointError for a missing or damaged checkpoint, DeviceError for a missing or too small device (with the
        numbers, before anything is allocated), RequestError for keywords of a wrong kind.
        """
        cache_bytes = checked_cache_bytes(cache_bytes)
        folder = resolve(model, revision)
        bar = TerminalBar("loading weights", "B")
        try:
            with Checkpoint.open(folder, progress or bar) as checkpoint:
                tokenizer = Tokenizer.from_folder(folder, checkpoint.config.eos_ids)
                template = ChatTemplate.from_folder(folder, tokenizer)
                return cls(Engine(checkpoint, Gpu(device), context=context, cache_bytes=cache_bytes), tokenizer, template, model_name(model, folder))
        finally:
            bar.close()

    # -- what it is ------------------------------------------------------------------------------------------------------
    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def template(self) -> ChatTemplate:
        return self._template

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may take together."""
        return self._engine.context_length

    @property
    def cache_info(self) -> CacheInfo:
        """What the prefix cache holds and has done."""
        return self._engine.cache.info()

    def clear_cache(self) -> None:
        """Forgets every snapshot of the prefix cache."""
        with self._lock:
            self._engine.cache.clear()

    def __repr__(self) -> str:
        c = self._engine.config
        return f"<lily.Model {self.name}: {c.num_layers} layers, hidden {c.hidden_size}, {c.num_experts} experts, on {self._engine.gpu.name}>"

    def _repr_markdown_(self) -> str:
        """For notebooks."""
        c, memory = self._engine.config, self._engine.memory_bytes()
        rows = {
            "device": self._engine.gpu.name, "layers": f"{len(c.gdn_layers)} gated DeltaNet, {len(c.attention_layers)} attention",
            "hidden size": f"{c.hidden_size:,}", "experts": f"{c.num_experts}, {c.top_k} a token", "vocabulary": f"{c.vocab_size:,}",
            "context": f"{self.context_length:,} tokens", "weights": f"{memory['weights'] / 1e6:,.1f} MB",
        }
        lines = [f"**lily.Model** `{self.name}`", "", "| | |", "|---|---|", *(f"| {name} | {value} |".replace("\n", " ") for name, value in rows.items())]
        return "\n".join(lines)

    # -- its end ---------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Frees the weights, the cache and the state of every session, after the streams that other threads run. Later calls
        are RequestErrors. A stream that this thread still has open may finish and is the last."""
        self._lock.close(self._engine.close)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- generation ------------------------------------------------------------------------------------------------------
    def generate(self, prompt: Prompt = None, **keywords: Any) -> Reply:
        """A whole answer.

        prompt: a str (one user message through the chat template; with raw=True plain text to continue), or a list of
        messages; or prompt_ids=[…] instead. Keywords, all optional:
        max_tokens (2,048, within the context); stop, a str or a list of them;
        temperature (0 = greedy), top_p, top_k, min_p, seed, repetition_penalty, presence_penalty, frequency_penalty,
        logit_bias, logprobs, top_logprobs: as `SamplingParams`, defaults from the checkpoint's generation_config;
        enable_thinking, and thinking_budget: tokens after which the thought is closed, 0 for none;
        tools, tool_choice ("auto", "none", "required" or one function), parallel_tool_calls (False = at most one call):
        calls in the answer become `tool_calls` and are not in `text`;
        response_format: {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": …}} (extra `guidance`);
        options (`ExecutionOptions`); progress(done, total) over prompt tokens, by default a bar on a terminal when it takes long.
        docs/generation.md says more. Raises RequestError, TemplateError, ContextLengthError or DeviceError.
        """
        return joined(self.stream(prompt, **keywords))

    def chat(self, messages: Sequence[dict[str, Any]], **keywords: Any) -> Reply:
        """`generate` for a list of messages."""
        if isinstance(messages, str):
            raise RequestError("chat takes a list of messages", fix="use generate() for a single string")
        return self.generate(messages, **keywords)

    def stream(self, prompt: Prompt = None, **keywords: Any) -> Iterator[Piece]:
        """As `generate`, in pieces as they come. The request is checked at once, before the first piece is asked for.
        Closing the iterator ends the generation."""
        request, progress = self._request(prompt, **keywords)
        return self._stream(self._session, request, progress)

    async def agenerate(self, prompt: Prompt = None, **keywords: Any) -> Reply:
        """`generate` for asyncio. Cancelling the task ends the generation within one prefill chunk or one token."""
        return joined(await gathered(self.astream(prompt, **keywords)))

    async def achat(self, messages: Sequence[dict[str, Any]], **keywords: Any) -> Reply:
        """`chat` for asyncio, cancelled like `agenerate`."""
        if isinstance(messages, str):
            raise RequestError("achat takes a list of messages", fix="use agenerate() for a single string")
        return await self.agenerate(messages, **keywords)

    def astream(self, prompt: Prompt = None, **keywords: Any) -> AsyncGenerator[Piece, None]:
        """`stream` for asyncio. The request is checked when the first piece is asked for. Cancelling the task that waits, or
        `aclose()`, ends the generation within one prefill chunk or one token. `progress` is called in the generation's thread."""

        def open_stream(check: Check) -> Iterator[Piece]:
            request, progress = self._request(prompt, **keywords)
            return self._stream(self._session, request, progress, check)

        return async_pieces(open_stream)

    def logits(self, ids: Sequence[int], *, options: ExecutionOptions | None = None) -> np.ndarray:
        """Teacher-forced logits: float32 [len(ids), vocab]; row i predicts token i + 1."""
        with self._lock:
            return Session(self._engine).logits(token_ids(ids), options or ExecutionOptions())

    def session(self) -> ChatSession:
        """A conversation whose history and state are kept between turns."""
        return ChatSession(self, Session(self._engine, self._engine.cache))

    def restore(self, path: str | Path) -> ChatSession:
        """A conversation that `ChatSession.save` wrote, with its history and state.

        Raises SessionFileError when the file is missing or damaged, or was saved with another checkpoint, config or version,
        ContextLengthError when it is longer than the context, DeviceError when it does not fit into memory.
        """
        session = Session(self._engine, self._engine.cache)
        with self._lock:
            messages = session_file.restore(session, path)
        restored = ChatSession(self, session)
        restored.messages = messages
        return restored

    def _request(
        self, prompt: Prompt, *, prompt_ids: Sequence[int] | None = None, raw: bool = False, max_tokens: int | None = None, stop: object = None,
        enable_thinking: bool | None = None, thinking_budget: int | None = None, tools: object = None, tool_choice: object = None,
        parallel_tool_calls: bool | None = None, response_format: object = None, options: ExecutionOptions | None = None,
        progress: Progress | None = None, **sampling: Any,
    ) -> tuple[Request, Progress | None]:
        if unknown := sampling.keys() - SAMPLING_KEYWORDS:
            raise RequestError(f"unknown keyword {', '.join(sorted(unknown))}", fix="this version knows those of Model.generate's docstring")
        if progress is not None and not callable(progress):
            raise RequestError("progress must be a function of (done, total)")
        if (prompt is None) == (prompt_ids is None):
            raise RequestError("give either a prompt or prompt_ids")
        plan = plan_tools(tools, tool_choice, guided=guidance.available())
        if plan.forced and (raw or prompt_ids is not None):
            raise RequestError("can force a call only in answer to messages", where="tool_choice")
        if prompt_ids is not None:
            ids = list(token_ids(prompt_ids))
            if not ids:
                raise RequestError("prompt_ids is empty")
        elif raw:
            if not isinstance(prompt, str):
                raise RequestError("raw=True takes a string")
            ids = self._tokenizer.encode(prompt)
            if not ids:
                raise RequestError("the prompt is empty")
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = plan.prompt_ids(self._template, self._tokenizer, messages, enable_thinking=enable_thinking)
        request = build_request(
            self._engine.config, self._tokenizer, ids, raw=raw, max_tokens=max_tokens, stop=stop, options=options, sampling=sampling,
            thinking_budget=thinking_budget, plan=plan, schema=guidance.response_schema(response_format), several=parallel_tool_calls,
        )
        return request, progress

    def _stream(self, session: Session, request: Request, progress: Progress | None, check: Check | None = None) -> Iterator[Piece]:
        """`check`: may raise to end the generation when its turn has come, and after every prefill chunk."""
        with self._lock:
            if check is not None:
                check()
            bar = TerminalBar("reading the prompt", "tok")

            def report(done: int, total: int) -> None:
                (progress or bar)(done, total)
                if check is not None:
                    check()

            assembler, calls = TextAssembler(self._tokenizer, request), CallReader(request.tools, prefix=request.prefix, several=request.several)
            start = time.perf_counter()
            first_at = start
            count, reason = 0, "length"
            stop_ids = sorted(self._engine.config.eos_ids)
            marks = turn_marks(request.prompt_ids, self._tokenizer.control)
            tokens = session.generate(request.prompt_ids, request.sampling, request.max_tokens, stop_ids, request.options, report, marks, request.steering)
            try:
                for sampled in tokens:
                    count += 1
                    if count == 1:
                        first_at = time.perf_counter()
                    reasoning, text = assembler.push(sampled.token)
                    piece = calls.read(Piece(text, reasoning, (sampled.token,), logprobs=self._logprobs(sampled, assembler)))
                    if sampled.stopped or assembler.stopped or calls.ended:
                        reason = "stop"
                    yield piece
                    if assembler.stopped or calls.ended:
                        break
            finally:
                tokens.close()
                bar.close()
            reasoning, text = assembler.flush()
            cached = len(request.prompt_ids) - session.prefilled
            usage = Usage(len(request.prompt_ids), count, cached, first_at - start, time.perf_counter() - first_at)
            yield calls.read(Piece(text, reasoning, (), reason, usage, assembler.stop_string))

    def _logprobs(self, sampled: Sampled, assembler: TextAssembler) -> tuple[TokenLogprob, ...]:
        if sampled.logprobs is None:
            return ()
        return (token_logprob(self._tokenizer, sampled.token, sampled.logprobs, "stop" if sampled.stopped else assembler.place),)
