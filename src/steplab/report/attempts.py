"""Draws sections of a page; a record on which a section fails is left out of that section and reported."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from steplab.errors import LeftOut, warn_caller
from steplab.printing import plain
from steplab.report.kit.document import Identified

_MOST_LETTERS = 200


R = TypeVar("R", bound=Identified)
T = TypeVar("T")


class Attempts:
    """Tries to draw sections of some records.

    A store may hold a record that is wrong in an unforeseen way. It must not cost the figures of all other records.
    """

    def __init__(self) -> None:
        self.left_out: list[str] = []
        """One line per record left out of a section: the record, the section and the reason."""

    def draw(self, section: str, records: Sequence[R], draw: Callable[[Sequence[R]], T]) -> T:
        """Return `draw(records)`; where that fails, draw only the records on which it does not fail one by one.

        Where even that fails, draw no records, which `draw` must support. Each record left out is added to `left_out`
        and reported by a LeftOut warning.
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
        line = f"record {plain(record.id)} is left out of {section}, which cannot be drawn from it: {why}"
        self.left_out.append(line)
        warn_caller(LeftOut(line, error))
