"""A small table of texts, for the terminal and for the page alike."""

from dataclasses import dataclass, field, replace

_OPEN_ROWS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A table."""

    headers: tuple[str, ...]
    """Column headings."""
    rows: tuple[tuple[str, ...], ...]
    """Texts."""
    numeric: tuple[bool, ...]
    """Whether each column holds figures."""
    caption: str = ""
    """What all rows share."""
    bad_rows: frozenset[int] = field(default=frozenset())
    """Indices of rows about failures."""
    whole: frozenset[str] = field(default=frozenset())
    """Headings of the columns of text whose texts stay on one line of a terminal."""
    open_rows: int = _OPEN_ROWS
    """With how many rows at most it starts open on a page."""

    @property
    def folded(self) -> bool:
        """Whether it is long enough to start closed on a page."""
        return len(self.rows) > self.open_rows

    def remarking(self, remark: str) -> "Grid":
        """The table with a further sentence in its caption."""
        return replace(self, caption=f"{self.caption} {remark}".strip())

    def without(self, *headers: str) -> "Grid":
        """The table without these columns."""
        kept = [index for index, header in enumerate(self.headers) if header not in headers]
        return replace(
            self,
            headers=tuple(self.headers[index] for index in kept),
            rows=tuple(tuple(row[index] for index in kept) for row in self.rows),
            numeric=tuple(self.numeric[index] for index in kept),
        )
