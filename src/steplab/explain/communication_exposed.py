import dataclasses
import re
import shlex

from steplab.costs.rates import Gpu
from steplab.explain.case import Case, in_seconds
from steplab.records.finding import Finding
from steplab.specs.layout import SINGLE
from steplab.specs.resolve import command, options
from steplab.specs.step import StepSpec
from steplab.units import format_percent, format_time

CONSIDERABLE = 0.05
"""Least share of the step; collectives that cannot overlap, such as the last gradient bucket, take a few per cent."""
_FURTHER = 4
"""Factor by which the finding enlarges buckets; their number is the cost, so a small factor changes little."""
_GATHERS = re.compile(r"all_?gather", re.IGNORECASE)
_OF_BUCKETS = (
    "gradients are best sent as they arise: in larger buckets if there are many, smaller ones if the last is late "
    "(`steplab ddp` compares them, and other ways to send); fewer bytes with bf16 gradients, less often with gradient "
    "accumulation"
)
_OF_SHARDS = (
    "parameters that stay gathered after the forward pass take more memory, and are gathered once and not twice; a "
    "larger batch computes longer during the same messages; in your own code: FSDP2's "
    "set_modules_to_forward_prefetch, and half the bytes with MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
)
_OF_PARTS = (
    "ranks that split products or blocks wait for each other's activations, with little else to compute; "
    "layouts with less of tp and pp send less, as far as the model fits"
)


def communication_exposed(case: Case) -> Finding | None:
    """Finding if collectives without concurrent computation take a considerable share of the step."""
    seen = case.profile.communication
    if seen is None or (case.run.traced_ranks is not None and case.run.traced_ranks.meetings):
        return None  # with all ranks' traces explain.ranks separates waiting and transfer
    total_s, exposed_s = (case.per_step(seconds) for seconds in (seen.total_s, seen.exposed_s))
    length_s = case.length_s
    if not length_s or exposed_s <= CONSIDERABLE * length_s:
        return None
    change, note = _remedy(case)
    return Finding(
        kind="communication_exposed",
        title=f"Exposed communication takes {format_percent(exposed_s / length_s)} of the step",
        saw=(
            f"Collectives run for {format_time(total_s)} per step, {format_time(exposed_s)} of it "
            f"({format_percent(seen.exposed_s / seen.total_s)}) with no concurrent computation."
        ),
        why=(
            "Processes that train together exchange gradients or weights over links far slower than their memory. "
            "Communication that overlaps with computation costs little; exposed communication lengthens the step."
        ),
        change=change,
        note=note,
        evidence=in_seconds(
            {"collectives": total_s, "overlapped with computation": total_s - exposed_s, "exposed": exposed_s}
        ),
        saves_s=exposed_s,
        at_most=True,
        prediction=(
            "At most: all of it hidden. Overlapping collectives slow the computation, because they use cores and "
            "memory bandwidth, and a late rank makes the collectives of the other ranks look long."
        ),
    )


def _remedy(case: Case) -> tuple[str, str]:
    spec = case.spec
    if spec is None or spec.layout == SINGLE:
        if any(_GATHERS.search(kernel.name) for kernel in case.profile.kernels):
            return "fully_shard(block, mesh=mesh, reshard_after_forward=False)  # of each block", _OF_SHARDS
        return "DistributedDataParallel(model, bucket_cap_mb=100)", _OF_BUCKETS
    if spec.strategy is not None:
        if spec.strategy != "bucketed":
            return command(spec, {"data_parallel": "bucketed"}), _OF_BUCKETS
        return command(spec, {"bucket_size_mb": f"{_FURTHER * spec.bucket_size_mb:g}"}), _OF_BUCKETS
    if spec.layout.fsdp > 1:
        if spec.reshards:
            return command(spec, {"reshard_after_forward": "never"}), _OF_SHARDS
        return command(spec, {"batch": str(2 * spec.batch)}), _OF_SHARDS
    return _search_of_layouts(spec, case.gpu), _OF_PARTS


def _search_of_layouts(spec: StepSpec, gpu: Gpu | None) -> str:
    job = StepSpec(model=spec.model)
    kept = ("context", "pass_name", "precision", "compile", "attention", "checkpointing", "optimizer")
    job = dataclasses.replace(job, **{name: getattr(spec, name) for name in kept})
    sequences = spec.tokens_of_all // spec.context
    on = f" --gpu {shlex.quote(gpu.name)}" if gpu and gpu.is_stated else ""
    return f"steplab plan layout {options(job)} --gpus {spec.layout.world_size} --global-batch {sequences}{on}"
