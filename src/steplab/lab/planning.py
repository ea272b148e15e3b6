"""Predict a step's memory and time on any GPU, and estimate a model's needs at scale, without torch or a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from steplab.costs.rates import Gpu, gpu_named
from steplab.errors import SteplabError, UserError
from steplab.lab.checkpointing import choose_checkpointing, with_notes
from steplab.lab.keeping import open_store
from steplab.lab.layout_planning import plan_given_layout
from steplab.lab.measuring import asked_step
from steplab.lab.predicting import facts_of, is_traced, memory_of, operators_of, sizes_for_accounting
from steplab.measurement.progress import OnProgress, Progress
from steplab.plan.accounting import account, device_of, mesh_of
from steplab.plan.cards import fit_of
from steplab.plan.check import Predicted, check_runs
from steplab.plan.dry_run.events import Operator
from steplab.plan.time import predict_step_time, refuse_unknown_step
from steplab.records.accounting import Accounting
from steplab.records.prediction import CardFit, MemoryPrediction
from steplab.records.run import Run
from steplab.records.step_time import PlannedStep, StepTimePrediction, TimeCheck
from steplab.specs.checkpointing import AUTO
from steplab.specs.ddp import DEFAULT_BUCKET_MB, Variant, variants_of
from steplab.specs.hardware import HardwareSpec, accelerator_named, find_hardware, hardware_named
from steplab.specs.layout import parse_layout
from steplab.specs.step import StepSpec
from steplab.units import parse_bytes


def on_cuda(device: str) -> str:
    return "cuda"


DEFAULT_GPU = "H200 SXM"
"""Default GPU of predictions: the one whose measurements they are fitted to."""


def plan(spec: StepSpec | str | None = None, *, gpu: Gpu | str = DEFAULT_GPU, **fields: object) -> PlannedStep:
    """Predict the memory and time of a step on a GPU; `why_not` explains a missing prediction.

    `spec` and `fields` are as in `measure`. Neither torch nor a GPU is needed:

        planned = steplab.plan("2.7b", context=512, precision="bf16", gpu="H100 SXM")
        planned.memory.peak_bytes, planned.time.central_s

    `plan_memory`, `plan_time`, `plan_layout` and `plan_accounting` have the options of `steplab plan memory` and so on.
    """
    chosen = gpu_named(gpu) if isinstance(gpu, str) else gpu
    found = choose_checkpointing(asked_step("plan", spec, fields, on_cuda), chosen.hardware)
    planned = plan_steps([found.spec], gpu=chosen)[0]
    return replace(planned, memory=planned.memory and with_notes(planned.memory, found.notes))


def plan_memory(
    spec: StepSpec | str | None = None, *, gpu: Gpu | str | None = None, variant: str | None = None, **fields: object
) -> MemoryPrediction:
    """Predict the peak memory of a step on CUDA by category, for every rank of a layout.

    `spec` and `fields` are as in `measure`:

        steplab.plan_memory("2.7b", context=512, precision="bf16").peak_bytes

    `gpu` is a known GPU's name, or a Gpu with other figures (costs.rates.gpu_named); default: every known one.
    `variant`, for layouts of only dp, is a kind of data parallelism as in `steplab ddp`: `torch_ddp:25`, `sharded`,
    `fsdp2`.

    Raises UserError for an invalid request, Unsupported for unpredictable memory.
    """
    asked = asked_step("plan_memory", spec, fields, on_cuda)
    if asked.checkpointing == AUTO and gpu is None:
        raise UserError("checkpointing auto is chosen for a GPU; name it, as in --gpu 'H200 SXM'")
    wanted = hardware_named(gpu) if isinstance(gpu, str) else gpu.hardware if gpu else None
    chosen = choose_checkpointing(asked, wanted)
    found = memory_of(chosen.spec, asked_variant(asked, variant), gpu=wanted)
    found = with_notes(found, chosen.notes)
    return found if wanted is None else replace(found, cards=(_fit_on(wanted, found),))


def _fit_on(card: HardwareSpec, found: MemoryPrediction) -> CardFit:
    assert found.least_device_bytes is not None
    return fit_of(card, found.kind, found.least_device_bytes, found.safe_device_bytes)


def asked_variant(spec: StepSpec, name: str | None) -> Variant | None:
    """The data-parallel variant of this name. Raises UserError unless the layout is dp of two or more."""
    if name is None:
        return None
    if spec.layout.world_size == 1 or spec.layout.world_size != spec.layout.dp:
        raise UserError(
            f"a variant is of a layout of dp alone, not of {spec.layout}; use --layout dp=2, or leave it out"
        )
    found = variants_of([name], [DEFAULT_BUCKET_MB])
    return found[0]


def plan_time(
    spec: StepSpec | str | None = None, *, gpu: Gpu | str = DEFAULT_GPU, **fields: object
) -> StepTimePrediction:
    """The predicted time of a step on a GPU, with a 90 % interval.

    `spec` and `fields` are as in `measure`; `gpu` as in `plan_memory`:

        steplab.plan_time("2.7b", context=512, precision="bf16", gpu="H100 SXM").central_s

    `fit` says if memory suffices; the time assumes so. Raises UserError for an invalid request, Unsupported for an
    unpredictable time.
    """
    chosen = gpu_named(gpu) if isinstance(gpu, str) else gpu
    found = choose_checkpointing(asked_step("plan_time", spec, fields, on_cuda), chosen.hardware)
    memory, operators, _ = _memory_on(found.spec, chosen)
    return with_notes(_time_on(found.spec, chosen, operators, memory), found.notes)


def _memory_on(spec: StepSpec, gpu: Gpu) -> tuple[MemoryPrediction | None, list[Operator], list[str]]:
    """The memory, None if unpredictable; a traced model's operators; and notes that give the reason for None."""
    operators: list[Operator] = []
    try:
        return memory_of(spec, gpu=gpu.hardware, operators=operators), operators, []
    except SteplabError as error:
        return None, operators, [f"memory: {error}"]


