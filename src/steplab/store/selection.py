"""The records that a reader asks for, as an SQL condition."""

from dataclasses import dataclass

FINISHED = "('ok', 'out_of_memory', 'error')"
"""The statuses of an attempt that stands. A cell that crashed or timed out may go better next time."""
NOT_SUPERSEDED = f"""NOT EXISTS (
    SELECT 1 FROM record AS newer
    WHERE newer.study = record.study AND newer.cell = record.cell AND newer.kind = record.kind
    AND (newer.status IN {FINISHED}, newer.created_utc, newer.seq)
        > (record.status IN {FINISHED}, record.created_utc, record.seq)
)"""
"""True for the last attempt at a cell, and for every record outside of a study.

One that stands is never hidden by one that crashed or timed out: attempts end with the first that stands, so that the
other can be the newer only by a clock that was set back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The values that a record must match; None does not restrict."""

    kind: str | None = None
    """The record's kind: run, ceilings, ..."""
    study: str | None = None
    """The id of the record's study."""
    name: str | None = None
    """The name that the user gave."""
    status: str | None = None
    """The record's status: ok, or the kind of a failure."""
    outside_studies: bool = False
    """Whether the record must belong to no study."""
    all_attempts: bool = False
    """Whether attempts count that a newer attempt at the same cell has superseded."""

    def condition(self) -> str:
        """The condition behind WHERE, with a placeholder for each of `values`."""
        conditions = [f"{column} = ?" for column, _ in self._given()]
        if self.outside_studies:
            conditions.append("study IS NULL")
        return " AND ".join([*conditions, "TRUE" if self.all_attempts else NOT_SUPERSEDED])

    def values(self) -> list[str]:
        """The values of the placeholders."""
        return [value for _, value in self._given()]

    def _given(self) -> list[tuple[str, str]]:
        columns = (("kind", self.kind), ("study", self.study), ("name", self.name), ("status", self.status))
        return [(column, value) for column, value in columns if value is not None]
