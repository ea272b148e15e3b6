"""Measure alternating steps, and compare them; one may be of another git revision."""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from steplab.comparison.samples import FEWEST
from steplab.comparison.turns import over_starts, step_ratio
from steplab.errors import SteplabError, UserError
from steplab.git import git
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.lab.machine import refuse_torchrun
from steplab.lab.measuring import asked_step, completed
from steplab.measurement.processes.conversation import HERE, Surroundings
from steplab.measurement.processes.started import scratch_folder
from steplab.measurement.processes.turns import Session, Side
from steplab.measurement.progress import OnProgress
from steplab.records.comparison import Ratio
from steplab.records.environment import Environment
from steplab.records.failure import Failure
from steplab.records.finding import Finding, Findings, Trial, in_order
from steplab.records.run import Run
from steplab.specs.resolve import with_fields
from steplab.specs.step import StepSpec
from steplab.store.database import Store

STEPS = 30
STARTS, _SOON_S = 3, 60.0
"""Default number of process starts of each side by `ab`; one if the first start took longer than _SOON_S seconds."""
LEAST_GAIN = 0.003
"""Smallest time saving, as a share, that keeps a change."""
_PLAIN = 0.03
"""Relative difference of step times that stops measuring, once there are enough turns for a confidence interval."""
_MOST_ROUNDS = 2.5
"""Time limit of additional turns, as a multiple of the time of the first series."""


class StoredSession:
    """A Session that stores the run of each side that leaves."""

    def __init__(self, session: Session, store: Store, name: str) -> None:
        refuse_torchrun("alternate steps")
        self.session = session
        self._store, self._name = store, name
        self._chosen: dict[Side, tuple[str, ...]] = {}
        self.left: dict[Side, Run] = {}
        """Stored runs, in order of storing."""

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
        chosen = choose_checkpointing(spec)
        side = self.session.enter(label, chosen.spec, surroundings)
        self._chosen[side] = chosen.notes
        return side

    def seek_gain(
        self, before: Side, after: Side, steps: int, *, most_s: float, clock: Callable[[], float], apart: bool
    ) -> None:
        """Alternate two sides until their difference is clear, or a saving is ruled out; at most `steps` of each in a
        series.

        An undecided ratio gets more series, for `most_s` seconds or _MOST_ROUNDS times the first series, if that is
        longer. Without `apart`, a second side that does not fit in memory next to the first fails.
        """

        def is_open(threshold: float) -> bool:
            ratio = self.gain(before, after, threshold)
            if ratio is None or ratio.low is None:
                return ratio is not None
            return ratio.decision not in ("lower", "higher") and ratio.low < 1 - LEAST_GAIN

        def is_enough(rounds: int) -> bool:
            return rounds >= FEWEST and not is_open(_PLAIN)

        session, began_s = self.session, clock()
        session.measure((before, after), steps, is_enough=is_enough, apart=apart)
        most_s = max(most_s, _MOST_ROUNDS * (clock() - began_s))
        while clock() - began_s < most_s and not session.alternating and is_open(LEAST_GAIN):
            session.measure((before, after), steps, apart=apart)
        if session.alternating and not apart:
            after.failure = Failure(kind="out_of_memory", message=f"with the fastest step: {session.alternating}")
            session.resume()

    def gain(self, before: Side, after: Side, threshold: float = LEAST_GAIN) -> Ratio | None:
        """Time ratio of the second side to the first; None if one failed. `threshold`: smallest difference that counts,
        as a share. With a new process per turn, SEPARATE replaces it, because equal steps differ that much between
        processes.
        """
        if before.run is None or after.run is None or before.failure or after.failure:
            return None
        return step_ratio(before.run, after.run, threshold=None if self.session.alternating else threshold)

    def leave(self, side: Side) -> Run:
        """End a side's process and store its run; a side that never ran is first measured alone."""
        if side not in self.left:
            if side.failure is None and side.run is None:
                self.session.measure([side], side.spec.steps)
            run = completed(self.session.leave(side), self._name, self._chosen[side], self._store)
            self.left[side] = keep(self._store, run)
        return self.left[side]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    starts: tuple[tuple[Run, ...], ...]
    each: tuple[tuple[Ratio | None, ...], ...]
    """Per start, time ratio of each further side to the first; None if a time is missing."""

    @property
    def ratios(self) -> tuple[Ratio | None, ...]:
        return over_starts(self.each)

    @property
    def runs(self) -> tuple[Run, ...]:
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
    """Measure two or more steps alternately (A B B A A B and so on), and compare each with the first.

    `fields` are common to all sides, as in `measure`; `sides` differ. A single side is compared with the step without
    its fields. With `against`, a git revision, the first side imports its code from there:

        steplab.ab({"precision": "fp32"}, {"precision": "bf16"}, model="small").ratios[0].ratio
        steplab.ab(against="main", model="my_model:build")

    Each side and start has a record. `starts`: process starts of each side, because times differ more between processes
    than within one; None: `STARTS`, or one if a start takes over a minute. `threshold`: smallest difference that
    matters, as a share. `timeout_s` limits each warm-up and turn. Raises UserError if a step cannot be measured, or
    differs from the others in steps or device.
    """
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
    return chr(ord("A") + number) if number < 26 else str(number + 1)