def _time_on(
    spec: StepSpec, gpu: Gpu, operators: Sequence[Operator], memory: MemoryPrediction | None
) -> StepTimePrediction:
    if is_traced(spec) and spec.layout.world_size == 1:
        refuse_unknown_step(spec, gpu, operators_are_known=True)
        facts = memory.model if memory else facts_of(spec)
        time = predict_step_time(spec, gpu, operators or operators_of(spec), facts)
        tokens = spec.tokens_of_all if spec.model.kind == "hf" else _tokens_of_batches(spec)
        unknown = () if tokens else (f"tokens per second: {spec.model.name} sizes its batches itself",)
        time = with_notes(replace(time, tokens_per_step=tokens), unknown)
    else:
        time = predict_step_time(spec, gpu)
    if memory is None or gpu.hardware is None:
        return time
    return replace(time, fit=_fit_on(gpu.hardware, memory), least_device_bytes=memory.least_device_bytes)


def _tokens_of_batches(spec: StepSpec) -> int | None:
    from steplab.fake_step.step import tokens_of

    return tokens_of(spec)


def plan_steps(specs: Sequence[StepSpec], *, gpu: Gpu | str = DEFAULT_GPU) -> tuple[PlannedStep, ...]:
    """Predict memory and time of each step; `why_not` explains a missing prediction."""
    chosen = gpu_named(gpu) if isinstance(gpu, str) else gpu
    found = []
    for spec in specs:
        memory, operators, why_not = _memory_on(spec, chosen)
        time, layout = None, None
        try:
            if spec.layout.world_size == 1:
                time = _time_on(spec, chosen, operators, memory)
            else:
                layout = plan_given_layout(spec, chosen)
                why_not += [] if layout.candidates[0].time else [f"time: {layout.candidates[0].reason}"]
        except SteplabError as error:
            why_not.append(f"time: {error}")
        found.append(PlannedStep(spec=spec, memory=memory, time=time, layout=layout, why_not=tuple(why_not)))
    return tuple(found)


