"""A study as one web page that needs nothing else: no network, no script, no second file."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from steplab import stats, units
from steplab.records.attention import AttentionRun
from steplab.records.comm import CommRun
from steplab.records.ddp import DdpRun
from steplab.records.environment import Environment
from steplab.records.memory_references import MemoryReferences
from steplab.records.numerics import Numerics
from steplab.records.prediction import MemoryPrediction
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.records.timing import curve
from steplab.report import charts
from steplab.report.attempts import Attempts
from steplab.report.attention.document import attention_chapter
from steplab.report.attention_steps import attention_step_grid
from steplab.report.cells import Cell, cells_of, label, varying
from steplab.report.columns import make_sheet
from steplab.report.comm.document import TERMS as COMM_TERMS
from steplab.report.comm.document import comm_chapter
from steplab.report.curves import relative, settling, warmup_curves, worth_a_curve
from steplab.report.ddp.document import TERMS as DDP_TERMS
from steplab.report.ddp.document import ddp_chapter
from steplab.report.environments import condition_pairs, environment_pairs
from steplab.report.figures import WARMUP_COUNTS, steady_words, step_samples, warmup_study
from steplab.report.gaps import choices, doubts, gaps
from steplab.report.grid import Grid
from steplab.report.kit.document import Section, Table, table_of_texts
from steplab.report.kit.html import section_html
from steplab.report.kit.text import ABSENT, reason, unbroken
from steplab.report.memory_page import memory_part
from steplab.report.narrative import facts
from steplab.report.phase_bars import phases
from steplab.report.precision_page import precision_part
from steplab.report.profile_page import profile_sections
from steplab.report.run_text import describe
from steplab.units import format_share

T = TypeVar("T")


def render_page(
    runs: Sequence[Run],
    *,
    title: str,
    description: str = "",
    predictions: Mapping[str, MemoryPrediction] | None = None,
    references: MemoryReferences | None = None,
    numerics: Sequence[Numerics] = (),
    attention: Sequence[AttentionRun] = (),
    comm: Sequence[CommRun] = (),
    ddp: Sequence[DdpRun] = (),
    attempts: Attempts | None = None,
) -> str:
    """The page for `runs`, as HTML; `predictions` of their memory by the runs' ids are set beside what was measured,
    and `references` are what their memory is compared with.

    `numerics` are what was seen of the same steps' precision, and may stand without any run; so may `attention`
    and `comm`, benchmarks of attention alone and of collectives, and `ddp`, data-parallel studies.

    A record that a section cannot be drawn of is left out of that section, and the page says so; `attempts` has what
    was left out before. The same runs always give the same page.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("steplab.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["unbroken"] = unbroken
    tries = attempts if attempts is not None else Attempts()
    draw = tries.draw
    cells = draw("the page", runs, cells_of)
    runs_table = draw("the table of runs", cells, _run_table)
    shared = runs_table.caption if len(runs) > 1 else draw("the heading", cells, _alone)
    drawn = {cell.id for cell in cells}
    runs = [run for run in runs if run.id in drawn]
    records: list[Run | Numerics | AttentionRun | CommRun | DdpRun]
    records = [*runs, *numerics, *attention, *comm, *ddp]
    machines: Sequence[Run | Numerics | AttentionRun | CommRun | DdpRun]
    machines = [*(cell.run for cell in cells), *attention, *comm, *ddp] or numerics
    steps = draw("attention", cells, _steps_by_attention)
    sections = {
        "shared": shared,
        "facts": draw("the summary", cells, facts),
        "step_times": draw("step time", cells, charts.step_times),
        "phases": draw("phases of a step", cells, phases),
        "curves": draw("warm-up", cells, warmup_curves),
        "settling": draw("warm-up", cells, settling),
        "warmup": draw("warm-up", cells, _warmup_table),
        "profiles": draw("where the time goes", cells, profile_sections),
        "memory": draw("memory", cells, charts.peak_memory),
        "watched": draw("memory", cells, lambda some: memory_part(some, predictions or {}, references)),
        "precision": draw("precision", numerics, lambda some: precision_part(runs, some)),
        "attention": draw("attention", attention, lambda some: _html(attention_chapter(some, steps))),
        "comm": draw("communication", comm, lambda some: _html(comm_chapter(some))),
        "comm_terms": COMM_TERMS if comm else (),
        "ddp": draw("data parallelism", ddp, lambda some: _html(ddp_chapter(some))),
        "ddp_terms": DDP_TERMS if ddp else (),
        "mfu": draw("utilization", cells, charts.mfu),
        "utilization": draw("utilization", cells, _utilization_table),
        "runs": runs_table,
        "choices": draw("what was chosen", cells, lambda some: _told_once(some, choices)),
        "doubts": draw("utilization", cells, lambda some: _told_once(some, doubts)),
        "missing": draw("what was not measured", cells, lambda some: _told_once(some, _missing)),
        "environments": draw("environments", machines, _environments),
        "subtitle": " · ".join(part for part in draw("the heading", records, _subtitle) if part and part not in shared),
    }
    template = environment.get_template("page.html.j2")
    return template.render(title=title, description=description, left_out=tries.left_out, **sections)


def _alone(cells: Sequence[Cell]) -> str:
    """The step of the only run; empty where it is not the only one."""
    spec = cells[0].run.spec if len(cells) == 1 else None
    return describe(spec) if spec else ""


def _subtitle(records: Sequence[Run | Numerics | AttentionRun | CommRun | DdpRun]) -> list[str]:
    """How many runs, audits, benchmarks and studies, where, when, and with which version."""
    named = (r.environment and r.environment.device.name if isinstance(r, Numerics) else r.device_name for r in records)
    devices = list(dict.fromkeys(name for name in named if name))
    days = sorted({record.created_utc[:10] for record in records})
    made = sorted({record.steplab_version for record in records})
    runs = sum(isinstance(record, Run) for record in records)
    audits = sum(isinstance(record, Numerics) and record.spec is not None for record in records)
    attention = sum(isinstance(record, AttentionRun) for record in records)
    comm = sum(isinstance(record, CommRun) for record in records)
    ddp = sum(isinstance(record, DdpRun) for record in records)
    parts = [units.counted(runs, "run")] if runs else []
    parts += [units.counted(audits, "audit")] if audits else []
    parts += [units.counted(attention, "benchmark") + " of attention"] if attention else []
    parts += [units.counted(comm, "benchmark") + " of collectives"] if comm else []
    parts += [f"{ddp} data-parallel {'study' if ddp == 1 else 'studies'}"] if ddp else []
    parts += [", ".join(devices)]
    parts += [" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []
    parts += [f"steplab {', '.join(made)}"] if made else []
    return parts


def _run_table(cells: Sequence[Cell]) -> Grid:
    sheet = make_sheet([run_row(cell.run) for cell in cells])
    at = next((i + 1 for i, column in enumerate(sheet.columns) if column.key == "step_time_s"), 0)
    extra = ("95 % interval", "mean ± sd") if at else ()

    def widened(own: tuple[T, ...], added: tuple[T, ...]) -> tuple[T, ...]:
        return own[:at] + added + own[at:]

    return Grid(
        headers=widened(tuple(column.header for column in sheet.columns), extra),
        rows=tuple(widened(texts, _spread(c.run) if at else ()) for texts, c in zip(sheet.cells, cells, strict=True)),
        numeric=widened(tuple(column.numeric for column in sheet.columns), (True,) * len(extra)),
        caption=sheet.caption,
        bad_rows=frozenset(index for index, cell in enumerate(cells) if cell.run.failure),
    )


def _spread(run: Run) -> tuple[str, str]:
    """Interval of the median, and mean with standard deviation, of a run's step time."""
    samples = step_samples(run)
    if not samples:
        return ABSENT, ABSENT
    summary, show = stats.summarize(samples), units.format_time
    deviation = f" ± {show(summary.stdev)}" if summary.stdev is not None else ""
    return f"{show(summary.low)} to {show(summary.high)}", show(summary.mean) + deviation


def _warmup_table(cells: Sequence[Cell]) -> Grid | None:
    """Means after 0, 1, 2 and 5 warm-up steps, for the runs whose curves are drawn."""
    chosen, fields = worth_a_curve(cells), varying(cells)
    rows = []
    for cell in chosen:
        timing = cell.run.timing
        assert timing is not None  # chosen for its curve
        texts = [_mean(effect.mean_s, cell.run) for effect in warmup_study(timing)]
        rows.append((label(cell, fields), *texts, steady_words(curve(timing))))
    if not rows:
        return None
    headers = ("run", *(f"mean after {count}" for count in WARMUP_COUNTS), "steady state")
    return Grid(headers=headers, rows=tuple(rows), numeric=(False, *(True for _ in WARMUP_COUNTS), False))


def _mean(value: float | None, run: Run) -> str:
    times = relative(value, run)
    return ABSENT if value is None or times is None else f"{units.format_time(value)} ({times:.2f}×)"


def _utilization_table(cells: Sequence[Cell]) -> Grid | None:
    """A row a run: each convention a column, and the peak they are shares of."""
    used = [cell for cell in cells if cell.run.utilizations]
    if not used:
        return None
    fields = varying(cells)
    kinds = list(dict.fromkeys((u.kind, u.convention) for cell in used for u in cell.run.utilizations))
    rows = []
    for cell in used:
        values = {(u.kind, u.convention): u.value for u in cell.run.utilizations}
        shares = [values.get(kind) for kind in kinds]
        first = cell.run.utilizations[0]
        peak = first.peak_flops_per_s
        rows.append(
            (
                label(cell, fields),
                *(ABSENT if share is None else format_share(share) for share in shares),
                ABSENT if peak is None else f"{units.format_rate(peak, 'FLOP/s')}, {first.dtype}",
                first.peak_source,
            )
        )
    headers = [f"{kind.upper()} ({convention.replace('_', ' ')})" for kind, convention in kinds]
    return Grid(
        headers=("run", *headers, "dense peak", "source of the peak"),
        rows=tuple(rows),
        numeric=(False, *(True for _ in kinds), True, False),
    )


def _missing(run: Run) -> list[str]:
    """What was not measured and why, the reason of a failure included."""
    return gaps(run) + ([reason(run.failure.kind, run.failure.message)] if run.failure else [])


def _told_once(cells: Sequence[Cell], told: Callable[[Run], list[str]]) -> list[tuple[str, list[str]]]:
    """What is told of the runs, each text once, with the cells it holds for."""
    fields = varying(cells)
    found: dict[str, list[str]] = {}
    for cell in cells:
        for text in told(cell.run):
            found.setdefault(text, []).append(label(cell, fields))
    return [(text, ["all runs"] if len(names) == len(cells) > 1 else names) for text, names in found.items()]


def _environments(
    records: Sequence[Run | Numerics | AttentionRun | CommRun | DdpRun],
) -> list[tuple[int, list[tuple[str, str]]]]:
    """Each environment once, with the number of records made in it and the range of what moved meanwhile."""
    groups: dict[tuple[tuple[str, str], ...], list[Environment]] = {}
    for record in records:
        if record.environment:
            groups.setdefault(tuple(environment_pairs(record.environment)), []).append(record.environment)
    return [(len(envs), [*pairs, *condition_pairs(envs)]) for pairs, envs in groups.items()]


def _html(chapter: Section | None) -> str:
    """A chapter as HTML; nothing for none."""
    return section_html(chapter) if chapter else ""


def _steps_by_attention(cells: Sequence[Cell]) -> Table | None:
    """Training steps that differ in their attention alone."""
    grid = attention_step_grid([cell.run for cell in cells])
    if grid is None:
        return None
    return table_of_texts("steps", grid.headers, grid.rows, numeric=grid.numeric, caption=grid.caption)
