"""Computes the figures of a data-parallel study from its samples.

A step is as long as the slowest rank's, so times are the largest of the ranks' medians. Waiting for a slow GPU
therefore does not count as communication.
"""

from collections.abc import Callable, Iterable
from statistics import median

from steplab.comparison.samples import compare_samples
from steplab.records import timing
from steplab.records.comparison import Ratio
from steplab.records.ddp import CATEGORIES, MOMENTS, DdpCell, DdpRun, StateMemory, TracedSteps
from steplab.records.disturbances import WAITS
from steplab.records.figure import Figure, values
from steplab.records.profile import PHASES
from steplab.records.rows import Row
from steplab.report.kit.document import row_of

MOMENT_WORDS = dict(zip(MOMENTS, ("initialised", "before the update", "after the update"), strict=True))
_WIDEST = 0.5
"""Widest interval of exposed communication, as a share of `alone_s`, for which `hidden` is not None."""


def phase_s(cell: DdpCell, phase: str, *, baseline: bool = False) -> float | None:
    samples = [rank.samples(phase, baseline=baseline) for rank in cell.ranks]
    return max((median(column) for column in samples if column), default=None)


def step_s(cell: DdpCell) -> float | None:
    return phase_s(cell, "step")


def baseline_s(cell: DdpCell) -> float | None:
    """Seconds of the same step without communication, alternating with the variant."""
    return phase_s(cell, "step", baseline=True)


def host_lead_s(cell: DdpCell) -> float | None:
    """Python's shortest lead over the GPU at the end of a phase, over ranks."""
    return min((found for rank in cell.ranks if (found := timing.lead_s(rank.phases)) is not None), default=None)


def waits_for_host(cell: DdpCell) -> bool:
    """True if Python was barely ahead of the GPU on some rank; other ranks wait for its messages."""
    return any(timing.waits_for_host(rank.phases) for rank in cell.ranks)


def usual_baseline_s(run: DdpRun, phase: str = "step") -> float | None:
    """Median time of a phase without communication, over the measurements that alternated with each variant.

    The separate baseline came first, on a machine that may not have settled; it serves only if no variant was timed.
    """
    return _usual(run, lambda cell, beside: phase_s(cell, phase, baseline=beside))


def usual_spread(run: DdpRun) -> float | None:
    return _usual(run, lambda cell, beside: spread_over_ranks(cell, baseline=beside))


def _usual(run: DdpRun, figure: Callable[[DdpCell, bool], float | None]) -> float | None:
    beside = [value for cell in run.cells if (value := figure(cell, True)) is not None]
    if beside:
        return median(beside)
    return figure(run.baseline, False) if run.baseline else None


def baseline_range_s(run: DdpRun) -> tuple[float, float] | None:
    found = [seconds for cell in run.cells if (seconds := baseline_s(cell)) is not None]
    return (min(found), max(found)) if found else None


def exposed_s(cell: DdpCell) -> float | None:
    whole, without = step_s(cell), baseline_s(cell)
    return whole - without if whole is not None and without is not None else None


def exposed_range_s(cell: DdpCell) -> tuple[float, float] | None:
    ratio, whole_s, without_s = step_ratio(cell), step_s(cell), baseline_s(cell)
    if ratio is None or ratio.low is None or ratio.high is None or whole_s is None or without_s is None:
        return None
    return whole_s * ratio.low / ratio.ratio - without_s, whole_s * ratio.high / ratio.ratio - without_s


def step_ratio(cell: DdpCell) -> Ratio | None:
    """Ratio of the step to the same step without communication, on its slowest rank; alternating steps are paired."""
    slowest = [
        max((r.samples("step", baseline=beside) for r in cell.ranks), key=lambda of: median(of or (0,)), default=())
        for beside in (True, False)
    ]
    if not all(slowest):
        return None
    if len(slowest[0]) != len(slowest[1]) or cell.turns == "before_and_after":
        return compare_samples([slowest[0]], [slowest[1]], in_turns=False)
    return compare_samples(*([[sample] for sample in samples] for samples in slowest), in_turns=True)


def hidden(cell: DdpCell) -> float | None:
    """Share of communication hidden by computation, 1 - exposed_s / alone_s; negative if it adds more than `alone_s`.

    None if the interval of exposed communication is too wide.
    """
    added_s, whole_s = exposed_s(cell), alone_s(cell)
    if added_s is None or exposed_range_s(cell) is None or not whole_s or is_vague(cell):
        return None
    return 1 - max(added_s, 0.0) / whole_s


def is_vague(cell: DdpCell) -> bool:
    """True if the interval of exposed communication is wider than half of `alone_s`."""
    bounds, whole_s = exposed_range_s(cell), alone_s(cell)
    return bounds is not None and bool(whole_s) and bounds[1] - bounds[0] > _WIDEST * (whole_s or 0.0)


def alone_s(cell: DdpCell) -> float | None:
    return max((median(rank.alone_s) for rank in cell.ranks if rank.alone_s), default=None)


