"""Audits the numerics of one step: in fp32, and again in its precision, on one batch and the same random numbers.

The accumulation study adds one number to a sum a thousand times, and compares each addition with exact fractions.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from statistics import mode

import torch

from steplab.errors import ERRORS, Unsupported
from steplab.measurement.jobs import AuditTask
from steplab.measurement.machine.device import open_device
from steplab.measurement.machine.failures import failure_of, failure_of_step
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.measurement.precision.modes import AuditPlace, Operators, Products, rule_of
from steplab.measurement.precision.watch import NumericsWatch
from steplab.measurement.runner import Runner, refuse_unserved_step
from steplab.measurement.step.step import ModelStep
from steplab.measurement.tensors import dtype_name
from steplab.model.build import build_workload
from steplab.model.workload import Workload
from steplab.records.codec import new_head
from steplab.records.numerics import Accumulation, Audit, Binade, LossScaling, Numerics
from steplab.specs.step import AUTOCAST, StepSpec
from steplab.specs.step_choices import WITH_MASTERS

NUMBER = 0.01
NUM_ADDITIONS = 1000

STUDY: tuple[tuple[torch.dtype, torch.dtype, bool], ...] = (
    (torch.float32, torch.float32, False),
    (torch.float16, torch.float16, False),
    (torch.float32, torch.float16, False),
    (torch.float32, torch.float16, True),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.float32, torch.bfloat16, False),
)
"""Type of the sum, of the addend, and True if the addend is first cast to the sum's (without effect)."""


def accumulate(device: torch.device) -> tuple[Accumulation, ...]:
    return tuple(_accumulate(device, *types) for types in STUDY)


def _accumulate(device: torch.device, accumulator: torch.dtype, addend: torch.dtype, cast: bool) -> Accumulation:
    total = torch.zeros((), dtype=accumulator, device=device)
    sums = torch.zeros(NUM_ADDITIONS + 1, dtype=accumulator, device=device)
    for index in range(1, NUM_ADDITIONS + 1):
        number = torch.tensor(NUMBER, dtype=addend, device=device)
        total += number.to(accumulator) if cast else number
        sums[index] = total
    seen: list[float] = sums.tolist()
    value: float = torch.tensor(NUMBER, dtype=addend).item()
    return Accumulation(
        accumulator=dtype_name(accumulator),
        addend=dtype_name(addend),
        cast=cast,
        number=NUMBER,
        addend_value=value,
        num_additions=NUM_ADDITIONS,
        num_rounded=sum(Fraction(before) + Fraction(value) != Fraction(after) for before, after in pairwise(seen)),
        result=seen[-1],
        binades=tuple(_binades(seen, torch.finfo(accumulator).eps)),
    )


def _binades(sums: Sequence[float], eps: float) -> list[Binade]:
    """Additions by the power of two below their sum; `eps`: spacing of numbers between 1 and 2."""
    added: dict[float, list[float]] = {}
    for before, after in pairwise(sums):
        start = 2.0 ** (math.frexp(before)[1] - 1) if before else 0.0
        added.setdefault(start, []).append(after - before)
    return [
        Binade(start=start, spacing=start * eps, num_additions=len(steps), added=mode(steps))
        for start, steps in added.items()
    ]


_LOW = {"fp16": torch.float16, **dict.fromkeys(("bf16", "bf16_pure", *WITH_MASTERS), torch.bfloat16)}
_HEADROOM = 8
"""Factor by which gradients may exceed the audited ones before the suggested loss scale makes them overflow."""
_MOST_HALVINGS = 16
_HISTORY = 8


def audit_step(task: AuditTask, observer: Observer, world: World | None = None) -> Numerics:
    """Audit a step, or without one (`task.spec` None) only run the accumulation study. A failure of the model is
    recorded. Raises UserError or Unsupported for an impossible request.
    """
    spec = task.spec
    if spec is not None and spec.layout.world_size > 1:
        raise Unsupported(f"an audit of layout {spec.layout}", "an audit runs in one process", "leave --layout out")
    device = open_device(spec.device if spec else task.device)
    if spec is not None:
        refuse_unserved_step(spec, device.torch_device)
    runner = Runner(device, observer)
    runner.begin("sums")
    runner.read_clocks()
    sums = accumulate(device.torch_device)
    record = Numerics(**new_head(), spec=spec, environment=runner.environment, accumulations=sums)
    if spec is None:
        return record
    audited = _AuditedStep(spec, runner)
    try:
        audit = audited.run()
    except ERRORS:
        raise
    except Exception as error:  # a failure of the model or of its memory
        failure = failure_of_step(error, runner.stage, spec, device)
        return dataclasses.replace(record, failure=failure, notes=tuple(audited.notes))
    return dataclasses.replace(record, audit=audit, notes=tuple(audited.notes))


@dataclass(frozen=True, slots=True)
class _Pass:
    watch: NumericsWatch
    loss: float | None
    loss_dtype: str | None


