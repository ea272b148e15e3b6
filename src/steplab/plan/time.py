"""Predicts the time of a training step on one GPU without running it: `predict_step_time`.

plan.dry_run lists the step's operators, plan.fusion merges them into kernels as torch.compile would, and
plan.kernel_time gives each kernel's time. Times are summed, because kernels on one stream do not overlap. Where Python
launches too slowly, the step takes Python's time, predicted for a quick and a slow CPU (a factor of two).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, get_args

from steplab.costs.flops import DTYPE_OF_MATMULS, Convention, model_flops_per_token
from steplab.costs.kernel_time import has_own_rates
from steplab.costs.rates import Gpu, StepRates
from steplab.errors import Unsupported
from steplab.plan.dry_run.events import MADE_BY_HOST, READS_A_VALUE, Operator, RepeatedBlocks
from steplab.plan.dry_run.step import operators_of
from steplab.plan.fusion import Kernel, kernels_of
from steplab.plan.kernel_time import Host, KernelTimes, hosts_of, on_tensor_cores
from steplab.plan.layout.model import own_facts
from steplab.plan.memory import refuse_unknown_formats
from steplab.records.profile import CompiledShares
from steplab.records.run import ModelFacts, Utilization
from steplab.records.step_time import Bound, PhaseTimes, StepTimePrediction, TimePart
from steplab.specs.attention_kernels import refuse_unserved_attention, with_attention_chosen
from steplab.specs.checkpointing import checkpointing_remark, num_first, period_of
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import AFTER, FP8
from steplab.units import counted, listed

_PHASES = ("forward", "backward", "optimizer")


def predict_step_time(
    spec: StepSpec, gpu: Gpu, operators: Iterable[Operator] | None = None, facts: ModelFacts | None = None
) -> StepTimePrediction:
    """Predict the time of one step in one process on `gpu`, by phase and kind of kernel, with a 90 % interval.

    Args:
        operators: of the eager step of any model, from a trace (fake_step); None: a dry run of steplab's Transformer.
        facts: sizes of the traced model.

    Raises Unsupported for unknown operators, several processes, other devices than CUDA, or a number format without a
    stated peak on this GPU.
    """
    refuse_unknown_step(spec, gpu, operators_are_known=operators is not None)
    parts = throttled(_parts(spec, gpu, operators), gpu)
    if spec.updates_in_backward:
        hidden = hidden_update(spec, gpu)
        parts = [_in_backward(part, hidden) for part in parts]
    spread = step_spread(spec, gpu)
    hosts = hosts_of(spec, gpu, operators)
    by_phase = {name: [part for part in parts if part.phase == name] for name in _PHASES}
    phases = [_phase(name, own, spec, gpu, spread, hosts) for name, own in by_phase.items()]
    phases = [phase for phase in phases if phase.device_s > 0]
    times = ("seconds", "low_s", "high_s", "device_s", "host_s", "slow_host_s")
    totals = {name: sum(getattr(phase, name) for phase in phases) for name in times}
    step = PhaseTimes(phase="step", bound=max(phases, key=lambda phase: phase.seconds).bound, **totals)
    return StepTimePrediction(
        gpu=gpu.name,
        phases=(*phases, step),
        parts=tuple(parts),
        is_fitted=has_own_rates(spec.precision, gpu),
        tokens_per_step=None if spec.model.kind == "factory" else spec.tokens_of_all,
        utilizations=_utilizations(spec, gpu, parts, step.seconds, facts),
        model=facts or (own_facts(spec.model.shape) if spec.model.shape else None),
        sources=gpu.sources,
        notes=(*(_notes_of_trace(operators) if operators is not None else ()), *_notes(spec, gpu)),
        spec=spec,
    )


def hidden_update(spec: StepSpec, gpu: Gpu) -> float:
    """Share (0 to 1) of the optimizer's time that overlaps with the backward pass; 0 without a record of it."""
    return gpu.rates.step.hidden_update if spec.optimizer == "adamw_triton" else 0.0


def _in_backward(part: TimePart, hidden: float) -> TimePart:
    """Count an optimizer kernel as part of backward, with the time and bytes that do not overlap."""
    if part.phase != "optimizer":
        return part
    left = 1 - hidden
    return dataclasses.replace(part, phase="backward", seconds=part.seconds * left, moved_bytes=part.moved_bytes * left)