@contextmanager
def checked_out(revision: str) -> Iterator[Surroundings]:
    """Check out a revision in a temporary worktree.

    Processes run in the same folder there, and import from it: a user's model, and steplab if the repository has it.
    Raises UserError outside a git repository, and for an unknown revision.
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
                raise UserError(
                    f"revision {revision} has no folder {here.relative_to(root)}; run from a folder that it has"
                )
            yield Surroundings(folder=folder, environment=os.environ | {"PYTHONPATH": _import_path(root, tree)})
        finally:
            with suppress(UserError):  # git has not added it, or will forget it once its folder is gone
                _git("worktree", "remove", "--force", str(tree))


def _import_path(root: Path, tree: Path) -> str:
    """PYTHONPATH with the repository's entries, also of `sys.path` (editable installs), moved to the worktree."""
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    found = []
    for entry in dict.fromkeys([*given, *sys.path]):
        path = Path(entry).resolve()
        if path.is_relative_to(root) and not any(map(path.is_relative_to, installed)):
            found.append(str(tree / path.relative_to(root)))
        elif entry in given:
            found.append(entry)
    return os.pathsep.join(dict.fromkeys(found))


def _git(*arguments: str, otherwise: str = "") -> str:
    try:
        return git(*arguments, timeout_s=None)
    except FileNotFoundError:
        raise UserError("--against needs git, which is not installed") from None
    except subprocess.CalledProcessError as error:
        raise UserError(otherwise or f"git {arguments[0]} failed: {' '.join(error.stderr.split())}") from None


def try_findings(
    run: Run,
    findings: Findings,
    *,
    store: Path | str | None = None,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_trial: Callable[[str], None] = lambda what: None,
    session: Callable[..., Session] = Session,
) -> Findings:
    """Measure the changes that findings propose; return the findings with these trials.

    Each changed step alternates with the unchanged one. `timeout_s` limits each warm-up and turn. A failing change
    gives a trial with a failure. Raises UserError for a run without a step, SteplabError if the unchanged step fails or
    runs on another device.
    """
    if run.spec is None:
        what = (
            "an imported trace"
            if run.profile
            else "an imported snapshot"
            if run.memory_profile
            else "a loop of your own"
        )
        raise UserError(
            f"run {run.id} is {what}, which steplab cannot run again; apply the changes there, and profile it again"
        )
    spec = dataclasses.replace(run.spec, steps=max(run.spec.steps, STEPS))
    if spec.device == "auto" and run.environment:  # so that a machine without this kind of device refuses
        spec = dataclasses.replace(spec, device=run.environment.device.kind)
    proposed = {_key(finding): finding.fields for finding in findings.findings if finding.fields}
    if not proposed:
        return findings
    tried: dict[frozenset[tuple[str, str]], Run | str] = {}
    with (
        open_store(store, write=True) as opened,
        StoredSession(session(timeout_s=timeout_s, on_progress=on_progress), opened, name=f"trying {run.id}") as taking,
    ):
        on_trial("the unchanged step")
        unchanged = taking.enter("unchanged", spec)
        _refuse_another_device(run, unchanged.environment)
        for key, fields in proposed.items():
            if unchanged.failure is None:
                tried[key] = _tried(taking, unchanged, spec, fields, on_trial)
        base = taking.leave(unchanged)
    if base.failure is not None:
        raise SteplabError(f"the step of run {run.id} did not run again: {failure_words(base.failure)}")
    _refuse_another_device(run, base.environment)
    trials = {key: _trial(base, outcome) for key, outcome in tried.items()}
    measured = (dataclasses.replace(finding, trial=trials.get(_key(finding))) for finding in findings.findings)
    return dataclasses.replace(findings, findings=in_order(measured))


def _key(finding: Finding) -> frozenset[tuple[str, str]]:
    return frozenset(finding.fields.items())


def _tried(
    taking: StoredSession, unchanged: Any, spec: StepSpec, fields: Mapping[str, str], on_trial: Callable[[str], None]
) -> Run | str:
    words = ", ".join(f"{name} {value}" for name, value in fields.items())
    on_trial(words)
    try:
        changed = taking.enter(words, with_fields(spec, fields))
    except UserError as error:  # the device, or this build of torch, does not do that
        return str(error)
    taking.session.measure([unchanged, changed], spec.steps)
    return taking.leave(changed)


def _trial(base: Run, outcome: Run | str) -> Trial:
    run = None if isinstance(outcome, str) else outcome
    ids = (base.id, run.id) if run else (base.id,)
    tokens_ratio = run.spec.tokens_of_all / base.spec.tokens_of_all if run and run.spec and base.spec else 1.0
    ratio = step_ratio(base, run, tokens_ratio=tokens_ratio) if run else None
    if run is None or ratio is None:
        failure = failure_words(run.failure) if run else str(outcome)
        before_s = base.median_s or 0.0
        return Trial(before_s=before_s, after_s=None, run_ids=ids, tokens_ratio=tokens_ratio, failure=failure)
    return Trial(
        before_s=ratio.a,
        after_s=ratio.a * ratio.ratio * tokens_ratio,
        least_saved_s=None if ratio.high is None else ratio.a * (1 - ratio.high),
        most_saved_s=None if ratio.low is None else ratio.a * (1 - ratio.low),
        run_ids=ids,
        tokens_ratio=tokens_ratio,
        alternating=run.turns.alternating if run.turns else None,
    )


def _refuse_another_device(run: Run, found: Environment | None) -> None:
    was, now = run.environment.device.name if run.environment else None, found.device.name if found else None
    if was is not None and now is not None and was != now:
        raise SteplabError(
            f"run {run.id} was measured on {was}, but this machine has {now}, for which its predictions do not hold; "
            "profile the step here, and explain that"
        )


def failure_words(failure: Failure | None) -> str:
    if failure is None:
        return "it has no step time"
    kind = failure.kind.replace("_", " ")
    return failure.message if failure.message.startswith(kind) else f"{kind}: {failure.message}"
