"""Tabulates several planned steps: memory, smallest GPU that fits, and time."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.layout_plan import LayoutTime
from steplab.records.prediction import FitVerdict
from steplab.records.rows import Row
from steplab.records.step_time import PhaseTimes, PlannedStep
from steplab.report.kit.document import MOST_ROWS, Block, Column, Document, Section, Sentences, Table, Verdict
from steplab.report.kit.grouping import told_once
from steplab.report.memory.figures import smallest_card
from steplab.report.plan.document import ANSWERS
from steplab.specs.study import in_common, labels

_MEASURED = ("step_time_s", "peak_allocated_bytes", "device", "id")


def planned_document(steps: Sequence[PlannedStep]) -> Document:
    table = planned_table(steps)
    specs = [step.spec for step in steps]
    shared, sizes = " · ".join(in_common(specs)), {spec.layout.world_size for spec in specs}
    on = f" on {units.counted(sizes.pop(), 'GPU')}" if len(sizes) == 1 and sizes != {1} else ""
    return Document(
        title=shared if len(steps) == 1 else f"{units.counted(len(steps), 'planned step')}{on}",
        subtitle="" if len(steps) == 1 else shared,
        verdict=Verdict(sentences=tuple(_fit(steps))),
        sections=(Section.of("", table, _missing(steps)),),
        data=table.rows,
    )


def _fit(steps: Sequence[PlannedStep]) -> Iterator[str]:
    gpus = {timed.gpu for step in steps if (timed := step.time or step.layout)}
    if len(gpus) != 1:
        return
    (gpu,) = gpus
    found = told_once((name, verdict) for name, step in _named(steps) if (verdict := _verdict(step, gpu)))
    judged, fitting = sum(map(len, found.values())), len(found.get("fits", ()))
    if judged == 1:
        yield f"The step {ANSWERS[next(iter(found))].format(gpu)}."
    elif judged:
        others = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in found.items() if verdict != "fits")
        verb = "fits" if fitting == 1 else "fit"
        yield f"{fitting} of {judged} steps {verb} on {gpu}{f' ({others})' if others else ''}."


def planning_blocks(steps: Sequence[PlannedStep], measured: Sequence[Row]) -> tuple[Block, ...]:
    return planned_table(steps, measured), _missing(steps)


def planned_table(steps: Sequence[PlannedStep], measured: Sequence[Row] = ()) -> Table:
    rows: list[Row] = []
    for (told, step), seen in zip(_named(steps), measured or ({},) * len(steps), strict=True):
        memory, on = step.memory, step.time or step.layout
        card = smallest_card(memory) if memory else None
        row: Row = {"step": told, "peak_bytes": memory.peak_bytes if memory else None}
        row |= {"fits": card.gpu if card else "none" if memory else None, "gpu": on.gpu if on else None}
        if time := _time(step):
            row |= {"time_s": time.seconds, "low_s": time.low_s, "high_s": time.high_s}
            row |= {"bound": time.bound} if isinstance(time, PhaseTimes) else {}
            row |= {"tokens_per_s": step.time.tokens_per_s if step.time else step.spec.tokens_of_all / time.seconds}
        row |= {"why_not": "; ".join(step.why_not) or None}
        rows.append(row | {f"measured_{key}": seen.get(key) for key in _MEASURED})
    return Table(
        name="planned steps",
        columns=(
            Column(key="step", wraps_from=16),
            Column(key="peak_bytes", header="peak"),
            Column(key="measured_peak_allocated_bytes", header="measured peak", rank=1),
            Column(key="fits", header="smallest GPU that fits", wraps_from=10),
            Column(key="time_s", header="time"),
            Column(key="low_s", header="low", rank=1),
            Column(key="high_s", header="high", rank=1),
            Column(key="bound", rank=2),
            Column(key="tokens_per_s", header="tokens/s", rank=2),
            Column(key="measured_step_time_s", header="measured time", rank=1),
            Column(key="measured_device", header="measured on", shared="measured on {}", rank=3),
            Column(key="gpu", header="time on", shared="Time on {}", rank=2),
            Column(key="measured_id", header="record", rank=3),
        ),
        rows=tuple(rows),
        caption="Predicted by a dry run: the peak of memory on a CUDA device, and the time with its 90 % interval. "
        "`steplab plan memory` and `steplab plan time` show the components of one step.",
        first=MOST_ROWS,
    )


def _named(steps: Sequence[PlannedStep]) -> Iterator[tuple[str, PlannedStep]]:
    return zip(labels([step.spec for step in steps]), steps, strict=True)


def _time(step: PlannedStep) -> PhaseTimes | LayoutTime | None:
    if step.time:
        return step.time.step
    return step.layout.candidates[0].time if step.layout else None


def _missing(steps: Sequence[PlannedStep]) -> Sentences:
    found = told_once((name, why) for name, step in _named(steps) for why in step.why_not)
    return Sentences.of((f"{why} ({'; '.join(names)})" for why, names in found.items()), "finding")


def _verdict(step: PlannedStep, gpu: str) -> FitVerdict | None:
    cards = step.memory.cards if step.memory else ()
    return next((card.verdict for card in cards if card.gpu == gpu), None)
