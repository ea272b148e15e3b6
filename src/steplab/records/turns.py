"""The turns in which a step was measured alternately with other steps on the same device."""

from collections.abc import Iterator
from dataclasses import dataclass

from steplab.records.problems import Problem

MOST_IN_A_BLOCK = 3
"""Steps of a block. The steps of a turn follow each other at once and share its disturbances, so that comparisons
resample whole blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Consecutive steps, between those of other runs of the session."""

    place: int
    """Number of the turn among all turns of the session, from 0."""
    steps: int
    """Measured steps. They follow those of the earlier turns in `timing.back_to_back`."""
    lead_in_s: tuple[float, ...] = ()
    """Times in seconds of the steps before them, in which caches and clocks settle; they are not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """The turns of one run in a session."""

    session: str
    """Identity of the session, which all runs that took turns with each other share."""
    label: str
    """Name of the run in the session, such as 'A'."""
    turns: tuple[Turn, ...] = ()
    """The turns in their order."""
    alternating: str | None = None
    """Why each turn had a process of its own; None: one process stayed alive for all turns and waited between them."""

    @property
    def num_steps(self) -> int:
        """Measured steps of all turns."""
        return sum(turn.steps for turn in self.turns)

    def blocks_of(self, samples: tuple[float, ...]) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """The samples in blocks of at most MOST_IN_A_BLOCK steps of one turn, each with the place of its turn."""
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
        """Yield what cannot be right (records.problems)."""
        places = [turn.place for turn in self.turns]
        if places != sorted(set(places)):
            yield ".turns", "are not in the order of their places"
