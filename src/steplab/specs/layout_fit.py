"""Checks that a model and its batch can be split as a layout says, before anything is built."""

from math import gcd

from steplab.errors import Unsupported, UserError
from steplab.specs.cuda_graph import RECORD_THEIR_OWN
from steplab.specs.layout import Layout
from steplab.specs.model import ModelSpec, TransformerShape

STAGES_A_RANK = {"1f1b": 1, "gpipe": 1, "interleaved": 2}
"""Pipeline stages per rank of pp, by the name of the schedule."""
_LARGEST_SHOWN = 1024
"""Largest size that an error lists."""


def refuse_unserved_layout(
    layout: Layout, model: ModelSpec, *, pass_name: str, precision: str, compile: str, loss: str, accumulation: int
) -> None:
    """Raise Unsupported for a step that cannot run along fsdp, tp or pp; every step can run along dp alone."""
    what, only_dp = f"layout {layout}", f"use dp={layout.world_size}"
    if layout.world_size == layout.dp:
        return
    if model.kind != "transformer":
        if layout.tp > 1 or layout.pp > 1:
            why = "only steplab's own Transformer can be split along tp and pp"
            raise Unsupported(f"{what} for {model.name}", why, f"{only_dp} or fsdp={layout.world_size}")
        if compile not in ("off", "block"):
            why = "its parameters are gathered and freed block by block"
            raise Unsupported(f"compile {compile} with {what} for {model.name}", why, "use --compile block")
    if model.shape is not None and model.shape.head == "tied":
        why = "the embedding and the head share a weight, and are split and gathered apart"
        raise Unsupported(f"model.head tied with {what}", why, f"use --model.head untied, or {only_dp}")
    if precision == "fp16":
        why = "its gradient scaler would need all ranks to agree on an overflow"
        raise Unsupported(f"precision fp16 with {what}", why, f"use --precision bf16, or {only_dp}")
    if compile in RECORD_THEIR_OWN:
        why = "a recorded CUDA graph cannot follow parameters that are gathered and freed during the step"
        raise Unsupported(f"compile {compile} with {what}", why, "use default or max-autotune-no-cudagraphs")
    if loss != "plain" and (layout.tp > 1 or layout.pp > 1):
        why = "tp splits the vocabulary over ranks, and a pipeline computes the loss from the logits of its last stage"
        raise Unsupported(f"loss {loss} with {what}", why, "use --loss plain, or a layout of dp and fsdp")
    if layout.pp > 1 and pass_name == "forward":
        raise Unsupported(
            f"pass forward with {what}", "a pipeline runs forward and backward passes in turn", "use forward_backward"
        )
    if layout.pp > 1 and accumulation > 1:
        raise Unsupported(
            f"accumulation {accumulation} with {what}",
            "the microbatches of a pipeline accumulate gradients already",
            f"leave it out, and use --batch and --microbatches {accumulation} times as large",
        )


def refuse_unserved_triton_optimizer(layout: Layout, *, precision: str) -> None:
    """Raise Unsupported for parameters that the optimizer in one kernel does not take."""
    if precision == "bf16_pure":
        raise Unsupported(
            "optimizer adamw_triton with precision bf16_pure", "its kernel is for float32", "use adamw_fused"
        )
    if layout.world_size > layout.dp:
        why = "its kernel takes whole tensors, and parameters are parts of tensors there"
        raise Unsupported(f"optimizer adamw_triton with layout {layout}", why, "use adamw_fused")


def refuse_unserved_masters(layout: Layout, *, optimizer: str | None, micro_steps: int) -> None:
    """Raise Unsupported where bf16 weights with fp32 masters would train otherwise than autocast over fp32 weights, and
    for an optimizer that keeps no masters; None: the step has no optimizer."""
    what, instead = "precision bf16_master", "use --precision bf16"
    if layout.world_size > 1:
        raise Unsupported(f"{what} with layout {layout}", "ranks would add up their gradients in bf16", instead)
    if micro_steps > 1:
        why = "gradients of micro-steps would be added up in bf16"
        raise Unsupported(f"{what} with accumulation {micro_steps}", why, f"{instead}, or a larger --batch")
    if optimizer not in (None, "adamw_triton"):
        why = "the optimizer has to keep fp32 masters of the weights"
        raise Unsupported(f"{what} with optimizer {optimizer}", why, "use --optimizer adamw_triton")


def refuse_uneven_split(layout: Layout, shape: TransformerShape, *, model_name: str, context: int) -> None:
    """Raise UserError if tp does not divide every size that it splits; it lists the valid sizes of tp. Raise
    Unsupported where it would split queries from keys."""
    if shape.projections == "merged":
        raise Unsupported(
            f"layout {layout} with merged projections",
            "tp splits queries, keys and values each by its heads",
            "use --model.projections separate",
        )
    split = {
        f"{shape.num_heads} heads": shape.num_heads,
        **({f"{shape.kv_heads} heads of keys and values": shape.kv_heads} if shape.num_kv_heads else {}),
        f"width {shape.d_ff} of the feed-forward blocks": shape.d_ff,
        f"vocabulary of {shape.vocab_size}": shape.vocab_size,
        f"context of {context} tokens": context,
    }
    tp, common = layout.tp, gcd(*split.values())
    for what, size in split.items():
        if size % tp:
            valid = ", ".join(
                str(divisor) for divisor in range(1, min(common, _LARGEST_SHOWN) + 1) if common % divisor == 0
            )
            raise UserError(f"tp={tp} does not divide the {what} of {model_name}; valid for tp: {valid}")


def refuse_uneven_pipeline(
    layout: Layout, *, model_name: str, num_layers: int, schedule: str, batch: int, microbatches: int
) -> None:
    """Raise UserError for more stages than blocks, and for a number of microbatches that does not fit the batch."""
    pp = layout.pp
    stages = pp * STAGES_A_RANK[schedule]
    if stages > num_layers:
        most = num_layers // STAGES_A_RANK[schedule]
        raise UserError(
            f"pp={pp} makes {stages} stages (schedule {schedule}), but {model_name} has {num_layers} "
            f"blocks; valid for pp: 1 to {max(most, 1)}"
        )

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
