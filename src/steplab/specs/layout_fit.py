"""Whether a model and its batch can be cut as a layout says: refused before anything is built, naming what fits."""

from math import gcd
from typing import TYPE_CHECKING

from steplab.errors import Unsupported, UserError
from steplab.specs.model import TransformerShape

if TYPE_CHECKING:
    from steplab.specs.step import StepSpec

STAGES_A_RANK = {"1f1b": 1, "gpipe": 1, "interleaved": 2}
"""Stages of the pipeline that each rank of pp has, by the name of its schedule."""
_LARGEST_SHOWN = 1024
"""What would fit is listed so far."""


def refuse_what_does_not_fit(spec: "StepSpec") -> None:
    """Raise UserError for a size that does not divide what it splits, Unsupported for what no layout serves."""
    layout = spec.layout
    if layout.world_size == layout.dp:
        return
    _refuse_unserved(spec)
    shape = spec.model.shape
    assert shape is not None
    if layout.tp > 1:
        _check_tensor(spec, shape)
    if layout.pp > 1:
        _check_pipeline(spec, shape)


def num_microbatches(spec: "StepSpec") -> int:
    """Into how many parts a pipeline cuts a batch: as many as asked for, or as it has sequences."""
    return spec.microbatches or spec.batch


def _refuse_unserved(spec: "StepSpec") -> None:
    what, only_dp = f"layout {spec.layout}", f"use dp={spec.layout.world_size}"
    if spec.model.kind != "transformer":
        raise Unsupported(
            f"{what} for {spec.model.name}", "only steplab's own Transformer is cut along fsdp, tp and pp", only_dp
        )
    if spec.precision == "fp16":
        why = "its gradient scaler would need all ranks to agree on an overflow"
        raise Unsupported(f"precision fp16 with {what}", why, f"use --precision bf16, or {only_dp}")
    if spec.compile in ("reduce-overhead", "max-autotune"):
        why = "a recorded CUDA graph cannot follow parameters that come and go"
        raise Unsupported(f"compile {spec.compile} with {what}", why, "use default or max-autotune-no-cudagraphs")
    if spec.layout.pp > 1 and spec.pass_name == "forward":
        raise Unsupported(
            f"pass forward with {what}", "a pipeline runs forward and backward passes in turn", "use forward_backward"
        )


def _check_tensor(spec: "StepSpec", shape: TransformerShape) -> None:
    split = {
        f"{shape.num_heads} heads": shape.num_heads,
        f"width {shape.d_ff} of the feed-forward blocks": shape.d_ff,
        f"vocabulary of {shape.vocab_size}": shape.vocab_size,
        f"context of {spec.context} tokens": spec.context,
    }
    tp, common = spec.layout.tp, gcd(*split.values())
    for what, size in split.items():
        if size % tp:
            valid = ", ".join(
                str(divisor) for divisor in range(1, min(common, _LARGEST_SHOWN) + 1) if common % divisor == 0
            )
            raise UserError(f"tp={tp} does not divide the {what} of {spec.model.name}; valid for tp: {valid}")


def _check_pipeline(spec: "StepSpec", shape: TransformerShape) -> None:
    pp, schedule, parts = spec.layout.pp, spec.pipeline_schedule, num_microbatches(spec)
    stages = pp * STAGES_A_RANK[schedule]
    if stages > shape.num_layers:
        most = shape.num_layers // STAGES_A_RANK[schedule]
        raise UserError(
            f"pp={pp} makes {stages} stages (schedule {schedule}), and {spec.model.name} has {shape.num_layers} "
            f"blocks; valid for pp: 1 to {max(most, 1)}"
        )

    def fits(count: int) -> bool:
        in_rounds = schedule != "interleaved" or count % max(1, count // pp) == 0
        return spec.batch % count == 0 and count >= pp and in_rounds

    if not fits(parts):
        counts = [count for count in range(pp, min(spec.batch, _LARGEST_SHOWN) + 1) if fits(count)]
        fitting = f"valid: {', '.join(map(str, counts))}" if counts else f"use --batch {pp} or a multiple"
        raise UserError(
            f"a batch of {spec.batch} sequences cannot go through a pipeline of pp={pp} in {parts} microbatches, "
            f"which have to be at least pp and to divide the batch; {fitting}"
        )
