"""The specification of a training step: one frozen dataclass, checked once, before anything is built."""

from dataclasses import dataclass
from math import gcd
from typing import Literal

from steplab.errors import Unsupported, UserError
from steplab.ops.triton_places import FP8_MULTIPLE
from steplab.specs import step_choices as choices
from steplab.specs.model import SIZE_FIELDS
from steplab.specs.step_fields import StepField, check_declared, declared_fields

AUTOCAST: dict[str, Literal["bf16", "fp16"]] = {
    "fp16": "fp16",
    **dict.fromkeys(("bf16", *choices.WITH_MASTERS), "bf16"),
}
"""Number format of autocast, for the precisions that use it."""
STAGES_A_RANK = {"1f1b": 1, "gpipe": 1, "interleaved": 2}
"""Pipeline stages per rank, by schedule."""
_LARGEST_SHOWN = 1024
_OFF = "or --cuda-graph off"
_AFTER = "or --update after"
_PLAIN = "or --block-ops plain"


def refuse_unserved_layout(spec: choices.StepChoices) -> None:
    """Raise Unsupported if the step cannot be split along fsdp, tp or pp; every step supports dp."""
    layout, model = spec.layout, spec.model
    what, only_dp = f"layout {layout}", f"use dp={layout.world_size}"
    if layout.world_size == layout.dp:
        return
    if model.kind != "transformer":
        if layout.tp > 1 and model.kind != "hf":
            why = "only steplab's own Transformer and transformers' models with a plan can be split along tp"
            fix = f"{only_dp} or fsdp={layout.world_size}; pp=2 can be planned"
            raise Unsupported(f"{what} for {model.name}", why, fix)
        if spec.compile not in ("off", "block"):
            why = "its parameters are gathered and freed block by block"
            raise Unsupported(f"compile {spec.compile} with {what} for {model.name}", why, "use --compile block")
    if model.shape is not None and model.shape.head == "tied":
        why = "the embedding and the head share a weight, and are split and gathered apart"
        raise Unsupported(f"model.head tied with {what}", why, f"use --model.head untied, or {only_dp}")
    if spec.precision == "fp16":
        why = "its gradient scaler would need all ranks to agree on an overflow"
        raise Unsupported(f"precision fp16 with {what}", why, f"use --precision bf16, or {only_dp}")
    if spec.compile in choices.RECORD_THEIR_OWN:
        why = "a recorded CUDA graph cannot follow parameters that are gathered and freed during the step"
        raise Unsupported(f"compile {spec.compile} with {what}", why, "use default or max-autotune-no-cudagraphs")
    if spec.loss != "plain" and (layout.tp > 1 or layout.pp > 1):
        why = "tp splits the vocabulary over ranks, and a pipeline computes the loss from the logits of its last stage"
        raise Unsupported(f"loss {spec.loss} with {what}", why, "use --loss plain, or a layout of dp and fsdp")
    if layout.pp > 1 and spec.pass_name == "forward":
        why = "a pipeline runs forward and backward passes in turn"
        raise Unsupported(f"pass forward with {what}", why, "use forward_backward")
    if layout.pp > 1 and spec.accumulation > 1:
        why = "the microbatches of a pipeline accumulate gradients already"
        fix = f"leave it out, and use --batch and --microbatches {spec.accumulation} times as large"
        raise Unsupported(f"accumulation {spec.accumulation} with {what}", why, fix)


def refuse_uneven_split(spec: choices.StepChoices) -> None:
    """Raise UserError, with valid sizes, if tp divides the model unevenly. Raise Unsupported for merged projections."""
    layout, shape = spec.layout, spec.model.shape
    if layout.tp == 1 or shape is None:
        return
    if shape.projections == "merged":
        why = "tp splits queries, keys and values each by its heads"
        raise Unsupported(f"layout {layout} with merged projections", why, "use --model.projections separate")
    split = {
        f"{shape.num_heads} heads": shape.num_heads,
        **({f"{shape.kv_heads} heads of keys and values": shape.kv_heads} if shape.num_kv_heads else {}),
        f"width {shape.d_ff} of the feed-forward blocks": shape.d_ff,
        f"vocabulary of {shape.vocab_size}": shape.vocab_size,
        f"context of {spec.context} tokens": spec.context,
    }
    tp, common = layout.tp, gcd(*split.values())
    for what, size in split.items():
        if size % tp:
            divisors = [number for number in range(1, min(common, _LARGEST_SHOWN) + 1) if common % number == 0]
            raise UserError(f"tp={tp} does not divide the {what}; valid for tp: {', '.join(map(str, divisors))}")


