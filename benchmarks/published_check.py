"""Predictions beside steps that others measured and published, and the factors of each source.

    python -m benchmarks.published_check [TABLE.json.xz] > table.md            (from the root of the checkout)

Where a source has rows enough on a GPU, factors are fitted to those that are not of a row's like: of models of other
sizes, or where it has one model, on other numbers of GPUs. All other rows are predicted with the kernels' rates alone.
"""

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from benchmarks.published import TABLE, PublicLoad, PublicRow, StackRates, load_of, read_rows, split_step, step_of
from benchmarks.search import STAY, Params, search

from steplab.costs.flops import DTYPE_OF_MATMULS
from steplab.costs.rates import gpu_of
from steplab.errors import Unsupported
from steplab.specs.hardware import hardware_named
from steplab.stats import percentile

LEAST_ROWS = 4
"""Rows that a source needs on one GPU before factors are fitted."""
APART = 0.05
"""By which two measured steps of one job must differ, for their order to be more than noise."""
_MANY_ROWS = 20
"""From which on products, attention and streaming have a factor each, rather than one together."""
_KINDS = ("product_factor", "attention_factor", "streaming_factor")
_NETWORK = {
    True: {"network_bytes_per_s": 50e9, "exposed": 0.1},
    False: {"network_bytes_per_s": 50e9, "hop_s": 1e-5},
}
"""Figures of the network, by whether there are many rows; they start at a 400 Gbit/s card for each GPU. Of few rows, no
communication is taken to be hidden."""

Loaded = tuple[PublicRow, PublicLoad, float]
"""A row, its load and its measured seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCheck:
    """A prediction beside the measured seconds of a row."""

    row: PublicRow
    measured_s: float
    predicted_s: float | None = None
    spread: float = 0.0
    """Half of the 90 % interval, as a share of the prediction."""
    constant_s: float | None = None
    """By one share of the stated peak, the best for all rows of the source on this GPU."""
    unsupported: str | None = None
    """Why there is no prediction."""

    @property
    def error(self) -> float | None:
        return self.predicted_s / self.measured_s - 1 if self.predicted_s else None

    @property
    def constant_error(self) -> float | None:
        return self.constant_s / self.measured_s - 1 if self.constant_s else None

    @property
    def inside(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.predicted_s is not None and abs(self.measured_s / self.predicted_s - 1) <= self.spread


def counts(row: PublicRow) -> bool:
    """Whether a row's time is complete enough to be scored."""
    return row.scored and row.time_grade in ("A", "B") and row.measured_s is not None


def loaded_rows(rows: Sequence[PublicRow]) -> Iterator[Loaded]:
    """The rows that count and can be predicted."""
    for row in rows:
        measured = row.measured_s
        if not counts(row) or measured is None or row.card is None or row.is_split:
            continue
        try:
            load = load_of(row, gpu_of(hardware_named(row.card)))
        except Unsupported:
            continue
        yield row, load, measured


def check_rows(rows: Sequence[PublicRow]) -> list[RowCheck]:
    """A check of every row whose time counts, in their order."""
    scored = [row for row in rows if counts(row)]
    loaded = list(loaded_rows(scored))
    stacks, constants = unseen_stacks(loaded), _constants(scored)
    loads = {row.id: load for row, load, _ in loaded}
    return [_check_row(row, loads.get(row.id), stacks.get(row.id), constants.get(row.id)) for row in scored]


def _check_row(row: PublicRow, load: PublicLoad | None, stack: StackRates | None, constant_s: float | None) -> RowCheck:
    blank = RowCheck(row=row, measured_s=row.measured_s or math.nan, constant_s=constant_s)
    try:
        step_of(row)
        assert row.card is not None
        gpu = gpu_of(hardware_named(row.card))
        used = stack or StackRates(spread=gpu.rates.step.spread["elsewhere"])
        seconds = split_step(row, gpu).seconds if row.is_split else (load or load_of(row, gpu)).seconds(used)
    except Unsupported as error:
        return replace(blank, unsupported=error.why)
    return replace(blank, predicted_s=seconds, spread=used.spread)


# --- the factors of a source --------------------------------------------------------------------------------------


def unseen_stacks(rows: Sequence[Loaded]) -> dict[str, StackRates]:
    """For each row of a source with enough of them, by its id, the factors of a fit without the rows of its like; none
    for a source whose rows are all alike."""
    groups: dict[tuple[str, str], list[Loaded]] = defaultdict(list)
    for row, load, measured in rows:
        groups[row.group, str(row.card)].append((row, load, measured))
    found: dict[str, StackRates] = {}
    for own in groups.values():
        each = list(_unseen(own)) if len(own) >= LEAST_ROWS else []
        if each:
            spread = percentile([abs(load.seconds(stack) / measured - 1) for _, load, measured, stack in each], 90)
            found |= {row.id: replace(stack, spread=spread) for row, _, _, stack in each}
    return found


