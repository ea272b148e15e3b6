"""A data-parallel study in words: what was asked, where it ran, what came out."""

from collections import Counter
from collections.abc import Iterator

from steplab import units
from steplab.records.ddp import DdpRun
from steplab.report.kit.grouping import told_once


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


def facts(run: DdpRun) -> Iterator[str]:
    """The size of the gradients, and how the host was ahead of the devices."""
    if found := run.facts:
        yield (
            f"{units.format_count(found.num_parameters)} parameters in {found.num_tensors} tensors: "
            f"{units.format_bytes(found.gradient_bytes)} of gradients per rank and step."
        )
    if held := [rank.held_s for cell in run.cells for rank in cell.ranks if rank.held_s]:
        yield (
            f"Before each step the devices were held idle for {units.format_time(min(held))} to "
            f"{units.format_time(max(held))}, so that the host was ahead of them."
        )
    elif run.facts and run.facts.backend == "nccl":
        yield "Whether the host was ahead of the devices before each step is not recorded."
    if uncounted := [cell.contender.label for cell in run.cells if any(rank.baseline_freed for rank in cell.ranks)]:
        yield (
            f"Other memory and the peak are not known for {', '.join(uncounted)}: an earlier variant's memory was "
            "freed during the measurement."
        )


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
    found = told_once((cell.contender.label, note) for cell in run.cells for note in cell.notes)
    return [*run.notes, *(f"{note} ({', '.join(labels)})" for note, labels in found.items())]
