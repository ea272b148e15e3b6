"""Drawing what can be drawn: a record that a section fails on is left out of that section, and said to be."""

import warnings
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from steplab.errors import LeftOut
from steplab.report.kit.text import plain

_MOST_LETTERS = 200


class Identified(Protocol):
    """A record, or what stands for one."""

    @property
    def id(self) -> str:
        """The record's."""


R = TypeVar("R", bound=Identified)
T = TypeVar("T")


class Attempts:
    """Tries to draw sections of some records.

    A record can be wrong in ways that nobody thought of, and is in the store all the same. One such must not take the
    figures of all others with it.
    """

    def __init__(self) -> None:
        self.left_out: list[str] = []
        """A line for each record that a section is without: which, of what, why."""

    def draw(self, section: str, records: Sequence[R], draw: Callable[[Sequence[R]], T]) -> T:
        """`draw(records)`; where that fails, of those records alone that it does not fail on one by one.

        Where even that fails, of none: `draw` must be able to draw nothing. Each record left out is told in `left_out`
        and by a LeftOut warning.
        """
        try:
            return draw(records)
        except Exception as error:
            failure = error
        good = [record for record in records if self._draws_alone(section, record, draw)]
        if good and len(good) < len(records):
            try:
                return draw(good)
            except Exception as error:
                failure = error
        for record in good:
            self._leave_out(section, record, failure)
        return draw(())

    def _draws_alone(self, section: str, record: R, draw: Callable[[Sequence[R]], T]) -> bool:
        try:
            draw([record])
        except Exception as error:
            self._leave_out(section, record, error)
            return False
        return True

    def _leave_out(self, section: str, record: Identified, error: Exception) -> None:
        why = plain(" ".join(f"{type(error).__name__}: {error}".split()))[:_MOST_LETTERS]
        line = f"record {plain(record.id)} is left out of {section}, which cannot be drawn of it: {why}"
        self.left_out.append(line)
        warnings.warn(LeftOut(line, error), stacklevel=4)
