"""Fits the factors of each source of published figures and GPU to its rows (plan.public).

The interval comes from rows that a fit has not seen: models of other sizes, or where a source has one model, other
numbers of GPUs.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from steplab.costs.rates import gpu_of
from steplab.errors import Unsupported
from steplab.plan.public import PublicLoad, PublicRow, StackRates, load_of
from steplab.plan.search import STAY, Params, search
from steplab.specs.hardware import hardware_named
from steplab.stats import percentile

LEAST_ROWS = 4
"""Rows that a source needs on one GPU before factors are fitted."""
_INTERVAL = 90
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


def counts(row: PublicRow) -> bool:
    """Whether a row's time is complete enough to be scored."""
    return row.scored and row.time_grade in ("A", "B") and row.measured_s is not None


def unseen_stacks(rows: Sequence[Loaded]) -> dict[str, StackRates]:
    """For each row of a source with enough of them, by its id, the factors of a fit without the rows of its like."""
    found: dict[str, StackRates] = {}
    for own in _groups(rows).values():
        each = list(_unseen(own))
        spread = percentile([abs(load.seconds(stack) / measured - 1) for _, load, measured, stack in each], _INTERVAL)
        found |= {row.id: dataclasses.replace(stack, spread=spread) for row, _, _, stack in each}
    return found


def _groups(rows: Sequence[Loaded]) -> dict[tuple[str, str], list[Loaded]]:
    found: dict[tuple[str, str], list[Loaded]] = defaultdict(list)
    for row, load, measured in rows:
        found[row.group, str(row.card)].append((row, load, measured))
    return {key: own for key, own in found.items() if len(own) >= LEAST_ROWS}


def _unseen(own: Sequence[Loaded]) -> Iterator[tuple[PublicRow, PublicLoad, float, StackRates]]:
    """Every row with a fit to the others: without the models of its size, or of a source with one model, without the
    rows of as many GPUs."""
    many = len({row.model.key for row, _, _ in own}) > 1
    likes = {row.id: str(row.model.key if many else row.gpus) for row, _, _ in own}
    for like in sorted(set(likes.values())):
        rest = [each for each in own if likes[each[0].id] != like]
        stack = fitted_stack(rest)
        yield from ((row, load, seconds, stack) for row, load, seconds in own if likes[row.id] == like)


def fitted_stack(own: Sequence[Loaded]) -> StackRates:
    """The factors of a source on a GPU by these rows of it."""
    many, several_nodes = len(own) >= _MANY_ROWS, any(load.hops for _, load, _ in own)
    start = dict.fromkeys(_KINDS, 1.0) if many else {"all": 1.0}
    start |= _NETWORK[many] if several_nodes else {}
    usual = _NETWORK[many]

    def stack(params: Params) -> StackRates:
        kinds = dict.fromkeys(_KINDS, params["all"]) if "all" in params else {}
        rest = {name: value for name, value in params.items() if name != "all"}
        return StackRates(**({"exposed": 1.0} | usual | kinds | rest))

    def error(params: Params) -> float:
        if params.get("exposed", 0.0) > 1:
            return math.inf
        trial = stack(params)
        away = sum(abs(math.log(params[name] / start[name])) for name in start)
        return sum(abs(math.log(load.seconds(trial) / measured)) for _, load, measured in own) / len(own) + STAY * away

    return stack(search(error, start))
