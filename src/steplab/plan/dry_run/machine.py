"""Imitates torch in the dry run: memory, autograd, autocast, matmuls with their workspace, checkpointing.

Every action goes to the listener as an event (events.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from steplab.costs.kernel_time import Product
from steplab.costs.operators import flops_of_elements
from steplab.plan.dry_run.events import Allocations, Began, Kind, Listener, Operand, Operator
from steplab.plan.dry_run.sizes import BF16, FP16, FP32, Count, Dtype, Sizes
from steplab.plan.dry_run.tape import Backward, Enough, Frame, Node
from steplab.plan.dry_run.tensors import Slot, Storage, Tensor
from steplab.specs.step import AUTOCAST

_FORMATS = {"bf16": BF16, "fp16": FP16}


class Parameter:
    """A weight, allocated in fp32, and its gradient."""

    def __init__(self, machine: "Machine", name: str, count: Count, num_uses: int = 1) -> None:
        self.name = name
        self._num_uses = num_uses
        self.tensor = machine.new(count, FP32, name, category="parameters")
        self.tensor.slot = Slot(FP32, is_leaf=True, num_uses=num_uses)
        self.master: Tensor | None = None
        """fp32 master weight, which the optimizer updates; None: it updates the weight itself."""

    def convert(self, machine: "Machine", dtype: Dtype) -> None:
        if dtype is not self.tensor.dtype:
            self.tensor = machine.new(self.tensor.count, dtype, self.name, category="parameters")
            self.tensor.slot = Slot(dtype, is_leaf=True, num_uses=self._num_uses)

    def keep_master(self, machine: "Machine", dtype: Dtype) -> None:
        self.master = self.tensor
        self.master.storage.piece.category = "optimizer_state"
        self.master.storage.piece.what = f"masters of {self.name}"
        self.convert(machine, dtype)

    @property
    def slot(self) -> Slot:
        assert self.tensor.slot is not None
        return self.tensor.slot


@dataclass(frozen=True, slots=True)
class Gathering:
    low_precision: bool = True
    """True if FSDP2 gathers all weights but the embedding's in the matmuls' format, so that autocast makes no copies.
    """
    fused_norms: bool = True
    """True if norms of an fp32 stream with low-precision weights run as one kernel, from torch 2.12 on.

    Earlier torch composes them of operators, which also save the normalised stream in fp32.
    """


class Machine:
    def __init__(
        self,
        sizes: Sizes,
        precision: str,
        workspace: Count,
        listen: Listener,
        gathering: Gathering | None = None,
        *,
        tells_operators: bool = True,
    ) -> None:
        """Start with an empty GPU.

        Args:
            workspace: bytes of a cuBLAS handle; each thread that runs matmuls has one.
            gathering: how FSDP2 gathers the weights; None: they are kept whole.
            tells_operators: report operators too; describing them takes a third of a dry run's time.
        """
        self.gathering = gathering
        self.sizes = sizes
        self.phase = ""
        self.where = ""
        self.allocations = Allocations(listen, workspace)
        self._listen, self._tells_operators = listen, tells_operators
        self.weight_dtype = BF16 if precision == "bf16_pure" else FP32
        self.autocast = _FORMATS[AUTOCAST[precision]] if precision in AUTOCAST else None
        """Format that autocast casts matmuls' inputs to; None without autocast."""
        self.product_dtype = self.autocast or self.weight_dtype
        self.tape: list[Node] | None = None
        """Nodes of the forward pass, in order; None: it has no gradients."""
        self.takes_fp8 = precision == "fp8"
        self._fp32_products = "tf32" if precision == "tf32" else "fp32"
        self._weight_copies: dict[int, Tensor] = {}
        self._frame: Frame | None = None

    # --- memory -------------------------------------------------------------------------------------------

    def new(self, count: Count, dtype: Dtype, what: str, category: str = "temporaries") -> Tensor:
        made = self.allocations
        number = made.make(what, count.formula(dtype), count.value * dtype.num_bytes, self.where, category)
        return Tensor(count, dtype, Storage(made.piece(number), number, made.free))

    def run(
        self,
        name: str,
        reads: tuple[Tensor, ...],
        count: Count,
        dtype: Dtype,
        what: str,
        *,
        also_read_bytes: int = 0,
        strided: bool = False,
    ) -> Tensor:
        made = self.new(count, dtype, what)
        self.ran(name, reads, (made,), also_read_bytes=also_read_bytes, strided=strided)
        return made

    def copy(self, tensor: Tensor, dtype: Dtype, added_to: Tensor | None = None) -> Tensor:
        """Copy a tensor to fresh memory; added_to: write its sum with this tensor instead."""
        what = tensor.what.removesuffix(f", in {tensor.dtype.name}")
        made = self.new(tensor.count, dtype, tensor.what if tensor.dtype is dtype else f"{what}, in {dtype.name}")
        if added_to is None:
            self.ran("copy", (tensor,), (made,))
        else:
            self.ran("add", (tensor, added_to), (made,))
        return made

    def product(
        self,
        name: str,
        factors: tuple[Tensor, Tensor],
        sizes: Product,
        count: Count,
        what: str,
        added: tuple[Tensor, ...] = (),
        dtype: Dtype | None = None,
    ) -> Tensor:
        self.start_products()

        def multiply() -> Tensor:
            made = self.new(count, dtype or factors[0].dtype, what)
            self.ran(name, (*factors, *added), (made,), product=sizes)
            return made

        return self.dear(multiply, is_linear=name != "bmm")

    def start_products(self) -> None:
        self.allocations.start_products(self.phase, self.where)

    def dear(self, make: Callable[[], Tensor], *, is_linear: bool = False) -> Tensor:
        """Output of an operator that selective checkpointing saves instead of running it again.

        is_linear: True for a linear layer, of which `selective_2` recomputes every second one.
        """
        return make() if self._frame is None else self._frame.output(make, is_linear=is_linear)

    # --- events -------------------------------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        self.phase = phase
        self._listen(Began(phase))

    def ran(
        self,
        name: str,
        reads: tuple[Tensor, ...],
        writes: tuple[Tensor, ...],
        *,
        product: Product | None = None,
        fused_flops: float | None = None,
        also_read_bytes: int = 0,
        strided: bool = False,
    ) -> None:
        """Report an operator.

        Args:
            fused_flops: FLOPs, for fused attention only.
            also_read_bytes: bytes of tensors that are not among `reads`.
        """
        if not self._tells_operators:
            return
        first = (reads or writes)[0]
        kind: Kind
        if fused_flops is not None:
            kind, flops = "attention", fused_flops
        elif product is not None:
            kind, flops = "matmul", float(product.flops)
        else:
            elements = max([tensor.count.value for tensor in (*reads, *writes)])
            kind, flops = "streaming", float(flops_of_elements(name, elements))
        self._listen(
            Operator(
                name=name,
                kind=kind,
                dtype=self._fp32_products if product is not None and first.dtype is FP32 else first.dtype.name,
                flops=flops,
                read_bytes=sum([tensor.num_bytes for tensor in reads]) + also_read_bytes,
                written_bytes=sum([tensor.num_bytes for tensor in writes]),
                reads=_operands(reads),
                writes=_operands(writes),
                strided=strided,
                product=product,
                phase=self.phase,
                where=self.where,
                what=writes[0].what,
                recomputed=self._frame is not None and self._frame.recomputing,
            )
        )

    # --- casts --------------------------------------------------------------------------------------------

    def cast(self, x: Tensor, dtype: Dtype | None) -> Tensor:
        if dtype is None or x.dtype is dtype:
            return x
        source = x.dtype
        node = self.node((x.slot,), (), lambda machine, kept, gradient: (machine.copy(gradient, source),))
        copy = self.copy(x, dtype)
        copy.heads_together = x.heads_together
        node.gives(copy)
        return copy

    def weight(self, parameter: Parameter) -> Tensor:
        """The weight as a matmul reads it: under autocast a copy, made once in each pass."""
        if self.autocast is None or parameter.tensor.dtype is self.autocast:
            return parameter.tensor
        if id(parameter) not in self._weight_copies:
            copy = self.cast(parameter.tensor, self.autocast)
            copy.storage.piece.category = "autocast_copies"
            self._weight_copies[id(parameter)] = copy
        return self._weight_copies[id(parameter)]

    # --- autograd -----------------------------------------------------------------------------------------

    def node(self, inputs: tuple[Slot | None, ...], kept: tuple[Tensor, ...], backward: Backward) -> Node:
        node = Node(inputs, kept, backward, self.where)
        if self.tape is None:
            return node
        if self._frame is not None and kept:
            number = self._frame.enter(kept)
            node.kept, node.recomputed = (), partial(self._recomputed, self._frame, number)
        if self._frame is None or not self._frame.recomputing:
            self.tape.append(node)
        return node

    def made_from(
        self,
        x: Tensor,
        output: Tensor,
        backward: str,
        kept: tuple[Tensor, ...] = (),
        *,
        what: str = "",
        strided: bool = False,
    ) -> Tensor:
        """Register that x became `output`; one operator, which reads the output's gradient and `kept`, is its backward.

        what: description of the gradient; '': 'gradient of' and x's description.
        """
        like = (x.count, x.dtype, what or f"gradient of {x.what}")
        node = self.node(
            (x.slot,), kept, lambda m, kept, gradient: (m.run(backward, (gradient, *kept), *like, strided=strided),)
        )
        return node.gives(output)

    @contextmanager
    def forward_pass(self, *, gradients: bool) -> Iterator[None]:
        """Run a forward pass under autocast; tensors that outlive it count as saved activations."""
        started = self.allocations.num_made
        self.tape = [] if gradients else None
        yield
        self._weight_copies.clear()
        self.allocations.call_rest("activations", started)

    def checkpoint(self, run: Callable[[Any], Any], x: Any, checkpointing: str) -> Any:
        """run(x) under activation checkpointing: its nodes save nothing, and backward recomputes them."""
        if self.tape is None:
            return run(x)
        self._frame = Frame(run, x, checkpointing)
        output = self._frame.run()
        self._frame = None
        return output

    def _recomputed(self, frame: Frame, number: int) -> tuple[Tensor, ...]:
        if not frame.has_found():
            started = self.allocations.num_made
            self._frame, frame.recomputing = frame, True
            with suppress(Enough):
                frame.run()
            self._frame = None
            self._weight_copies.clear()
            self.allocations.call_rest("activations", started)
        return frame.take(number)


def _operands(tensors: tuple[Tensor, ...]) -> tuple[Operand, ...]:
    return tuple([Operand(tensor.storage.number, tensor.num_bytes, tensor.start) for tensor in tensors])
