"""What the front end knows about a source file: its kernels, their parameters, its function constants."""
from __future__ import annotations

from dataclasses import dataclass

ADDRESS_SPACES = {"device", "constant", "threadgroup", "thread"}
POSITIONS = set(
    "thread_position_in_grid thread_position_in_threadgroup threadgroup_position_in_grid threads_per_threadgroup "
    "dispatch_threads_per_threadgroup threads_per_grid threadgroups_per_grid thread_index_in_threadgroup "
    "thread_index_in_simdgroup simdgroup_index_in_threadgroup simdgroups_per_threadgroup threads_per_simdgroup "
    "thread_execution_width thread_index_in_quadgroup quadgroup_index_in_threadgroup".split()
)


@dataclass
class Parameter:
    """A kernel parameter: attribute (`buffer`, `threadgroup` or a position), its index, and its type's facts."""
    name: str
    attribute: str
    index: int = 0
    space: str = ""
    writable: bool = False
    reference: bool = False      # `T&`, not `T*`


@dataclass
class Kernel:
    name: str
    line: int
    is_template: bool
    parameters: list[Parameter]
    max_threads: str = "0"


@dataclass
class Entry:
    name: str                    # host_name or function name
    callee: str                  # C++ spelling: function or function<arguments>
    kernel: Kernel


@dataclass
class FunctionConstant:
    name: str
    type: str
    index: str
    required: bool = True