def refuse_uneven_pipeline(spec: choices.StepChoices) -> None:
    pp, schedule, shape = spec.layout.pp, spec.pipeline_schedule, spec.model.shape
    if pp == 1:
        return
    batch, microbatches = spec.batch, spec.num_microbatches
    if shape is not None:
        refuse_stages_without_blocks(pp, schedule, shape.num_layers)

    def fits(count: int) -> bool:
        in_rounds = schedule != "interleaved" or count % max(1, count // pp) == 0
        return batch % count == 0 and count >= pp and in_rounds

    if not fits(microbatches):
        counts = [count for count in range(pp, min(batch, _LARGEST_SHOWN) + 1) if fits(count)]
        fitting = f"valid: {', '.join(map(str, counts))}" if counts else f"use --batch {pp} or a multiple"
        raise UserError(
            f"a batch of {batch} sequences cannot be split into {microbatches} microbatches for a pipeline of pp={pp}: "
            f"their number must be at least pp and divide the batch; {fitting}"
        )


def refuse_stages_without_blocks(pp: int, schedule: str, num_layers: int) -> None:
    stages = pp * STAGES_A_RANK[schedule]
    if stages > num_layers:
        most = num_layers // STAGES_A_RANK[schedule]
        raise UserError(
            f"pp={pp} makes {stages} stages (schedule {schedule}), but the model has {num_layers} "
            f"blocks; valid for pp: 1 to {max(most, 1)}"
        )


def refuse_unrecorded_step(spec: choices.StepChoices) -> None:
    if spec.cuda_graph != "step":
        return
    refuse_unserved_graph(spec.device)
    if spec.compile in choices.RECORD_THEIR_OWN:
        why = "that mode records its own CUDA graphs"
        raise Unsupported(
            f"cuda_graph step with compile {spec.compile}", why, f"use --compile block, default or off, {_OFF}"
        )
    if spec.precision == "fp16":
        why = "its gradient scaler waits for the GPU in each step to look for overflows"
        raise Unsupported("cuda_graph step with precision fp16", why, f"use --precision bf16, {_OFF}")
    if spec.layout.world_size > 1:
        why = "steplab does not record communication between processes"
        raise Unsupported(f"cuda_graph step with {spec.layout.world_size} processes", why, f"use one process, {_OFF}")


def refuse_unserved_update(spec: choices.StepChoices) -> None:
    """Raise Unsupported for an overlapped update if it needs all gradients first, or all arrive at once."""
    if spec.update != choices.OVERLAPPED or spec.pass_name != "train":
        return
    what, layout = "update overlapped with", spec.layout
    if spec.precision == "fp16":
        why = "its gradient scaler looks for overflows in all gradients before an update"
        raise Unsupported(f"{what} precision fp16", why, f"use --precision bf16, {_AFTER}")
    if layout.world_size > layout.dp:
        why = "torch's engines finish all gradients at the end"
        raise Unsupported(f"{what} layout {layout}", why, f"use dp={layout.world_size}, {_AFTER}")
    if layout.dp > 1 and spec.data_parallel not in choices.IN_FLIGHT:
        why = "it sends all gradients after the backward pass"
        raise Unsupported(f"{what} data_parallel {spec.data_parallel}", why, f"use --data-parallel bucketed, {_AFTER}")
    if layout.world_size == 1 and spec.compile not in ("off", "block"):
        why = "a model compiled as a whole makes all gradients at the end of its backward pass"
        raise Unsupported(f"{what} compile {spec.compile}", why, f"use --compile block, {_AFTER}")


def refuse_unserved_triton_optimizer(spec: choices.StepChoices) -> None:
    layout = spec.layout
    if spec.optimizer != "adamw_triton" or spec.pass_name != "train":
        return
    if spec.precision == "bf16_pure":
        what = "optimizer adamw_triton with precision bf16_pure"
        raise Unsupported(what, "its kernel is for float32", "use adamw_fused")
    if layout.world_size > layout.dp:
        why = "its kernel takes whole tensors, and parameters are parts of tensors there"
        raise Unsupported(f"optimizer adamw_triton with layout {layout}", why, "use adamw_fused")


def refuse_unserved_masters(spec: choices.StepChoices) -> None:
    """Raise Unsupported if bf16 weights would train differently from autocast, or have no masters."""
    if spec.precision not in choices.WITH_MASTERS:
        return
    layout, micro_steps = spec.layout, spec.micro_steps
    what, instead = f"precision {spec.precision}", "use --precision bf16"
    if layout.world_size > 1:
        raise Unsupported(f"{what} with layout {layout}", "ranks would add up their gradients in bf16", instead)
    if micro_steps > 1:
        why = "gradients of micro-steps would be added up in bf16"
        raise Unsupported(f"{what} with accumulation {micro_steps}", why, f"{instead}, or a larger --batch")
    if spec.optimizer != choices.KEEPS_MASTERS and spec.pass_name == "train":
        why = "the optimizer has to keep fp32 masters of the weights"
        raise Unsupported(f"{what} with optimizer {spec.optimizer}", why, f"use --optimizer {choices.KEEPS_MASTERS}")


def refuse_unserved_fp8(spec: choices.StepChoices) -> None:
    if spec.precision not in choices.FP8:
        return
    what, shape = f"precision {spec.precision} for {spec.model.label}", spec.model.shape
    if spec.precision == "fp8" and (shape is None or not shape.num_heads):
        why, instead = "it has no block of steplab's Transformer", "which converts the blocks of any model"
        raise Unsupported(what, why, f"use --precision fp8_torchao, {instead}, or --precision bf16")
    if shape is None:
        return
    sizes = {
        "tokens in a batch": spec.batch * spec.context,
        "d-model": shape.d_model,
        "d-ff": shape.d_ff,
        "width of keys": shape.query_key_value_widths[1],
    }
    for name, size in sizes.items():
        if size % FP8_MULTIPLE:
            why = f"products in fp8 take multiples of {FP8_MULTIPLE}, and the {name} is {size}"
            raise Unsupported(what, why, "use --precision bf16")


def refuse_unserved_block_ops(spec: choices.StepChoices) -> None:
    """Raise Unsupported unless all three Triton kernels can run; a mixture would be measured under a wrong name."""
    if spec.block_ops != "triton":
        return
    model, layout, shape, what = spec.model, spec.layout, spec.model.shape, "block_ops triton with"
    if shape is None or shape.num_heads == 0:
        raise Unsupported(f"{what} {model.name}", "it has no block of steplab's Transformer", "use --block-ops plain")
    if shape.projections != "merged":
        why = "its kernels read queries, keys and values, and gate and up, from one tensor"
        raise Unsupported(f"{what} separate projections", why, f"use --model.projections merged, {_PLAIN}")
    if shape.norm != "rmsnorm" or shape.feed_forward != "swiglu" or shape.learned_positions:
        why = "its kernels are for RMSNorm, SwiGLU and rotary embedding"
        raise Unsupported(f"{what} {model.label}", why, "use --block-ops plain, or a model with these parts")
    if layout.world_size > layout.dp:
        why = "parameters are parts of tensors there"
        raise Unsupported(f"{what} layout {layout}", why, f"use dp={layout.world_size}, {_PLAIN}")
    if spec.device == "mps":
        raise Unsupported(f"{what} device mps", "its kernels are for CUDA", "use --block-ops plain")


def refuse_unserved_graph(device: str) -> None:
    """Raise Unsupported for a device without CUDA graphs. `auto` passes: it is resolved later."""
    kind = device.partition(":")[0]
    if kind in ("cpu", "mps"):
        why = "CUDA graphs are recorded and replayed by a CUDA GPU"
        raise Unsupported(f"cuda_graph step on {kind}", why, "use --cuda-graph off, or --device cuda")


_REFUSALS = (
    *(refuse_unserved_layout, refuse_uneven_split, refuse_uneven_pipeline, refuse_unrecorded_step),
    *(refuse_unserved_triton_optimizer, refuse_unserved_update, refuse_unserved_block_ops, refuse_unserved_masters),
    refuse_unserved_fp8,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpec(choices.StepChoices):
    """Everything that determines a training step and its measurement."""

    def __post_init__(self) -> None:
        check_declared(STEP_FIELDS, self)
        if self.layout.world_size > 1 and (self.device == "mps" or ":" in self.device):
            raise UserError(
                f"device {self.device} is one device, but layout {self.layout} takes {self.layout.world_size}; "
                "use --device cuda or cpu"
            )
        for refuse in _REFUSALS:
            refuse(self)
        limit = self.model.max_context
        if limit is not None and self.context > limit:
            longer = (
                "max_position_embeddings in the configuration" if self.model.hf_config else "model.learned_positions"
            )
            raise UserError(
                f"context {self.context} is longer than the {limit} positions of {self.model.name}; "
                f"use --context {limit} or less, or raise {longer}"
            )


STEP_FIELDS: tuple[StepField, ...] = declared_fields(StepSpec)
FIELDS: dict[str, StepField] = {field.key: field for field in (*STEP_FIELDS, *SIZE_FIELDS)}
"""Every field that can be set or swept, model sizes included, by its name in study files and options."""
CHOICES: dict[str, tuple[str, ...]] = {field.attribute: field.choices for field in STEP_FIELDS if field.choices}
"""Valid values of each field that is a choice, by its name in StepSpec."""


def describe(spec: StepSpec) -> str:
    """The step's settings in words, without `quiet` defaults."""
    fields = [field for field in STEP_FIELDS if field.about.role in ("size", "what")]
    chosen = [field for field in fields if not (field.about.quiet and field.read(spec) == field.default)]
    values = [(field, field.value(spec)) for field in chosen]
    return " · ".join(field.say(value) for field, value in values if value is not None)
