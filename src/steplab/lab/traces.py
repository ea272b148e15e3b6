"""Traces of models of others, kept in a folder of the user's cache: the first takes seconds, the same again none.

Kept is a step's stream of events, of configurations of transformers alone: a function of the user's own may depend on
any file. A trace belongs to the step, the versions of torch and transformers, and steplab's own files.
"""

import functools
import hashlib
import importlib.metadata
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from steplab.plan.dry_run.events import Allocated, Began, Event, Freed, Listener, Operator
from steplab.plan.dry_run.tensors import Piece
from steplab.specs.step import StepSpec

Open = Callable[[Listener], AbstractContextManager[Callable[[], None]]]
"""A context in which a step is built, and a function that runs it; both tell their events."""
T = TypeVar("T")
_LEFT = 64
"""Newest traces that stay."""


class _Trace(msgspec.Struct, array_like=True, gc=False):
    pieces: list[tuple[str, str, int, str, str]]
    """Fields of every different piece."""
    phases: list[str]
    operators: list[Operator]
    runs: list[list[int]]
    """Events of the build and of each run of the step: 4 n + kind, n being a piece, an allocation in order, a phase or
    an operator, by kind."""


def kept(spec: StepSpec, what: str, trace: Open) -> Open:
    """`trace`, or where the same was traced before, what it told; what: which trace of the step it is."""
    if spec.model.kind != "hf":
        return trace
    path = _folder() / f"{_key(spec, what)}.trace"
    with suppress(OSError, zlib.error, msgspec.MsgspecError):
        found = msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=_Trace)
        return functools.partial(_told_again, found)
    return functools.partial(_told_and_kept, path, trace)


def kept_facts(spec: StepSpec, what: str, kind: type[T], find: Callable[[], T]) -> T:
    """What `find` returns, a dataclass, or what it returned before of the same step."""
    if spec.model.kind != "hf":
        return find()
    path = _folder() / f"{_key(spec, what)}.trace"
    with suppress(OSError, zlib.error, msgspec.MsgspecError):
        return msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=kind)
    found = find()
    _keep(path, found)
    return found


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steplab" / "traces"


def _key(spec: StepSpec, what: str) -> str:
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "steplab")]
    facts = (msgspec.json.encode(spec.as_predicted), what, *versions, _sources())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


@functools.cache
def _sources() -> tuple[tuple[str, int, int], ...]:
    """Sizes and times of steplab's files that a trace depends on."""
    root = Path(__file__).parents[1]
    files = [path for name in _DEPENDS_ON for path in sorted((root / name).glob("*.py"))]
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)


_DEPENDS_ON = ("fake_step", "model", "measurement/step", "plan/dry_run", "lab")


@contextmanager
def _told_again(trace: _Trace, listen: Listener) -> Iterator[Callable[[], None]]:
    made: list[Piece] = []

    def tell(run: list[int]) -> None:
        for code in run:
            listen(_event(trace, made, *divmod(code, 4)))

    build, *runs = trace.runs
    tell(build)
    left = iter(runs)
    yield lambda: tell(next(left))


def _event(trace: _Trace, made: list[Piece], number: int, kind: int) -> Event:
    if kind == 0:
        what, formula, num_bytes, category, where = trace.pieces[number]
        piece = Piece(what=what, formula=formula, num_bytes=num_bytes, category=category, where=where)
        made.append(piece)
        return Allocated(piece)
    if kind == 1:
        return Freed(made[number])
    return Began(trace.phases[number]) if kind == 2 else trace.operators[number]


@contextmanager
def _told_and_kept(path: Path, trace: Open, listen: Listener) -> Iterator[Callable[[], None]]:
    runs: list[list[Event]] = [[]]

    def listen_too(event: Event) -> None:
        runs[-1].append(event)
        listen(event)

    with trace(listen_too) as run:

        def run_once_more() -> None:
            runs.append([])
            run()

        yield run_once_more
        told = _written(runs)  # before the context ends, which frees what is there
    _keep(path, told)


def _keep(path: Path, found: object) -> None:
    """A cache that cannot be written is none."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(f".{os.getpid()}")
        begun.write_bytes(zlib.compress(msgspec.msgpack.encode(found), 1))
        begun.replace(path)
        for old in sorted(path.parent.glob("*.trace"), key=lambda each: -each.stat().st_mtime)[_LEFT:]:
            old.unlink()


def _written(runs: list[list[Event]]) -> _Trace:
    pieces: dict[tuple[str, str, int, str, str], int] = {}
    made: dict[int, int] = {}
    phases: dict[str, int] = {}
    operators: list[Operator] = []

    def code(event: Event) -> int:
        if isinstance(event, Allocated):
            piece = event.piece
            made[id(piece)] = len(made)
            facts = (piece.what, piece.formula, piece.num_bytes, piece.category, piece.where)
            return 4 * pieces.setdefault(facts, len(pieces))
        if isinstance(event, Freed):
            return 4 * made[id(event.piece)] + 1
        if isinstance(event, Began):
            return 4 * phases.setdefault(event.phase, len(phases)) + 2
        operators.append(event)
        return 4 * (len(operators) - 1) + 3

    coded = [[code(event) for event in run] for run in runs]
    return _Trace(list(pieces), list(phases), operators, coded)