def _parts(spec: StepSpec, gpu: Gpu, operators: Iterable[Operator] | None) -> list[TimePart]:
    if operators is None:
        return parts_of(dataclasses.replace(spec, update=AFTER), gpu)
    compiled = spec.compile != "off"
    if compiled and isinstance(operators, RepeatedBlocks):
        of_two, of_three = (_of_operators(each, spec, gpu) for each in (operators.of_two, operators.of_three))
        return _listed(_extrapolated(of_two, of_three, operators.times))
    return _listed(_of_operators(operators, spec, gpu))


def _of_operators(operators: Iterable[Operator], spec: StepSpec, gpu: Gpu) -> "dict[_Key, _Sum]":
    ran = [op for op in operators if op.name != MADE_BY_HOST]
    return _sums(kernels_of(ran, compiled=spec.compile != "off", blocks_alone=spec.compile == "block"), gpu, spec)


def compiled_shares(spec: StepSpec, gpu: Gpu, operators: Iterable[Operator] | None = None) -> CompiledShares:
    """Ratios of the compiled step's times and kernel counts to the eager step's, all predicted.

    It also lists code lines that wait for the GPU to read a value, or copy a tensor from the CPU. operators: as in
    `predict_step_time`, which raises the same exceptions.
    """
    refuse_unknown_step(spec, gpu, operators_are_known=operators is not None)
    known = dataclasses.replace(spec, update=AFTER)  # not compiled whole if overlapped
    eager, compiled = (_parts(dataclasses.replace(known, compile=mode), gpu, operators) for mode in ("off", "default"))
    updates = _num_kernels([part for part in eager if part.phase == "optimizer"])
    eager_host_s, compiled_host_s = (
        predict_step_time(dataclasses.replace(known, compile=mode), gpu, operators).step.host_s
        for mode in ("off", "default")
    )
    before, after = (_num_kernels(parts) - updates for parts in (eager, compiled))
    eager_s = _memory_bound_s(eager, gpu)
    return CompiledShares(
        memory_bound=_memory_bound_s(compiled, gpu) / eager_s if eager_s else 1.0,
        products=_throttling_of(compiled, gpu) / _throttling_of(eager, gpu),
        kernels=after / before,
        host=compiled_host_s / eager_host_s,
        reads_at=_places(READS_A_VALUE, operators or ()),
        made_at=_places(MADE_BY_HOST, operators or ()),
    )


def _places(name: str, operators: Iterable[Operator]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(op.what for op in operators if op.name == name and op.what))


def _num_kernels(parts: Sequence[TimePart]) -> int:
    return sum(part.kernels for part in parts)


def _memory_bound_s(parts: Sequence[TimePart], gpu: Gpu) -> float:
    model = [part for part in parts if part.kind == "streaming" and part.phase != "optimizer"]
    return sum(part.seconds for part in model) - _num_kernels(model) * gpu.rates.step.gap(replayed=False)


def _utilizations(
    spec: StepSpec, gpu: Gpu, parts: Sequence[TimePart], step_s: float, facts: ModelFacts | None
) -> tuple[Utilization, ...]:
    executed = sum(part.flops for part in parts if part.kind != "streaming")
    used = model_utilizations(spec, gpu, step_s, facts)
    return (*used, _utilization("hfu", "as_executed", executed, spec, gpu, step_s))


def model_utilizations(
    spec: StepSpec, gpu: Gpu, step_s: float, facts: ModelFacts | None = None
) -> tuple[Utilization, ...]:
    """MFU of a step of `step_s` seconds over all GPUs of the layout, by each convention of counting FLOPs.

    Empty if the model's sizes are unknown. facts: of a traced model; None: steplab's own.
    """
    if facts is None and spec.model.shape is not None:
        facts = own_facts(spec.model.shape)
    flops = dict[str, float]()
    if facts is not None and not facts.is_counted:
        for convention in get_args(Convention):
            needed = model_flops_per_token(
                convention,
                num_parameters=facts.num_active_parameters or facts.num_parameters,
                num_embedding_parameters=facts.num_embedding_parameters,
                num_layers=facts.num_layers,
                attention_width=facts.attention_width,
                context=spec.context,
                backward=spec.pass_name != "forward",
            )
            if needed is not None and (facts.is_causal or convention != "causal"):
                flops[convention] = needed * spec.tokens_of_all
    return tuple(_utilization("mfu", convention, each, spec, gpu, step_s) for convention, each in flops.items())


