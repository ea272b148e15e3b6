"""How far Python was ahead of the device in a step, and what that says of it."""

from collections.abc import Sequence
from statistics import median

from steplab import units
from steplab.records.timing import HARDLY_AHEAD, PhaseSamples, find_phase


def lead_s(phases: Sequence[PhaseSamples], name: str = "step") -> float | None:
    """Median of a phase's samples, of the step the least at any phase's end; None where it is not known."""
    samples = find_phase(tuple(phases), name)
    return median(samples.lead_s) if samples and samples.lead_s else None


def waits_for_host(phases: Sequence[PhaseSamples]) -> bool:
    """Whether Python was hardly ahead at the end of some phase: then the device waits for it, if only at times."""
    lead, step = lead_s(phases), find_phase(tuple(phases), "step")
    return lead is not None and step is not None and lead < HARDLY_AHEAD * median(step.best_s)


def waiting_words(phases: Sequence[PhaseSamples]) -> str | None:
    """A sentence where Python was hardly ahead; None otherwise."""
    if not waits_for_host(phases):
        return None
    step = find_phase(tuple(phases), "step")
    assert step is not None
    parts = [samples.phase for samples in phases if samples.phase != "step"]
    leads = {name: found for name in parts if (found := lead_s(phases, name)) is not None}
    late = [name for name, found in leads.items() if found < HARDLY_AHEAD * median(step.best_s)]
    where = f" of {' and '.join(late)}" if late else ""
    least = units.format_time(lead_s(phases) or 0.0)
    return (
        f"At the end{where} Python was hardly ahead of the device ({least}): the step waits for Python, at times at "
        "least. Where it is slow to start kernels, larger batches, compiling or CUDA graphs give the device more to do "
        "for each start; where it waits for a result itself, that can be put off. `steplab profile` shows which."
    )
