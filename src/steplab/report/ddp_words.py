"""A data-parallel study in words: what was asked, where it ran, what came out."""

from collections import Counter
from collections.abc import Iterator

from steplab import units
from steplab.records.ddp import DdpCell, DdpRun
from steplab.report import ddp_figures as figures
from steplab.report.columns import reason

_STEADY = 1.05
"""By how much the same step may differ between turns: more than it does on a quiet machine."""


def asked(run: DdpRun) -> str:
    """The step: model, context, batch on each rank, micro-steps, precision, compile."""
    step = run.study.step
    parts = [step.model.label, f"context {step.context}", f"batch {step.batch} a rank", step.precision]
    parts += [f"{step.micro_steps} micro-steps"] if step.micro_steps > 1 else []
    parts += ["each block compiled"] if step.compile == "block" else []
    return ", ".join(parts)


def ranks_words(run: DdpRun) -> str:
    """2 ranks, NVIDIA H200, nccl; the hosts where there are several."""
    facts = run.facts
    if facts is None:
        return units.counted(run.study.processes, "rank")
    devices = ", ".join(dict.fromkeys(place.device for place in facts.places))
    hosts = Counter(place.host for place in facts.places)
    over = " on " + ", ".join(f"{host} ({count})" for host, count in hosts.items()) if len(hosts) > 1 else ""
    return f"{units.counted(len(facts.places), 'rank')}{over}, {devices}, {facts.backend}"


def told_of(run: DdpRun) -> Iterator[str]:
    """The study in sentences: what was fastest, and how it stands to torch's own."""
    if facts := run.facts:
        yield (
            f"{units.format_count(facts.num_parameters)} parameters in {facts.num_tensors} tensors: "
            f"{units.format_bytes(facts.gradient_bytes)} of gradients a rank and step."
        )
    least, most = figures.baseline_range_s(run) or (0.0, 0.0)
    if most > _STEADY * least:
        yield (
            f"The step without communication took {units.format_time(least)} beside one contender and "
            f"{units.format_time(most)} beside another: something disturbed it, and figures of what is exposed with it."
        )
    compared = [cell for cell in figures.timed(run) if figures.exposed_s(cell) is not None]
    if compared:
        first = min(compared, key=lambda cell: figures.step_s(cell) or 0.0)
        yield f"Shortest step: {first.contender.label}, {_added(first)}."
    theirs, ours = figures.best(compared, "torch_ddp"), figures.best(compared, "bucketed")
    best_s, ours_s = figures.best_ddp_s(run.cells), figures.exposed_s(ours) if ours else None
    if theirs and ours and best_s and ours_s is not None:
        adds = f"{units.format_time(ours_s)}, {ours_s / best_s:.2f} of" if ours_s > 0 else "nothing above the noise, of"
        yield (
            f"{ours.contender.label} adds {adds} what torch DDP adds at its best, "
            f"{theirs.contender.bucket_size_mb:g} MB: {units.format_time(best_s)}."
        )
    if held := [rank.held_s for cell in run.cells for rank in cell.ranks if rank.held_s]:
        yield (
            f"Before each step the devices were held for {units.format_time(min(held))} to "
            f"{units.format_time(max(held))}, idle, so that Python was ahead of them."
        )
    elif run.facts and run.facts.backend == "nccl":
        yield "Whether Python was given a head start before each step is not recorded."
    if late := [cell.contender.label for cell in figures.timed(run) if figures.waits_for_host(cell)]:
        yield (
            f"Python was hardly ahead of the device in {', '.join(late)}: what is exposed there has the device's waits "
            "for Python in it, and not communication alone."
        )
    if uncounted := [cell.contender.label for cell in run.cells if any(rank.others_let_go for rank in cell.ranks)]:
        yield (
            f"What {', '.join(uncounted)} held besides parameters, gradients and optimizer state is not known, nor any "
            "peak: what a contender before had kept was let go of meanwhile."
        )
    for cell in run.cells:
        if cell.failure:
            yield f"{cell.contender.label}: {reason(cell.failure.kind, cell.failure.message)}"


def _added(cell: DdpCell) -> str:
    whole, show = units.format_time(figures.step_s(cell) or 0.0), units.format_time
    without_s, added_s, bounds = figures.baseline_s(cell), figures.exposed_s(cell), figures.exposed_range_s(cell)
    if not without_s or not added_s or added_s <= 0 or bounds is None:
        return f"{whole}, nothing exposed above the noise"
    share = units.format_percent(added_s / without_s)
    between = f"{show(bounds[0])} to {show(bounds[1])}"
    return f"{whole}, {show(added_s)} of it exposed ({between}), {share} of the step without it"


def model_words(run: DdpRun) -> Iterator[str]:
    """How the model of the overhead is made, and what it says."""
    model = run.model
    if model is None:
        return
    yield (
        "With s bytes of gradients in n buckets, bandwidth w and overhead o a call: all by itself n o + s / w; "
        "exposed, where each call's overhead is, n o + s / (n w), least for buckets of sqrt(s w o). Here s = "
        f"{units.format_message(model.gradient_bytes)}, w = {units.format_rate(model.bytes_per_s, 'B/s')}, "
        f"o = {units.format_time(model.call_s)}, backward {units.format_time(model.backward_s)}: "
        f"{model.best_bucket_mb:.3g} MB."
    )
