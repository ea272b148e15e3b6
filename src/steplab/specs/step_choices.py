"""The fields of a training step, each declared once. A field's `unused` refuses it, with a fix, if it has no effect."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self

from steplab.ops.attention.implementations import NAMES, TABLE
from steplab.ops.triton_places import NAMES as LOSS_NAMES
from steplab.ops.triton_places import TABLE as LOSS_TABLE
from steplab.specs.checkpointing import CHECKPOINTING, check_checkpointing
from steplab.specs.layout import DEVICES_TOLD, SINGLE, Layout, check_device, parse_layout
from steplab.specs.model import MEASURED, MODEL_SIZES, PLANNING_ONLY, ModelSpec
from steplab.specs.step_fields import Declared

Pass = Literal["forward", "forward_backward", "train"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16_master", "bf16_pure", "fp8", "fp8_torchao"]
CompileMode = Literal["off", "block", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
CudaGraph = Literal["off", "step"]
BlockOps = Literal["plain", "triton"]
Optimizer = Literal["adamw_fused", "adamw_foreach", "adamw_loop", "adamw_triton", "sgd"]
Update = Literal["after", "overlapped"]
DataParallelStrategy = Literal["naive", "flat", "overlap", "bucketed"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved"]
Reshard = Literal["auto", "always", "never"]

AFTER: Final = "after"
ALONE: Final[dict[str, Any]] = {
    "update": AFTER,
    "data_parallel": "bucketed",
    "microbatches": None,
    "pipeline_schedule": "1f1b",
    "reshard_after_forward": "auto",
}
"""Values of the multi-process fields in a step of one process."""
OVERLAPPED: Final = "overlapped"
IN_FLIGHT = ("overlap", "bucketed")
"""Data-parallel strategies that send gradients during the backward pass."""
FP8 = ("fp8", "fp8_torchao")
"""Precisions with fp8 products in the blocks' linear layers."""
WITH_MASTERS = ("bf16_master", *FP8)
"""Precisions with bf16 weights and fp32 master weights in the optimizer."""
KEEPS_MASTERS = "adamw_triton"
"""The optimizer that keeps fp32 masters, and the default for WITH_MASTERS."""
RECORD_THEIR_OWN = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record CUDA graphs of the model and replay them."""
DEFAULT_MODEL = "tiny"
_MODELS = ", ".join(MEASURED)


def averages_gradients(layout: Layout) -> bool:
    """True if steplab's own data parallelism averages gradients: dp is the only axis. Else FSDP2 does."""
    return layout.world_size == layout.dp > 1


def no_strategy(spec: "StepChoices") -> str | None:
    layout = spec.layout
    if averages_gradients(layout):
        return None
    if layout.world_size == 1:
        return (
            "one process alone averages no gradients; leave it out, "
            "or start several: --layout dp=2 (--gpus 2, or --processes 2 on the CPU)"
        )
    whose = "FSDP2 averages" if layout.data_ranks > 1 else "no data-parallel ranks average"
    return f"{whose} the gradients of layout {layout}; leave it out, or use --layout dp={layout.world_size}"


def no_buckets(spec: "StepChoices") -> str | None:
    if not averages_gradients(spec.layout) or spec.data_parallel == "bucketed":
        return no_strategy(spec)
    return f"data_parallel {spec.data_parallel} has no buckets; leave it out, or use --data-parallel bucketed"


def no_gradients(spec: "StepChoices") -> str | None:
    if spec.pass_name != "forward":
        return None
    return "pass forward has no gradients to accumulate; leave it out, or use --pass train"


def _needs_built_in(own: str) -> "Callable[[StepChoices], str | None]":
    """Make `unused` of a field that needs a built-in model. `own` completes the reason: 'has its own blocks'."""

    def why(spec: "StepChoices") -> str | None:
        if spec.model.kind == "transformer":
            return None
        return f"{spec.model.name} {own}; leave it out, or use a built-in model"

    return why


def _needs_axis(axis: str, lacks: str, instead: str = "") -> "Callable[[StepChoices], str | None]":
    """Make `unused` of a field that needs this axis. `lacks` completes the reason: 'has no pipeline'."""

    def why(spec: "StepChoices") -> str | None:
        if getattr(spec.layout, axis) > 1:
            return None
        what = "a step of one process" if spec.layout.world_size == 1 else f"layout {spec.layout}"
        return f"{what} {lacks}; leave it out, or use a layout with {axis}, as --layout {axis}=2{instead}"

    return why


