"""Describes each optimizer's state between steps, and its temporaries within one."""

from collections.abc import Sequence
from typing import NamedTuple

from steplab.ops.triton_places import ADAMW_BLOCK
from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.sizes import FP32, INT32, INT64, Count, Dtype
from steplab.plan.dry_run.tensors import Tensor

_Tensors = tuple[Tensor, ...]


class Table(NamedTuple):
    size: Count
    dtype: Dtype
    what: str


def tables_of_one_kernel(sizes: Sequence[int], *, has_masters: bool) -> tuple[Table, ...]:
    """GPU tables of ops/adamw for one kernel's tensors; `sizes` are in elements.

    For each tensor they hold five addresses (six with a master weight), its size, its first block and three rates; for
    each block of elements, the number of its tensor.
    """
    number, width = len(sizes), 6 if has_masters else 5
    num_blocks = sum(-(-size // ADAMW_BLOCK) for size in sizes)
    each, blocks = Count(number, str(number)), Count(num_blocks, str(num_blocks))
    return (
        Table(Count(width * number, f"{width} {number}"), INT64, "addresses"),
        Table(each, INT64, "numbers of elements"),
        Table(each, INT64, "first blocks"),
        Table(blocks, INT32, "tensors of blocks"),
        Table(Count(3 * number, f"3 {number}"), FP32, "rates"),
        Table(Count(4, "4"), INT64, "learning rate, betas, weight decay"),
    )


class Optimizer:
    def __init__(self, m: Machine, parameters: list[Parameter], name: str) -> None:
        self._machine, self._parameters, self._name = m, parameters, name
        self._state: list[Tensor] = []
        self._moments: list[tuple[Tensor, Tensor]] = []
        self._addresses: dict[bool, Tensor] = {}
        self._blocks: dict[bool, _Tensors] = {}

    def step(self) -> None:
        self._machine.where = self._name
        if self._name != "sgd" and not self._moments:
            for parameter in self._parameters:
                self._make_state(parameter)
        if self._name == "adamw_foreach":
            self._foreach()
        elif self._name == "adamw_loop":
            self._loop()
        else:
            for has_masters in (False, True):
                self._launch(has_masters)
        for parameter in self._parameters:
            parameter.slot.gradient = None

    def _make_state(self, parameter: Parameter) -> None:
        """Allocate both moments in the updated tensor's format, for a single kernel also the step number on the GPU."""
        updated = parameter.master or parameter.tensor
        m, like = self._machine, (updated.count, updated.dtype)
        if self._name in ("adamw_fused", "adamw_triton"):
            self._state.append(m.new(m.sizes.one, FP32, "step numbers", category="optimizer_state"))
        first, second = (
            m.new(*like, f"{what} of {parameter.name}", category="optimizer_state")
            for what in ("first moments", "second moments")
        )
        self._moments.append((first, second))

    def _launch(self, has_masters: bool) -> None:
        indices = [index for index, p in enumerate(self._parameters) if (p.master is not None) is has_masters]
        parameters = [self._parameters[index] for index in indices]
        if not parameters:
            return
        if self._name == "adamw_triton":
            self._tables(parameters, has_masters)
        self._fused(parameters, tuple(moment for index in indices if self._moments for moment in self._moments[index]))

    def _tables(self, parameters: list[Parameter], has_masters: bool) -> None:
        """Allocate a kernel's tables: the addresses in each step, because gradients move, and the others once."""
        sizes = [parameter.tensor.count.value for parameter in parameters]
        addresses, *others = tables_of_one_kernel(sizes, has_masters=has_masters)
        made = self._new_table(addresses)
        if has_masters not in self._blocks:
            self._blocks[has_masters] = tuple(self._new_table(other) for other in others)
        self._addresses[has_masters] = made

    def _new_table(self, table: Table) -> Tensor:
        return self._machine.new(table.size, table.dtype, table.what, category="optimizer_state")

    def _fused(self, parameters: list[Parameter], state: _Tensors) -> None:
        """One kernel: reads weights, gradients and state, and writes all except gradients.

        A master weight is read instead of the weight, and both are written.
        """
        weights, gradients = _tensors(parameters)
        updated = tuple(p.master or p.tensor for p in parameters)
        also_written = weights if updated != weights else ()
        name = "adamw_kernel" if self._name == "adamw_triton" else "_fused_adamw_" if state else "_foreach_add_"
        self._machine.ran(name, (*updated, *gradients, *state), (*updated, *state, *also_written))

    def _foreach(self) -> None:
        m, parameters = self._machine, self._parameters
        roots = [m.new(p.tensor.count, p.tensor.dtype, f"root of the second moments of {p.name}") for p in parameters]
        first, second = (tuple(moments) for moments in zip(*self._moments, strict=True))
        self._adamw("_foreach_", *_tensors(parameters), first, second, tuple(roots), tuple(roots))

    def _loop(self) -> None:
        """Each parameter's AdamW denominator is still alive while the next one's root is computed."""
        m, denominator = self._machine, None
        for parameter, (first, second) in zip(self._parameters, self._moments, strict=True):
            like = (parameter.tensor.count, parameter.tensor.dtype)
            root = m.new(*like, f"root of the second moments of {parameter.name}")
            denominator = m.new(*like, f"denominator of {parameter.name}")
            self._adamw("", *_tensors([parameter]), (first,), (second,), (root,), (denominator,))
            del root
        del denominator

    def _adamw(
        self,
        prefix: str,
        weights: _Tensors,
        gradients: _Tensors,
        first: _Tensors,
        second: _Tensors,
        roots: _Tensors,
        denominators: _Tensors,
    ) -> None:
        for name, reads, writes in (
            ("mul_", weights, weights),  # weight decay
            ("lerp_", (*first, *gradients), first),
            ("mul_", second, second),
            ("addcmul_", (*second, *gradients), second),
            ("sqrt", second, roots),
            ("div", roots, denominators),
            ("add_", denominators, denominators),
            ("addcdiv_", (*weights, *first, *denominators), weights),
        ):
            self._machine.ran(f"{prefix}{name}", reads, writes)


def _tensors(parameters: list[Parameter]) -> tuple[_Tensors, _Tensors]:
    gradients = tuple(gradient for p in parameters if (gradient := p.slot.gradient) is not None)
    return tuple(p.tensor for p in parameters), gradients
