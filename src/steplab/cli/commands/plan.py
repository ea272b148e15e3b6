"""Predict the memory and the time of a step, and account for a model at scale, without torch and without a GPU.

For example: steplab plan time --model 2.7b --precision bf16 --gpu "H100 SXM"
"""

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from steplab.cli.options import SPREAD, GivenFields, PageOptions, Recipe, step_options
from steplab.errors import UserError
from steplab.specs.model import SIZE_FIELDS
from steplab.specs.step import FIELDS

if TYPE_CHECKING:
    from steplab.report.kit.document import Document

plan = App(name="plan", help_format="plaintext")

_OF_MEASURING = ("warmup", "steps", "seed")
"""Fields of a step that have no effect on what is predicted."""


@step_options(without=_OF_MEASURING)
class PlannedStepOptions(GivenFields):
    """The step that is predicted. `plan steps` takes a list for each option: --context 128,256."""


def _chosen(out: PageOptions) -> str:
    """The format that is written."""
    from steplab.cli.output import chosen_format

    return chosen_format(out.format, out)


def _write(document: "Document", chosen: str, out: PageOptions, record: object = None) -> None:
    """Print a document, or write it to a file; as JSON the record, where there is one."""
    import msgspec

    from steplab.cli.output import emit, emit_document

    if chosen == "json" and record is not None:
        emit(msgspec.json.format(msgspec.json.encode(record)).decode(), out, chosen)
    else:
        emit_document(document, chosen, out)


