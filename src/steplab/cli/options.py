"""The options that commands share, by the same names everywhere.

Values stay text here; `specs.resolve` turns them into a spec, so that a study file, Python and the command line
are checked by one code and answer with one message.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from steplab.errors import UserError

if TYPE_CHECKING:
    from steplab.specs.study import Grid

STEP = Group.create_ordered("The step")
_SPREAD = Group.create_ordered("Several processes")
_SIZES = Group.create_ordered("Sizes of a built-in model, in place of its own")
_OUTPUT = Group.create_ordered("Where it is kept and how it is shown")

Format = Literal["table", "json", "csv", "md", "latex"]


def _step(name: str, help: str) -> Parameter:
    return Parameter(name=name, help=help, group=STEP)


def _spread(name: str, help: str) -> Parameter:
    return Parameter(name=name, help=help, group=_SPREAD)


def _size(name: str, help: str) -> Parameter:
    return Parameter(name=f"--model.{name}", help=help, group=_SIZES)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What is measured. `sweep` takes a list for each: --context 128,256."""

    model: Annotated[
        str | None,
        _step(
            "--model",
            "tiny, small, medium, large, xl, 2.7b, 8b, toy; hf:PATH/config.json; or package.module:function "
            "[default: tiny]",
        ),
    ] = None
    batch: Annotated[str | None, _step("--batch", "Sequences a step [default: 4]")] = None
    context: Annotated[str | None, _step("--context", "Tokens a sequence [default: 128]")] = None
    pass_name: Annotated[
        str | None, _step("--pass", "forward (no gradients), forward_backward, or train [default: train]")
    ] = None
    precision: Annotated[
        str | None,
        _step("--precision", "fp32, tf32, bf16 or fp16 (autocast over fp32 weights), bf16_pure [default: fp32]"),
    ] = None
    compile: Annotated[
        str | None,
        _step(
            "--compile",
            "off, or a mode of torch.compile: default, reduce-overhead, max-autotune, "
            "max-autotune-no-cudagraphs [default: off]",
        ),
    ] = None
    attention: Annotated[
        str | None,
        _step(
            "--attention",
            "plain (scores materialised), sdpa (torch chooses), sdpa_flash, sdpa_cudnn, sdpa_efficient, sdpa_math, "
            "flex, flash_triton (FlashAttention-2, steplab's own), flash_reference (the same in tiled PyTorch), "
            "flash_attn_4 (that package's), auto (the fastest by a table of measurements) [default: plain]",
        ),
    ] = None
    checkpointing: Annotated[
        str | None,
        _step(
            "--checkpointing",
            "Activations that backward recomputes: none, full (of every block), every_2, every_3, ... (of every Nth "
            "block), selective (all but matmuls and fused attention) [default: none]",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        _step("--optimizer", "adamw_fused, adamw_foreach, adamw_loop or sgd [default: adamw_fused]"),
    ] = None
    warmup: Annotated[str | None, _step("--warmup", "Steps kept but not counted [default: 5]")] = None
    steps: Annotated[str | None, _step("--steps", "Measured steps [default: 10]")] = None
    seed: Annotated[str | None, _step("--seed", "Of the random weights and tokens [default: 0]")] = None
    device: Annotated[str | None, _step("--device", "auto, cpu, mps, cuda or cuda:N [default: auto]")] = None
    layout: Annotated[
        str | None,
        _spread(
            "--layout",
            "Processes, one a GPU, along each of dp, fsdp, tp and pp: dp=2,fsdp=2 [default: dp=1]",
        ),
    ] = None
    data_parallel: Annotated[
        str | None,
        _spread("--data-parallel", "When gradients travel: naive, flat, overlap or bucketed [default: bucketed]"),
    ] = None
    bucket_size_mb: Annotated[
        str | None, _spread("--bucket-size-mb", "Largest bucket of gradients, in 1e6 bytes [default: 25]")
    ] = None
    reshard_after_forward: Annotated[
        str | None,
        _spread(
            "--reshard-after-forward",
            "Whether fsdp frees a block's parameters between its passes: always, never, or auto (never in a pipeline, "
            "else always) [default: auto]",
        ),
    ] = None
    pipeline_schedule: Annotated[
        str | None, _spread("--pipeline-schedule", "Of pp: 1f1b, gpipe or interleaved [default: 1f1b]")
    ] = None
    microbatches: Annotated[
        str | None, _spread("--microbatches", "Into how many parts pp cuts a batch [default: one sequence each]")
    ] = None
    vocab_size: Annotated[str | None, _size("vocab-size", "Rows of embedding and head")] = None
    d_model: Annotated[str | None, _size("d-model", "Width of the residual stream")] = None
    d_ff: Annotated[str | None, _size("d-ff", "Inner width of the feed-forward blocks")] = None
    num_layers: Annotated[str | None, _size("num-layers", "Blocks")] = None
    num_heads: Annotated[str | None, _size("num-heads", "Attention heads")] = None

    def fields(self) -> dict[str, object]:
        """One value a field, as resolve_step takes them."""
        for name, value in self._given():
            if "," in value and name != "layout":
                raise UserError(f"--{name} takes one value here, not '{value}'; `steplab sweep` takes lists")
        return dict(self._given())

    def grid(self) -> "Grid":
        """A list of values a field, as studies take them."""
        return {
            name: [value] if name == "layout" else [part.strip() for part in value.split(",")]
            for name, value in self._given()
        }

    def _given(self) -> list[tuple[str, str]]:
        sizes = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")
        external = {"pass_name": "pass"} | {size: f"model.{size}" for size in sizes}
        return [
            (external.get(field.name, field.name), value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
        ]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """How many processes measure together. Under torchrun neither is needed: those that it started do."""

    gpus: Annotated[
        int | None, _spread("--gpus", "Start so many processes, each on a GPU of its own; tensors travel by NCCL")
    ] = None
    processes: Annotated[
        int | None, _spread("--processes", "Start so many processes on the CPU; tensors travel by gloo")
    ] = None

    def as_layout(self) -> str | None:
        """The options of a step that start as many, for a command that takes these alone; None: no number is given."""
        if self.gpus is not None:
            return f"--layout dp={self.gpus}"
        return f"--layout dp={self.processes} --device cpu" if self.processes is not None else None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Where records lie."""

    store: Annotated[
        Path | None,
        Parameter(help="The store [default: $STEPLAB_STORE, else the XDG data folder]", group=_OUTPUT),
    ] = None
    debug: Annotated[
        bool, Parameter(help="Show the traceback of an error", negative="", group=_OUTPUT, show_default=False)
    ] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OutputOptions(StoreOptions):
    """Where records lie, and how they are shown."""

    format: Annotated[Format | None, Parameter(help="[default: by --output's ending, else table]", group=_OUTPUT)] = (
        None
    )
    output: Annotated[Path | None, Parameter(help="Write to this file instead of standard output", group=_OUTPUT)] = (
        None
    )
