"""What can be said of a low-precision cell's peak where the same cell in fp32 was not measured."""

import dataclasses

from steplab import units
from steplab.errors import Unsupported
from steplab.records.memory_profile import MemoryProfile
from steplab.records.memory_references import Fp32Forecast
from steplab.records.run import Run
from steplab.specs.attention_kernels import refuse_unserved_attention

_SAFELY = 2
"""How many times its own error a predicted difference must have for its sign to be told."""
_ESTIMATES_ARE_OFF = 0.03
"""Of the peak: by so much the estimates of recorded compiled steps are off at most, whatever one of them met."""
_CLOSE = 1e-3


def forecast_sentence(name: str, profile: MemoryProfile, forecast: Fp32Forecast) -> str:
    """Which way low precision, called `name`, moves the peak, by what a dry run predicts in fp32; none where the
    difference is within the prediction's error."""
    own, fp32, measured = forecast.own.peak_bytes, forecast.fp32.peak_bytes, profile.peak_bytes
    error = abs(own - measured)
    is_estimate = "estimate" in (forecast.own.kind, forecast.fp32.kind)
    how = "estimate" if is_estimate else "dry run"
    doubt = max(_SAFELY * error, int(_ESTIMATES_ARE_OFF * measured) if is_estimate else 0)
    met = "to the byte" if not error else f"within {_up(100 * error / measured)} %"
    predicts = f"predicts {units.format_bytes(fp32)} in fp32"
    text = f"No cell in fp32 was measured; the {how} of the step, which met this peak {met}, {predicts}"
    moved = moved_words(measured, fp32)
    if moved is None and not is_estimate:
        return f"{text}: with {name} the peak is where it would be."
    if moved is None or abs(measured - fp32) <= doubt:
        return f"{text}: too near to this cell's to say whether {name} lowers the peak or raises it."
    size = units.format_bytes(abs(measured - fp32))
    text += f": with {name} the peak is {moved}, by {size}."
    if profile.peak_phase and profile.peak_phase != forecast.fp32.peak_phase:
        text += f" In fp32 it would lie in {forecast.fp32.peak_phase}."
    return text


def _up(percent: float) -> str:
    """At least one hundredth, so that a small error is not told as none."""
    return f"{max(percent, 0.01):.2f}"


def moved_words(after: int, before: int) -> str | None:
    """'3.9 % lower'; None where both are the same as they are written, too."""
    if abs(after - before) <= _CLOSE * before and units.format_bytes(after) == units.format_bytes(before):
        return None
    direction = "lower" if after < before else "higher"
    if not before:
        return f"{units.format_bytes(after)} {direction}"
    percent = 100 * abs(after - before) / before
    return f"{percent:.1f} % {direction}" if percent >= 0.1 else f"{percent:.1g} % {direction}"


def balance(run: Run, profile: MemoryProfile, low_bytes: int, copies: int) -> str:
    """How far a record alone bounds what autocast does. `low_bytes` are kept for backward in low precision, `copies`
    are casts of weights alive at the peak.

    The two belong to different moments, for fp32 may peak where this step does not: so their difference says nothing.
    At any moment fp32 holds at most `low_bytes` more of activations, which bounds what autocast saves.
    """
    size = units.format_bytes
    told = f"Kept in float32 the low-precision activations would take {size(low_bytes)} more" if low_bytes else ""
    if profile.saved_left_out:
        bound = f"{told}, of those that this record lists" if told else "This record lists not all that was kept"
        bound += "; it does not tell how much autocast can lower this peak"
    elif told:
        bound = f"{told}: autocast cannot lower this peak by more than that, temporaries apart"
    else:
        bound = "Nothing is kept in low precision: autocast has nothing to lower this peak by, temporaries apart"
    if copies:
        may = f"and may raise it: {size(copies)} of weight copies, alive at the peak, would not be there in fp32."
    elif profile.peak_phase == "optimizer":
        may = "and does not raise it: the peak lies in the optimizer, when activations are gone."
    else:
        may = "and may raise it."
    return f"{bound}, {may}{_would_tell(run)}"


def _would_tell(run: Run) -> str:
    """That the cell in fp32 would settle it, where it can be run so."""
    if run.spec is None:
        return ""
    try:
        refuse_unserved_attention(dataclasses.replace(run.spec, precision="fp32"))
    except Unsupported:
        return f" No cell in fp32 can tell more: attention {run.spec.attention} does not run in it."
    return " The same cell in fp32 would tell."
