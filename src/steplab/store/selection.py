"""Which records a reader asks for, as an SQL condition."""

from dataclasses import dataclass

NOT_SUPERSEDED = """NOT EXISTS (
    SELECT 1 FROM record AS newer
    WHERE newer.study = record.study AND newer.cell = record.cell AND newer.kind = record.kind
    AND (newer.created_utc, newer.seq) > (record.created_utc, record.seq)
)"""
"""True of the last attempt at a cell, and of every record that belongs to no study."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What a record must match; None does not restrict."""

    kind: str | None = None
    """run, ceilings, ..."""
    study: str | None = None
    """Id of the study it belongs to."""
    name: str | None = None
    """What the user called it."""
    status: str | None = None
    """ok, or the kind of a failure."""
    all_attempts: bool = False
    """Whether attempts that a newer one at the same cell has superseded count too."""

    def condition(self) -> str:
        """What stands behind WHERE, a placeholder for each of `values`."""
        conditions = [f"{column} = ?" for column, _ in self._given()]
        return " AND ".join([*conditions, "TRUE" if self.all_attempts else NOT_SUPERSEDED])

    def values(self) -> list[str]:
        """What the placeholders stand for."""
        return [value for _, value in self._given()]

    def _given(self) -> list[tuple[str, str]]:
        columns = (("kind", self.kind), ("study", self.study), ("name", self.name), ("status", self.status))
        return [(column, value) for column, value in columns if value is not None]
