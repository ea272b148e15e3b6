"""Reports every operator that torch dispatches below autograd as an event of the dry run."""

import bisect
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steplab.costs.kernel_time import Product
from steplab.costs.operators import flops_of_elements
from steplab.fake_step import kernels
from steplab.fake_step.storages import Storages, format_of
from steplab.plan.dry_run import events
from steplab.plan.dry_run.parts import BEFORE, BEHIND

_aten = torch.ops.aten
_PLAIN_NAMES = {
    **dict.fromkeys(("_to_copy", "copy_", "clone"), "copy"),
    **dict.fromkeys(("zeros", "ones", "full", "zeros_like", "ones_like", "full_like"), "fill"),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), "fill"),
    **dict.fromkeys(("zero_", "fill_", "scalar_tensor"), "fill"),
}
_NO_KERNEL = frozenset(
    {*("empty", "empty_like", "empty_strided", "empty_permuted"), *("new_empty", "new_empty_strided", "lift_fresh")}
)
_RANDOM = (_aten.uniform_.default, _aten.normal_.default)
"""Operators that fill weights while a model is built, and change no fake tensor."""
_READ_IN_PART = frozenset({"embedding", "index", "index_select", "gather", "nll_loss_forward"})
"""Operators that read only some elements of their first tensor, at the indices in the second."""
_NOT_READ = {"nll_loss_backward": 1, "zero": 0}
"""Operators -> position of a tensor whose sizes alone they use."""
_NOT_WRITTEN = {"_fused_adamw_": 1}
"""Operators -> position of gradients, which they declare as written but do not write."""
_ACCUMULATE = "AccumulateGrad"


