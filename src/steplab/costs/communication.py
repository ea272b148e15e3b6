"""Bytes on the wire and bus bandwidth of collectives, and a line fitted to their measured times.

Bus bandwidth follows nccl-tests (PERFORMANCE.md): S / t for a message of S bytes, times the share of S that each rank
must send in a ring (all-reduce over n ranks: 2 (n - 1) / n). It compares with the links' bandwidth for any collective
and number of ranks.

A call is modelled as t = alpha + beta · w (Hockney 1994), w the bytes on the wire, optionally plus gamma · n for n
ranks. The fit minimizes squares of *relative* differences, so all message lengths weigh the same; no term is negative.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from steplab.specs.comm import CommSpec

FEWEST_SIZES = 3
"""Fewest sizes for a fit: two points always fit a line exactly."""


def bus_factor(collective: str, world_size: int) -> float:
    if collective == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (world_size - 1) / world_size
    return 1.0  # broadcast, reduce, send_recv


def wire_bytes(spec: CommSpec) -> float:
    return spec.message_bytes * bus_factor(spec.collective, spec.world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    wire_bytes: float
    world_size: int
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_rank: float | None = None
    num_points: int
    rms_relative: float
    """Root mean square of (fitted - measured) / measured."""
    worst_relative: float
    """The (fitted - measured) / measured of largest magnitude, with its sign."""


def fit_line(points: Sequence[Point], *, by_rank: bool = False) -> Line | None:
    """Fit the line to measured times; `by_rank` adds the term for the number of ranks.

    None for fewer than FEWEST_SIZES different sizes. `by_rank` also needs two world sizes and four points.
    """
    sizes = {point.wire_bytes for point in points}
    worlds = {point.world_size for point in points}
    if len(sizes) < FEWEST_SIZES or (by_rank and (len(worlds) < 2 or len(points) < 4)):
        return None
    import numpy as np

    times = np.array([point.time_s for point in points])
    columns = [np.ones(len(points)), np.array([point.wire_bytes for point in points])]
    columns += [np.array([float(point.world_size) for point in points])] if by_rank else []
    matrix = np.stack(columns, axis=1) / times[:, None]  # relative differences: each row should give 1
    scale = np.linalg.norm(matrix, axis=0)
    best: tuple[float, np.ndarray] | None = None
    # The best of all choices of terms without a negative one: exact for at most three terms.
    for count in range(1, len(columns) + 1):
        for chosen in map(list, itertools.combinations(range(len(columns)), count)):
            found = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], np.ones(len(points)), rcond=None)[0]
            if (found < 0).any():
                continue
            terms = np.zeros(len(columns))
            terms[chosen] = found / scale[chosen]
            error = float(np.square(matrix @ terms - 1).mean())
            if best is None or error < best[0]:
                best = error, terms
    assert best is not None  # a single term is never negative: all entries are positive
    relative = matrix @ best[1] - 1
    alpha_s, beta, *gamma = best[1].tolist()
    return Line(
        alpha_s=alpha_s,
        beta_s_per_byte=beta,
        gamma_s_per_rank=gamma[0] if by_rank else None,
        num_points=len(points),
        rms_relative=best[0] ** 0.5,
        worst_relative=float(relative[np.abs(relative).argmax()]),
    )
