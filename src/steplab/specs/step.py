"""The training step under test: one frozen spec, validated once, before anything is built."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from steplab.errors import UserError
from steplab.specs.checkpointing import check_checkpointing
from steplab.specs.layout import SINGLE, Layout
from steplab.specs.layout_fit import refuse_what_does_not_fit
from steplab.specs.model import LARGEST, ModelSpec

Pass = Literal["forward", "forward_backward", "train"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16_pure"]
CompileMode = Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Attention = Literal[
    "plain",
    "sdpa",
    "sdpa_flash",
    "sdpa_cudnn",
    "sdpa_efficient",
    "sdpa_math",
    "flex",
    "flash_reference",
    "flash_triton",
    "flash_attn_4",
    "auto",
]
Optimizer = Literal["adamw_fused", "adamw_foreach", "adamw_loop", "sgd"]
DataParallelStrategy = Literal["naive", "flat", "overlap", "bucketed"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved"]
Reshard = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpec:
    """Everything that decides what one training step computes and how it is measured."""

    model: ModelSpec
    """The model under test."""
    batch: int = 4
    """Sequences a step; of several processes, of each."""
    context: int = 128
    """Tokens a sequence."""
    pass_name: Pass = "train"
    """forward: inference, without gradients. forward_backward: gradients too. train: the optimizer as well."""
    precision: Precision = "fp32"
    """fp32: IEEE matmuls. tf32: fp32 tensors, TF32 matmuls. bf16, fp16: autocast over fp32 weights (fp16 with
    a gradient scaler). bf16_pure: weights, gradients and optimizer state in bf16."""
    compile: CompileMode = "off"
    """off: eager. Otherwise the mode given to torch.compile."""
    attention: Attention = "plain"
    """plain materialises the scores; sdpa lets torch choose its kernel; sdpa_* admits that one alone; flex is torch's
    FlexAttention; flash_triton and flash_reference are steplab's FlashAttention-2, in Triton and in tiled PyTorch;
    flash_attn_4 is that package's; auto takes the one measured to be fastest."""
    checkpointing: str = "none"
    """none, full, every_N or selective: which activations backward recomputes (see specs.checkpointing)."""
    optimizer: Optimizer = "adamw_fused"
    """adamw_fused, adamw_foreach and adamw_loop are torch's three implementations of AdamW."""
    warmup: int = 5
    """Steps run and kept, but not counted, before the measured ones."""
    steps: int = 10
    """Measured steps."""
    seed: int = 0
    """Seed of the random weights and of the random batch, which is another on each data-parallel rank."""
    device: str = "auto"
    """auto (cuda, else mps, else cpu), cpu, mps, cuda or cuda:N. Of several processes each has a GPU of its own."""
    layout: Layout = SINGLE
    """How the step is spread over processes; by default it is not, and the fields below have no say."""
    data_parallel: DataParallelStrategy = "bucketed"
    """When gradients are averaged over the `dp` axis, and how many at a time, where it is the only one (see
    parallel.data_parallel); beside other axes torch's FSDP2 averages them."""
    bucket_size_mb: float = 25.0
    """Largest bucket of gradients, in units of 1e6 bytes; for `bucketed` alone."""
    reshard_after_forward: Reshard = "auto"
    """Whether blocks sharded over `fsdp` are freed after their forward pass and gathered again for their backward pass.
    auto: always, but never in a pipeline, where each microbatch would gather them anew."""
    pipeline_schedule: PipelineSchedule = "1f1b"
    """In what order the microbatches of a pipeline run (see parallel.pipeline)."""
    microbatches: int | None = None
    """Into how many parts a pipeline cuts the batch; None: one sequence each."""

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 1), ("warmup", 0), ("steps", 1), ("seed", 0)):
            if not least <= getattr(self, name) <= LARGEST:
                raise UserError(f"{name} must be at least {least} and below 2^63, not {getattr(self, name)}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                shown = external_name(name)
                raise UserError(f"{shown} '{getattr(self, name)}' is not known; choose one of {', '.join(choices)}")
        check_checkpointing(self.checkpointing)
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "mps", "cuda") or (":" in self.device) != bool(
            kind == "cuda" and index.isascii() and index.isdecimal()
        ):
            raise UserError(f"device '{self.device}' is not known; choose one of auto, cpu, mps, cuda or cuda:N")
        self._check_layout()
        limit = self.model.max_context
        if limit is not None and self.context > limit:
            raise UserError(
                f"context {self.context} is longer than the {limit} positions of {self.model.name}; "
                f"use --context {limit} or less, or raise max_position_embeddings in the configuration"
            )

    def _check_layout(self) -> None:
        if not 0 < self.bucket_size_mb < LARGEST:
            raise UserError(f"bucket_size_mb must be more than 0, not {self.bucket_size_mb}")
        if self.microbatches is not None and not 1 <= self.microbatches <= LARGEST:
            raise UserError(f"microbatches must be at least 1 and below 2^63, not {self.microbatches}")
        if self.layout.world_size > 1 and (self.device == "mps" or ":" in self.device):
            raise UserError(
                f"device {self.device} is one device, and layout {self.layout} takes {self.layout.world_size}; "
                "use --device cuda or cpu"
            )
        refuse_what_does_not_fit(self)

    @property
    def tokens(self) -> int:
        """Tokens a step of one process: batch x context."""
        return self.batch * self.context

    @property
    def tokens_of_all(self) -> int:
        """Tokens a step of all processes together; those that share a batch count it once."""
        return self.tokens * self.layout.data_ranks

    @property
    def strategy(self) -> str | None:
        """How steplab's own data parallelism averages gradients; None without a `dp` axis, and beside other axes, where
        FSDP2 averages them."""
        return self.data_parallel if self.layout.world_size == self.layout.dp > 1 else None

    @property
    def bucket_mb(self) -> float | None:
        """Size of the buckets of gradients; None where there are none."""
        return self.bucket_size_mb if self.strategy == "bucketed" else None

    @property
    def checkpoints_apply(self) -> bool:
        """Whether `checkpointing` has a say: without gradients nothing is kept, and a factory builds its own model."""
        return self.pass_name != "forward" and self.model.kind != "factory"


CHOICES: dict[str, tuple[str, ...]] = {
    "pass_name": get_args(Pass),
    "precision": get_args(Precision),
    "compile": get_args(CompileMode),
    "attention": get_args(Attention),
    "optimizer": get_args(Optimizer),
    "data_parallel": get_args(DataParallelStrategy),
    "reshard_after_forward": get_args(Reshard),
    "pipeline_schedule": get_args(PipelineSchedule),
}


def external_name(field: str) -> str:
    """The name of a field on the command line and in tables: `pass` cannot be a Python name."""
    return "pass" if field == "pass_name" else field


def internal_name(name: str) -> str:
    """The attribute of StepSpec behind an external name."""
    return "pass_name" if name == "pass" else name


STEP_FIELDS: tuple[str, ...] = tuple(
    external_name(field.name) for field in dataclasses.fields(StepSpec) if field.name != "model"
)
"""What can be said of a step besides its model, by external name."""
