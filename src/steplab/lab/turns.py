"""Measure steps in turns on one device, store their records and compare them; one may be of another git revision."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from steplab.comparison.samples import FEWEST
from steplab.comparison.turns import over_starts, step_ratio
from steplab.errors import UserError
from steplab.git import git
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.lab.machine import refuse_torchrun
from steplab.lab.measuring import asked_step, completed
from steplab.measurement.processes.conversation import HERE, Surroundings
from steplab.measurement.processes.scratch import scratch_folder
from steplab.measurement.processes.turns import Session, Side
from steplab.measurement.progress import OnProgress
from steplab.records.comparison import Ratio
from steplab.records.failure import Failure
from steplab.records.run import Run
from steplab.specs.step import StepSpec
from steplab.store.database import Store

STEPS = 30
"""Measured steps of each side unless others are asked for."""
STARTS, _SOON_S = 3, 60.0
"""Starts of each side by `ab`, and seconds that the first may take for others to follow unasked."""
LEAST_GAIN = 0.003
"""The smallest gain that a change is kept for, as a share of the step; several such add up to what matters."""
_PLAIN = 0.03
"""A difference that is larger than this share with the fewest turns that have an interval gets no more of them."""
_MOST_ROUNDS = 2.5
"""How many times the first turns what these leave open may take: three rounds in all, as the third ends after that."""


class StoredSession:
    """A session whose records are stored as sides leave; those that are left at its end, too, even if it is
    interrupted."""

    def __init__(self, session: Session, store: Store, name: str) -> None:
        self.session = session
        """The session itself, which measures the sides."""
        self._store, self._name = store, name
        self._chosen: dict[Side, tuple[str, ...]] = {}
        """What was chosen for each side."""
        self.left: dict[Side, Run] = {}
        """The record of each side that has left, in the order in which they did."""

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            for side in self._chosen:
                if side.run is not None:
                    self.leave(side)
        finally:
            self.session.__exit__(*exception)
        if exception and exception[0] is KeyboardInterrupt and self.left:
            stored = ", ".join(run.id for run in self.left.values())
            raise KeyboardInterrupt(f"stored with the turns until then: {stored}")

    def enter(self, label: str, spec: StepSpec, surroundings: Surroundings = HERE) -> Side:
        """Build a step and warm it up. Raises UserError for a step that cannot be measured at all."""
        chosen = choose_checkpointing(spec)
        side = self.session.enter(label, chosen.spec, surroundings)
        self._chosen[side] = chosen.notes
        return side

    def seek_gain(
        self, before: Side, after: Side, steps: int, *, most_s: float, clock: Callable[[], float], alternates: bool
    ) -> None:
        """Measure two sides in turns until their difference is plain, or the second can no longer be found to save
        time; at most `steps` of each. What that leaves open gets as many again, until `most_s` seconds have passed, or
        twice more. Unless the session `alternates`, a second side that does not fit beside the first fails."""

        def is_open(threshold: float) -> bool:
            ratio = self.gain(before, after, threshold)
            if ratio is None or ratio.low is None:
                return ratio is not None
            return ratio.decision not in ("lower", "higher") and ratio.low < 1 - LEAST_GAIN

        def is_enough(rounds: int) -> bool:
            return rounds >= FEWEST and not is_open(_PLAIN)

        session, began_s = self.session, clock()
        session.measure((before, after), steps, is_enough=is_enough, alternates=alternates)
        most_s = max(most_s, _MOST_ROUNDS * (clock() - began_s))
        while clock() - began_s < most_s and not session.alternating and is_open(LEAST_GAIN):
            session.measure((before, after), steps, alternates=alternates)
        if session.alternating and not alternates:
            after.failure = Failure(kind="out_of_memory", message=f"beside the fastest step: {session.alternating}")
            session.resume()

    def gain(self, before: Side, after: Side, threshold: float = LEAST_GAIN) -> Ratio | None:
        """The time of the second side over that of the first; None where one of them has failed. Where each turn has a
        process of its own, what such processes differ by is the least that can be told."""
        if before.run is None or after.run is None or before.failure or after.failure:
            return None
        return step_ratio(before.run, after.run, threshold=None if self.session.alternating else threshold)

    def leave(self, side: Side) -> Run:
        """End a side, and store its record; a side that had no turn is measured by itself first. Of one that has left,
        the record."""
        if side not in self.left:
            if side.failure is None and side.run is None:
                self.session.measure([side], side.spec.steps)
            run = completed(self.session.leave(side), self._name, self._chosen[side], self._store)
            self.left[side] = keep(self._store, run)
        return self.left[side]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Steps that were measured in turns."""

    starts: tuple[tuple[Run, ...], ...]
    """The records of each start: of the sides in the order in which they were given."""
    each: tuple[tuple[Ratio | None, ...], ...]
    """Of each start, step time of each further side over that of the first; None where one of the two has none."""

    @property
    def ratios(self) -> tuple[Ratio | None, ...]:
        """The ratio of each further side over all starts (comparison.turns.of_starts)."""
        return over_starts(self.each)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The records of all starts."""
        return tuple(run for runs in self.starts for run in runs)


def ab(
    *sides: Mapping[str, object],
    against: str | None = None,
    threshold: float | None = None,
    starts: int | None = None,
    name: str = "",
    store: Path | str | None = None,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_side: Callable[[str], None] = lambda label: None,
    **fields: object,
) -> Compared:
    """Measure two or more steps in turns, A B B A A B and so on, and compare each with the first.

    `fields` are those of all sides, as in `measure`, and `sides` those in which each differs; a single one is compared
    with the step without it. With `against`, a git revision, the first side imports its code from there:

        steplab.ab({"precision": "fp32"}, {"precision": "bf16"}, model="small").ratios[0].ratio
        steplab.ab(against="main", model="my_model:build")

    A record of each side and start is stored. `starts` is the number of times that the sides start anew, because two
    processes of one step differ by more than turns within one; None: `STARTS`, or one where that takes over a minute.
    `threshold` is the smallest difference that matters, as a share. `timeout_s` limits
    the time until a side is warm, and that of each turn; `on_side` is called with the label of each as it is built.
    Raises UserError for a step that cannot be measured at all, or whose steps or device are not those of the others.
    """
    refuse_torchrun("measure in turns")
    if against and sides:
        raise UserError("with another revision both sides have the same options; leave out the others, or `against`")
    if not against and not sides:
        raise UserError("name what the sides differ in, as in steplab ab '--precision fp32' '--precision bf16'")
    differing = ({}, {}) if against else ({}, *sides) if len(sides) == 1 else sides
    specs = [asked_step("ab", None, {"steps": STEPS, **fields, **side}) for side in differing]
    steps, devices = {spec.steps for spec in specs}, {spec.device for spec in specs}
    if len(steps) > 1 or len(devices) > 1:
        what = "--steps" if len(steps) > 1 else "--device"
        raise UserError(f"steps that take turns have the same {what}; give it once, for all of them")
    name = checked_name(name)
    if starts is not None and starts < 1:
        raise UserError("starts must be at least 1")
    found: list[tuple[Run, ...]] = []
    with checked_out(against) if against else nullcontext(HERE) as first, open_store(store, write=True) as opened:
        for start in range(starts or STARTS):
            began_s = time.monotonic()
            with StoredSession(Session(timeout_s=timeout_s, on_progress=on_progress), opened, name) as taking:
                present = []
                for number, spec in enumerate(specs):
                    on_side(label_of(number) + (f", start {start + 1}" if start else ""))
                    present.append(taking.enter(label_of(number), spec, HERE if number else first))
                taking.session.measure(present, specs[0].steps)
                found.append(tuple(taking.leave(side) for side in present))
            restarts = taking.session.alternating or any(run.failure for run in found[-1])
            if restarts or (starts is None and time.monotonic() - began_s > _SOON_S):
                break
    others = len(specs) - 1
    ratios = [
        tuple(step_ratio(runs[0], run, threshold=threshold, num_decided=others) for run in runs[1:]) for runs in found
    ]
    return Compared(starts=tuple(found), each=tuple(ratios))


def label_of(number: int) -> str:
    """The label of a side: A, B and so on."""
    return chr(ord("A") + number) if number < 26 else str(number + 1)


@contextmanager
def checked_out(revision: str) -> Iterator[Surroundings]:
    """A worktree of a revision of the repository around the working folder, which is removed at the end.

    Its processes work in the same folder of the repository as this one, and import what this one imports from the
    repository from the worktree instead: a user's model, and steplab itself where it is the repository's. Files that
    git does not track are not there. Raises UserError outside of a repository, and for an unknown revision.
    """
    here = Path.cwd().resolve()
    root = Path(_git("rev-parse", "--show-toplevel", otherwise="--against needs a git repository")).resolve()
    commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", otherwise=f"no revision '{revision}'")
    with scratch_folder() as scratch:
        tree = scratch.path.resolve() / "tree"
        try:
            _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
            folder = tree / here.relative_to(root)
            if not folder.is_dir():
                raise UserError(f"revision {revision} has no folder {here.relative_to(root)}; run from one that it has")
            yield Surroundings(folder=folder, environment=os.environ | {"PYTHONPATH": _import_path(root, tree)})
        finally:
            with suppress(UserError):  # git has not added it, or will forget it once its folder is gone
                _git("worktree", "remove", "--force", str(tree))


def _import_path(root: Path, tree: Path) -> str:
    """PYTHONPATH with the repository's entries in the worktree, and those of `sys.path` that are in the repository.

    An editable installation adds such an entry, which would otherwise be found in the repository.
    """
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    found = []
    for entry in dict.fromkeys([*given, *sys.path]):
        path = Path(entry).resolve()
        if path.is_relative_to(root) and not _is_installed(path):
            found.append(str(tree / path.relative_to(root)))
        elif entry in given:
            found.append(entry)
    return os.pathsep.join(dict.fromkeys(found))


def _is_installed(path: Path) -> bool:
    """Whether it belongs to Python or to a virtual environment, which a repository may contain."""
    return any(path.is_relative_to(Path(prefix).resolve()) for prefix in {sys.prefix, sys.base_prefix})


def _git(*arguments: str, otherwise: str = "") -> str:
    try:
        return git(*arguments, timeout_s=None)
    except FileNotFoundError:
        raise UserError("--against needs git, which is not installed") from None
    except subprocess.CalledProcessError as error:
        raise UserError(otherwise or f"git {arguments[0]} failed: {' '.join(error.stderr.split())}") from None
