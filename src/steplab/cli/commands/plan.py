"""Predict a step's memory and time, without torch and without a GPU.

For example: steplab plan time --model 2.7b --precision bf16 --gpu "H100 SXM"
"""

from typing import Annotated

from cyclopts import App, Parameter

from steplab.cli.options import SPREAD, GivenFields, PageOptions, Recipe, parts_of, step_fields
from steplab.errors import UserError
from steplab.specs.model import SIZE_FIELDS
from steplab.specs.step import FIELDS

plan = App(name="plan", help_format="plaintext")

_OF_MEASURING = ("warmup", "steps", "seed")


class PlannedStepOptions(GivenFields, declared=step_fields(without=_OF_MEASURING)):
    """Options for the predicted step. `plan steps` takes lists: --context 128,256."""


_Peaks = Annotated[
    tuple[str, ...],
    Parameter(help="Dense peak in FLOP/s by number format: bf16=989e12 [may be repeated]", show_default=False),
]
_Bandwidth = Annotated[float | None, Parameter(help="Memory bandwidth in bytes/s: 4.8e12")]
_Memory = Annotated[str | None, Parameter(name="--memory", help="Memory of the GPU: 96GiB")]


@plan.command
def memory(
    *,
    gpu: Annotated[str | None, Parameter(help="GPU to fit [default: every known GPU]")] = None,
    of_gpu: _Memory = None,
    step: PlannedStepOptions = PlannedStepOptions(),
    recipe: Recipe = None,
    variant: Annotated[
        str | None,
        Parameter(help="Variant of `steplab ddp` for --layout dp=N: torch_ddp:25, sharded, fsdp2", group=SPREAD),
    ] = None,
    out: PageOptions = PageOptions(),
) -> None:
    """Predict the peak memory of a step on a CUDA device, component by component.

    No memory is allocated: a model of torch's allocator follows the step
    operator by operator. Each component has its formula; GPUs that fit are
    listed. --layout shows the ranks that need most. Model xxl has only a lower
    bound.

    For example: steplab plan memory --model 2.7b --context 512 --precision bf16
    """
    from steplab.cli.output import chosen_format, write_view
    from steplab.cli.progress import shown
    from steplab.lab.planning import DEFAULT_GPU, chosen_gpu, on_cuda, plan_memory
    from steplab.specs.changes import resolve_with_recipe
    from steplab.views.view import show

    spec = resolve_with_recipe(step.fields() | {"recipe": recipe}, on_cuda)
    chosen = chosen_format(out.format, out)
    card = chosen_gpu(gpu or DEFAULT_GPU, memory=of_gpu) if gpu or of_gpu else None
    with shown("predicting"):
        prediction = plan_memory(spec, gpu=card, variant=variant)
    write_view(show(prediction, store=out.store), chosen, out)


@plan.command
def time(
    *,
    gpu: Annotated[str, Parameter(help="GPU, such as H100 SXM or A100 SXM 80GB")] = "H200 SXM",
    peak: _Peaks = (),
    bandwidth: _Bandwidth = None,
    of_gpu: _Memory = None,
    step: PlannedStepOptions = PlannedStepOptions(),
    recipe: Recipe = None,
    out: PageOptions = PageOptions(),
) -> None:
    """Predict the time of a step on a GPU, by phase and kind of kernel, with a 90 % interval.

    Kernels take the time measured for their kind and size; an unmeasured GPU
    scales these by its data sheet, with a wider interval. Other models are
    traced by torch without a GPU. With --layout, communication is included;
    `plan layout` finds the best one.

    For example: steplab plan time --model 2.7b --context 512 --precision bf16 --compile default --gpu "H200 SXM"
    """
    from steplab.cli.output import chosen_format, write_view
    from steplab.cli.progress import shown
    from steplab.lab.layout_planning import plan_given_layout
    from steplab.lab.planning import chosen_gpu, on_cuda, plan_time
    from steplab.specs.changes import resolve_with_recipe
    from steplab.views.view import show

    spec = resolve_with_recipe(step.fields() | {"recipe": recipe}, on_cuda)
    chosen = chosen_format(out.format, out)
    card = chosen_gpu(gpu, peak, bandwidth, of_gpu)
    with shown("predicting"):
        found = plan_given_layout(spec, card) if spec.layout.world_size > 1 else plan_time(spec, gpu=card)
    write_view(show(found, store=out.store), chosen, out)


_OF_LAYOUTS = (
    *("layout", "batch", "accumulation", "microbatches", "data_parallel", "bucket_size_mb"),
    *("reshard_after_forward", "pipeline_schedule", "device", "pass"),
    *_OF_MEASURING,
)
"""Step fields that a layout decides, or that do not affect it."""


class JobOptions(GivenFields, declared=step_fields(without=_OF_LAYOUTS)):
    """Options for the step, without the fields that a layout decides."""