def _unseen(own: Sequence[Loaded]) -> Iterator[tuple[PublicRow, PublicLoad, float, StackRates]]:
    """Every row with a fit to those that are not of its like; nothing where all are."""
    many = len({row.model.key for row, _, _ in own}) > 1
    likes = {row.id: str(row.model.key if many else row.gpus) for row, _, _ in own}
    for like in sorted(set(likes.values())):
        rest = [each for each in own if likes[each[0].id] != like]
        if rest:
            stack = fitted_stack(rest)
            yield from ((row, load, seconds, stack) for row, load, seconds in own if likes[row.id] == like)


def fitted_stack(own: Sequence[Loaded]) -> StackRates:
    """The factors of a source on a GPU by these rows of it."""
    many, several_nodes = len(own) >= _MANY_ROWS, any(load.hops for _, load, _ in own)
    start = dict.fromkeys(_KINDS, 1.0) if many else {"all": 1.0}
    start |= _NETWORK[many] if several_nodes else {}

    def stack(params: Params) -> StackRates:
        kinds = dict.fromkeys(_KINDS, params["all"]) if "all" in params else {}
        rest = {name: value for name, value in params.items() if name != "all"}
        return StackRates(**({"exposed": 1.0} | _NETWORK[many] | kinds | rest))

    def error(params: Params) -> float:
        if params.get("exposed", 0.0) > 1:
            return math.inf
        trial = stack(params)
        away = sum(abs(math.log(params[name] / start[name])) for name in start)
        return sum(abs(math.log(load.seconds(trial) / measured)) for _, load, measured in own) / len(own) + STAY * away

    return stack(search(error, start))


def _constants(rows: Sequence[PublicRow]) -> dict[str, float]:
    """Seconds of each row by one share of the stated peak, of the model's FLOPs by the convention that suits it best
    (full: 6 N + 12 L d T a token), for all rows of a source on a GPU: the median of what they reach, fitted to all."""
    groups: dict[tuple[str, str], list[tuple[PublicRow, float]]] = defaultdict(list)
    for row in rows:
        try:
            spec = step_of(row)
        except Unsupported:
            continue
        assert row.card is not None
        passes = 1 if spec.pass_name == "forward" else 3
        attention = (row.model.layers or 0) * (row.model.hidden or 0) * spec.context
        flops = passes * 2 * (row.num_parameters + 2 * attention) * spec.tokens * spec.micro_steps
        flops *= spec.layout.data_ranks / (row.gpus or 1) if row.is_split else 1
        peak = hardware_named(row.card).peaks[DTYPE_OF_MATMULS[spec.precision]].flops_per_s
        groups[row.group, row.card].append((row, flops / peak))
    found: dict[str, float] = {}
    for own in groups.values():
        share = median(at_peak_s / (row.measured_s or 1.0) for row, at_peak_s in own)
        found |= {row.id: at_peak_s / share for row, at_peak_s in own}
    return found


# --- the tables ---------------------------------------------------------------------------------------------------


def groups_of(checks: Sequence[RowCheck]) -> dict[str, list[RowCheck]]:
    """The predicted rows of each source, and of each source on each GPU."""
    found: dict[str, list[RowCheck]] = defaultdict(list)
    for check in checks:
        if check.error is not None:
            found[check.row.group].append(check)
            found[f"{check.row.steplab_gpu or check.row.gpu}, {check.row.group}"].append(check)
    return dict(sorted(found.items()))


def summary(checks: Sequence[RowCheck]) -> tuple[str, ...]:
    """Of a group: rows, median error, p90, worst, share in the interval, and the constant's median and p90."""
    errors = [abs(check.error or 0.0) for check in checks]
    constants = [abs(check.constant_error or 0.0) for check in checks]
    figures = [median(errors), percentile(errors, 90), max(errors)], [median(constants), percentile(constants, 90)]
    off, of_constant = ([f"{100 * figure:.1f} %" for figure in some] for some in figures)
    inside = f"{100 * sum(check.inside for check in checks) / len(checks):.0f} %"
    return str(len(checks)), *off, inside, *of_constant


def ranking(checks: Sequence[RowCheck]) -> dict[str, list[bool]]:
    """By source, of pairs of one job whose measured times differ: whether they are predicted in the measured order."""
    found: dict[str, list[bool]] = defaultdict(list)
    for first, second in itertools.combinations([check for check in checks if check.predicted_s], 2):
        if first.row.job == second.row.job and abs(first.measured_s / second.measured_s - 1) > APART:
            predicted = (first.predicted_s or 0.0) < (second.predicted_s or 0.0)
            found[first.row.group].append((first.measured_s < second.measured_s) == predicted)
    return found


def main(table: str = str(TABLE)) -> None:
    """Print the tables as Markdown."""
    checks = check_rows(read_rows(Path(table)))
    print("| source | steps | median | p90 | worst | in the interval | best constant: median | p90 |")
    print("|---|---|---|---|---|---|---|---|")
    for name, group in groups_of(checks).items():
        print(f"| {' | '.join((name, *summary(group)))} |")
    print("\n| source | pairs of one job | in the measured order |\n|---|---|---|")
    for name, pairs in ranking(checks).items():
        print(f"| {name} | {len(pairs)} | {mean(pairs):.0%} |")
    print("\n| row | not predicted |\n|---|---|")
    for check in checks:
        if check.unsupported:
            print(f"| {check.row.id} | {check.unsupported} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
