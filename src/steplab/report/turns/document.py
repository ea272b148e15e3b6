from collections.abc import Iterator, Sequence

from steplab import units
from steplab.comparison.turns import over_starts
from steplab.records.comparison import Ratio
from steplab.records.rows import Row
from steplab.records.run import Run
from steplab.records.timing import waits_for_host
from steplab.report.kit.document import RESULT, Column, Document, Section, Table, Verdict, row_of
from steplab.report.kit.quantities import LABEL, Quantity
from steplab.report.kit.text import why_failed
from steplab.specs.changes import numerics_of_fp8

_RATIO = Quantity(lambda ratio: f"{ratio:.3f}")
_SEEN = 0.005
"""Relative difference that is visible between a ratio and the quotient of two times of three digits."""


RATIO_IN_TURNS = (
    "When A and B alternate, each step is divided by the median of both sides' steps around its turn; the ratio is of "
    "the medians after that, B / A. A slow spell of the machine cancels, so the ratio may differ from the quotient of "
    "the step times."
)


def turns_document(
    starts: Sequence[Sequence[Run]], each: Sequence[Sequence[Ratio | None]], words: Sequence[str]
) -> Document:
    """Compare alternating runs with the first of them.

    `starts` has the runs of each start of their processes, `each` the ratios in it. `words` are the user's names of the
    runs.
    """
    runs, ratios = starts[-1], over_starts(each)
    table = _table(starts, each, ratios, words)
    return Document(
        title=f"{' and '.join(_label(run) for run in runs)} in turns",
        verdict=Verdict(
            sentences=tuple(_answers(runs, ratios, words, len(starts))),
            cautions=tuple(_cautions(runs)),
        ),
        sections=(Section.of("", table), Section.notes(_notes(runs, len(starts)))),
        data=table.rows,
    )


def ratio_words(ratio: Ratio, a_s: float, b_s: float) -> str:
    between = (
        f"95 % interval {ratio.low:.3f} to {ratio.high:.3f}" if ratio.low and ratio.high else "too few for an interval"
    )
    source = "; a ratio from turns, not of these times" if abs(b_s / a_s / ratio.ratio - 1) > _SEEN else ""
    return f"{ratio.ratio:.3f} times as long ({between}{source})"


def _answers(
    runs: Sequence[Run], ratios: Sequence[Ratio | None], words: Sequence[str], num_starts: int
) -> Iterator[str]:
    first = runs[0]
    for run, ratio, said in zip(runs, (None, *ratios), words, strict=True):
        if run.failure:
            yield f"{_label(run)} ({said}) has no step time: {why_failed(run.failure, most=None)}."
        elif ratio:
            yield _answer(_label(first), f"{_label(run)} ({said})", ratio, num_starts)
    if first.failure is None and not any(ratios):
        yield f"{_label(first)} alone was measured, so there is nothing to compare it with."


def leaning_word(ratio: Ratio) -> str:
    """slower or faster, if the whole interval is on that side of 1 but not beyond the threshold; else empty."""
    if ratio.why or ratio.low is None or ratio.high is None:
        return ""
    slower, faster = ratio.decision == "undecided" and ratio.low > 1, ratio.decision == "not higher" and ratio.high < 1
    return "slower" if slower else "faster" if faster else ""


def _answer(a: str, b: str, ratio: Ratio, num_starts: int) -> str:
    times = f"{units.format_time(ratio.a)} and {units.format_time(ratio.b)} per step"
    told = f"{ratio_words(ratio, ratio.a, ratio.b)}, {times}" + (f"; {ratio.why}" if ratio.why else "")
    within = units.format_percent(ratio.threshold)
    leaning = leaning_word(ratio)
    probably = f"{b} is probably {leaning} than {a}, but perhaps by less than {within}"
    if ratio.decision == "same":
        return f"{b} takes as long as {a}, within {within}: {told}."
    if ratio.decision == "undecided":
        more = f" About {units.counted(ratio.more, 'more turn')} of each would decide." if ratio.more else ""
        if num_starts > 1:
            more = f" More starts may decide, such as --starts {2 * num_starts}."
        open_ = probably if leaning else f"Not decided whether {b} differs from {a} by more than {within}"
        return f"{open_}: {told}.{more}"
    if ratio.decision == "not higher":
        open_ = f"{b} is not slower than {a} by more than {within}; whether it is faster is not known"
        return f"{probably if leaning else open_}: {told}."
    which = "slower" if ratio.decision == "higher" else "faster"
    return f"{b} is {which} than {a}: {told}."


