"""What each optimizer holds between steps, and makes for a while within one."""

from steplab.ops.adamw.block import ADAMW_BLOCK
from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.sizes import FP32, INT32, INT64, Count
from steplab.plan.dry_run.tensors import Tensor

_Tensors = tuple[Tensor, ...]


class Optimizer:
    """One of StepSpec's optimizers over all parameters."""

    def __init__(self, m: Machine, parameters: list[Parameter], name: str) -> None:
        self._machine, self._parameters, self._name = m, parameters, name
        self._state: list[Tensor] = []
        self._moments: list[tuple[Tensor, Tensor]] = []
        self._addresses: Tensor | None = None
        self._blocks: _Tensors | None = None

    def step(self) -> None:
        """Update the parameters, and let go of their gradients."""
        self._machine.where = self._name
        if self._name != "sgd" and not self._moments:
            for parameter in self._parameters:
                self._make_state(parameter)
        if self._name == "adamw_foreach":
            self._foreach()
        elif self._name == "adamw_loop":
            self._loop()
        else:
            if self._name == "adamw_triton":
                self._tables()
            self._fused()
        for parameter in self._parameters:
            parameter.slot.gradient = None

    def _make_state(self, parameter: Parameter) -> None:
        """Both moments in the parameter's format; in one kernel, the step's number is on the device too."""
        m, like = self._machine, (parameter.tensor.count, parameter.tensor.dtype)
        if self._name in ("adamw_fused", "adamw_triton"):
            self._state.append(m.new(m.sizes.one, FP32, "step numbers", category="optimizer_state"))
        first, second = (
            m.new(*like, f"{what} of {parameter.name}", category="optimizer_state")
            for what in ("first moments", "second moments")
        )
        self._moments.append((first, second))

    def _tables(self) -> None:
        """What ops/adamw has on the device of the tensors: five addresses of each, anew where gradients are elsewhere,
        then their sizes, their rates, and of each block of elements whose it is."""
        m, number = self._machine, len(self._parameters)
        addresses = m.new(Count(5 * number, f"5 {number}"), INT64, "addresses", category="optimizer_state")
        if self._blocks is None:
            num_blocks = sum(-(-parameter.tensor.count.value // ADAMW_BLOCK) for parameter in self._parameters)
            sizes = Count(number, str(number))
            self._blocks = (
                m.new(sizes, INT64, "numbers of elements", category="optimizer_state"),
                m.new(sizes, INT64, "first blocks", category="optimizer_state"),
                m.new(Count(num_blocks, str(num_blocks)), INT32, "tensors of blocks", category="optimizer_state"),
                m.new(Count(3 * number, f"3 {number}"), FP32, "rates", category="optimizer_state"),
                m.new(Count(4, "4"), INT64, "learning rate, betas, weight decay", category="optimizer_state"),
            )
        self._addresses = addresses

    def _fused(self) -> None:
        """One kernel over all: reads parameter, gradient and state of each, and writes all but the gradient."""
        weights, gradients = _tensors(self._parameters)
        state = tuple(moment for pair in self._moments for moment in pair)
        name = "adamw_kernel" if self._name == "adamw_triton" else "_fused_adamw_" if state else "_foreach_add_"
        self._machine.ran(name, (*weights, *gradients, *state), (*weights, *state))

    def _foreach(self) -> None:
        """An operator after the other over all parameters, with all square roots of second moments at once."""
        m, parameters = self._machine, self._parameters
        roots = [m.new(p.tensor.count, p.tensor.dtype, f"root of the second moments of {p.name}") for p in parameters]
        first, second = (tuple(moments) for moments in zip(*self._moments, strict=True))
        self._adamw("_foreach_", *_tensors(parameters), first, second, tuple(roots), tuple(roots))

    def _loop(self) -> None:
        """One parameter after the other: the root, then the denominator, while the last parameter's is still there."""
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
        """The operators of torch's unfused AdamW (torch/optim/adam.py), each reading and writing memory."""
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
    """The weights, and their gradients."""
    gradients = tuple(gradient for p in parameters if (gradient := p.slot.gradient) is not None)
    return tuple(p.tensor for p in parameters), gradients
