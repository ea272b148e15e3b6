"""Turns of a step that alternated with others on the same device."""

from collections.abc import Iterator
from dataclasses import dataclass

from steplab.records.problems import Problem

MOST_IN_A_BLOCK = 3
"""Steps per block. Steps of a turn share its disturbances, so comparisons resample whole blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Consecutive steps, between other runs' turns."""

    place: int
    """Number among all turns of the session, from 0."""
    steps: int
    """Measured steps, in order within `timing.back_to_back`."""
    lead_in_s: tuple[float, ...] = ()
    """Seconds of the uncounted steps before them, while caches and clocks settle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Turns of one run in a session."""

    session: str
    """Id of the session, common to its alternating runs."""
    label: str
    """Name of the run in the session, such as 'A'."""
    turns: tuple[Turn, ...] = ()
    alternating: str | None = None
    """Reason for a process per turn; None: one process waited between turns."""

    @property
    def num_steps(self) -> int:
        return sum(turn.steps for turn in self.turns)

    def blocks_of(self, samples: tuple[float, ...]) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Blocks of at most MOST_IN_A_BLOCK samples of one turn, each with its turn's place."""
        blocks, first = [], 0
        for turn in self.turns:
            end = first + turn.steps
            blocks += [
                (turn.place, samples[start : min(start + MOST_IN_A_BLOCK, end)])
                for start in range(first, end, MOST_IN_A_BLOCK)
            ]
            first = end
        return tuple(blocks)

    def problems(self) -> Iterator[Problem]:
        places = [turn.place for turn in self.turns]
        if places != sorted(set(places)):
            yield ".turns", "are not in the order of their places"
