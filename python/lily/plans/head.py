"""Lowering of the embedding, the norms, the head and the choice of the next token."""

from __future__ import annotations

from .. import policy
from ..graph import Op
from . import geometry as geo
from .context import Builder
from .linear import weight_bindings


def embed(b: Builder, op: Op) -> None:
    """Gather and dequantise rows of the embedding; a decode step reads its token from the step state (D2)."""
    c, ctx = b.config, b.ctx
    g = ctx.groups["embed"]
    from_step = "step" in op.reads
    name = f"embed_step_{g.suffix}" if from_step else f"embed_{g.suffix}"
    b.emit(op.id, "embed", name,
           [*weight_bindings(b, g, ctx.rows / g.n), b.bind(3, "step" if from_step else "ids"), b.bind(4, "h", "w")], 5, "EmbedArgs",
           {"rows": ctx.rows, "hidden": c.hidden_size, "vocab": c.vocab_size},
           geo.embed_grid(c.hidden_size, ctx.rows), geo.EMBED_THREADS)


def rmsnorm(b: Builder, op: Op) -> None:
    c, ctx = b.config, b.ctx
    b.emit(op.id, "norm", "rmsnorm", [b.bind(0, "h"), b.bind(1, op.reads[1]), b.bind(2, "x", "w")], 3, "NormArgs",
           {"rows": ctx.rows, "n": c.hidden_size, "eps": c.rms_norm_eps}, (ctx.rows, 1, 1), geo.norm_threads(c.hidden_size))


def add_rmsnorm(b: Builder, op: Op) -> None:
    """Residual and norm in one pass over the row."""
    c, ctx = b.config, b.ctx
    b.emit(op.id, "norm", "add_rmsnorm",
           [b.bind(0, "h", "rw"), b.bind(1, "y"), b.bind(2, op.reads[2]), b.bind(3, "x", "w")], 4, "NormArgs",
           {"rows": ctx.rows, "n": c.hidden_size, "eps": c.rms_norm_eps}, (ctx.rows, 1, 1), geo.norm_threads(c.hidden_size))


def final_norm(b: Builder, op: Op) -> None:
    """Norm of the rows whose logits are wanted: the last `head_rows` rows of the pass."""
    c, ctx = b.config, b.ctx
    source = b.region("h").slice(2 * (ctx.rows - ctx.head_rows) * c.hidden_size)
    b.emit(op.id, "norm", "rmsnorm", [b.bind(0, source), b.bind(1, "p:final_norm"), b.bind(2, "head_x", "w")], 3, "NormArgs",
           {"rows": ctx.head_rows, "n": c.hidden_size, "eps": c.rms_norm_eps}, (ctx.head_rows, 1, 1), geo.norm_threads(c.hidden_size))


def argmax(b: Builder, op: Op) -> None:
    """First of two argmax launches: per block the highest logit, lowest id on a tie, and whether any is not finite."""
    c = b.config
    blocks = policy.argmax_blocks(c.vocab_size)
    b.emit(op.id, "sampling", "argmax_partial", [b.bind(0, "logits"), b.bind(1, "partial", "w"), b.bind(2, "nonfinite", "w")], 3,
           "ArgmaxArgs", {"vocab": c.vocab_size, "blocks": blocks}, (blocks, 1, 1), geo.ARGMAX_THREADS)


def sample(b: Builder, op: Op) -> None:
    b.emit(op.id, "sampling", "sample_token",
           [b.bind(0, "logits"), b.bind(1, "sample_params"), b.bind(2, "step"), b.bind(3, "sampled", "w")], 4, "SampleArgs",
           {"vocab": b.config.vocab_size}, (1, 1, 1), geo.SAMPLE_THREADS)


def adjust(b: Builder, op: Op) -> None:
    """Penalties, bias and mask on the logits, in place; only in the plans of requests that have one of them."""
    vocab = b.config.vocab_size
    b.emit(op.id, "logits", "adjust_logits",
           [b.bind(0, "logits", "rw"), b.bind(1, "token_counts", "rw"), b.bind(2, "logit_bias"), b.bind(3, "token_mask"), b.bind(4, "sample_params"),
            b.bind(5, "step")], 6, "SampleArgs", {"vocab": vocab}, (-(-vocab // (8 * geo.ADJUST_THREADS)), 1, 1), geo.ADJUST_THREADS)


def logprobs(b: Builder, op: Op) -> None:
    b.emit(op.id, "logits", "token_logprobs",
           [b.bind(0, "logits"), b.bind(1, "sample_params"), b.bind(2, "step"), b.bind(3, "sampled"), b.bind(4, "logprobs", "w")], 5, "SampleArgs",
           {"vocab": b.config.vocab_size}, (1, 1, 1), geo.LOGPROBS_THREADS)


def finish(b: Builder, op: Op, sampled: bool, stop_count: int) -> None:
    """Second argmax launch and the end of a step: token hand-off (D2), stop ids, position and ring slot."""
    b.emit(op.id, "sampling", "finish",
           [b.bind(0, "partial"), b.bind(1, "nonfinite"), b.bind(2, "step", "rw"), b.bind(3, "stop_ids"), b.bind(5, "sampled")], 4,
           "FinishArgs", {"rows": b.ctx.rows, "blocks": policy.argmax_blocks(b.config.vocab_size), "stop_count": stop_count,
                          "sample": int(sampled)}, (1, 1, 1), geo.FINISH_THREADS)


def advance(b: Builder) -> None:
    b.emit("advance", "sampling", "advance", [b.bind(0, "step", "rw")], 1, "AdvanceArgs", {"rows": b.ctx.rows}, (1, 1, 1),
           geo.ADVANCE_THREADS)
