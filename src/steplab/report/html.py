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
from steplab.report.kit.document import Table, table_of_texts
from steplab.report.kit.html import section_html
from steplab.report.kit.text import ABSENT, reason, unbroken
from steplab.report.memory.document import TERMS as MEMORY_TERMS
from steplab.report.memory.document import memory_chapter
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
) -> str:
    """The page for `runs`, as HTML; `predictions` of their memory by the runs' ids are set beside what was measured,
    and `references` are what their memory is compared with.

    `numerics` are what was seen of the same steps' precision, and may stand without any run; so may `attention`
    and `comm`, benchmarks of attention alone and of collectives, and `ddp`, data-parallel studies.

    The same runs always give the same page.
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
    cells = cells_of(runs)
    runs_table = _run_table(cells)
    grid = attention_step_grid([cell.run for cell in cells])
    steps = _as_table(grid) if grid else None
    alone = describe(runs[0].spec) if len(runs) == 1 and runs[0].spec else ""
    shared = runs_table.caption if len(runs) > 1 else alone
    return environment.get_template("page.html.j2").render(
        title=title,
        description=description,
        subtitle=" · ".join(
            part for part in _subtitle(runs, numerics, attention, comm, ddp) if part and part not in shared
        ),
        shared=shared,
        facts=facts(cells),
        step_times=charts.step_times(cells),
        phases=phases(cells),
        curves=warmup_curves(cells),
        settling=settling(cells),
        warmup=_warmup_table(cells),
        profiles=profile_sections(cells),
        memory=section_html(found) if (found := memory_chapter(cells, predictions or {}, references)) else "",
        memory_terms=MEMORY_TERMS if any(run.memory_profile for run in runs) else (),
        precision=precision_part(runs, numerics),
        attention=section_html(found) if (found := attention_chapter(attention, steps)) else "",
        comm=section_html(found) if (found := comm_chapter(comm)) else "",
        comm_terms=COMM_TERMS if comm else (),
        ddp=section_html(found) if (found := ddp_chapter(ddp)) else "",
        ddp_terms=DDP_TERMS if ddp else (),
        mfu=charts.mfu(cells),
        utilization=_utilization_table(cells),
        runs=runs_table,
        choices=_told_once(cells, choices),
        doubts=_told_once(cells, doubts),
        missing=_told_once(cells, _missing),
        environments=_environments([*(cell.run for cell in cells), *attention, *comm, *ddp] or numerics),
    )


def _subtitle(
    runs: Sequence[Run],
    numerics: Sequence[Numerics],
    attention: Sequence[AttentionRun],
    comm: Sequence[CommRun],
    ddp: Sequence[DdpRun],
) -> list[str]:
    """How many runs, audits, benchmarks and studies, where, when, and with which version."""
    records: list[Run | Numerics | AttentionRun | CommRun | DdpRun] = [*runs, *numerics, *attention, *comm, *ddp]
    named = (r.environment and r.environment.device.name if isinstance(r, Numerics) else r.device_name for r in records)
    devices = list(dict.fromkeys(name for name in named if name))
    days = sorted({record.created_utc[:10] for record in records})
    made = sorted({record.steplab_version for record in records})
    audits = sum(record.spec is not None for record in numerics)
    parts = [units.counted(len(runs), "run")] if runs else []
    parts += [units.counted(audits, "audit")] if audits else []
    parts += [units.counted(len(attention), "benchmark") + " of attention"] if attention else []
    parts += [units.counted(len(comm), "benchmark") + " of collectives"] if comm else []
    parts += [f"{len(ddp)} data-parallel {'study' if len(ddp) == 1 else 'studies'}"] if ddp else []
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


def _as_table(grid: Grid) -> Table:
    """A grid of texts as a table."""
    return table_of_texts("steps", grid.headers, grid.rows, numeric=grid.numeric, caption=grid.caption)
