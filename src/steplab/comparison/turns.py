"""The ratio of the step times of two runs that took turns on one device."""

from collections.abc import Sequence

from steplab.comparison.samples import Blocks, compare_samples
from steplab.records.comparison import Ratio
from steplab.records.run import Run


def step_ratio(a: Run, b: Run, *, threshold: float | None = None, tokens_ratio: float = 1.0) -> Ratio | None:
    """The step time of `b` over that of `a`, on the tokens of a step of `a`.

    A run that was there before the other may have had turns beside further runs; those are left out. `tokens_ratio` is
    the tokens per step of `b` divided by those of `a`. None: one of them has no steps, or they took no turns with each
    other.
    """
    of_a, of_b = _blocks(a), _blocks(b)
    if not of_a or not of_b or not a.turns or not b.turns or a.turns.session != b.turns.session:
        return None
    if of_a[0][0] < of_b[0][0]:
        of_a = _beside(of_a, of_b)
    else:
        of_b = _beside(of_b, of_a)
    return _ratio(
        [samples for _, samples in of_a],
        [[sample / tokens_ratio for sample in samples] for _, samples in of_b],
        threshold,
        alternating=bool(a.turns.alternating or b.turns.alternating),
    )


_Placed = Sequence[tuple[int, tuple[float, ...]]]
"""Samples of blocks, each with the place of its turn."""


def _beside(earlier: _Placed, later: _Placed) -> _Placed:
    """The blocks of the run that was there first that lie beside those of the other, which it precedes in a round."""
    first, last = later[0][0], later[-1][0]
    start = max(place for place, _ in earlier if place < first)
    end = min((place for place, _ in earlier if place > last), default=last)
    return [(place, samples) for place, samples in earlier if start <= place <= end]


def _ratio(of_a: Blocks, of_b: Blocks, threshold: float | None, *, alternating: bool) -> Ratio | None:
    """Turns are compared pair by pair, in their order; where each was a process of its own they are too few."""
    if alternating:
        together = [[sample for block in side for sample in block] for side in (of_a, of_b)]
        return compare_samples(together[:1], together[1:], in_turns=False, threshold=threshold)
    both = min(len(of_a), len(of_b))
    return compare_samples(of_a[:both], of_b[:both], in_turns=True, threshold=threshold) if both else None


def _blocks(run: Run) -> _Placed:
    step = run.timing.phase("step") if run.timing and not run.failure else None
    return run.turns.blocks_of(step.best_s) if run.turns and step else ()