def spread_over_ranks(cell: DdpCell, *, baseline: bool = False) -> float | None:
    """Slowest rank's median step over the fastest rank's, minus 1; None if untimed."""
    medians = [median(samples) for rank in cell.ranks if (samples := rank.samples("step", baseline=baseline))]
    return max(medians) / min(medians) - 1 if medians and min(medians) > 0 else None


def best(cells: Iterable[DdpCell]) -> DdpCell | None:
    """Fastest step. Exposed communication is no criterion, because a disturbed baseline makes it look smaller."""
    return min((cell for cell in cells if step_s(cell) is not None), key=lambda cell: step_s(cell) or 0.0, default=None)


def best_ddp(cells: Iterable[DdpCell]) -> DdpCell | None:
    return best(cell for cell in cells if cell.contender.kind == "torch_ddp")


def best_ddp_s(cells: Iterable[DdpCell]) -> float | None:
    """Seconds that torch DDP adds to a step at its best bucket size; None unless the whole interval is above zero."""
    found = best_ddp(cells)
    added, bounds = (exposed_s(found), exposed_range_s(found)) if found else (None, None)
    return added if added and added > 0 and (bounds is None or bounds[0] > 0) else None


def peak_bytes(cell: DdpCell) -> int | None:
    if any(rank.baseline_freed for rank in cell.ranks):
        return None
    own = [rank.peak.peak_allocated_bytes - (rank.beside_bytes or 0) for rank in cell.ranks if rank.peak is not None]
    return max(own, default=None)


def memory_at(cell: DdpCell, moment: str) -> StateMemory | None:
    found = [memory for rank in cell.ranks if (memory := rank.moment(moment)) is not None]
    return max(found, key=lambda memory: memory.known_bytes, default=None)


def expected_at(cell: DdpCell, moment: str) -> StateMemory | None:
    return next((memory for memory in cell.expected if memory.moment == moment), None)


def timed(run: DdpRun) -> list[DdpCell]:
    return [cell for cell in run.cells if step_s(cell) is not None]


def ddp_rows(run: DdpRun) -> list[Row]:
    """One row per variant. The row of the step without communication has medians over all its measurements that
    alternated with variants.
    """
    figures = (*time_figures(run), *MEMORY)
    return [
        {
            "variant": cell.contender.label,
            "kind": cell.contender.kind,
            "bucket_mb": cell.contender.bucket_size_mb,
            **row_of(cell.contender, "transport", "update"),
            "status": cell.status,
            "turns": cell.turns or None,
            "num_ranks": len(cell.ranks) or None,
            "steps": len(cell.ranks[0].samples("step")) if cell.ranks else None,
            **values(figures, cell),
            "failure": cell.failure.message if cell.failure else None,
        }
        for cell in run.cells
    ]


def _is_baseline(cell: DdpCell) -> bool:
    return cell.contender.kind == "none" and cell.failure is None


def _bound(end: int) -> Callable[[DdpCell], float | None]:
    return lambda cell: bounds[end] if (bounds := exposed_range_s(cell)) else None


def _traced(read: Callable[[TracedSteps], float]) -> Callable[[DdpCell], float | None]:
    return lambda cell: read(cell.traced) if cell.traced and cell.traced.communication_s else None


_ADDED: tuple[Figure[DdpCell], ...] = (
    Figure(
        key="baseline_s",
        header="without",
        rank=1,
        note="Without: the same step without communication, alternating with the variant.",
        find=baseline_s,
    ),
    Figure(key="exposed_s", header="exposed", note="Exposed: step − without.", find=exposed_s),
    Figure(
        key="exposed_low_s",
        header="exposed min",
        rank=1,
        note="Exposed min and max: bounds from the 95 % interval of step / without.",
        find=_bound(0),
    ),
    Figure(key="exposed_high_s", header="exposed max", rank=1, find=_bound(1)),
)
_SENT: tuple[Figure[DdpCell], ...] = (
    Figure(
        key="alone_s",
        header="alone",
        rank=1,
        note="Alone: the same messages without computation.",
        find=alone_s,
    ),
    Figure(
        key="hidden",
        header="hidden",
        unit="share",
        rank=2,
        note="Hidden: 1 − exposed / alone, shown if exposed max − min is below alone / 2; below zero, "
        "communication slows concurrent computation by more than is hidden.",
        find=hidden,
    ),
    Figure(
        key="traced_exposed_s",
        header="exposed in trace",
        rank=3,
        note="Exposed in trace: messages without concurrent computation, under a profiler.",
        find=_traced(lambda traced: traced.exposed_s),
    ),
    Figure(key="num_calls", header="calls", unit="label", rank=2, find=lambda cell: cell.num_calls),
    Figure(
        key="sent_bytes",
        header="messages",
        rank=4,
        note="Messages: the sum of their sizes.",
        find=lambda cell: sum(messages.total_bytes for messages in cell.messages) or None,
    ),
    Figure(
        key="wire_bytes",
        header="on the wire",
        rank=4,
        note="On the wire: the sum of each size times nccl-tests' factor.",
        find=lambda cell: cell.wire_bytes,
    ),
)
_HOST_LEAD: Figure[DdpCell] = Figure(
    key="host_lead_s",
    header="host ahead",
    rank=3,
    note="Host ahead: Python's least lead over the GPU at the end of a phase, including the hold before the step.",
    find=host_lead_s,
)