def plans_of(runs: Sequence[Run]) -> dict[str, PlannedStep]:
    """Predictions by run id, for the distinct training steps of steplab's Transformer in these runs: on the GPU that
    all ran on, if it is known, else on DEFAULT_GPU. Of more than _MOST_PLANNED steps, evenly spaced ones are predicted,
    with the first and the last.
    """
    steps = {
        run.spec.as_predicted: run
        for run in runs
        if run.spec and run.spec.pass_name == "train" and run.spec.model.kind == "transformer"
    }
    if len(steps) > _MOST_PLANNED:
        chosen = [round(place * (len(steps) - 1) / (_MOST_PLANNED - 1)) for place in range(_MOST_PLANNED)]
        steps = {spec: run for place, (spec, run) in enumerate(steps.items()) if place in chosen}
    ran_on = {run.device_name for run in steps.values()}
    known = find_hardware(ran_on.pop() or "") if len(ran_on) == 1 else None
    planned = plan_steps(list(steps), gpu=known.name if known else DEFAULT_GPU)
    return {run.id: step for run, step in zip(steps.values(), planned, strict=True)}


def plan_accounting(
    spec: StepSpec | str | None = None,
    *,
    gpu: str = "H100 SXM",
    mesh: str = "fsdp=16,tp=4",
    axes: str | None = None,
    flops_per_s: float | None = None,
    axis_bytes_per_s: float | None = None,
    counted_in: str = "H100 SXM",
    **fields: object,
) -> Accounting:
    """Memory, devices and batch that a model needs at scale, by formula; see plan.accounting.

        steplab.plan_accounting("xxl", mesh="fsdp=16,tp=4").questions[0].answer

    Args:
        spec: with `fields`, as in `measure`; only model, batch and context count.
        gpu: the mesh's device, a known GPU or TPU; `flops_per_s` and `axis_bytes_per_s` replace its figures.
        mesh: number of devices along each axis.
        axes: number of a torus's axes that each axis of the mesh uses.
        counted_in: GPU whose memory is the unit for weights, gradients and optimizer state.

    Raises UserError for an unknown device or an impossible mesh; Unsupported for a model with unknown parts.
    """
    asked = asked_step("plan_accounting", spec, fields)
    device = device_of(accelerator_named(gpu), flops_per_s=flops_per_s, axis_bytes_per_s=axis_bytes_per_s)
    return account(
        sizes_for_accounting(asked),
        model=asked.model.label,
        tokens=asked.tokens,
        mesh=mesh_of(device, parse_layout(mesh), None if axes is None else parse_layout(axes)),
        device=device,
        counted=device_of(accelerator_named(counted_in)),
    )


_MOST_PLANNED = 12


def chosen_gpu(
    name: str, peaks: tuple[str, ...] = (), bandwidth: float | None = None, memory: str | None = None
) -> Gpu:
    """A GPU with changed figures. `peaks`: texts such as bf16=989e12, in FLOP/s; `memory`: such as 96GiB. Raises
    UserError for other texts.
    """
    found: dict[str, float] = {}
    for text in peaks:
        dtype, _, value = text.partition("=")
        try:
            found[dtype] = float(value)
        except ValueError:
            raise UserError(f"--peak takes a number format and FLOP/s, as bf16=989e12, not '{text}'") from None
        if dtype not in _FORMATS:
            raise UserError(f"--peak takes one of {', '.join(_FORMATS)}, as bf16=989e12, not '{text}'")
    memory_bytes = None if memory is None else parse_bytes(memory)
    return gpu_named(name, peak=found, bandwidth_bytes_per_s=bandwidth, memory_bytes=memory_bytes)


_FORMATS = ("fp32", "tf32", "bf16", "fp16")


def check_plan(store: Path | None = None, on_progress: OnProgress = lambda progress: None) -> list[TimeCheck]:
    """Predict every run of the store, next to its measured time. Raises UserError without runs on a GPU."""

    def tell(done: int, total: int) -> None:
        on_progress(Progress(stage="predict", done=done, total=total))

    tell(0, 0)
    with open_store(store, write=False) as opened:
        runs = [record for record in opened.iterate(kind="run") if isinstance(record, Run)]
    found = check_runs(runs, predicted, tell)
    if not found:
        raise UserError("the store has no measured step on a GPU; import some with `steplab import`")
    return found


def predicted(spec: StepSpec, gpu: str) -> Predicted:
    chosen = gpu_named(gpu)
    memory, operators, _ = _memory_on(spec, chosen)
    try:
        return _time_on(spec, chosen, operators, memory), memory.peak_bytes if memory else None
    except SteplabError as error:
        raise UserError(str(error)) from error
