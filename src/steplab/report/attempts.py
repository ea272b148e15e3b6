"""Draws sections of a page; a record whose drawing raises an exception is left out and reported."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from steplab.errors import LeftOut, warn_caller
from steplab.printing import plain
from steplab.report.kit.document import Identified

_MOST_LETTERS = 200


R = TypeVar("R", bound=Identified)
T = TypeVar("T")


class Attempts:
    def __init__(self) -> None:
        self.left_out: list[str] = []

    def draw(self, section: str, records: Sequence[R], draw: Callable[[Sequence[R]], T]) -> T:
        """Call `draw(records)` for a section, without the records that make it raise; each gives a LeftOut warning.

        If the remaining records still raise together, `draw(())` is returned.
        """
        good = records
        try:
            return draw(good)
        except Exception:
            good = [record for record in records if self._draws_alone(section, record, draw)]
        try:
            return draw(good)
        except Exception as error:
            for record in good:
                self._leave_out(section, record, error)
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
        line = f"record {plain(record.id)} is left out of {section}, which cannot be drawn from it: {why}"
        self.left_out.append(line)
        warn_caller(LeftOut(line, error))
