"""Checks of imported records beyond their types: `check` refuses values that no steplab writes.

A record that a measurement made is right by construction. A record from a file may have columns of different lengths,
absurd numbers or unknown categories, which would fail in a report long after the import. Here they are refused in one
line that names the field.

There are two sorts of rules: those for any value (finite, not absurd, text in one line), with exceptions by the name of
the field, and those for values that must agree with each other, one function for each class in `_RULES`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from steplab.errors import SteplabError
from steplab.records.attention import AttentionCell
from steplab.records.ceilings import Ceiling
from steplab.records.comm import CommCell, CommFit, CommRun, RankTimes
from steplab.records.ddp import MOMENTS, DdpCell, DdpRank, DdpRun, Messages
from steplab.records.memory_profile import MEMORY_CATEGORIES, UNNAMED_CATEGORIES, MemoryProfile, MemoryTimeline
from steplab.records.numerics import Accumulation, Audit, Elements, MatmulAudit
from steplab.records.profile import CATEGORIES, OUTSIDE, PHASES, Profile, Timeline
from steplab.records.ranks import RankSamples
from steplab.records.record import Record
from steplab.records.run import Run, Utilization
from steplab.records.timing import PhaseSamples, Timing, find_phase
from steplab.specs.attention import PASSES
from steplab.specs.comm import COLLECTIVES
from steplab.specs.model import TransformerShape

Problem = tuple[str, str]
"""Path of a field within the checked value, such as '.device_s[3]', and what is wrong with it."""

LARGEST = 1e18
"""Upper bound of every time, count and size: thirty billion years, or an exabyte."""
LARGEST_FLOPS = 1e30
"""Upper bound of FLOPs and FLOP/s."""

_OF_TENSORS = frozenset(
    {"loss", "reference_loss", "largest", "smallest", "largest_gradient", "suggested_scale", "number", "addend_value",
     "result", "start", "spacing", "added"}
)  # fmt: skip
"""Fields with values of tensors, which have any size and sign."""
_SIGNED = frozenset(
    {"worst_relative", "worst_fit", "alpha_s", "beta_s_per_byte", "gamma_s_per_rank", "call_s", "lead_s", "stream",
     "gradient_exponents", "temperature_c", "outside_bytes"}
)  # fmt: skip
"""Fields that may be negative: fitted values, differences, exponents, and the stream -1, which means not known."""
_AS_GIVEN = frozenset({"hf_config"})
"""Fields with the content of a user's file, which reports do not show and which is not checked."""

