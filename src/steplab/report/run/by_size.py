"""Tables over sizes: each pass of a step with its mean and deviation, and each choice against its baseline."""

from collections.abc import Iterator, Sequence

from steplab import stats
from steplab.records.disturbances import disturbance_words
from steplab.records.rows import Row, Scalar
from steplab.report.kit.document import MOST_ROWS, Column, Section, Table
from steplab.report.kit.quantities import LABEL, TIMES
from steplab.report.run.cells import RunCell, label, said, varying
from steplab.report.run.effects import VERBS, Effect, Pair, effects_of
from steplab.report.run.figures import phase_names

_RUN = Column(key="run", wraps_from=16)
_RECORD = Column(key="id", header="record", rank=3)


def passes_table(cells: Sequence[RunCell]) -> Table:
    """Mean, standard deviation and median of each pass of each run's step: forward, backward and optimizer."""
    fields = varying(cells)
    rows: list[Row] = []
    for cell in cells:
        timing = cell.run.timing
        names = phase_names(cell.run)
        for name in (*names, *(["step"] if len(names) != 1 else [])):
            samples = timing.phase(name) if timing else None
            if samples is None or not samples.best_s:
                continue
            summary = stats.summarize(samples.best_s)
            row: Row = {"run": label(cell, fields), "part": name, "median_s": summary.median, "mean_s": summary.mean}
            row |= {"stdev_s": summary.stdev, "count": summary.count, "id": cell.id}
            rows.append(row | {"warnings": disturbance_words(cell.run)})
    return Table(
        name="passes",
        columns=(
            _RUN,
            Column(key="part", header="pass"),
            Column(key="median_s", header="median"),
            Column(key="mean_s", header="mean"),
            Column(key="stdev_s", header="sd"),
            Column(key="count", header="steps", quantity=LABEL, shared="{} measured steps"),
            Column(key="warnings", header="warning", rank=1, wraps_from=12),
            _RECORD,
        ),
        rows=tuple(rows),
        caption="Steps back to back; sd is the standard deviation over steps (n − 1).",
        first=MOST_ROWS,
    )


def effects_sections(cells: Sequence[RunCell]) -> Iterator[Section]:
    """A table for each value of a choice against its baseline, one row per pair of runs equal in all else; values of
    which there is one pair share a table."""
    order = {cell.id: place for place, cell in enumerate(cells)}
    effects = list(effects_of(cells))
    for effect in effects:
        if len(effect.pairs) > 1:
            yield Section.of(effect.choice, _effect_table(effect, order))
    if single := [effect for effect in effects if len(effect.pairs) == 1]:
        yield Section.of("Choices with one pair of runs" if len(single) > 1 else single[0].choice, _single(single))


def _effect_table(effect: Effect, order: dict[str, int]) -> Table:
    pairs = sorted(effect.pairs, key=lambda pair: order[pair.before.id])
    fields = [field for field in varying([pair.before for pair in pairs]) if field != effect.field]
    base, value = (said(effect.field, cell.values[effect.field]) for cell in (pairs[0].before, pairs[0].after))
    rows = [{"run": label(pair.before, fields), **_pair_row(pair)} for pair in pairs]
    return _pairs_table(f"{effect.field} {effect.choice}", (_RUN, *_pair_columns(base, value)), rows)


def _single(effects: Sequence[Effect]) -> Table:
    """One row per choice."""
    fields = varying([effect.pairs[0].before for effect in effects])
    rows = [
        {"choice": effect.choice, "run": label(effect.pairs[0].before, fields), **_pair_row(effect.pairs[0])}
        for effect in effects
    ]
    columns = (Column(key="choice", wraps_from=20), _RUN, *_pair_columns("before", "after"))
    return _pairs_table("choices with one pair", columns, rows)


def _pair_row(pair: Pair) -> dict[str, Scalar]:
    before_bytes, after_bytes = (
        cell.run.peak.peak_allocated_bytes if cell.run.peak else None for cell in (pair.before, pair.after)
    )
    return {
        "before_s": pair.before_s,
        "after_s": pair.after_s,
        "ratio": pair.ratio,
        "certain": VERBS.get(pair.decision, ""),
        "before_bytes": before_bytes,
        "after_bytes": after_bytes,
        "bytes_ratio": after_bytes / before_bytes if before_bytes and after_bytes else None,
        "ids": f"{pair.before.id} {pair.after.id}",
    }


def _pair_columns(before: str, after: str) -> tuple[Column, ...]:
    return (
        Column(key="before_s", header=before),
        Column(key="after_s", header=after),
        Column(key="ratio", header="speed-up", quantity=TIMES),
        Column(key="certain", header="doubt", rank=1),
        Column(key="before_bytes", header=f"peak, {before}", rank=2),
        Column(key="after_bytes", header=f"peak, {after}", rank=2),
        Column(key="bytes_ratio", header="peak ×", quantity=TIMES, rank=2),
        Column(key="ids", header="records", rank=3, wraps_from=12),
    )


def _pairs_table(name: str, columns: tuple[Column, ...], rows: Sequence[Row]) -> Table:
    caption = "Median step times of runs that differ in nothing else; the speed-up is the first over the second."
    if any(row["certain"] for row in rows):
        caption += (
            " Undecided: the times differ by no more than starts of one step on such machines may. No difference: by "
            "less than 5 %, or in turns less than 1 %."
        )
    return Table(name=name, columns=columns, rows=tuple(rows), caption=caption, first=MOST_ROWS)
