"""torch's private interfaces, all of them here, each with what happens where it is missing.

How much memory a refused allocation asked for: torch's message rounds it to two decimals, its observer does
not. Without the observer the message serves.

Whether a module is compiled, or watches its own hooks: where torch keeps that elsewhere, it is taken for an ordinary
one, and a profile of it shows what its hooks did to it.

What a watched step did with memory: the allocator's history, the tree of the profiler's events, the tensors in the
nodes of autograd's graph. Where torch has renamed one of these, watching ends in an error, and the record has a note.

A kernel that spins for so many cycles, by which a device is held: where torch has renamed it, what is timed with a head
start for the host is a failure that names it.

What autocast does with an operator: which kernels the dispatcher has for it. Where torch has renamed that, an audit of
precision is a failure that names it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import profile

from steplab.units import GIB, KIB, MIB

_SCALES = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_refused: list[int] = []


def watch_refused_allocations() -> None:
    """Have torch report each allocation the CUDA allocator refuses."""
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None and torch.cuda.is_available():
        attach(lambda device, size, device_total, device_free: _refused.append(size))


def last_refused_bytes() -> int | None:
    """Size of the last allocation refused since the watch began; None if none was reported."""
    return _refused[-1] if _refused else None


def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many cycles of the GPU's clock."""
    sleep: Any = torch.cuda._sleep
    sleep(cycles)


def bytes_in_message(message: str) -> int | None:
    """The size in "Tried to allocate 2.00 GiB", to the two decimals it is given with."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return round(float(found[1]) * _SCALES[found[2]]) if found else None


def minds_hooks(module: nn.Module) -> bool:
    """Whether hooks on a module, or inside it, would change what runs.

    A compiled one (module.compile(), or torch.compile(module), or a block whose forward pass is) would take them into
    its graph, or compile again; in inference, TransformerEncoderLayer leaves its fused path where it finds one.
    """
    if getattr(module, "compiled_within", False):
        return True
    compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return compiled or (isinstance(module, nn.TransformerEncoderLayer) and not module.training)


def minds_function_modes(module: nn.Module) -> bool:
    """Whether a mode over torch's functions would change what a module runs: in inference these leave a fused path."""
    fused = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
    return isinstance(module, fused) and not module.training


@contextmanager
def memory_history() -> Iterator[None]:
    """Within it the CUDA allocator writes down what it does, and the Python lines that asked for it."""
    record: Any = torch.cuda.memory._record_memory_history
    # Stacks of C++ as well would make the snapshot a hundred times slower.
    record(enabled="all", context="alloc", stacks="python", clear_history=True)
    try:
        yield
    finally:
        record(enabled=None)


def memory_snapshot() -> dict[str, Any]:
    """The allocator's history and state, as torch.cuda.memory._dump_snapshot would pickle it."""
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot


def profiled_events(profiler: profile) -> list[Any]:
    """The profiler's events as trees: operators with their inputs, ranges, and what was allocated and released."""
    results: Any = profiler.profiler
    roots: list[Any] = results.kineto_results.experimental_event_tree()
    return roots


def next_sequence_number() -> int:
    """The number that the next node of autograd's graph made by this thread will have."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def kept_by_node(node: Any) -> list[Any]:
    """What a node of autograd's graph keeps, as it is stored: tensors, or whatever a pack hook made of them.

    Not the public attributes, which would call the unpack hook: under activation checkpointing, that recomputes.
    """
    kept: list[Any] = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            value = getattr(node, name)
            kept += [saved.data for saved in (value if isinstance(value, (tuple, list)) else [value])]
    return kept


def sequence_number(node: Any) -> int:
    """Nodes of one thread are numbered in the order they were made."""
    number: int = node._sequence_nr()
    return number


def running_node() -> Any:
    """The node of autograd's graph that runs now, in the backward pass; None outside of it."""
    return torch._C._current_autograd_node()


def autocast_has_rule(op: str, device_type: str) -> bool:
    """Whether autocast has a kernel of its own for an operator (named without `aten::`) on that kind of device; the
    others it lets pass."""
    return any(_kernels_of(op, f"Autocast{device_type.upper()}"))


def is_made_of_parts(op: str) -> bool:
    """Whether an operator is dispatched again, operator by operator, so that autocast sees each of these."""
    found = _kernels_of(op, "CompositeImplicitAutograd")
    return bool(found) and all(found)


def is_operator(op: str) -> bool:
    """Whether torch's dispatcher has an operator of that name."""
    return bool(_kernels_of(op, "Undefined"))


def _kernels_of(op: str, key: str) -> list[bool]:
    """For each overload whether it has a kernel for a dispatch key; those that write to `out` are left out."""
    found = []
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{op}"):
        if not schema.overload_name.endswith("out"):
            name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            try:
                found.append(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
            except RuntimeError:  # an overload of TorchScript's alone
                continue
    return found


def bucket_bytes(wrapped: Any) -> tuple[int, ...]:
    """The sizes of DistributedDataParallel's buckets as they are launched; empty where torch does not say."""
    told: Any = getattr(wrapped, "_get_ddp_logging_data", dict)()
    text = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
    return tuple(int(size) for size in str(text).split(",") if size.strip().isdecimal())


def compile_alike_in_all_wrappers() -> None:
    """Have torch compile a block to the same code whoever averages its gradients, or raise.

    DistributedDataParallel would have its blocks' graphs divided by its buckets. And whoever had a block compiled too
    often would run it uncompiled from there on, which is another step. Process-wide in torch.
    """
    import torch._dynamo.config as dynamo

    for name, value in (("optimize_ddp", False), ("fail_on_recompile_limit_hit", True)):
        if hasattr(dynamo, name):
            setattr(dynamo, name, value)