@plan.command
def memory(
    *,
    gpu: Annotated[
        str | None, Parameter(help="GPU of the catalogue that the step should fit [default: each of the catalogue]")
    ] = None,
    step: PlannedStepOptions = PlannedStepOptions(),
    recipe: Recipe = None,
    variant: Annotated[
        str | None,
        Parameter(
            help="How the ranks of --layout dp=N share state, as `steplab ddp` names it: torch_ddp:25, sharded, fsdp2",
            group=SPREAD,
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool,
        Parameter(
            help="Whether ranks of tp split the tokens between the products, as steplab runs it; the other way can be "
            "planned only",
            group=SPREAD,
        ),
    ] = True,
    out: PageOptions = PageOptions(),
) -> None:
    """Predict the peak memory of a step on a CUDA device, with everything that it consists of.

    Nothing is allocated and nothing is stored: the step is run dry, operator
    by operator, with a model of torch's allocator. Each summand is shown with
    its formula, followed by the GPUs that the step fits. Of model xxl only a
    lower bound is predicted.

    With --layout each group of ranks is predicted, and the ranks that need
    most are shown in full.

    For example: steplab plan memory --model 2.7b --context 512 --precision bf16
    """
    from steplab.cli.progress import shown
    from steplab.lab.planning import on_cuda, plan_memory
    from steplab.report.plan.document import plan_document
    from steplab.specs.changes import resolve_with_recipe

    spec, chosen = resolve_with_recipe(step.fields() | {"recipe": recipe}, on_cuda), _chosen(out)
    with shown("predicting"):
        prediction = plan_memory(spec, gpu=gpu, variant=variant, sequence_parallel=sequence_parallel)
    _write(plan_document(prediction.spec or spec, prediction), chosen, out, prediction)


@plan.command
def time(
    *,
    gpu: Annotated[str, Parameter(help="GPU of the catalogue, such as H100 SXM or A100 SXM 80GB")] = "H200 SXM",
    peak: Annotated[
        tuple[str, ...],
        Parameter(
            help="Dense peak that replaces the catalogue's, in FLOP/s by number format: bf16=989e12 [may be repeated]",
            negative="",
            show_default=False,
        ),
    ] = (),
    bandwidth: Annotated[
        float | None, Parameter(help="Memory bandwidth that replaces the catalogue's, in bytes per second: 4.8e12")
    ] = None,
    step: PlannedStepOptions = PlannedStepOptions(),
    recipe: Recipe = None,
    out: PageOptions = PageOptions(),
) -> None:
    """Predict the time of a step on a GPU, by phase and by kind of kernel, with a 90 % interval.

    The step is run dry, operator by operator, and each kernel takes what
    kernels of its kind and size were measured to take. A GPU that was not
    measured is taken to reach the same shares of its stated figures, and the
    interval is wider.

    A transformers configuration or a function of your own is traced: torch
    runs its step on tensors without content, which needs no GPU.

    With --layout it is the time on that layout, with what its ranks send;
    `plan layout` finds the best one, and takes other networks.

    For example: steplab plan time --model 2.7b --context 512 --precision bf16 --compile default --gpu "H200 SXM"
    """
    from steplab.cli.progress import shown
    from steplab.lab.layout_planning import plan_given_layout
    from steplab.lab.planning import chosen_gpu, on_cuda, plan_time
    from steplab.report.plan.layouts import layouts_document
    from steplab.report.plan.time import time_document
    from steplab.specs.changes import resolve_with_recipe

    spec, chosen = resolve_with_recipe(step.fields() | {"recipe": recipe}, on_cuda), _chosen(out)
    card = chosen_gpu(gpu, peak, bandwidth)
    if spec.layout.world_size > 1:
        with shown("predicting"):
            found = plan_given_layout(spec, card)
        _write(layouts_document(found), chosen, out, found)
        return
    with shown("predicting"):
        prediction = plan_time(spec, gpu=card)
    _write(time_document(prediction.spec or spec, prediction), chosen, out, prediction)


_OF_LAYOUTS = (
    *("layout", "batch", "accumulation", "microbatches", "data_parallel", "bucket_size_mb"),
    *("reshard_after_forward", "pipeline_schedule", "device", "pass"),
    *_OF_MEASURING,
)
"""Fields of a step that follow from a layout, or have no effect on it."""


@step_options(without=_OF_LAYOUTS)
class JobOptions(GivenFields):
    """The step that is spread over GPUs."""


@plan.command
def layout(
    *,
    gpus: Annotated[str, Parameter(help="Number of GPUs, or several: 64,512")],
    global_batch: Annotated[str, Parameter(help="Sequences in a step of all GPUs together")],
    gpu: Annotated[str, Parameter(help="GPU of the hardware catalogue, or several: 'H100 SXM,H200 SXM'")] = "H200 SXM",
    gpus_per_node: Annotated[
        int | None, Parameter(help="GPUs of a node [default: that of the vendor's cluster, else 8]")
    ] = None,
    link: Annotated[
        tuple[str, ...],
        Parameter(
            help="Bus bandwidth that is reached, in GB/s of one GPU: node=330 or network=45; or what is stated of the "
            "network of one GPU: network=400Gb/s [may be repeated]",
            negative="",
            show_default=False,
        ),
    ] = (),
    profile: Annotated[
        str | None, Parameter(help="Record of `steplab comm` whose communication profile replaces the node's link")
    ] = None,
    tokens: Annotated[
        str | None, Parameter(help="Tokens of the whole training, as 300B or 15T, for its days and GPU-hours")
    ] = None,
    step: JobOptions = JobOptions(),
    out: PageOptions = PageOptions(),
) -> None:
    """Rank all layouts of a training step on a number of GPUs by predicted time.

    Every factorisation into dp, fsdp, tp and pp is planned: memory of the
    ranks that need most, messages by axis, and the time of a step with its
    90 % interval. Layouts that do not fit are listed with the reason. The
    options that are shown are taken by `steplab run` as they are. A page
    (--output plan.html) shows memory and time of the fastest as a picture.

    Options of the step, --gpus, --gpu, --global-batch and --link take lists:
    then each combination is planned, and the best layouts stand side by side.

    For example: steplab plan layout --model 8b --context 4096 --precision bf16 --attention sdpa_cudnn --compile
    default --checkpointing auto --gpus 64,512 --gpu "H100 SXM" --global-batch 512 --tokens 2T
    """
    from steplab.cli.progress import shown
    from steplab.lab.layout_planning import plan_layouts
    from steplab.report.plan.compared_layouts import compared_layouts_document
    from steplab.report.plan.layouts import layouts_document
    from steplab.units import parse_count

    chosen = _chosen(out)
    with shown("planning the layouts"):
        found = plan_layouts(
            step.grid(),
            gpus=_numbers("--gpus", gpus),
            global_batches=_numbers("--global-batch", global_batch),
            gpu_names=_parts(gpu),
            links=link,
            gpus_per_node=gpus_per_node,
            profile=profile,
            tokens=None if tokens is None else parse_count(tokens),
            store=out.store,
        )
    if len(found) == 1:
        _write(layouts_document(found[0]), chosen, out, found[0])
    else:
        _write(compared_layouts_document(found), chosen, out, found)


def _parts(text: str) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in text.split(",")]


