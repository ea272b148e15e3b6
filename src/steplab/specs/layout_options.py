"""Why some fields, most of them of several processes, have no effect on some steps, and what to type instead."""

from typing import TYPE_CHECKING

from steplab.specs.layout import Layout

if TYPE_CHECKING:
    from steplab.specs.step import StepSpec


def no_strategy(spec: "StepSpec") -> str | None:
    """Why steplab's own data parallelism averages no gradients; None where it does."""
    layout = spec.layout
    if spec.strategy is not None:
        return None
    if layout.world_size == 1:
        return (
            "one process has no other to average gradients with; leave it out, "
            "or start several: --layout dp=2 (--gpus 2, or --processes 2 on the CPU)"
        )
    whose = "FSDP2 averages" if layout.data_ranks > 1 else "no data-parallel ranks average"
    return f"{whose} the gradients of layout {layout}; leave it out, or use --layout dp={layout.world_size}"


def no_buckets(spec: "StepSpec") -> str | None:
    """Why gradients are not averaged in buckets; None where they are."""
    if spec.strategy is None or spec.bucket_mb is not None:
        return no_strategy(spec)
    return f"data_parallel {spec.data_parallel} has no buckets; leave it out, or use --data-parallel bucketed"


def no_gradients(spec: "StepSpec") -> str | None:
    """Why there are no gradients to accumulate; None where there are."""
    if spec.pass_name != "forward":
        return None
    return "pass forward has no gradients to accumulate; leave it out, or use --pass train"


def no_shards(spec: "StepSpec") -> str | None:
    """Why no parameters are sharded; None where they are."""
    return _no_axis(spec.layout, "fsdp", "frees no parameters")


def no_pipeline(spec: "StepSpec") -> str | None:
    """Why there is no pipeline; None where there is one."""
    return _no_axis(spec.layout, "pp", "has no pipeline")


def _no_axis(layout: Layout, axis: str, lacks: str) -> str | None:
    if getattr(layout, axis) > 1:
        return None
    what = "a step of one process" if layout.world_size == 1 else f"layout {layout}"
    return f"{what} {lacks}; leave it out, or use a layout with {axis}, as --layout {axis}=2"