class _AuditedStep:
    def __init__(self, spec: StepSpec, runner: Runner) -> None:
        self.spec, self.device, self.begin = spec, runner.device, runner.begin
        self.notes: list[str] = []

    def run(self) -> Audit:
        spec = self.spec
        if spec.compile != "off":
            self.notes.append("compile: the audit ran the step eagerly; a compiled one may leave out some casts")
        if spec.micro_steps > 1:
            self.notes.append(f"accumulation: the audit ran one of the {spec.micro_steps} micro-steps")
        self.begin("build")
        workload = self._with_one_batch(build_workload(spec, self.device.torch_device))
        self.begin("reference")
        reference = self._reference(workload)
        self.begin("audit")
        step = self._step(workload, spec)
        seen = self._pass(step, 1.0, reference)
        for name in seen.watch.left_out:
            self.notes.append(f"module {name or 'model'}: not audited inside, because hooks would change its kernels")
        # computed before the next passes, which need the memory of the recorded tensors
        audit = Audit(
            loss_dtype=seen.loss_dtype,
            loss=_finite(seen.loss),
            reference_loss=_finite(reference.loss) if reference else None,
            modules=seen.watch.modules(),
            operations=seen.watch.operations(),
            matmuls=seen.watch.operators.matmuls(),
            gradient_exponents=reference.watch.exponents.counts() if reference else (),
            kept_on_cuda=self._kept_on_cuda(seen.watch),
        )
        if num_products := len(seen.watch.operators.fp8_products):
            self.begin("histories")
            audit = dataclasses.replace(audit, matmuls=seen.watch.operators.matmuls(self._trained(num_products)))
        if spec.precision == "fp16" and reference and spec.pass_name != "forward":
            self.begin("scaling")
            audit = dataclasses.replace(audit, loss_scaling=self._loss_scaling(step, reference, seen))
        return audit

    def _with_one_batch(self, workload: Workload) -> Workload:
        if workload.module is None or workload.make_batch is None:
            raise Unsupported(
                f"an audit of {self.spec.model.name}",
                "its factory returns a whole step, which steplab cannot divide into phases",
                "have the factory return (module, make_batch)",
            )
        batch = workload.make_batch()
        return dataclasses.replace(workload, make_batch=lambda: batch)

    def _reference(self, workload: Workload) -> _Pass | None:
        try:
            step = self._step(workload, dataclasses.replace(self.spec, precision="fp32"))
            return self._pass(step, 1.0, None)
        except ERRORS:
            raise
        except Exception as error:  # a kernel without fp32, or too little memory: the types can still be reported
            self.notes.append(f"overflow, underflow: no fp32 run to compare with: {failure_of(error, None).message}")
            return None

    def _step(self, workload: Workload, spec: StepSpec) -> ModelStep:
        pass_name = "forward_backward" if spec.pass_name == "train" else spec.pass_name
        eager = dataclasses.replace(spec, compile="off", cuda_graph="off", pass_name=pass_name, accumulation=1)
        return ModelStep(workload, eager, self.device.torch_device)

    def _pass(self, step: ModelStep, scale: float, reference: _Pass | None) -> _Pass:
        torch.manual_seed(self.spec.seed)
        low = _LOW.get(self.spec.precision, torch.float32)
        watch = NumericsWatch(step.module, self.device.torch_device, low, reference.watch if reference else None)
        try:
            with watch.forward():
                step.forward()
            loss, step.loss = step.loss, None
            if loss is None:
                return _Pass(watch, None, None)
            with watch.backward():
                (loss * scale if scale != 1.0 else loss).backward()
            watch.gradients()
            return _Pass(watch, float(loss.detach()), dtype_name(loss.dtype))
        finally:
            step.module.zero_grad(set_to_none=True)

    def _trained(self, num_products: int) -> list[Products]:
        """Fp8 products in the first training steps of a new copy of the step, for histories of largest magnitudes.
        Steps without `num_products` products are left out: they cannot be matched with the audited ones.
        """
        eager = dataclasses.replace(self.spec, compile="off", cuda_graph="off", update="after", accumulation=1)
        found = []
        try:
            step = ModelStep(build_workload(eager, self.device.torch_device), eager, self.device.torch_device)
            for _ in range(_HISTORY):
                with Operators(AuditPlace(), checked_rows=0) as seen:
                    step.run()
                found.append(seen.fp8_products)
        except torch.OutOfMemoryError as error:
            self.notes.append(f"histories of largest magnitudes: none: {failure_of(error, None).message}")
        return [products for products in found if len(products) == num_products]

    def _loss_scaling(self, step: ModelStep, reference: _Pass, unscaled: _Pass) -> LossScaling | None:
        exact = reference.watch.all_gradients.elements()
        lost = unscaled.watch.all_gradients.elements()
        if exact is None or lost is None or not exact.largest:
            return None
        largest_representable = torch.finfo(torch.float16).max
        scale = 2.0 ** math.floor(math.log2(largest_representable / (_HEADROOM * exact.largest)))
        for _ in range(_MOST_HALVINGS):
            kept = self._pass(step, scale, reference).watch.all_gradients.elements()
            if kept is not None and not kept.num_overflowed:
                return LossScaling(largest_gradient=exact.largest, suggested_scale=scale, unscaled=lost, scaled=kept)
            scale /= 2
        self.notes.append(f"loss scaling: the gradients overflow even with a loss scale of {scale:g}")
        return None

    def _kept_on_cuda(self, watch: NumericsWatch) -> tuple[str, ...]:
        if self.device.torch_device.type == "cuda" or self.spec.precision not in AUTOCAST:
            return ()
        low = dtype_name(_LOW[self.spec.precision])
        free = (operation for operation in watch.operations() if operation.rule == "none" and low in operation.outputs)
        return tuple(dict.fromkeys(op.op for op in free if rule_of(op.op, "cuda", ())[0] == "fp32"))


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None
