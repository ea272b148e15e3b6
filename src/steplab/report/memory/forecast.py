"""Compares a cell's peak in low precision with a predicted peak in fp32, where fp32 was not measured."""

import dataclasses

from steplab import units
from steplab.errors import Unsupported
from steplab.records.memory_profile import MemoryProfile
from steplab.records.memory_references import Fp32Forecast
from steplab.records.run import Run
from steplab.specs.attention_kernels import refuse_unserved_attention

_SAFELY = 2
"""Smallest predicted difference, in multiples of the prediction's error, for which lower or higher is stated."""
_ESTIMATES_ARE_OFF = 0.03
"""Largest relative error of an estimate over the recorded compiled steps."""
_CLOSE = 1e-3


def forecast_sentence(name: str, profile: MemoryProfile, forecast: Fp32Forecast) -> str:
    """By how much the low precision `name` lowers or raises the peak, compared with the dry run's peak in fp32.

    Where the difference is within the prediction's error, the sentence says so.
    """
    own, fp32, measured = forecast.own.peak_bytes, forecast.fp32.peak_bytes, profile.peak_bytes
    error = abs(own - measured)
    is_estimate = "estimate" in (forecast.own.kind, forecast.fp32.kind)
    how = "estimate" if is_estimate else "dry run"
    doubt = max(_SAFELY * error, int(_ESTIMATES_ARE_OFF * measured) if is_estimate else 0)
    met = "exactly" if not error else f"within {_up(100 * error / measured)} %"
    predicts = f"predicts {units.format_bytes(fp32)} in fp32"
    text = f"The same cell in fp32 was not measured. The {how} of the step, which gives this peak {met}, {predicts}"
    moved = moved_words(measured, fp32)
    if moved is None and not is_estimate:
        return f"{text}: with {name} the peak is the same."
    if moved is None or abs(measured - fp32) <= doubt:
        return f"{text}, too close to this cell's peak to say whether {name} lowers or raises it."
    size = units.format_bytes(abs(measured - fp32))
    text += f": with {name} the peak is {moved}, by {size}."
    if profile.peak_phase and profile.peak_phase != forecast.fp32.peak_phase:
        text += f" In fp32 the peak would be in {forecast.fp32.peak_phase}."
    return text


def _up(percent: float) -> str:
    """The percentage with two decimals, at least 0.01, so that a small error does not read as none."""
    return f"{max(percent, 0.01):.2f}"


def moved_words(after: int, before: int) -> str | None:
    """'3.9 % lower'; None where both sizes are written alike."""
    if abs(after - before) <= _CLOSE * before and units.format_bytes(after) == units.format_bytes(before):
        return None
    direction = "lower" if after < before else "higher"
    if not before:
        return f"{units.format_bytes(after)} {direction}"
    percent = 100 * abs(after - before) / before
    return f"{percent:.1f} % {direction}" if percent >= 0.1 else f"{percent:.1g} % {direction}"


def balance(run: Run, profile: MemoryProfile, low_bytes: int, copies: int) -> str:
    """Bounds of autocast's effect on the peak, from this record alone.

    `low_bytes` are saved for backward in low precision; `copies` are bytes of cast weights alive at the peak. Their
    difference is not the effect, because the step in fp32 may peak at another moment. At any moment the step in fp32
    holds at most `low_bytes` more of activations, which bounds what autocast can save.
    """
    more = units.format_bytes(low_bytes)
    told = f"In float32 the low-precision activations would take {more} more" if low_bytes else ""
    if profile.saved_left_out:
        bound = f"{told}, of those that this record lists" if told else "This record does not list all saved tensors"
        bound += "; it does not say by how much autocast can lower this peak."
    elif told:
        bound = f"{told}, so autocast lowers this peak by at most that, excluding temporaries."
    else:
        bound = "Nothing is saved in low precision, so autocast does not lower this peak, excluding temporaries."
    if copies:
        size = units.format_bytes(copies)
        may = f"It may also raise the peak: {size} of weight copies, alive at the peak, would not exist in fp32."
    elif profile.peak_phase == "optimizer":
        may = "It does not raise the peak, which is in the optimizer, after the activations were freed."
    else:
        may = "It may also raise the peak."
    return f"{bound} {may}{_would_tell(run)}"


def _would_tell(run: Run) -> str:
    """Advice to measure the cell in fp32, if it can run in fp32."""
    if run.spec is None:
        return ""
    try:
        refuse_unserved_attention(dataclasses.replace(run.spec, precision="fp32"))
    except Unsupported:
        return f" The same cell cannot be measured in fp32: attention {run.spec.attention} does not run in it."
    return " Measure the same cell in fp32 to see the difference."
