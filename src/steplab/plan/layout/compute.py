"""Predicts the seconds of a step's parts on one rank: one kernel after the other, as in plan.time."""

from collections.abc import Iterable
from dataclasses import dataclass

from steplab.costs.kernel_time import streaming_s
from steplab.costs.operators import UPDATE_PASSES
from steplab.costs.rates import Gpu
from steplab.costs.weights import PartName
from steplab.errors import Unsupported
from steplab.plan.dry_run.parts import Parts
from steplab.plan.fusion import Kernel, kernels_of
from steplab.plan.kernel_time import KernelTimes, on_tensor_cores

DTENSOR_KERNEL_S, DTENSOR_KERNEL_SLOW_S = 105e-6, 150e-6
"""Python's time per kernel if DTensor splits the tensors, compiled or not, on a quick and on a slow CPU.

It limits the step of every layout with tp in benchmarks/results/layout_h200_202611.jsonl.gz: 100 to 150 microseconds
per kernel.
"""

HOOKS_S, HOOKS_SLOW_S = 0.5e-3, 1.6e-3
"""Python's time for FSDP2's hooks around one unit in one pass, on a quick and on a slow CPU.

In the same records, pipelines with FSDP2 take that much longer than Python's time for their kernels explains.
"""


@dataclass(frozen=True, slots=True)
class Work:
    kernels: float = 0.0
    tensor_s: float = 0.0
    """Seconds of matmuls and fused attention on tensor cores, at the full clock."""
    other_s: float = 0.0
    ideal_s: float = 0.0
    """Seconds that the kernels in `tensor_s` would take at the tensor cores' peak."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.kernels + other.kernels,
            self.tensor_s + other.tensor_s,
            self.other_s + other.other_s,
            self.ideal_s + other.ideal_s,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(self.kernels * times, self.tensor_s * times, self.other_s * times, self.ideal_s * times)

    @property
    def seconds(self) -> float:
        return self.tensor_s + self.other_s


class PartTimes:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._known: dict[tuple[int, str, str, bool], Work] = {}
        self._kernels = KernelTimes(gpu)
        self._parts: list[Parts] = []
        """Kept alive, because `_known` is keyed by their ids."""

    def of(self, parts: Parts, phase: str, part: PartName, *, compiled: bool) -> Work:
        key = (id(parts), phase, part, compiled)
        if key not in self._known:
            self._parts.append(parts)
            operators = parts.operators.get((phase, part), ())
            self._known[key] = self._work(kernels_of(operators, compiled=compiled and part == "block"))
        return self._known[key]

    def update_s(self, weight_bytes: int, num_elements: float, optimizer: str) -> Work:
        """Predict the optimizer's time from the bytes that its kernels read and write.

        Raises Unsupported for adamw_triton, whose traffic across ranks is unknown.
        """
        if optimizer not in UPDATE_PASSES:
            what = f"predicting the time of several processes with optimizer {optimizer}"
            raise Unsupported(what, "its memory traffic is known only for one process", "use adamw_fused")
        moved_bytes = UPDATE_PASSES[optimizer] * weight_bytes * num_elements
        return Work(1, 0.0, streaming_s(_NAMES[optimizer], moved_bytes, self._gpu))

    def copy_s(self, num_bytes: float) -> float:
        return streaming_s("copy", 2 * num_bytes, self._gpu) if num_bytes else 0.0

    def _work(self, kernels: Iterable[Kernel]) -> Work:
        total = Work()
        for kernel in kernels:
            op, seconds = kernel.operator, self._kernels.of(kernel)
            launched = int(not kernel.sums_rows)  # a compiler's code launches both kernels of a norm at once
            if on_tensor_cores(op):
                total += Work(launched, seconds, 0.0, op.flops / self._gpu.peaks[op.dtype])
            else:
                total += Work(launched, 0.0, seconds, 0.0)
        return total


_NAMES = {"adamw_fused": "_fused_adamw_"} | dict.fromkeys(("adamw_foreach", "adamw_loop", "sgd"), "_foreach_add_")
