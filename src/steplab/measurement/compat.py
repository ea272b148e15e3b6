"""torch's private interfaces, and what happens in a version that lacks one.

A refused allocation's size then comes from torch's message, which rounds it. Compiled modules, and those that react to
hooks, count as ordinary. Recording memory (history, event trees, saved tensors) ends with a note. Timing with a head
start (a spinning kernel) and audits (autocast's rules) fail and name the interface.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile

from steplab.units import GIB, KIB, MIB

_SCALES = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_refused: list[int] = []


def watch_refused_allocations() -> None:
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None and torch.cuda.is_available():
        attach(lambda device, size, device_total, device_free: _refused.append(size))


def last_refused_bytes() -> int | None:
    """Bytes of the last refused allocation; None without one since watching began."""
    return _refused[-1] if _refused else None


def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for `cycles` of the GPU's clock."""
    sleep: Any = torch.cuda._sleep
    sleep(cycles)


def bytes_in_message(message: str) -> int | None:
    """Bytes in "Tried to allocate 2.00 GiB", which is rounded to two decimals."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return round(float(found[1]) * _SCALES[found[2]]) if found else None


def minds_hooks(module: nn.Module) -> bool:
    """True if hooks would change the run: a compiled module would trace them, and an encoder layer in inference would
    leave its fused path.
    """
    if getattr(module, "compiled_within", False):
        return True
    compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return compiled or (isinstance(module, nn.TransformerEncoderLayer) and not module.training)


def minds_function_modes(module: nn.Module) -> bool:
    """True if a mode over torch's functions would make a module leave a fused path."""
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
    """Memory snapshot, as torch.cuda.memory._dump_snapshot would pickle it."""
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot


def profiled_events(profiler: profile) -> list[Any]:
    """Event trees: operators with inputs, ranges, allocations and releases."""
    results: Any = profiler.profiler
    roots: list[Any] = results.kineto_results.experimental_event_tree()
    return roots


def next_sequence_number() -> int:
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def saved_tensors(root: Any) -> Iterator[tuple[Any, Tensor]]:
    """Each node of the graph with each of its saved tensors as stored, in any order.

    Under checkpointing that is a token for recomputing the tensor, which is left out. Public attributes would call the
    unpack hook, which recomputes.
    """
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                value = getattr(node, name)
                held = [saved.data for saved in (value if isinstance(value, (tuple, list)) else [value])]
                yield from ((node, kept) for kept in held if isinstance(kept, Tensor))
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        waiting += fresh


def sequence_number(node: Any) -> int:
    """Number of an autograd node; nodes of one thread are numbered by creation."""
    number: int = node._sequence_nr()
    return number


def running_node() -> Any:
    return torch._C._current_autograd_node()


def autocast_has_rule(op: str, device_type: str) -> bool:
    """True if autocast has a kernel for the operator (without `aten::`) on that kind of device."""
    return any(_kernels_of(op, f"Autocast{device_type.upper()}"))


def is_made_of_parts(op: str) -> bool:
    """True for a composite operator: autocast sees the operators inside it instead."""
    found = _kernels_of(op, "CompositeImplicitAutograd")
    return bool(found) and all(found)


def is_operator(op: str) -> bool:
    return bool(_kernels_of(op, "Undefined"))


def _kernels_of(op: str, key: str) -> list[bool]:
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
    """DistributedDataParallel's buckets, in order of launch; empty if torch does not report them."""
    told: Any = getattr(wrapped, "_get_ddp_logging_data", dict)()
    text = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
    return tuple(int(size) for size in str(text).split(",") if size.strip().isdecimal())


def compile_alike_in_all_wrappers() -> None:
    """Process-wide: torch no longer divides compiled blocks by DDP's buckets, and raises for a block that was compiled
    too often instead of running it eagerly.
    """
    import torch._dynamo.config as dynamo

    for name, value in (("optimize_ddp", False), ("fail_on_recompile_limit_hit", True)):
        if hasattr(dynamo, name):
            setattr(dynamo, name, value)
