"""Whether a variant of a data-parallel study has given its memory back before the next one is built."""

from types import SimpleNamespace
from typing import Any

import pytest

from steplab.measurement.ddp import session as ddp_session
from steplab.units import GIB

BASELINE = 20 * GIB


def left_behind(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[str, ...], int | None]:
    """The notes where the allocator counts this, look by look, a second apart; and what counts as others' then."""
    looks, clock = iter([*counts, *[counts[-1]] * 100]), iter(range(1000))
    monkeypatch.setattr(ddp_session, "free", lambda device: next(looks))
    monkeypatch.setattr(ddp_session, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    session: Any = object.__new__(ddp_session._Session)
    session._world, session._baseline_bytes = SimpleNamespace(device=None), BASELINE
    return session._left_behind(), session._baseline_bytes


def test_what_is_let_go_of_a_little_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left_behind([BASELINE + 7 * GIB, BASELINE + 5 * GIB, BASELINE], monkeypatch) == ((), BASELINE)


def test_what_stays_is_told_of_and_counts_as_held_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    (note,), held = left_behind([BASELINE + 7 * GIB], monkeypatch)
    assert note == "memory: 7.00 GiB were not freed after the variant was measured"
    assert held == BASELINE + 7 * GIB
