"""The private interfaces of torch that steplab uses, and the effect of a missing one.

The size of a refused allocation: without the observer, torch's message, which rounds it.

Compiled modules, and modules that react to hooks: they count as ordinary, and their profile shows the hooks' effect.

The memory of a watched step (the allocator's history, the profiler's tree of events, the tensors in autograd's nodes):
recording ends in an error, and the record has a note.

A kernel that spins, to hold a device; autocast's rules for operators: timing with a head start, or an audit of
precision, fails and names it.
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
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None and torch.cuda.is_available():
        attach(lambda device, size, device_total, device_free: _refused.append(size))


def last_refused_bytes() -> int | None:
    """Size of the last refused allocation since watching began; None if none was reported."""
    return _refused[-1] if _refused else None


def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for `cycles` cycles of the GPU's clock."""
    sleep: Any = torch.cuda._sleep
    sleep(cycles)


def bytes_in_message(message: str) -> int | None:
    """The size in "Tried to allocate 2.00 GiB", which has two decimals."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return round(float(found[1]) * _SCALES[found[2]]) if found else None


def minds_hooks(module: nn.Module) -> bool:
    """True if hooks on a module, or inside it, would change the run.

    A compiled module would trace hooks into its graph, or compile again; in inference, TransformerEncoderLayer leaves
    its fused path if it has hooks.
    """
    if getattr(module, "compiled_within", False):
        return True
    compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return compiled or (isinstance(module, nn.TransformerEncoderLayer) and not module.training)


def minds_function_modes(module: nn.Module) -> bool:
    """True if a mode over torch's functions would make a module leave a fused path in inference."""
    fused = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
    return isinstance(module, fused) and not module.training


@contextmanager
def memory_history() -> Iterator[None]:
    record: Any = torch.cuda.memory._record_memory_history
    # Recording the stacks of C++ as well would make the snapshot a hundred times slower.
    record(enabled="all", context="alloc", stacks="python", clear_history=True)
    try:
        yield
    finally:
        record(enabled=None)


def memory_snapshot() -> dict[str, Any]:
    """As torch.cuda.memory._dump_snapshot would pickle it."""
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot


def profiled_events(profiler: profile) -> list[Any]:
    """The profiler's events as trees: operators with inputs, ranges, allocations and releases."""
    results: Any = profiler.profiler
    roots: list[Any] = results.kineto_results.experimental_event_tree()
    return roots


def next_sequence_number() -> int:
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def kept_by_node(node: Any) -> list[Any]:
    """Saved tensors of an autograd node as stored: tensors, or the return value of a pack hook.

    The public attributes would call the unpack hook, which recomputes under activation checkpointing.
    """
    kept: list[Any] = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            value = getattr(node, name)
            kept += [saved.data for saved in (value if isinstance(value, (tuple, list)) else [value])]
    return kept


def sequence_number(node: Any) -> int:
    """Nodes of one thread are numbered in the order of their creation."""
    number: int = node._sequence_nr()
    return number


def running_node() -> Any:
    return torch._C._current_autograd_node()


def autocast_has_rule(op: str, device_type: str) -> bool:
    """True if autocast has a kernel for the operator (without `aten::`) on that kind of device."""
    return any(_kernels_of(op, f"Autocast{device_type.upper()}"))


def is_made_of_parts(op: str) -> bool:
    """True for a composite operator: autocast sees its parts."""
    found = _kernels_of(op, "CompositeImplicitAutograd")
    return bool(found) and all(found)


def is_operator(op: str) -> bool:
    return bool(_kernels_of(op, "Undefined"))


def _kernels_of(op: str, key: str) -> list[bool]:
    """Overloads that write to `out` are left out."""
    found = []
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{op}"):
        if not schema.overload_name.endswith("out"):
            name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            try:
                found.append(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
            except RuntimeError:  # an overload that only TorchScript has
                continue
    return found


def bucket_bytes(wrapped: Any) -> tuple[int, ...]:
    """The sizes of DistributedDataParallel's buckets, in the order of launch; empty if torch does not report them."""
    told: Any = getattr(wrapped, "_get_ddp_logging_data", dict)()
    text = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
    return tuple(int(size) for size in str(text).split(",") if size.strip().isdecimal())


def compile_alike_in_all_wrappers() -> None:
    """Have torch compile a block to the same code for every kind of data parallelism, or raise.

    DistributedDataParallel would divide its blocks' graphs by buckets, and a block compiled too often would run
    uncompiled from then on. The setting is process-wide in torch.
    """
    import torch._dynamo.config as dynamo

    for name, value in (("optimize_ddp", False), ("fail_on_recompile_limit_hit", True)):
        if hasattr(dynamo, name):
            setattr(dynamo, name, value)