def _utilization(
    kind: Literal["mfu", "hfu"], convention: str, flops: float, spec: StepSpec, gpu: Gpu, step_s: float
) -> Utilization:
    dtype, num_devices = DTYPE_OF_MATMULS[spec.precision], spec.layout.world_size
    return Utilization(
        kind=kind,
        convention=convention,
        flops=flops,
        dtype=dtype,
        peak_flops_per_s=gpu.peaks[dtype],
        peak_source=gpu.peak_sources.get(dtype, ""),
        value=flops / step_s / (gpu.peaks[dtype] * num_devices),
        num_devices=num_devices,
    )


def throttled(parts: Sequence[TimePart], gpu: Gpu) -> list[TimePart]:
    """Lengthen tensor-core kernels to the power limit's clock, which falls once the step's share of the tensor cores'
    peak passes a threshold."""
    slower = _throttling_of(parts, gpu)
    return [
        dataclasses.replace(part, seconds=part.seconds * slower) if on_tensor_cores(part) else part for part in parts
    ]


def _throttling_of(parts: Sequence[TimePart], gpu: Gpu) -> float:
    tensor = [part for part in parts if on_tensor_cores(part)]
    reached = sum(part.flops / gpu.peaks[part.dtype] for part in tensor) / sum(part.seconds for part in parts)
    return throttling(reached, gpu.rates.step)


def throttling(reached: float, rates: StepRates) -> float:
    """Factor (1 or more) on the time of matmuls, if the step reaches this share of the tensor cores' peak."""
    return 1 + rates.throttle * max(0.0, reached - rates.throttle_from)


def parts_of(spec: StepSpec, gpu: Gpu) -> list[TimePart]:
    """GPU time by phase, kind and operator, at the full clock, longest first within a phase.

    Few blocks and micro-steps are run dry; the others are extrapolated, because each adds the same.
    """
    spec = as_chosen(spec, gpu)

    def of_micro_steps(number: int) -> "dict[_Key, _Sum]":
        return _of_blocks(dataclasses.replace(spec, accumulation=number), gpu)

    return _listed(_repeated(of_micro_steps, _FEWEST_MICRO_STEPS, spec.micro_steps))


def as_chosen(spec: StepSpec, gpu: Gpu) -> StepSpec:
    """The step with attention `auto` replaced by the implementation for this GPU."""
    return with_attention_chosen(spec, spec.model.shape, gpu.device_names)[0]


_FEWEST_MICRO_STEPS = 2
"""Micro-steps to run dry: the first allocates the gradients, and each later one adds to them."""


def _of_blocks(spec: StepSpec, gpu: Gpu) -> "dict[_Key, _Sum]":
    shape = spec.model.shape
    assert shape is not None
    first = num_first(spec.checkpointing)
    if first is not None and spec.checkpoints_apply:
        return _of_first_blocks(spec, gpu, min(first, shape.num_layers))
    period = period_of(spec.checkpointing)
    return _repeated(partial(_summed, spec, gpu), shape.num_layers % period + period, shape.num_layers, period)


def _of_first_blocks(spec: StepSpec, gpu: Gpu, num_first: int) -> "dict[_Key, _Sum]":
    """Kernels of a step with its first `num_first` blocks checkpointed.

    Each further block, checkpointed or not, is assumed to add the same kernels as the others like it.
    """
    assert spec.model.shape is not None

    def summed(first: int, others: int) -> "dict[_Key, _Sum]":
        return _summed(dataclasses.replace(spec, checkpointing=f"first_{first}"), gpu, first + others)

    others = spec.model.shape.num_layers - num_first
    found = smaller = summed(1, min(others, 1))
    if num_first > 1:
        found = _extrapolated(smaller, summed(2, min(others, 1)), num_first - 1, found)
    if others > 1:
        found = _extrapolated(smaller, summed(1, 2), others - 1, found)
    return found