_MOST_LAYERS = 10_000

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_UNPRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except the tab, other line breaks, marks of writing direction, and surrogates."""
_STEP_PHASES = ("step", *PHASES)
_MEMORY_CATEGORIES = {*MEMORY_CATEGORIES, *UNNAMED_CATEGORIES}
_SENT = (*COLLECTIVES, "reduce", "gather", "scatter", "barrier")


def check(record: Record) -> None:
    """Raise SteplabError, naming the record and the path of the first field that cannot be right."""
    shown = record.id if _ID.fullmatch(record.id) else ascii(record.id[:64])
    for path, why in _problems(record, ""):
        raise SteplabError(f"record {shown}: {path.removeprefix('.')} {why}")


def _problems(value: Any, name: str) -> Iterator[Problem]:
    """All problems of a value in a field of this name, including those of values inside it."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in _AS_GIVEN:
                yield from _within(f".{field.name}", _problems(getattr(value, field.name), field.name))
        if rule := _RULES.get(type(value)):
            yield from rule(value)
    elif isinstance(value, str):
        yield from _text_problems(value, name)
    elif isinstance(value, (int, float)):
        yield from _number_problems(value, name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _within(f"[{ascii(key)[:80]}]", (*_problems(key, ""), *_problems(item, name)))
    elif isinstance(value, Sequence) and not _are_plain_counts(value):
        for index, item in enumerate(value):
            yield from _within(f"[{index}]", _problems(item, name))


def _are_plain_counts(values: Sequence[Any]) -> bool:
    """Whether these are numbers that every field allows; a fast check of the common case, over all of them at once."""
    if not values or not set(map(type, values)) <= {int, float}:
        return False
    total = sum(values)  # NaN, where one is
    return bool(min(values) >= 0 and total < LARGEST)


def _text_problems(text: str, name: str) -> Iterator[Problem]:
    if name == "id" and not _ID.fullmatch(text):
        yield "", f"must be up to 64 letters, digits, '-' and '_', not {text[:64]!a}"
    if name == "created_utc" and not _is_time(text):
        yield "", f"must be a time such as 2026-11-21T07:30:00Z, not {text[:64]!a}"
    if found := _UNPRINTABLE.search(text):
        yield "", f"has the control character {found[0]!a} at position {found.start()}"


def _is_time(text: str) -> bool:
    try:
        return bool(_TIME.fullmatch(text) and datetime.fromisoformat(text))
    except ValueError:
        return False


def _number_problems(number: float, name: str) -> Iterator[Problem]:
    if isinstance(number, float) and not math.isfinite(number):
        yield "", f"must be a finite number, not {number}"
    elif name not in _OF_TENSORS:
        most = LARGEST_FLOPS if "flops" in name else LARGEST
        if abs(number) >= most:
            yield "", f"must be below {most:.0e}, not {_short(number)}"
        elif number < 0 and name not in _SIGNED:
            yield "", f"must not be negative, but is {_short(number)}"


def _short(number: float) -> str:
    return f"{number:.6g}" if isinstance(number, float) else str(number) if abs(number) < 10**24 else "a longer number"


def _within(path: str, problems: Iterator[Problem] | Sequence[Problem]) -> Iterator[Problem]:
    return ((path + inner, why) for inner, why in problems)


# --- values that must agree -----------------------------------------------------------------------------------


def _known(path: str, value: str, known: Sequence[str] | set[str]) -> Iterator[Problem]:
    if value not in known:
        yield path, f"'{value[:64]}' is not known; it must be one of {', '.join(sorted(known))}"


def _as_long(path: str, column: Sequence[object], length: int, other: str) -> Iterator[Problem]:
    if len(column) != length:
        yield path, f"has {len(column)} entries, but {other} has {length}"


def _phase_samples(phase: PhaseSamples) -> Iterator[Problem]:
    clocks = {name: getattr(phase, name) for name in ("device_s", "host_s", "lead_s")}
    given = {name: samples for name, samples in clocks.items() if samples is not None}
    for name, samples in given.items():
        yield from _as_long(f".{name}", samples, len(phase.best_s), ".device_s" if phase.device_s else ".host_s")
    if phase.phase == "step" and not all(phase.best_s):
        yield ".device_s" if phase.device_s else ".host_s", "has a step that took no time"


def _phases(
    path: str, phases: Sequence[PhaseSamples], *, in_each_step: bool = True, may_be_empty: bool = False
) -> Iterator[Problem]:
    """Problems of the phases of the same steps. In a user's own loop a phase need not occur in each step."""
    if len({phase.phase for phase in phases}) < len(phases):
        yield path, "has the same phase twice"
    steps = find_phase(tuple(phases), "step") or next(iter(phases), None)
    for index, phase in enumerate(phases):
        count, most = len(phase.best_s), len(steps.best_s) if steps else 0
        if not count and not may_be_empty:
            yield f"{path}[{index}]", "has no samples"
        if count > most or (in_each_step and count < most):
            yield f"{path}[{index}]", f"has {count} samples of {phase.phase[:64]}, where others have {most}"


def _timing(timing: Timing, *, in_each_step: bool) -> Iterator[Problem]:
    yield from _phases(".timing.warmup", timing.warmup, in_each_step=in_each_step, may_be_empty=True)
    yield from _phases(".timing.synchronised", timing.synchronised, in_each_step=in_each_step)
    yield from _measured(".timing.back_to_back", timing.back_to_back, in_each_step=in_each_step)


def _measured(path: str, phases: Sequence[PhaseSamples], *, in_each_step: bool = True) -> Iterator[Problem]:
    yield from _phases(path, phases, in_each_step=in_each_step)
    if phases and not find_phase(tuple(phases), "step"):
        yield path, "lacks the phase step"


def _numbered(path: str, numbers: Sequence[int], expected: int | None = None) -> Iterator[Problem]:
    """Problems of the numbers of ranks, which must be complete and in order."""
    if list(numbers) != list(range(len(numbers))):
        yield path, f"must be ranks 0 to {len(numbers) - 1} in order, not {', '.join(map(str, numbers[:8]))}"
    elif numbers and expected is not None and len(numbers) != expected:
        yield path, f"has {len(numbers)} ranks, but {expected} took part"


def _run(run: Run) -> Iterator[Problem]:
    if run.timing:
        yield from _timing(run.timing, in_each_step=run.spec is not None)
        for index, phase in enumerate(run.timing.back_to_back):
            if run.spec:
                yield from _known(f".timing.back_to_back[{index}].phase", phase.phase, _STEP_PHASES)
    yield from _numbered(".ranks", [rank.rank for rank in run.ranks], run.spec.layout.world_size if run.spec else None)
    first = run.ranks[0].phase("step") if run.ranks else None
    for index, rank in enumerate(run.ranks):
        step = rank.phase("step")
        if first and step and len(step.best_s) != len(first.best_s):
            yield f".ranks[{index}].back_to_back", f"has {len(step.best_s)} steps, but rank 0 has {len(first.best_s)}"


def _rank_samples(rank: RankSamples) -> Iterator[Problem]:
    yield from _measured(".back_to_back", rank.back_to_back)


def _shape(shape: TransformerShape) -> Iterator[Problem]:
    if shape.num_layers > _MOST_LAYERS:  # they are walked through one by one where memory is predicted
        yield ".num_layers", f"must be at most {_MOST_LAYERS}, not {shape.num_layers}"


def _utilization(used: Utilization) -> Iterator[Problem]:
    if used.num_devices < 1:
        yield ".num_devices", "must be at least 1, not 0"


def _timeline(timeline: Timeline) -> Iterator[Problem]:
    yield from _as_long(".categories", timeline.categories, len(timeline.names), ".names")
    for name in ("stream", "start_ns", "duration_ns"):
        yield from _as_long(f".{name}", getattr(timeline, name), len(timeline.kernel), ".kernel")
    for index, kernel in enumerate(timeline.kernel):
        if kernel >= len(timeline.names):
            yield f".kernel[{index}]", f"is number {kernel} of {len(timeline.names)} names"
    for field in ("phases", "ranges"):
        for index, (_, start, end, *_) in enumerate(getattr(timeline, field)):
            if end < start:
                yield f".{field}[{index}]", f"ends at {end} ns, before it starts at {start} ns"


def _profile(profile: Profile) -> Iterator[Problem]:
    phases = (*PHASES, OUTSIDE)
    if profile.num_steps < 1:
        yield ".num_steps", "must be at least 1, not 0"
    if not profile.phases:
        yield ".phases", "is empty"
    for field in ("phases", "kernels", "ops", "host_calls"):
        for index, part in enumerate(getattr(profile, field)):
            yield from _known(f".{field}[{index}].phase", part.phase, phases)
            if field in ("kernels", "ops"):
                yield from _known(f".{field}[{index}].category", part.category, CATEGORIES)
            if getattr(part, "calls", 1) < 1:
                yield f".{field}[{index}].calls", "must be at least 1, not 0"
    for index, phase in enumerate(profile.phases):
        for category in phase.categories:
            yield from _known(f".phases[{index}].categories", category, CATEGORIES)
    if timeline := profile.timeline:
        for index, category in enumerate(timeline.categories):
            yield from _known(f".timeline.categories[{index}]", category, CATEGORIES)
        for index, (phase_name, *_) in enumerate(timeline.phases):
            yield from _known(f".timeline.phases[{index}]", phase_name, phases)


def _memory_profile(profile: MemoryProfile) -> Iterator[Problem]:
    for category in profile.at_peak:
        yield from _known(".at_peak", category, _MEMORY_CATEGORIES)
    if (total := sum(profile.at_peak.values())) != profile.peak_bytes:
        yield ".at_peak", f"sums to {total} bytes, but the peak is {profile.peak_bytes}"
    for index, made in enumerate(profile.largest):
        yield from _known(f".largest[{index}].category", made.category, _MEMORY_CATEGORIES)
    for index, kept in enumerate(profile.saved):
        yield from _known(f".saved[{index}].category", kept.category, _MEMORY_CATEGORIES)
    for field in ("largest", "saved"):
        for index, group in enumerate(getattr(profile, field)):
            if group.count < 1:
                yield f".{field}[{index}].count", "must be at least 1, not 0"
    for index, phase in enumerate(profile.phases):
        if phase.end_s < phase.start_s:
            yield f".phases[{index}]", f"ends at {phase.end_s} s, before it starts at {phase.start_s} s"


def _memory_timeline(timeline: MemoryTimeline) -> Iterator[Problem]:
    if not timeline.time_s:
        yield ".time_s", "is empty"
    if any(later < earlier for earlier, later in zip(timeline.time_s, timeline.time_s[1:], strict=False)):
        yield ".time_s", "does not ascend"
    for index, category in enumerate(timeline.categories):
        yield from _known(f".categories[{index}]", category, _MEMORY_CATEGORIES)
    yield from _as_long(".allocated_bytes", timeline.allocated_bytes, len(timeline.categories), ".categories")
    for index, column in enumerate(timeline.allocated_bytes):
        yield from _as_long(f".allocated_bytes[{index}]", column, len(timeline.time_s), ".time_s")


def _rank_times(times: RankTimes) -> Iterator[Problem]:
    if not times.best_s or not all(times.best_s):
        yield ".device_s" if times.device_s else ".alone_s", "has no samples, or one that took no time"
    if times.calls_per_sample < 1:
        yield ".calls_per_sample", "must be at least 1, not 0"


def _comm_cell(cell: CommCell) -> Iterator[Problem]:
    yield from _numbered(".ranks", [times.rank for times in cell.ranks], cell.spec.world_size)
    if not cell.failure and not cell.ranks:
        yield ".ranks", "is empty, and no failure says why"


def _comm_fit(fit: CommFit) -> Iterator[Problem]:
    yield from _known(".collective", fit.collective, COLLECTIVES)


def _comm_run(run: CommRun) -> Iterator[Problem]:
    yield from _numbered(".ranks", [rank.rank for rank in run.ranks], run.study.num_processes)


def _ddp_rank(rank: DdpRank) -> Iterator[Problem]:
    yield from _measured(".phases", rank.phases)
    yield from _measured(".baseline", rank.baseline)
    for index, memory in enumerate(rank.memory):
        yield from _known(f".memory[{index}].moment", memory.moment, MOMENTS)


def _ddp_cell(cell: DdpCell) -> Iterator[Problem]:
    for index, messages in enumerate(cell.messages):
        yield from _known(f".messages[{index}].collective", messages.collective, _SENT)
    if not cell.failure and not cell.ranks:
        yield ".ranks", "is empty, and no failure says why"


def _ddp_run(run: DdpRun) -> Iterator[Problem]:
    for index, cell in enumerate(run.cells):
        yield from _numbered(f".cells[{index}].ranks", [rank.rank for rank in cell.ranks], run.study.processes)
        if cell.contender not in run.study.contenders:
            yield f".cells[{index}].contender", f"must be a variant of the study, not {cell.contender.label}"
    if run.facts:
        yield from _numbered(".facts.places", [place.rank for place in run.facts.places], run.study.processes)


def _messages(messages: Messages) -> Iterator[Problem]:
    if not messages.sizes_bytes:
        yield ".sizes_bytes", "is empty"


def _attention_cell(cell: AttentionCell) -> Iterator[Problem]:
    for index, timed in enumerate(cell.passes):
        yield from _known(f".passes[{index}].phase", timed.phase, PASSES)
        if not timed.best_s or not all(timed.best_s):
            yield f".passes[{index}]", "has no samples, or one that took no time"
    for name in cell.flops:
        yield from _known(".flops", name, PASSES)
    if not cell.failure and not cell.passes:
        yield ".passes", "is empty, and no failure says why"


def _ceiling(ceiling: Ceiling) -> Iterator[Problem]:
    if not ceiling.seconds or not all(ceiling.seconds):
        yield ".seconds", "has no samples, or one that took no time"
    yield from _known(".unit", ceiling.unit, ("FLOP/s", "B/s"))


def _elements(elements: Elements) -> Iterator[Problem]:
    for name in ("inf", "nan", "zero", "subnormal", "overflowed", "underflowed", "below_range"):
        count = getattr(elements, f"num_{name}")
        if count is not None and count > elements.num_elements:
            yield f".num_{name}", f"is {count} of {elements.num_elements} elements"


def _audit(audit: Audit) -> Iterator[Problem]:
    for index, (exponent, _) in enumerate(audit.gradient_exponents):
        if abs(exponent) > 1100:
            yield f".gradient_exponents[{index}]", f"must be an exponent from -1100 to 1100, not {exponent}"


def _matmul_audit(matmul: MatmulAudit) -> Iterator[Problem]:
    yield from _known(".phase", matmul.phase, ("forward", "backward"))


def _accumulation(accumulation: Accumulation) -> Iterator[Problem]:
    if not accumulation.binades:
        yield ".binades", "is empty"
    if accumulation.num_rounded > accumulation.num_additions:
        yield ".num_rounded", f"is {accumulation.num_rounded} of {accumulation.num_additions} additions"


_RULES: dict[type, Callable[[Any], Iterator[Problem]]] = {
    PhaseSamples: _phase_samples,
    Run: _run,
    RankSamples: _rank_samples,
    Utilization: _utilization,
    Timeline: _timeline,
    Profile: _profile,
    MemoryProfile: _memory_profile,
    MemoryTimeline: _memory_timeline,
    RankTimes: _rank_times,
    CommCell: _comm_cell,
    CommFit: _comm_fit,
    CommRun: _comm_run,
    DdpRank: _ddp_rank,
    DdpCell: _ddp_cell,
    DdpRun: _ddp_run,
    Messages: _messages,
    TransformerShape: _shape,
    AttentionCell: _attention_cell,
    Ceiling: _ceiling,
    Elements: _elements,
    Audit: _audit,
    MatmulAudit: _matmul_audit,
    Accumulation: _accumulation,
}