@dataclass(frozen=True, kw_only=True, slots=True)
class StepChoices:
    """Fields of a StepSpec, which also checks them and their combinations."""

    model: ModelSpec = Declared(
        help=f"Model: {_MODELS}; {', '.join(PLANNING_ONLY)}, only for `plan memory` and `plan accounting`; "
        "hf:PATH/config.json; or package.module:function",
        default_words=DEFAULT_MODEL,
        shown=lambda spec: spec.model.label,
        order=tuple(MODEL_SIZES),
        role="size",
        axis=1,
    ).field()
    batch: int = Declared(
        help="Sequences in a micro-step, on each data-parallel rank",
        least=1,
        said="batch {}",
        rank=1,
        role="size",
        axis=3,
        panel=10,
    ).field(4)
    context: int = Declared(help="Tokens per sequence", least=1, said="context {}", role="size", axis=2).field(128)
    pass_name: Pass = Declared(
        help="Passes of a step",
        meanings={
            "forward": "inference without gradients",
            "forward_backward": "gradients too",
            "train": "the optimizer as well",
        },
        words={"forward_backward": "forward + backward"},
        rank=1,
        panel=1,
    ).field("train")
    precision: Precision = Declared(
        help="Number formats",
        meanings={
            "fp32": "IEEE matmuls",
            "tf32": "fp32 tensors, TF32 matmuls",
            "bf16": "autocast over fp32 weights",
            "fp16": "the same, with a gradient scaler",
            "bf16_master": "autocast over bf16 linear layers with fp32 masters in adamw_triton",
            "bf16_pure": "weights, gradients and optimizer state in bf16",
            "fp8": "bf16_master, with the products of linear layers within blocks in fp8",
            "fp8_torchao": "the same by torchao",
        },
        panel=11,
        baseline="fp32",
    ).field("fp32")
    compile: CompileMode = Declared(
        help="Compile each block, or the whole model in a torch.compile mode",
        meanings={"off": "eager", "block": "each block, in the default mode"},
        said="compiled ({})",
        words={"off": "eager", "block": "compiled block by block", "default": "compiled"},
        rank=1,
        panel=5,
        baseline="off",
    ).field("off")
    cuda_graph: CudaGraph = Declared(
        help="Replay kernels as CUDA graphs",
        meanings={"off": "only torch.compile's", "step": "each phase of the step"},
        header="CUDA graph",
        said="CUDA graph: {}",
        words={"off": "no CUDA graph", "step": "replayed as CUDA graphs"},
        quiet=True,
        rank=1,
        panel=6,
        baseline="off",
    ).field("off")
    attention: str = Declared(
        help="Attention",
        choices=NAMES,
        meanings={row.name: row.summary for row in TABLE},
        # A factory's model has its own attention.
        applies=lambda spec: spec.model.kind != "factory",
        said="{} attention",
        panel=2,
        baseline="plain",
    ).field("plain")
    block_ops: BlockOps = Declared(
        help="Kernels between the matrix products of a block",
        meanings={
            "plain": "torch's operators",
            "triton": "steplab's kernels for RMSNorm with the sum before it, rotary embedding and SwiGLU; needs "
            "model.projections merged",
        },
        unused=_needs_built_in("has its own blocks"),
        header="block operators",
        said="{} block operators",
        quiet=True,
        rank=2,
        panel=7,
        baseline="plain",
    ).field("plain")
    loss: str = Declared(
        help="How the output head and the loss are computed",
        choices=LOSS_NAMES,
        meanings={row.name: row.summary for row in LOSS_TABLE},
        unused=_needs_built_in("computes its own loss"),
        said="{} loss",
        quiet=True,
        rank=2,
        panel=7,
        baseline="plain",
    ).field("plain")
    checkpointing: str = Declared(
        help="Activations to recompute in backward",
        meanings=CHECKPOINTING,
        check=check_checkpointing,
        applies=lambda spec: spec.checkpoints_apply,
        said="checkpointing {}",
        words={"none": "no checkpointing"},
        quiet=True,
        rank=2,
        panel=3,
        order=tuple(CHECKPOINTING),
        baseline="none",
    ).field("none")
    optimizer: Optimizer = Declared(
        help="Optimizer",
        meanings={
            "adamw_fused": "torch's fused AdamW",
            "adamw_foreach": "its loop over lists of tensors",
            "adamw_loop": "its loop over parameters",
            "adamw_triton": "steplab's one kernel",
        },
        applies=lambda spec: spec.pass_name == "train",
        rank=4,
        panel=4,
        baseline="adamw_loop",
    ).field("adamw_fused")
    update: Update = Declared(
        help="When parameters are updated",
        meanings={
            "after": "once all gradients are there",
            "overlapped": "each block's as soon as its own are there, during the backward pass; across "
            "ranks as soon as they have arrived",
        },
        applies=lambda spec: spec.pass_name == "train",
        words={"after": "update afterwards", "overlapped": "update overlapped"},
        quiet=True,
        rank=4,
        panel=8,
        baseline="after",
    ).field("after")
    accumulation: int = Declared(
        help="Micro-steps in a step; their gradients are averaged",
        least=1,
        unused=no_gradients,
        header="micro-steps",
        said="{} micro-step{s}",
        quiet=True,
        rank=4,
    ).field(1)
    warmup: int = Declared(
        help="Steps before the measured ones, outside the statistics",
        least=0,
        header="warm-up",
        said="{} warm-up step{s}",
        rank=3,
        role="how",
        panel=9,
    ).field(5)
    steps: int = Declared(help="Measured steps", least=1, said="{} measured step{s}", rank=8, role="how").field(10)
    seed: int = Declared(
        help="Seed of the random weights and tokens", least=0, said="seed {}", quiet=True, rank=12, role="how"
    ).field(0)
    device: str = Declared(
        help=f"Device: {DEVICES_TOLD}",
        check=check_device,
        column="requested_device",
        header="requested",
        said="device {}",
        quiet=True,
        rank=13,
        role="device",
    ).field("auto")
    layout: Layout = Declared(
        help="Processes along dp, fsdp, tp and pp: dp=2,fsdp=2",
        group="processes",
        parse=parse_layout,
        shown=lambda spec: str(spec.layout),
        said="layout {}",
        words={str(SINGLE): "one process"},
        quiet=True,
        rank=1,
        panel=6,
    ).field(SINGLE)
    data_parallel: DataParallelStrategy = Declared(
        help="Average gradients over dp",
        meanings={
            "naive": "one by one after the backward pass",
            "flat": "all at once after it",
            "overlap": "each as soon as it is ready",
            "bucketed": "in buckets, each as soon as it is ready",
        },
        group="processes",
        unused=no_strategy,
        header="strategy",
        said="{} gradients",
        rank=1,
    ).field("bucketed")
    bucket_size_mb: float = Declared(
        help="Largest bucket of gradients, in units of 1e6 bytes",
        group="processes",
        above=0,
        unused=no_buckets,
        header="bucket",
        said="buckets of {}",
        unit="MB",
        rank=2,
    ).field(25.0)
    reshard_after_forward: Reshard = Declared(
        help="Free a block's fsdp parameters after its forward pass and gather them again for the backward pass",
        meanings={"auto": "always, but never in a pipeline, where each microbatch would gather them again"},
        group="processes",
        unused=_needs_axis("fsdp", "frees no parameters"),
        header="reshard",
        said="reshard after forward: {}",
        quiet=True,
        rank=2,
    ).field("auto")
    pipeline_schedule: PipelineSchedule = Declared(
        help="Order of a pipeline's microbatches",
        meanings={
            "1f1b": "a backward pass as soon as there is one",
            "gpipe": "all forward passes first",
            "interleaved": "1f1b over two shorter stages per rank",
        },
        group="processes",
        unused=_needs_axis("pp", "has no pipeline"),
        header="schedule",
        said="{} schedule",
        rank=2,
    ).field("1f1b")
    microbatches: int | None = Declared(
        help="Parts into which a pipeline cuts the batch",
        default_words="one per sequence",
        group="processes",
        least=1,
        unused=_needs_axis("pp", "has no pipeline", "; micro-steps whose gradients are averaged are --accumulation"),
        shown=lambda spec: spec.num_microbatches,
        said="{} microbatch{es}",
        rank=2,
    ).field(None)

    @property
    def num_microbatches(self) -> int:
        """`microbatches`, or one per sequence; 1 without a pipeline."""
        return (self.microbatches or self.batch) if self.layout.pp > 1 else 1

    @property
    def tokens(self) -> int:
        """Tokens in a micro-step of one process: batch x context."""
        return self.batch * self.context

    @property
    def as_predicted(self) -> Self:
        """Copy with default warm-up, steps, seed and device, which do not affect a prediction."""
        return replace(self, device="auto", warmup=5, steps=10, seed=0)

    @property
    def micro_steps(self) -> int:
        """`accumulation`, or 1 without gradients."""
        return 1 if self.pass_name == "forward" else self.accumulation

    @property
    def tokens_of_all(self) -> int:
        """Tokens in a step: batch x context x micro-steps x data-parallel ranks."""
        return self.tokens * self.micro_steps * self.layout.data_ranks

    @property
    def replays_model(self) -> bool:
        return self.cuda_graph == "step" or self.compile in RECORD_THEIR_OWN

    @property
    def launcher(self) -> str:
        """How kernels are launched: eager, compiled, or triton (block operators), whose Python is slowest."""
        return "triton" if self.block_ops == "triton" else "eager" if self.compile == "off" else "compiled"

    @property
    def updates_in_backward(self) -> bool:
        """True if parameters are updated during the backward pass; several ranks update them after it."""
        return self.update == OVERLAPPED and self.pass_name == "train" and self.layout.world_size == 1

    @property
    def strategy(self) -> str | None:
        """Strategy of steplab's own gradient averaging; None without dp, or if FSDP2 averages."""
        return self.data_parallel if averages_gradients(self.layout) else None

    @property
    def bucket_mb(self) -> float | None:
        """Bucket size in units of 1e6 bytes; None without buckets."""
        return self.bucket_size_mb if self.strategy == "bucketed" else None

    @property
    def reshards(self) -> bool:
        if self.reshard_after_forward == "auto":
            return self.layout.pp == 1
        return self.reshard_after_forward == "always"

    @property
    def checkpoints_apply(self) -> bool:
        """True if `checkpointing` has an effect: the step has gradients, and the model is not a factory's."""
        return self.pass_name != "forward" and self.model.kind != "factory"
