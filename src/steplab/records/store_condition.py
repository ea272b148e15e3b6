"""The condition of a store's file, as `steplab store check` finds it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadableRecord:
    """A stored record that cannot be read."""

    id: str
    """Its id, or what is left of it."""
    kind: str
    """Its kind, or what is left of it."""
    created_utc: str
    """When it was made, or what is left of that."""
    why: str
    """Why it cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreCondition:
    """What is in a store's file, and what is wrong with it."""

    path: str
    """The file."""
    format: int
    """The store's format."""
    size_bytes: int
    """Size of the file in bytes."""
    free_bytes: int
    """Bytes of the file that hold nothing, which `compact` gives back."""
    journal: str
    """SQLite's journal mode: wal (write-ahead log) or, on network folders, delete."""
    file_system: str | None
    """The network file system that the store is on; None: a local one, or not known."""
    num_records: int
    """Number of records that can be read, or belong to a newer steplab."""
    num_studies: int
    """Number of studies."""
    num_outdated: int
    """Number of records whose row in lists is not what this version makes of them; `repair` makes those rows again."""
    has_unreachable: bool
    """Whether SQLite cannot read parts of the file where records may have been."""
    unreadable: tuple[UnreadableRecord, ...]
    """The records that cannot be read."""
    damage: tuple[str, ...]
    """What SQLite's integrity check finds; empty for a sound file."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not (self.damage or self.unreadable or self.has_unreachable)
