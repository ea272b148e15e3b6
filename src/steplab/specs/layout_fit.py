"""Checks that a model and its batch can be split as a layout says, before anything is built."""

from math import gcd
from typing import TYPE_CHECKING

from steplab.errors import Unsupported, UserError
from steplab.specs.cuda_graph import RECORD_THEIR_OWN

if TYPE_CHECKING:  # which asks here
    from steplab.specs.step import StepSpec

STAGES_A_RANK = {"1f1b": 1, "gpipe": 1, "interleaved": 2}
"""Pipeline stages per rank of pp, by the name of the schedule."""
_LARGEST_SHOWN = 1024
"""Largest size that an error lists."""


def refuse_unserved_layout(spec: "StepSpec") -> None:
    """Raise Unsupported for a step that cannot run along fsdp, tp or pp; every step can run along dp alone."""
    layout, model = spec.layout, spec.model
    what, only_dp = f"layout {layout}", f"use dp={layout.world_size}"
    if layout.world_size == layout.dp:
        return
    if model.kind != "transformer":
        if layout.tp > 1 or layout.pp > 1:
            why = "only steplab's own Transformer can be split along tp and pp"
            fix = f"{only_dp} or fsdp={layout.world_size}"
            if model.kind == "hf":
                fix += ", or `steplab plan layout`, which plans a Transformer with the same parts"
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
    if spec.compile in RECORD_THEIR_OWN:
        why = "a recorded CUDA graph cannot follow parameters that are gathered and freed during the step"
        raise Unsupported(f"compile {spec.compile} with {what}", why, "use default or max-autotune-no-cudagraphs")
    if spec.loss != "plain" and (layout.tp > 1 or layout.pp > 1):
        why = "tp splits the vocabulary over ranks, and a pipeline computes the loss from the logits of its last stage"
        raise Unsupported(f"loss {spec.loss} with {what}", why, "use --loss plain, or a layout of dp and fsdp")
    if layout.pp > 1 and spec.pass_name == "forward":
        raise Unsupported(
            f"pass forward with {what}", "a pipeline runs forward and backward passes in turn", "use forward_backward"
        )
    if layout.pp > 1 and spec.accumulation > 1:
        raise Unsupported(
            f"accumulation {spec.accumulation} with {what}",
            "the microbatches of a pipeline accumulate gradients already",
            f"leave it out, and use --batch and --microbatches {spec.accumulation} times as large",
        )


def refuse_uneven_split(spec: "StepSpec") -> None:
    """Raise UserError if tp does not divide every size that it splits; it lists the valid sizes of tp. Raise
    Unsupported where it would split queries from keys."""
    layout, shape = spec.layout, spec.model.shape
    if layout.tp == 1 or shape is None:
        return
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
        f"context of {spec.context} tokens": spec.context,
    }
    tp, common = layout.tp, gcd(*split.values())
    for what, size in split.items():
        if size % tp:
            valid = ", ".join(
                str(divisor) for divisor in range(1, min(common, _LARGEST_SHOWN) + 1) if common % divisor == 0
            )
            raise UserError(f"tp={tp} does not divide the {what}; valid for tp: {valid}")


def refuse_uneven_pipeline(spec: "StepSpec") -> None:
    """Raise UserError for more stages than blocks, and for a number of microbatches that does not fit the batch."""
    pp, shape = spec.layout.pp, spec.model.shape
    if pp == 1 or shape is None:
        return
    schedule, batch, microbatches = spec.pipeline_schedule, spec.batch, spec.num_microbatches
    stages = pp * STAGES_A_RANK[schedule]
    if stages > shape.num_layers:
        most = shape.num_layers // STAGES_A_RANK[schedule]
        raise UserError(
            f"pp={pp} makes {stages} stages (schedule {schedule}), but the model has {shape.num_layers} "
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