def _warnings(cell: DdpCell) -> str | None:
    found = {WAITS: waits_for_host(cell), "wide interval": is_vague(cell)}
    return ", ".join(word for word, is_so in found.items() if is_so) or None


_OTHERS: tuple[Figure[DdpCell], ...] = (
    Figure(
        key="deviation",
        header="vs one process",
        unit="error",
        rank=2,
        note="Vs one process: the largest distance between a parameter tensor and one process's, after two steps on "
        "all ranks' batches, over its change in them.",
        find=lambda cell: cell.deviation,
    ),
    Figure(key="first_step_s", header="first step", rank=7, find=lambda cell: cell.first_step_s),
    Figure(key="warnings", find=_warnings),
    Figure(key="traced_step_s", find=lambda cell: cell.traced.step_s if cell.traced else None),
    Figure(key="traced_communication_s", find=_traced(lambda traced: traced.communication_s)),
)


def time_figures(run: DdpRun) -> tuple[Figure[DdpCell], ...]:
    best_s = best_ddp_s(run.cells)
    knows_tokens = run.facts is None or run.facts.knows_tokens

    def usual_s(cell: DdpCell, phase: str = "step") -> float | None:
        return usual_baseline_s(run, phase) if _is_baseline(cell) else phase_s(cell, phase)

    def of_best(cell: DdpCell) -> float | None:
        added_s = exposed_s(cell)
        return added_s / best_s if added_s is not None and best_s else None

    def tokens_per_s(cell: DdpCell) -> float | None:
        step_s = usual_s(cell)
        return run.study.tokens / step_s if step_s and knows_tokens else None

    def of_phase(name: str) -> Figure[DdpCell]:
        header = {"gradient sync": "sync", "optimizer": "opt. step"}.get(name, name)
        note = "Sync: gradient sync, after backward." if header == "sync" else ""
        return Figure(
            key=f"{name.replace(' ', '_')}_s", header=header, rank=5, note=note, find=lambda cell: usual_s(cell, name)
        )

    return (
        Figure(key="step_s", header="step", find=usual_s),
        *_ADDED,
        Figure(
            key="of_best_ddp",
            header="× DDP",
            unit="times",
            rank=1,
            note="× DDP: exposed over torch DDP's at the bucket size with the shortest step, if that is surely above "
            "zero.",
            find=of_best,
        ),
        *_SENT,
        *map(of_phase, PHASES),
        _HOST_LEAD,
        Figure(
            key="rank_spread",
            header="spread over ranks",
            unit="share",
            rank=6,
            find=lambda cell: usual_spread(run) if _is_baseline(cell) else spread_over_ranks(cell),
        ),
        Figure(key="tokens_per_s", find=tokens_per_s),
        *_OTHERS,
    )


def _held(moment: str, owner: str = "", header: str | None = None, rank: int = 0) -> Figure[DdpCell]:
    def find(cell: DdpCell) -> int | None:
        memory = memory_at(cell, moment)
        if memory is None:
            return None
        if not owner:
            return memory.known_bytes + (memory.other_bytes or 0)
        size: int | None = getattr(memory, f"{owner}_bytes")
        return size

    return Figure(key=f"{moment}_{owner + '_' if owner else ''}bytes", header=header, rank=rank, find=find)


def _by_formula(moment: str, header: str | None = None, note: str = "") -> Figure[DdpCell]:
    def find(cell: DdpCell) -> int | None:
        expected = expected_at(cell, moment)
        return expected.known_bytes if expected else None

    return Figure(key=f"{moment}_formula_bytes", header=header, rank=2, note=note, find=find)


MEMORY = (
    *(_held(moment, header=words) for moment, words in MOMENT_WORDS.items()),
    _held("after_step", "parameters", "parameters", 2),
    _held("after_step", "gradients", "gradients", 2),
    _held("after_step", "optimizer", "optimizer state", 1),
    _held("after_step", "other", "other", 3),
    _by_formula(
        "after_step",
        "by formula",
        "The formula counts parameters, gradients and optimizer state. ZeRO divides the optimizer state (sharded), the "
        "gradients too (sharded, peer_copy), or all (FSDP2) by the number of ranks.",
    ),
    Figure(
        key="peak_bytes",
        header="peak of a step",
        rank=1,
        note="The peak is the allocator's, without the memory that peer copies share.",
        find=peak_bytes,
    ),
    *(_held(moment, owner) for moment in MOMENTS[:-1] for owner in CATEGORIES),
    *map(_by_formula, MOMENTS[:-1]),
)
"""Bytes of the rank with most memory; categories are measured after the first update."""
