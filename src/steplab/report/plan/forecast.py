"""What a list of cells says of what is expected of each."""

from collections.abc import Sequence

from steplab import units
from steplab.records.planned_step import PlannedStep
from steplab.records.prediction import Verdict
from steplab.specs.step import describe


def forecast_lines(steps: Sequence[PlannedStep], gpu: str) -> list[str]:
    """A line for each step: what it is, its expected time and peak, and whether it fits."""
    return [f"{describe(step.spec)}: {_expected(step, gpu)}" for step in steps]


def _expected(step: PlannedStep, gpu: str) -> str:
    parts = []
    if step.time is not None:
        low, high = units.format_time(step.time.low_s), units.format_time(step.time.high_s)
        parts.append(f"about {units.format_time(step.time.central_s)} a step ({low} to {high})")
    if step.memory is not None:
        parts.append(f"peak {units.format_bytes(step.memory.peak_bytes)}")
        verdict = _verdict(step, gpu)
        if verdict != "not known":
            parts.append(verdict if verdict == "fits" else f"{verdict} on {gpu}")
    return ", ".join(parts) or f"not predicted: {'; '.join(step.why_not)}"


def _verdict(step: PlannedStep, gpu: str) -> Verdict:
    cards = step.memory.cards if step.memory else ()
    return next((card.verdict for card in cards if card.gpu == gpu), "not known")


def forecast_summary(steps: Sequence[PlannedStep], gpu: str) -> str:
    """How many steps there are, and how many of them will not fit or are not predicted."""
    failing = sum(_verdict(step, gpu) == "does not fit" for step in steps)
    unknown = sum(step.time is None for step in steps)
    text = f"{units.counted(len(steps), 'cell')}, none measured"
    if unknown < len(steps):
        text += f"; predicted for {gpu} (--gpu)"
    text += f"; {failing} will not fit" if failing else ""
    return text + (f"; the time of {unknown} is not predicted" if unknown else "")
