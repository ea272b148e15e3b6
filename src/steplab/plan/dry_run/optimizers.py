"""What each optimizer holds between steps, and makes for a while within one."""

from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.memory import Tensor
from steplab.plan.dry_run.sizes import FP32


class Optimizer:
    """One of StepSpec's optimizers over all parameters."""

    def __init__(self, m: Machine, parameters: list[Parameter], name: str) -> None:
        self._machine, self._parameters, self._name = m, parameters, name
        self._state: list[Tensor] = []

    def step(self) -> None:
        """Update the parameters, and let go of their gradients."""
        self._machine.ledger.where = self._name
        if self._name != "sgd" and not self._state:
            for parameter in self._parameters:
                self._make_state(parameter)
        if self._name == "adamw_foreach":
            _foreach(self._machine, self._parameters)
        elif self._name == "adamw_loop":
            _loop(self._machine, self._parameters)
        for parameter in self._parameters:
            parameter.slot.gradient = None

    def _make_state(self, parameter: Parameter) -> None:
        """Both moments in the parameter's format; fused, the step's number is on the device too."""
        m, like = self._machine, (parameter.tensor.count, parameter.tensor.dtype)
        if self._name == "adamw_fused":
            self._state.append(m.new(m.sizes.one, FP32, "step numbers", category="optimizer_state"))
        for what in ("first moments", "second moments"):
            self._state.append(m.new(*like, f"{what} of {parameter.name}", category="optimizer_state"))


def _foreach(m: Machine, parameters: list[Parameter]) -> None:
    """All square roots of second moments at once."""
    _roots = [m.new(p.tensor.count, p.tensor.dtype, f"root of the second moments of {p.name}") for p in parameters]


def _loop(m: Machine, parameters: list[Parameter]) -> None:
    """One parameter after the other: the root, then the denominator, while the last parameter's is still there."""
    denominator = None
    for parameter in parameters:
        like = (parameter.tensor.count, parameter.tensor.dtype)
        root = m.new(*like, f"root of the second moments of {parameter.name}")
        denominator = m.new(*like, f"denominator of {parameter.name}")
        del root
    del denominator