class Watcher(TorchDispatchMode):
    """Reports each operator and each allocation while it is entered."""

    def __init__(
        self,
        doing: str,
        listen: events.Listener,
        storages: Storages,
        *,
        tf32: bool,
        fused_optimizer: bool,
        updates_in_backward: bool,
    ) -> None:
        """Reports nothing until it is entered.

        Args:
            doing: the action named in the error about an unknown operator.
            tf32: fp32 matmuls run in tf32.
            fused_optimizer: the optimizer's step counts are on the GPU.
            updates_in_backward: the update's memory counts in backward; its operators are still the optimizer's.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._listen, self._storages, self._tf32 = listen, storages, tf32
        self._fused_optimizer, self._updates_in_backward = fused_optimizer, updates_in_backward
        self._doing = doing
        self._phase = "build"
        self._where = self._first = ""
        self._begins: list[tuple[int, str]] = []
        """(sequence number of its first autograd node, part of the model)"""
        self._is_paused = self._cudnn = False
        self._calls = 0
        self._asked: set[int] = set()
        """Gradients that the autograd engine queried since the last operator, before adding them."""
        self.on_value: Callable[[], str] = lambda: ""
        """Called before the model reads a value off a tensor; returns the source line, 'model.py:12'."""
        self.parameters: dict[int, str] = {}

    def begin(self, phase: str) -> None:
        self._phase = phase
        self._where = self._first if phase == "forward" else ""
        if phase == "forward":
            self._begins = [(0, self._first)]
        if phase != "optimizer" or not self._updates_in_backward:
            self._listen(events.Began(phase))

    def follow(self, blocks: Iterable[nn.Module]) -> None:
        """Note where operators run: before these blocks, in 'block 3', or behind them."""
        blocks = list(blocks)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._entering(f"block {number}"))
            block.register_forward_hook(self._entering(BEHIND if block is blocks[-1] else ""))
        self._first = BEFORE if blocks else ""

    def tell_host_made(self, place: str, made: Tensor) -> None:
        if self._is_paused:
            return
        self._listen(
            events.Operator(
                name=events.MADE_BY_HOST,
                kind="streaming",
                dtype=format_of(made),
                written_bytes=_bytes_of(made),
                phase=self._phase,
                where=self._where,
                what=place,
            )
        )

    def paused(self) -> AbstractContextManager[object]:
        return mock.patch.object(self, "_is_paused", True)

    def place(self) -> str:
        node: Any = torch._C._current_autograd_node()
        return self._where if node is None else self.made_in(node._sequence_nr())

    def name_of_parameter(self, tensor: Tensor | None) -> str | None:
        return None if tensor is None else self.parameters.get(self._storages.number(tensor) or 0)

    def _entering(self, where: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._where = where
            if self._phase == "forward":
                self._begins.append((torch._C._autograd._get_sequence_nr(), where))

        return enter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if func.namespace == "prim":
            self._asked.update(id(each) for each in args[:1] if isinstance(each, Tensor))
            return func(*args, **kwargs)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if self._phase == "build" and func in _RANDOM:
            return args[0]
        self._calls += 1
        node: Any = torch._C._current_autograd_node() if self._is_engines else None
        accumulates = node is not None and _ACCUMULATE in node.name()
        if accumulates:
            self._name_gradient(node.variable, args)
        elif node is not None:
            self._where = self.made_in(node._sequence_nr())
        if node is not None and func is _aten.add.Tensor and self._is_added_in_place(args, accumulates):
            func = _aten.add_.Tensor
        made = self._run(func, args, kwargs)
        cast = func is _aten._to_copy.default and id(args[0]) in self._asked
        self._asked = {id(made)} if cast else set()
        return made

    @property
    def _recomputing(self) -> bool:
        return torch.is_grad_enabled() and self._phase == "backward" and torch._C._current_autograd_node() is not None

    @property
    def _is_engines(self) -> bool:
        return self._phase == "backward" and not torch.is_grad_enabled()

    def made_in(self, sequence_number: int) -> str:
        at = bisect.bisect_right(self._begins, sequence_number, key=lambda begun: begun[0])
        return self._begins[at - 1][1] if at else ""

    def _is_added_in_place(self, args: tuple[Any, ...], accumulates: bool) -> bool:
        """True if autograd without a dispatch mode would add this gradient to an existing one in place.

        It does so if the memory is dense and no view of another tensor's (torch/csrc/autograd/input_buffer.cpp).
        """
        if accumulates:
            return True
        there, added = args[:2]
        return id(added) in self._asked and not there._is_view() and is_non_overlapping_and_dense_or_false(there)

    def _name_gradient(self, parameter: Tensor, args: tuple[Any, ...]) -> None:
        for each in args[:1]:  # later additions are not its own
            if isinstance(each, Tensor):
                name = self.name_of_parameter(parameter) or "a weight"
                self._storages.call([each], "gradients", f"gradient of {name}")

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        place = self.on_value() if name == events.READS_A_VALUE else ""
        kernels.refuse_unknown(name, func.namespace, self._doing)
        product = kernels.product_of(name, args)
        if product is not None:
            self.start_products()
        made = func(*args, **kwargs)
        reads = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        outputs = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        kernels.refuse_sparse(name, outputs, self._doing)
        fresh = self._follow(name, reads, outputs)
        writes = fresh + _changed(func, args, kwargs)
        if name == events.READS_A_VALUE:
            writes = reads  # copied to the CPU, some four bytes
        if writes and name not in _NO_KERNEL and self._phase != "build":
            if name in _COPIES:
                self._tell("zeros", [], writes, None, (), place)
            if name == "_grouped_mm" and reads[0].dtype == torch.float32:
                self._tell(events.READS_A_VALUE, reads[2:3], reads[2:3], None, (), _GROUPS_IN_FP32)
                self._calls += 3 * (product.batch if product else 1)
            pointwise = torch.Tag.pointwise in func.tags
            self._tell(name, reads, writes, product, args, place, pointwise=pointwise)
        return made

    def _follow(self, name: str, reads: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        fresh = []
        on_host = self._phase == "optimizer" and not self._fused_optimizer
        for each in outputs:
            if self._storages.number(each) is None:
                if on_host and each.numel() == 1:
                    continue  # step numbers, which are on the device only for fused optimizers
                self._storages.add(each, f"output of {name}", self._where)
                fresh.append(each)
        of_parameter = reads and self._storages.number(reads[0]) in self.parameters
        if name == "_to_copy" and of_parameter and self._phase != "build":
            self._storages.call(fresh, "autocast_copies", self.name_of_parameter(reads[0]) or "a weight")
        return fresh

    def start_products(self) -> None:
        self._storages.start_products(self._phase, self._where)

    def _tell(
        self,
        name: str,
        reads: list[Tensor],
        writes: list[Tensor],
        product: Product | None,
        args: tuple[Any, ...],
        place: str,
        *,
        pointwise: bool = False,
    ) -> None:
        for count in kernels.held_within(name, args):
            number = self._storages.make("within the kernel", count.symbols, count.value, self._where)
            self._storages.free(number)
        if name in _NOT_WRITTEN:
            writes = [each for each in writes if not any(each is other for other in args[_NOT_WRITTEN[name]])]
        reads, part_bytes = _read(name, reads, writes)
        fused = kernels.fused_attention(name, args)
        kind: events.Kind
        if fused is not None:
            name, kind, product, flops = fused.name, "attention", fused.scores, fused.flops
        elif product is not None:
            kind, flops = "matmul", kernels.flops_of_product(name, args, product)
        else:
            elements = max(each.numel() for each in (*reads, *writes))
            kind, flops = "streaming", float(flops_of_elements(name, elements))
        read_bytes, written_bytes = sum(map(_bytes_of, reads)) + part_bytes, sum(map(_bytes_of, writes))
        if name in _COPIES:  # existing elements are written over filled ones
            written_bytes = read_bytes
        rate = _rate(name, reads, writes, args, pointwise=pointwise) if kind == "streaming" else ""
        if fused is not None and self._takes_cudnn(fused, reads[0]):
            rate = events.CHOSEN_BY_TORCH
        if name in _COPIES or _is_first_power(name, args):
            name = "copy"
        name = _PLAIN_NAMES.get(name, name if name.startswith("_f") else name.removesuffix("_"))
        first = next((each for each in (*reads, *writes) if each.is_floating_point()), writes[0])
        dtype, piece = format_of(first), self._storages.piece_of(writes[0])
        self._listen(
            events.Operator(
                name=name,
                kind=kind,
                dtype="tf32" if kind == "matmul" and dtype == "fp32" and self._tf32 else dtype,
                flops=flops,
                read_bytes=read_bytes,
                written_bytes=written_bytes,
                reads=self._operands(reads),
                writes=self._operands(writes),
                strided=kind == "streaming" and _is_strided(name, reads, writes),
                product=product,
                phase=self._phase,
                where=self._where,
                what=place or (piece.what if piece else ""),
                recomputed=self._recomputing,
                dropout=fused is not None and any(isinstance(each, float) and each > 0 for each in args),
                rate=rate,
                calls=self._calls,
            )
        )
        self._calls = 0

    def _takes_cudnn(self, fused: kernels.Fused, query: Tensor) -> bool:
        """True if torch may choose cuDNN's kernel, which it prefers on Hopper; backward follows forward."""
        if self._phase == "forward":
            self._cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        half = query.dtype in (torch.bfloat16, torch.float16)
        return self._cudnn and half and fused.scores.k % 8 == 0 and fused.scores.k <= _WIDEST_OF_CUDNN

    def _operands(self, tensors: list[Tensor]) -> tuple[events.Operand, ...]:
        return tuple(events.Operand(self._storages.number(each) or 0, _bytes_of(each)) for each in tensors)


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for place, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(declared.name)
            found += [each for each in tree_leaves(given) if isinstance(each, Tensor)]
    return found


