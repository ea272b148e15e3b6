"""Which of the fields that say how a step is spread over processes have no say in it."""

from steplab.specs.layout import Layout
from steplab.specs.step import StepSpec


def without_a_say(spec: StepSpec) -> dict[str, str]:
    """The fields that change nothing of this step, by name, each with why and what would give it a say."""
    layout, found = spec.layout, dict[str, str]()
    if spec.strategy is None:
        found["data_parallel"] = found["bucket_size_mb"] = _no_strategy(layout)
    elif spec.bucket_mb is None:
        found["bucket_size_mb"] = (
            f"data_parallel {spec.data_parallel} has no buckets; leave it out, or use --data-parallel bucketed"
        )
    if layout.fsdp == 1:
        found["reshard_after_forward"] = _no_axis(layout, "fsdp", "frees no parameters")
    if layout.pp == 1:
        found["pipeline_schedule"] = found["microbatches"] = _no_axis(layout, "pp", "has no pipeline")
    return found


def _no_strategy(layout: Layout) -> str:
    if layout.world_size == 1:
        return (
            "one process has nobody to average gradients with, and it would change nothing; leave it out, "
            "or start several: --layout dp=2 (--gpus 2, or --processes 2 on the CPU)"
        )
    whose = "FSDP2 averages" if layout.data_ranks > 1 else "no data-parallel ranks average"
    return f"{whose} the gradients of layout {layout}; leave it out, or use --layout dp={layout.world_size}"


def _no_axis(layout: Layout, axis: str, lacks: str) -> str:
    what = "a step of one process" if layout.world_size == 1 else f"layout {layout}"
    return f"{what} {lacks}; leave it out, or use a layout with {axis}, as --layout {axis}=2"