def _repeated(make: "Callable[[int], dict[_Key, _Sum]]", fewest: int, number: int, step: int = 1) -> "dict[_Key, _Sum]":
    """Kernels of `number` blocks or micro-steps, extrapolated from `make(fewest)` and `make(fewest + step)`."""
    if number <= fewest + step:
        return make(number)
    return _extrapolated(make(fewest), make(fewest + step), (number - fewest) // step)


def _extrapolated(
    smaller: "dict[_Key, _Sum]", larger: "dict[_Key, _Sum]", times: int, start: "dict[_Key, _Sum] | None" = None
) -> "dict[_Key, _Sum]":
    """`start` (by default `smaller`) plus `times` the difference between `larger` and `smaller`."""
    start = smaller if start is None else start
    added = {key: found.plus(smaller.get(key, _NOTHING), -1) for key, found in larger.items()}
    keys = dict.fromkeys([*start, *added])
    return {key: start.get(key, _NOTHING).plus(added.get(key, _NOTHING), times) for key in keys}


_Key = tuple[str, str, str, str]
"""Phase, kind, operator and number format."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sum:
    kernels: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    moved_bytes: float = 0.0

    def plus(self, other: "_Sum", times: int = 1) -> "_Sum":
        return _Sum(
            self.kernels + times * other.kernels,
            self.seconds + times * other.seconds,
            self.flops + times * other.flops,
            self.moved_bytes + times * other.moved_bytes,
        )


_NOTHING = _Sum()


def _summed(spec: StepSpec, gpu: Gpu, num_layers: int) -> dict[_Key, _Sum]:
    shape = spec.model.shape
    assert shape is not None
    model = dataclasses.replace(spec.model, shape=dataclasses.replace(shape, num_layers=num_layers))
    return _sums(kernels_of_step(dataclasses.replace(spec, model=model)), gpu, spec)


def kernels_of_step(spec: StepSpec) -> list[Kernel]:
    operators = operators_of(spec)
    kernels = kernels_of(operators, compiled=spec.compile != "off", blocks_alone=spec.compile == "block")
    if spec.block_ops == "triton" and spec.compile == "block":
        read = {operand.memory for op in operators if op.phase != "optimizer" for operand in op.reads}
        return [kernel for kernel in kernels if not _casts_gradient(kernel.operator, read)]
    return kernels


def _casts_gradient(op: Operator, read: set[int]) -> bool:
    """True if it casts a weight's gradient to fp32, which blocks of Triton operators compute in fp32 already
    (model/gradient_products). read: numbers of all allocations that forward and backward read."""
    widens = op.name == "copy" and op.written_bytes == 2 * op.read_bytes
    return widens and op.phase == "backward" and op.where.startswith("block ") and op.writes[0].memory not in read


def _sums(kernels: Sequence[Kernel], gpu: Gpu, spec: StepSpec) -> dict[_Key, _Sum]:
    found: dict[_Key, _Sum] = defaultdict(_Sum)
    times = KernelTimes(gpu, replayed=spec.replays_model)
    for kernel in kernels:
        op = kernel.operator
        key = (op.phase, op.kind, "fused" if kernel.fused else op.name, op.dtype)
        found[key] = found[key].plus(_Sum(1, times.of(kernel), op.flops, kernel.moved_bytes))
    return found


def _listed(sums: dict[_Key, _Sum]) -> list[TimePart]:
    parts = [
        TimePart(phase=phase, kind=kind, what=what, dtype=dtype, **dataclasses.asdict(each))
        for (phase, kind, what, dtype), each in sums.items()
    ]
    return sorted(parts, key=lambda part: (_PHASES.index(part.phase), -part.seconds, part.what, part.dtype))


def _phase(
    name: str, parts: list[TimePart], spec: StepSpec, gpu: Gpu, spread: float, hosts: tuple[dict[str, Host], ...]
) -> PhaseTimes:
    device_s, low, high = sum(part.seconds for part in parts), 1 - spread, 1 + spread
    if hosts and name in hosts[0]:
        quick, measured = (host[name] for host in hosts)
        host_s, slow_host_s = quick.host_s, measured.host_s
        seconds = device_s + measured.idle_s
        low_s, high_s = device_s * low + quick.idle_s, device_s * high + measured.idle_s
        host_bound = measured.idle_s > device_s / 2
    else:
        is_replayed = spec.cuda_graph == "step" or (spec.replays_model and name != "optimizer")
        paces = gpu.rates.host.paces("eager" if name == "optimizer" else spec.launcher)
        host_s, slow_host_s = (0.0 if is_replayed else pace * _num_kernels(parts) for pace in paces)
        seconds = max(device_s, host_s)
        low_s, high_s = seconds * low, max(device_s, slow_host_s) * high
        host_bound = host_s > device_s
    return PhaseTimes(
        phase=name,
        seconds=seconds,
        low_s=low_s,
        high_s=high_s,
        device_s=device_s,
        host_s=host_s,
        slow_host_s=slow_host_s,
        bound="host" if host_bound else _bound(parts),
    )


def _bound(parts: list[TimePart]) -> Bound:
    compute = sum(part.seconds for part in parts if part.kind != "streaming")
    return "compute" if compute > sum(part.seconds for part in parts) / 2 else "memory"


def step_spread(spec: StepSpec, gpu: Gpu) -> float:
    """Half the width of the 90 % interval of a step's time, as a share of that time."""
    known = gpu.rates.step.spread
    own = known["eager" if spec.compile == "off" else "compiled"]
    own = max(own, known.get("traced", own)) if spec.model.shape is None else own
    if has_own_rates(spec.precision, gpu):
        return own
    tried = gpu.rates.borrowers.get(gpu.name)
    if tried is None or DTYPE_OF_MATMULS[spec.precision] not in gpu.rates.products:
        return known["elsewhere"]
    return max(own, tried.spread)


def refuse_unknown_step(spec: StepSpec, gpu: Gpu, *, operators_are_known: bool = False) -> None:
    """Raise Unsupported for a step that `predict_step_time` does not support."""
    what, shape = f"predicting the time of {spec.model.label}", spec.model.shape
    if not operators_are_known and (shape is None or shape.num_heads == 0):
        why = "operators are known only for steplab's own Transformer"
        if shape is not None:
            raise Unsupported(what, f"{why}, with attention", "`steplab plan accounting` accounts for it")
        raise Unsupported(what, why, "measure it with `steplab run`, or replace the sizes of a built-in model")
    if spec.device in ("cpu", "mps"):
        raise Unsupported(what, f"the prediction is of a CUDA device, not of {spec.device}", "leave --device out")
    if spec.layout.world_size > 1:
        why = "the prediction is for a step of one process"
        instead = "`steplab plan time` and steplab.plan_steps predict it there, and `steplab plan layout` all layouts"
        raise Unsupported(f"{what} on layout {spec.layout}", why, instead)
    refuse_unknown_formats(spec, what)
    for dtype in (DTYPE_OF_MATMULS[spec.precision], *(["fp8"] if spec.precision in FP8 else [])):
        if dtype not in gpu.peaks:
            why = f"no peak of {gpu.name} is stated in {dtype}"
            raise Unsupported(f"{what} in {spec.precision}", why, f"give one with --peak {dtype}=FLOP/s")
    refuse_unserved_attention(spec, gpu.platform)


def _at(name: str, operators: Iterable[Operator]) -> str:
    """Source lines of operators of this name, as in ', at model.py:12'; '' if unknown."""
    places = _places(name, operators)
    return f", at {listed(places)}" if places else ""


def _notes_of_trace(operators: Iterable[Operator]) -> list[str]:
    notes = ["traced: the operators are those that torch ran on tensors without content"]
    if reads := sum(op.name == READS_A_VALUE for op in operators):
        notes.append(
            f"the model reads {counted(reads, 'value')} off tensors in a step, as `.item()` does"
            f"{_at(READS_A_VALUE, operators)}: Python waits for the GPU, which is not predicted"
        )
    if made := sum(op.name == MADE_BY_HOST for op in operators):
        notes.append(
            f"the model makes {counted(made, 'tensor')} in a step without naming a device"
            f"{_at(MADE_BY_HOST, operators)}, which the CPU makes and copies to the GPU; that is not predicted"
        )
    return notes


def _notes(spec: StepSpec, gpu: Gpu) -> list[str]:
    notes = ["without what runs before and after a step: loading data, logging, saving"]
    if spec.precision in FP8:
        notes.append(
            "fp8: the rates of its products and casts come from single layers on an H200, not from steps; "
            "utilization is a share of the bf16 peak"
        )
    elif gpu.is_fitted and not has_own_rates(spec.precision, gpu):
        notes.append(
            f"no record of {spec.precision} on {gpu.name} was fitted: it is taken to reach the shares of its peak that "
            "another format does"
        )
    if spec.compile != "off":
        notes.append("compiled: kernels between products are joined by rules; a compiler's own choices differ in part")
    if spec.replays_model:
        notes.append("CUDA graphs: replayed with one launch, so Python's time does not count")
    if spec.updates_in_backward:
        hidden = hidden_update(spec, gpu)
        share = (
            f"{hidden:.0%} of it is hidden, as in the fitted records" if hidden else "no record shows how much it hides"
        )
        notes.append(f"the update is overlapped with the backward pass: {share}")
    if spec.precision == "fp16":
        notes.append("without the gradient scaler's operators")
    chosen, said = with_attention_chosen(spec, spec.model.shape, gpu.device_names)
    notes += said
    attention = chosen.attention
    if attention not in ("plain", "sdpa") and attention not in gpu.rates.attention:
        notes.append(f"attention {attention} was not measured here: predicted as FlashAttention-2")
    shape = spec.model.shape
    num_layers = shape.num_layers if shape else None
    remark = checkpointing_remark(spec.checkpointing, num_layers=num_layers, gradients=spec.pass_name != "forward")
    return [*notes, remark] if remark else notes
