"""The category of each piece of memory."""

from collections.abc import Iterator, Sequence

import numpy as np

from steplab.records.memory_marks import Marks, Stretch
from steplab.records.memory_profile import MEASURED_CATEGORIES, UNNAMED_CATEGORIES
from steplab.snapshots.history import NONE, Codes
from steplab.snapshots.positions import Positions, Residents
from steplab.snapshots.replay import Lifetimes


def unnamed_categories(lifetimes: Lifetimes) -> Codes:
    """Places in UNNAMED_CATEGORIES, for a snapshot without marks."""
    before, during = UNNAMED_CATEGORIES.index("before"), UNNAMED_CATEGORIES.index("during")
    return np.where(lifetimes.start == NONE, before, during).astype(np.int8)


def categories(lifetimes: Lifetimes, marks: Marks, positions: Positions, residents: Residents) -> Codes:
    """Places in MEASURED_CATEGORIES, where each category is described. A piece belongs to the first owner that is
    named for it."""
    codes: Codes = np.full(len(lifetimes), MEASURED_CATEGORIES.index("temporaries"), dtype=np.int8)
    always = (lifetimes.start == NONE) & (lifetimes.end == lifetimes.num_events)
    codes[always] = MEASURED_CATEGORIES.index("workspaces")
    ordinals = positions.ordinals(lifetimes.start)
    for stretch in _forward_stretches(marks):
        made = (ordinals >= stretch.start) & (ordinals < stretch.end)
        kept = lifetimes.end >= positions.last_moment(stretch.end)
        codes[made & kept & (lifetimes.end < lifetimes.num_events)] = MEASURED_CATEGORIES.index("activations")
    owned = [owner for owner in marks.owned if owner.category in MEASURED_CATEGORIES]
    pieces = residents.find([owner.address for owner in owned], [owner.position for owner in owned])
    for piece, owner in reversed(list(zip(pieces.tolist(), owned, strict=True))):
        if piece != NONE:
            codes[piece] = MEASURED_CATEGORIES.index(owner.category)
    return codes


def _forward_stretches(marks: Marks) -> Iterator[Stretch]:
    """The forward passes whose results a backward pass uses: those of the step, and those that are repeated within
    it."""
    names = [phase.name for phase in marks.phases]
    if "forward" in names and "backward" in names:
        yield from (phase for phase in marks.phases if phase.name == "forward")
    yield from _outermost([module for module in marks.modules if module.in_backward])


def _outermost(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    end = NONE
    for stretch in stretches:
        if stretch.start >= end:
            yield stretch
            end = stretch.end