@plan.command
def layout(
    *,
    gpus: Annotated[str, Parameter(help="Number of GPUs: 64, or 64,512")],
    global_batch: Annotated[str, Parameter(help="Sequences per step, over all GPUs")],
    gpu: Annotated[str, Parameter(help="GPU, or several: 'H100 SXM,H200 SXM'")] = "H200 SXM",
    peak: _Peaks = (),
    bandwidth: _Bandwidth = None,
    of_gpu: _Memory = None,
    gpus_per_node: Annotated[int | None, Parameter(help="GPUs per node [default: the vendor's, else 8]")] = None,
    link: Annotated[
        tuple[str, ...],
        Parameter(
            help="Bus bandwidth per GPU: measured, in GB/s (node=330, network=45), or stated "
            "(network=400Gb/s) [may be repeated]",
            show_default=False,
        ),
    ] = (),
    profile: Annotated[str | None, Parameter(help="Record of `steplab comm` to use for the node's link")] = None,
    tokens: Annotated[
        str | None, Parameter(help="Tokens of the whole training, for days and GPU-hours: 300B, 15T")
    ] = None,
    step: JobOptions = JobOptions(),
    out: PageOptions = PageOptions(),
) -> None:
    """Rank all layouts of a training step on a number of GPUs by predicted time.

    Every factorisation into dp, fsdp, tp and pp is planned: memory,
    communication by axis, and time with a 90 % interval. Layouts that do not
    fit are listed with the reason. `steplab run` takes the options shown.
    --output plan.html adds pictures.

    The step, --gpus, --gpu, --global-batch and --link take lists; the best
    layouts of all combinations are compared.

    For example: steplab plan layout --model 8b --context 4096 --checkpointing auto --gpus 64,512 --global-batch 512
    """
    from steplab.cli.output import chosen_format, write_view
    from steplab.cli.progress import shown
    from steplab.lab.layout_planning import plan_layouts
    from steplab.lab.planning import chosen_gpu
    from steplab.units import parse_count
    from steplab.views.view import show

    chosen = chosen_format(out.format, out)
    with shown("planning the layouts"):
        found = plan_layouts(
            step.grid(),
            gpus=_numbers("--gpus", gpus),
            global_batches=_numbers("--global-batch", global_batch),
            gpu_names=[chosen_gpu(each, peak, bandwidth, of_gpu) for each in parts_of(gpu)],
            links=link,
            gpus_per_node=gpus_per_node,
            profile=profile,
            tokens=None if tokens is None else parse_count(tokens),
            store=out.store,
        )
    write_view(show(found[0] if len(found) == 1 else found, store=out.store), chosen, out)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in parts_of(text)]
    except ValueError:
        raise UserError(f"{option} takes whole numbers, such as 64 or 64,512, not '{text}'") from None


@plan.command
def steps(
    *,
    gpu: Annotated[str, Parameter(help="GPU, such as H100 SXM or A100 SXM 80GB")] = "H200 SXM",
    step: PlannedStepOptions = PlannedStepOptions(),
    out: PageOptions = PageOptions(),
) -> None:
    """Predict memory and time of several steps in one table; step options except --layout take lists.

    For example: steplab plan steps --model small,xl --context 128,1024 --precision fp32,bf16
    """
    from steplab.cli.output import chosen_format, emit_document
    from steplab.cli.progress import shown
    from steplab.lab.planning import plan_steps
    from steplab.report.plan.steps import planned_document
    from steplab.specs.study import study_from_grids

    chosen = chosen_format(out.format, out)
    cells = study_from_grids("plan", "", [step.grid()]).cells
    with shown("predicting"):
        planned = plan_steps(cells, gpu=gpu)
    emit_document(planned_document(planned), chosen, out)


@plan.command
def check(*, out: PageOptions = PageOptions()) -> None:
    """Compare predicted with measured times of the store's runs on a GPU.

    Errors are grouped, such as by precision and by waits for Python, with the
    coverage of the interval. The worst steps and unpredictable runs follow.
    JSON and CSV have one row per run, with memory.

    For example: steplab plan check --output check.html
    """
    from steplab.cli.output import chosen_format, emit_document
    from steplab.cli.progress import ProgressLine
    from steplab.lab.planning import check_plan
    from steplab.report.plan.check import check_document

    chosen = chosen_format(out.format, out)
    with ProgressLine() as line:
        checked = check_plan(out.store, line.within)
    emit_document(check_document(checked), chosen, out)


_OF_A_MODEL = [*(FIELDS[key] for key in ("model", "batch", "context")), *SIZE_FIELDS]


class ModelOptions(GivenFields, declared=_OF_A_MODEL):
    """Options for the model and for the tokens per step."""


@plan.command
def accounting(
    *,
    model: ModelOptions = ModelOptions(),
    gpu: Annotated[str, Parameter(help="Device of the mesh: a known GPU or TPU")] = "H100 SXM",
    mesh: Annotated[str, Parameter(help="Devices along each axis")] = "fsdp=16,tp=4",
    axes: Annotated[
        str | None, Parameter(help="Network axes for each mesh axis [default: fsdp=2,tp=1 on a torus]")
    ] = None,
    flops: Annotated[float | None, Parameter(help="FLOP/s of a device [default: its bf16 peak]")] = None,
    bandwidth: Annotated[
        float | None, Parameter(help="Bytes/s a device receives along one axis [default: its own]")
    ] = None,
    counted_in: Annotated[str, Parameter(help="Express the fp32 state in memories of this GPU")] = "H100 SXM",
    out: PageOptions = PageOptions(),
) -> None:
    """Derive a model's needs at scale: memory, devices, and the batch that hides communication.

    Each answer is one sentence with its formulas, numbers inserted, and their
    source. Formats md and latex render mathematics. Model xxl has only
    feed-forward blocks.

    For example: steplab plan accounting --model xxl --gpu "TPU v5p" --mesh fsdp=16,tp=4
    """
    from steplab.cli.output import chosen_format, emit_document
    from steplab.lab.planning import plan_accounting
    from steplab.report.plan.accounting import accounting_document
    from steplab.specs.resolve import resolve_step

    spec, chosen = resolve_step(model.fields()), chosen_format(out.format, out)
    found = plan_accounting(
        spec, gpu=gpu, mesh=mesh, axes=axes, flops_per_s=flops, axis_bytes_per_s=bandwidth, counted_in=counted_in
    )
    emit_document(accounting_document(found), chosen, out)
