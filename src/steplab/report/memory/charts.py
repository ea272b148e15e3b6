from collections.abc import Mapping, Sequence

from steplab import units
from steplab.records.prediction import MemoryPrediction
from steplab.report.kit.charts import color_number
from steplab.report.kit.document import Bar, Bars
from steplab.report.memory.categories import category_word, color_of, legend_of
from steplab.report.memory.figures import error_text, parts, profile_of, watched, whole, with_owners
from steplab.report.run.cells import RunCell, label, varying

_FIRST = 12


def peak_bars(cells: Sequence[RunCell], predictions: Mapping[str, MemoryPrediction]) -> Bars | None:
    """Draw each run's peak by category, with a stroke at its prediction; `predictions` is keyed by run id.

    None for one run without a prediction. Imported snapshots are left out, because their categories differ.
    """
    known = with_owners(cells)
    if len(known) + len([cell for cell in known if cell.run.id in predictions]) < 2:
        return None
    fields = varying(known)
    bars = tuple(_peak_bar(cell, fields, predictions.get(cell.run.id)) for cell in known)
    shown = [part.category for cell in known for part in parts(profile_of(cell)) if part.num_bytes]
    note = "Bytes allocated at the peak, by category; the peak is at the right."
    if any(bar.mark is not None for bar in bars):
        note += " The stroke marks the predicted peak, with its error under the name."
    if left_out := len(watched(cells)) - len(known):
        note += f" {units.counted(left_out, 'more watched run')} {'is' if left_out == 1 else 'are'} not drawn."
    return Bars(bars=bars, legend=legend_of(shown), note=note, first=_FIRST)


def _peak_bar(cell: RunCell, fields: Sequence[str], prediction: MemoryPrediction | None) -> Bar:
    profile, name = profile_of(cell), label(cell, fields)
    found = [(category_word(p.category), color_number(color_of(p.category)), p.num_bytes) for p in parts(profile)]
    error = whole(profile, prediction).error if prediction else None
    predicted = f"predicted {units.format_bytes(prediction.peak_bytes)}" if prediction else ""

    def show(size: float) -> str:
        return f"{units.format_bytes(size)}, {units.format_share(size / profile.peak_bytes)} of the peak"

    return Bar.of(
        name,
        found,
        show,
        figure=units.format_bytes(profile.peak_bytes),
        mark=prediction.peak_bytes if prediction else None,
        mark_tip=predicted,
        detail=predicted if error is None else f"{predicted}, {error_text(error, 1)}",
    )
