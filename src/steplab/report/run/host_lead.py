"""The host lead: how far the host was ahead of the device in a step."""

from collections.abc import Sequence
from statistics import median

from steplab import units
from steplab.records.timing import HARDLY_AHEAD, PhaseSamples, find_phase, lead_s, waits_for_host


def waiting_words(phases: Sequence[PhaseSamples]) -> str | None:
    """A sentence for a step that is nearly launch-bound; None for any other."""
    if not waits_for_host(phases):
        return None
    step = find_phase(phases, "step")
    assert step is not None
    parts = [samples.phase for samples in phases if samples.phase != "step"]
    leads = {name: found for name in parts if (found := lead_s(phases, name)) is not None}
    late = [name for name, found in leads.items() if found < HARDLY_AHEAD * median(step.best_s)]
    where = f" of {' and '.join(late)}" if late else ""
    least = units.format_time(lead_s(phases) or 0.0)
    return (
        f"Nearly launch-bound: the host lead at the end{where} is {least}, under 1 % of the step, so the device waits "
        "for the host at times. If launching kernels is slow, larger batches, compiling or CUDA graphs give the device "
        "more work per launch; if the host waits for a result, that can be deferred. `steplab profile` shows which."
    )
