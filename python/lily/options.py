"""Switches of the engine: each optimisation of the system with its control path kept alive for ablations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .errors import RequestError


@dataclass(frozen=True)
class ExecutionOptions:
    """How a pass is executed. Every switch leaves the mathematics alone; False selects the control path.

    fused_dequant: P1, weights are dequantised in the tile that multiplies them; False: a pass of its own writes them as bf16
        to scratch memory, which the matrix kernel reads back.
    gpu_routing: P2, routing stays on the GPU; False: each layer stops for the CPU to look at the routing (prefill).
    tile_by_load: P3, matrix tiles matched to the rows an expert has; False: 16-row tiles always.
    register_scan: P4, the recurrent state stays in registers over a pass; False: blockwise through memory.
    chunked_gdn: P4, prefill evaluates the recurrence in chunks on matrix tiles; False: row by row.
    chunk_size: P5, prompt rows per chunk; None lets `policy.chunk_size` choose.
    tensor_ops: P6, matrix tiles run on Metal 4 tensor operations where the device has them; False: on simdgroup matrices.
    gpu_token_handoff: D2, the sampled token goes straight into the next step's slot and steps run ahead; False: the
        token returns to the CPU after each step.
    concurrent_pass: D3, one concurrent pass with barriers only between levels; False: a serial pass.
    fused_chains: D4, the four fused chains; False: every operation is a launch of its own.
    extended_fusion: the fusions past D4 (`fusions.FUSIONS`); needs fused_chains.
    coalesced_kv: D5, neighbouring threads read neighbouring bytes of a KV row; False: strided.
    gqa_packing: D6, up to four query heads of a KV head share each loaded KV row; False: one query head a threadgroup.
    fixed_block_attention: D7, equal key blocks in parallel from 32K keys on; False: the general path always.
    """

    fused_dequant: bool = True
    gpu_routing: bool = True
    tile_by_load: bool = True
    register_scan: bool = True
    chunked_gdn: bool = True
    chunk_size: int | None = None
    tensor_ops: bool = True
    gpu_token_handoff: bool = True
    concurrent_pass: bool = True
    fused_chains: bool = True
    extended_fusion: bool = True
    coalesced_kv: bool = True
    gqa_packing: bool = True
    fixed_block_attention: bool = True

    def __post_init__(self) -> None:
        size = self.chunk_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise RequestError(f"ExecutionOptions.chunk_size must be a positive integer or None, got {size!r}")
        for f in fields(self):
            if f.name != "chunk_size" and not isinstance(getattr(self, f.name), bool):
                raise RequestError(f"ExecutionOptions.{f.name} must be True or False, got {getattr(self, f.name)!r}")

    @classmethod
    def from_pairs(cls, pairs: list[str]) -> ExecutionOptions:
        """Parses `NAME=on|off` (and `chunk_size=N`) as the command line gives them."""
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {}
        for pair in pairs:
            name, _, value = pair.partition("=")
            name = name.strip().replace("-", "_")
            if name not in known:
                raise RequestError(f"unknown option {name!r}; known: {', '.join(sorted(known))}")
            if name == "chunk_size":
                if not value.isdigit():
                    raise RequestError(f"option chunk_size needs a positive integer, got {value!r}")
                values[name] = int(value)
            elif value in ("on", "off", "true", "false"):
                values[name] = value in ("on", "true")
            else:
                raise RequestError(f"option {name} is on or off, got {value!r}")
        return cls(**values)
