"""A data-parallel study in words: what was asked, where it ran, what came out."""

from collections import Counter
from collections.abc import Iterator

from steplab import units
from steplab.records.ddp import DdpCell, DdpRun
from steplab.report.ddp import figures
from steplab.report.kit.text import reason

MOMENT_WORDS = {"initialised": "initialised", "before_step": "before the update", "after_step": "after the update"}
"""When the memory of a rank was looked at."""
_STEADY = 1.05
"""By how much the same step may differ between turns: more than it does on a quiet machine."""


def asked(run: DdpRun) -> str:
    """The step: model, context, batch per rank, micro-steps, precision, compile."""
    step = run.study.step
    parts = [step.model.label, f"context {step.context}", f"batch {step.batch} per rank", step.precision]
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


def verdict(run: DdpRun) -> Iterator[str]:
    """The study in sentences: what was fastest, and how it stands to torch's own."""
    if facts := run.facts:
        yield (
            f"{units.format_count(facts.num_parameters)} parameters in {facts.num_tensors} tensors: "
            f"{units.format_bytes(facts.gradient_bytes)} of gradients per rank and step."
        )
    least, most = figures.baseline_range_s(run) or (0.0, 0.0)
    if most > _STEADY * least:
        yield (
            f"The step without communication took {units.format_time(least)} beside one variant and "
            f"{units.format_time(most)} beside another: it was disturbed, and so is the exposed communication."
        )
    compared = [cell for cell in figures.timed(run) if figures.exposed_s(cell) is not None]
    if compared:
        first = min(compared, key=lambda cell: figures.step_s(cell) or 0.0)
        yield f"Shortest step: {first.contender.label}, {_added(first)}."
    theirs, ours = figures.best(compared, "torch_ddp"), figures.best(compared, "bucketed")
    best_s, ours_s = figures.best_ddp_s(run.cells), figures.exposed_s(ours) if ours else None
    if theirs and ours and best_s and ours_s is not None:
        adds = (
            f"{units.format_time(ours_s)}, {ours_s / best_s:.2f} times"
            if ours_s > 0
            else "nothing above the noise, against"
        )
        yield (
            f"{ours.contender.label} adds {adds} the {units.format_time(best_s)} that torch DDP adds at its best "
            f"bucket size, {theirs.contender.bucket_size_mb:g} MB."
        )
    if held := [rank.held_s for cell in run.cells for rank in cell.ranks if rank.held_s]:
        yield (
            f"Before each step the devices were held idle for {units.format_time(min(held))} to "
            f"{units.format_time(max(held))}, so that the host was ahead of them."
        )
    elif run.facts and run.facts.backend == "nccl":
        yield "Whether the host was given a head start before each step is not recorded."
    if late := [cell.contender.label for cell in figures.timed(run) if figures.waits_for_host(cell)]:
        yield (
            f"Nearly launch-bound (host lead under 1 % of the step): {', '.join(late)}. Exposed communication there "
            "includes the device's waits for the host."
        )
    if uncounted := [cell.contender.label for cell in run.cells if any(rank.baseline_freed for rank in cell.ranks)]:
        yield (
            f"Other memory and the peak are not known for {', '.join(uncounted)}: an earlier variant's memory was "
            "freed during the measurement."
        )
    for cell in run.cells:
        if cell.failure:
            yield f"{cell.contender.label}: {reason(cell.failure.kind, cell.failure.message)}."


def _added(cell: DdpCell) -> str:
    whole, show = units.format_time(figures.step_s(cell) or 0.0), units.format_time
    without_s, added_s, bounds = figures.baseline_s(cell), figures.exposed_s(cell), figures.exposed_range_s(cell)
    if not without_s or not added_s or added_s <= 0 or bounds is None:
        return f"{whole}, with nothing exposed above the noise"
    share = units.format_percent(added_s / without_s)
    between = f"{show(bounds[0])} to {show(bounds[1])}"
    return f"{whole}, {show(added_s)} of it exposed ({between}), {share} of the step without communication"


def model_words(run: DdpRun) -> Iterator[str]:
    """How the overhead is modelled, and the best bucket size by that model."""
    model = run.model
    if model is None:
        return
    yield (
        "Model: s bytes of gradients in n buckets, with bandwidth w and overhead o per call, take n o + s / w alone. "
        "Exposed, with the overhead of every call, are n o + s / (n w), least for buckets of sqrt(s w o). Here s = "
        f"{units.format_message(model.gradient_bytes)}, w = {units.format_rate(model.bytes_per_s, 'B/s')}, "
        f"o = {units.format_time(model.call_s)} and backward takes {units.format_time(model.backward_s)}: the best "
        f"bucket size is {model.best_bucket_mb:.3g} MB."
    )


def notes_of(run: DdpRun) -> list[str]:
    """Notes on the study and its variants, each text once, with the variants that it is about."""
    found: dict[str, list[str]] = {}
    for cell in run.cells:
        for note in cell.notes:
            found.setdefault(note, []).append(cell.contender.label)
    return [*run.notes, *(f"{note} ({', '.join(labels)})" for note, labels in found.items())]