def _numbers(option: str, text: str) -> list[int]:
    """Whole numbers in a list with commas. Raises UserError for anything else."""
    try:
        return [int(part) for part in _parts(text)]
    except ValueError:
        raise UserError(f"{option} takes whole numbers, as 64 or 64,512, not '{text}'") from None


@plan.command
def steps(
    *,
    gpu: Annotated[str, Parameter(help="GPU of the catalogue, such as H100 SXM or A100 SXM 80GB")] = "H200 SXM",
    step: PlannedStepOptions = PlannedStepOptions(),
    out: PageOptions = PageOptions(),
) -> None:
    """Predict memory and time of several steps in one table; every option of the step but --layout takes a list.

    For example: steplab plan steps --model small,xl --context 128,1024 --precision fp32,bf16
    """
    from steplab.cli.progress import shown
    from steplab.lab.planning import plan_steps
    from steplab.report.plan.steps import planned_document
    from steplab.specs.study import study_from_grids

    chosen = _chosen(out)
    cells = study_from_grids("plan", "", [step.grid()]).cells
    with shown("predicting"):
        planned = plan_steps(cells, gpu=gpu)
    _write(planned_document(planned), chosen, out)


@plan.command
def check(*, out: PageOptions = PageOptions()) -> None:
    """Set predictions of time and memory beside what was measured, for every run in the store.

    How far off, by precision, by whether rates were fitted to such a run and
    whether the GPU may have waited for Python; how often the measured time
    lies in the interval; and what cannot be predicted. JSON and CSV have one
    row for each run.

    For example: steplab plan check --output check.html
    """
    from steplab.cli.progress import ProgressLine
    from steplab.lab.planning import check_plan
    from steplab.report.plan.check import check_document

    chosen = _chosen(out)
    with ProgressLine() as line:
        checked = check_plan(out.store, line.within)
    _write(check_document(checked), chosen, out)


_OF_A_MODEL = ("model", "batch", "context", *(field.key for field in SIZE_FIELDS))


@step_options(without=[key for key in FIELDS if key not in _OF_A_MODEL])
class ModelOptions(GivenFields):
    """A model, and the batch whose activations are counted."""


@plan.command
def accounting(
    *,
    model: ModelOptions = ModelOptions(),
    gpu: Annotated[str, Parameter(help="Device of the mesh, a GPU or TPU by its name in the catalogue")] = "TPU v5p",
    mesh: Annotated[str, Parameter(help="Devices along each axis: FSDP and tensor parallelism")] = "fsdp=16,tp=4",
    axes: Annotated[
        str | None, Parameter(help="Axes of the network for each axis of the mesh [default: fsdp=2,tp=1 on a torus]")
    ] = None,
    flops: Annotated[float | None, Parameter(help="FLOP/s of a device, in place of its bf16 peak: 459e12")] = None,
    bandwidth: Annotated[
        float | None, Parameter(help="Bytes/s that a device receives along one axis, in place of its own: 180e9")
    ] = None,
    counted_in: Annotated[str, Parameter(help="GPU in whose memories the fp32 state is counted")] = "H100 SXM",
    out: PageOptions = PageOptions(),
) -> None:
    """Derive what a model takes at scale: memory, devices, and the batch that hides communication.

    Each question is answered in one sentence, followed by its formulas with
    the figures put in, and by their source. Formats md and latex write them as
    mathematics. Model xxl has feed-forward blocks alone.

    For example: steplab plan accounting --model xxl --mesh fsdp=16,tp=4
    """
    from steplab.lab.planning import plan_accounting
    from steplab.report.plan.accounting import accounting_document
    from steplab.specs.resolve import resolve_step

    spec, chosen = resolve_step(model.fields()), _chosen(out)
    found = plan_accounting(
        spec,
        gpu=gpu,
        mesh=mesh,
        axes=axes,
        flops_per_s=flops,
        axis_bytes_per_s=bandwidth,
        counted_in=counted_in,
    )
    _write(accounting_document(found), chosen, out)
