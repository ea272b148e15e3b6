"""Why a field, such as one for several processes, has no effect on some steps, and what to type instead."""

from typing import TYPE_CHECKING

from steplab.specs.layout import Layout

if TYPE_CHECKING:  # which asks here
    from steplab.specs.step import StepSpec


def averages_gradients(layout: Layout) -> bool:
    """Whether steplab's own data parallelism averages the gradients: alone on its axis; beside others FSDP2 does."""
    return layout.world_size == layout.dp > 1


def no_strategy(spec: "StepSpec") -> str | None:
    """Why steplab's own data parallelism averages no gradients; None if it does."""
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


def no_buckets(spec: "StepSpec") -> str | None:
    """Why gradients are not averaged in buckets; None if they are."""
    if not averages_gradients(spec.layout) or spec.data_parallel == "bucketed":
        return no_strategy(spec)
    return f"data_parallel {spec.data_parallel} has no buckets; leave it out, or use --data-parallel bucketed"


def no_gradients(spec: "StepSpec") -> str | None:
    """Why there are no gradients to accumulate; None if there are."""
    if spec.pass_name != "forward":
        return None
    return "pass forward has no gradients to accumulate; leave it out, or use --pass train"


def no_choice_of_loss(spec: "StepSpec") -> str | None:
    """Why steplab does not decide how the loss is computed; None if it does."""
    if spec.model.kind == "transformer":
        return None
    return f"{spec.model.name} computes its own loss; leave it out, or use a built-in model"


def no_choice_of_block_ops(spec: "StepSpec") -> str | None:
    """Why steplab does not decide what runs within a block; None if it does."""
    if spec.model.kind == "transformer":
        return None
    return f"{spec.model.name} has blocks of its own; leave it out, or use a built-in model"


def no_shards(spec: "StepSpec") -> str | None:
    """Why no parameters are sharded; None if they are."""
    return _no_axis(spec.layout, "fsdp", "frees no parameters")


def no_pipeline(spec: "StepSpec") -> str | None:
    """Why there is no pipeline; None if there is one."""
    return _no_axis(spec.layout, "pp", "has no pipeline")


def no_microbatches(spec: "StepSpec") -> str | None:
    """Why there are no microbatches, for which those of gradient accumulation are easily taken; None if there are."""
    why = no_pipeline(spec)
    return why and f"{why}; micro-steps whose gradients are averaged are --accumulation"


def _no_axis(layout: Layout, axis: str, lacks: str) -> str | None:
    if getattr(layout, axis) > 1:
        return None
    what = "a step of one process" if layout.world_size == 1 else f"layout {layout}"
    return f"{what} {lacks}; leave it out, or use a layout with {axis}, as --layout {axis}=2"