def _bytes_of(tensor: Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, stride in sizes if stride or not size)


def _read(name: str, reads: list[Tensor], writes: list[Tensor]) -> tuple[list[Tensor], int]:
    """(tensors that are read whole, bytes read of a tensor in part)"""
    if _PLAIN_NAMES.get(name) == "fill":
        return [], 0
    if name in _NOT_READ:
        reads = [each for place, each in enumerate(reads) if place != _NOT_READ[name]]
    if name not in _READ_IN_PART or len(reads) < 2:
        return reads, 0
    table, *indices = reads
    elements = writes[0].numel() if name in ("embedding", "index", "index_select") else indices[0].numel()
    return indices, elements * table.element_size()


def _is_strided(name: str, reads: list[Tensor], writes: list[Tensor]) -> bool:
    """True if elements that are neighbours in one of the tensors are apart in another of the same shape."""
    if name == "cat":
        return True
    whole = [each for each in (*reads, *writes) if each.numel() == writes[0].numel() and each.shape == writes[0].shape]
    if not all(map(is_non_overlapping_and_dense_or_false, whole)):
        return True
    return len({_order(each) for each in whole}) > 1


def _rate(name: str, reads: list[Tensor], writes: list[Tensor], args: tuple[Any, ...], *, pointwise: bool) -> str:
    """Access pattern of a kernel, which determines its share of the bandwidth; '': the operator's usual one.

    torch's elementwise kernels load several elements at once if all tensors have one shape, order and format. They load
    single elements if formats differ, and compute an index for each element if a tensor is strided or broadcast. In
    sums over rows, few threads read neighbouring elements (aten/src/ATen/native/cuda: Loops.cuh, Reduce.cuh).
    """
    if name in _COPIES or _is_first_power(name, args):
        return "copy strided" if name in _COPIES else "copy"
    if name in ("sum", "mean", "amax") and reads:
        dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
        last = reads[0].dim() - 1
        return "sum" if not dims or any(dim % reads[0].dim() == last for dim in dims) else "sum of rows"
    if name in ("embedding_dense_backward", "nll_loss_backward", "zero"):
        return "zeros"  # few are overwritten
    if name.startswith("index_put") and len(args) > 3 and args[3]:
        return "added rows"  # sorts the rows' numbers, then adds row by row (Indexing.cu)
    if name in ("index", "index_put", "index_put_", "_unsafe_index"):
        return "elementwise strided"  # an index is computed for each element (IndexKernel.cu)
    if "softmax" in name and reads and reads[0].shape[-1] * reads[0].element_size() > _LONGEST_ROW:
        return f"{name} long"  # rows that exceed a block's memory are read again
    if _PLAIN_NAMES.get(name) == "fill":
        return "zeros"
    if name.startswith("_fused_adam") and writes[0].dtype in (torch.bfloat16, torch.float16):
        return f"{name} half"
    if not pointwise:
        return ""
    one = writes[0]
    others = [each for each in (*reads, *writes) if each.dim()]
    floats = {each.dtype for each in others if each.is_floating_point()}
    alike = all(each.shape == one.shape for each in others) and not _is_strided(name, reads, writes)
    return "elementwise" + (" converting" if len(floats) > 1 else "") + ("" if alike else " strided")


def _is_first_power(name: str, args: tuple[Any, ...]) -> bool:
    return name == "pow" and len(args) > 1 and args[1] == 1


_WIDEST_OF_CUDNN = 128
_GROUPS_IN_FP32 = "torch's grouped products in fp32"
"""Named instead of a code line that reads values: in fp32, torch reads the groups' sizes on the CPU and multiplies
group by group (GroupedMMUtils.h).
"""
_LONGEST_ROW = 48 * 1024
"""Longest row, in bytes, that softmax keeps in a block's shared memory (SoftMax.cu: can_use_smem)."""
_COPIES = frozenset({"slice_backward", "select_backward"})
"""Operators that make zeros, then overwrite a part of them."""


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions longer than one element, from outermost to innermost in memory."""
    sizes = [place for place, size in enumerate(tensor.shape) if size > 1]
    return tuple(sorted(sizes, key=tensor.stride, reverse=True))