def _cautions(runs: Sequence[Run]) -> Iterator[str]:
    yield from numerics_of_fp8([run.spec.precision for run in runs if run.spec])
    if late := [_label(run) for run in runs if run.timing and waits_for_host(run.timing.back_to_back)]:
        yield f"Warning: in {units.listed(late)} the GPU may wait for Python, so CPU speed may affect this comparison."
    if apart := next((run.turns.alternating for run in runs if run.turns and run.turns.alternating), None):
        yield alternating_caution(apart)


def alternating_caution(why: str) -> str:
    return (
        f"Each turn was a process of its own, because {why}. Equal steps in different processes differ by some per "
        "cent, which the intervals do not cover."
    )


def _notes(runs: Sequence[Run], num_starts: int) -> Iterator[str]:
    if num_starts > 1:
        yield (
            f"The sides started {num_starts} times. The ratio of all starts is the mean of theirs; its interval covers "
            "how they differ (Student's t)."
        )
    turns = next((run.turns for run in runs if run.turns and run.turns.turns), None)
    if turns and not turns.alternating:
        steps = units.counted(max(turn.steps for turn in turns.turns), "step")
        yield (
            f"{len(turns.turns)} turns of {steps}, in the order A B B A. "
            "Between its turns a side keeps its weights and optimizer state in the device's memory."
        )
    yield f"{RATIO_IN_TURNS} `steplab show ID` shows a side in full."


def _table(
    starts: Sequence[Sequence[Run]],
    each: Sequence[Sequence[Ratio | None]],
    ratios: Sequence[Ratio | None],
    words: Sequence[str],
) -> Table:
    rows = [
        _row(run, ratio, said)
        for runs, of_start in zip(starts, each, strict=True)
        for run, ratio, said in zip(runs, (None, *of_start), words, strict=True)
    ]
    if len(starts) > 1:
        told = zip(starts[0][1:], ratios, words[1:], strict=True)
        rows += [_ratio_row(ratio) | {"side": _label(run), "what": f"{said}, all starts"} for run, ratio, said in told]
    return Table(
        name="sides",
        columns=(
            Column(key="side", header=""),
            Column(key="what", header="step", wraps_from=16),
            Column(key="step_time_s", header="step time"),
            Column(key="ratio", quantity=_RATIO),
            Column(key="low", quantity=_RATIO, rank=1),
            Column(key="high", quantity=_RATIO, rank=1),
            Column(key="decision", rank=2),
            Column(key="peak_bytes", header="peak memory", rank=3),
            Column(key="git_commit", header="commit", rank=4),
            Column(key="id", header="record", quantity=LABEL),
            RESULT,
        ),
        rows=tuple(rows),
    )


def _row(run: Run, ratio: Ratio | None, said: str) -> Row:
    return {
        "side": _label(run),
        "what": said,
        "step_time_s": run.median_s,
        "num_steps": len(run.samples_s) or None,
        **_ratio_row(ratio),
        "peak_bytes": run.peak.peak_allocated_bytes if run.peak else None,
        "git_commit": run.environment.git_commit if run.environment else None,
        "id": run.id,
        "session": run.turns.session if run.turns else None,
        "status": run.status,
        "failure": run.failure.message if run.failure else None,
    }


def _ratio_row(ratio: Ratio | None) -> Row:
    why = {"why": (ratio.why or None) if ratio else None}
    return row_of(ratio, "ratio", "low", "high", "p", "threshold", "decision") | why


def _label(run: Run) -> str:
    return run.turns.label if run.turns else "?"
