"""Predict the memory of any model, and trace its operators on tensors without content; traces are cached on disk."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from steplab.costs.weights import elements
from steplab.errors import SteplabError, Unsupported, UserError
from steplab.plan.dry_run.events import Allocated, Began, Event, Freed, Listener, Operator, RepeatedBlocks
from steplab.plan.dry_run.sizes import Count
from steplab.plan.dry_run.step import OpenStep, dry_step
from steplab.plan.dry_run.tensors import Piece
from steplab.plan.layout.model import ForeignModel, Known, Spread, own_facts
from steplab.plan.memory import predict_memory
from steplab.plan.model_sizes import Sizes, sizes_of
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import ModelFacts
from steplab.specs.ddp import Variant
from steplab.specs.hardware import HardwareSpec
from steplab.specs.layout import Layout
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import ALONE

Open = Callable[[Listener], AbstractContextManager[Callable[[], None]]]
"""Context manager that builds a step and yields a function to run it; the listener gets the events of both."""
T = TypeVar("T")
_LEFT = 512


Coded = int | Began | Allocated | Operator
"""An event as stored on disk; a release is stored as the number of its allocation."""


def kept(spec: StepSpec, what: str, trace: Open) -> Open:
    """Cache `trace` on disk for a transformers model; `what` distinguishes traces of one step."""
    if spec.model.kind != "hf":
        return trace
    path = _path(spec, what)
    found = _read(path, list[list[Coded]])
    return partial(_told_again, found) if found else partial(_told_and_kept, path, trace)


def _path(spec: StepSpec, what: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steplab" / "traces"
    facts = (msgspec.json.encode(spec.as_predicted), what, *_versions(), _sources())
    return folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.trace"


def _read(path: Path, kind: type[T]) -> T | None:
    """A cached file's content; None without a readable one."""
    with suppress(OSError, zlib.error, msgspec.MsgspecError):
        return msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=kind)
    return None


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(map(importlib.metadata.version, ("torch", "transformers", "steplab")))


@functools.cache
def _sources() -> tuple[tuple[str, int, int], ...]:
    root = Path(__file__).parents[1]
    files = [path for name in _DEPENDS_ON for path in sorted((root / name).glob("*.py"))]
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)


_DEPENDS_ON = ("fake_step", "model", "measurement/step", "plan/dry_run", "lab")


@contextmanager
def _told_again(runs: list[list[Coded]], listen: Listener) -> Iterator[Callable[[], None]]:
    pieces: list[Piece] = []
    left = iter(runs)

    def event(code: Coded) -> Event:
        if isinstance(code, int):
            return Freed(pieces[code])
        if isinstance(code, Allocated):
            pieces.append(code.piece)
        return code

    def tell() -> None:
        for code in next(left):
            listen(event(code))

    tell()
    yield tell


@contextmanager
def _told_and_kept(path: Path, trace: Open, listen: Listener) -> Iterator[Callable[[], None]]:
    runs: list[list[Event]] = []
    with _recorded(trace, runs, listen) as run:
        yield run
        told = _coded(runs)  # before the context ends and frees it
    _keep(path, told)


@contextmanager
def _recorded(trace: Open, runs: list[list[Event]], listen: Listener) -> Iterator[Callable[[], None]]:
    """Pass a trace's events to `listen`, and append the build's and each run's to `runs`."""
    runs.append([])

    def listen_too(event: Event) -> None:
        runs[-1].append(event)
        listen(event)

    with trace(listen_too) as run:

        def run_once_more() -> None:
            runs.append([])
            run()

        yield run_once_more


def _keep(path: Path, found: object) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(f".{os.getpid()}")
        begun.write_bytes(zlib.compress(msgspec.msgpack.encode(found), 1))
        begun.replace(path)
        for old in sorted(path.parent.glob("*.trace"), key=lambda each: -each.stat().st_mtime)[_LEFT:]:
            old.unlink()


def _coded(runs: list[list[Event]]) -> list[list[Coded]]:
    numbers: dict[int, int] = {}  # of allocations, by the id of their piece, which `runs` keeps alive

    def code(event: Event) -> Coded:
        if isinstance(event, Freed):
            return numbers[id(event.piece)]
        if isinstance(event, Allocated):
            numbers[id(event.piece)] = len(numbers)
        return event

    return [[code(event) for event in run] for run in runs]


def memory_of(
    spec: StepSpec,
    variant: Variant | None = None,
    *,
    gpu: HardwareSpec | None = None,
    operators: list[Operator] | None = None,
) -> MemoryPrediction:
    """Predict a step's memory; a trace of a third-party model appends its operators to `operators`. gpu: determines the
    cuBLAS workspace; None: a Hopper GPU.
    """
    model = spread_model(spec) if spec.layout.world_size > 1 else _deep_model(spec)
    open_step: OpenStep = dry_step
    if model is not None and spec.layout.world_size > 1:
        model.refuse_unplanned(spec)
    elif model is not None and operators is not None and spec.compile == "off":
        operators.extend(operators_of(spec))
    elif model is None and is_traced(spec):
        open_step = partial(_open_traced, operators)
    device = gpu.device_names[0] if gpu and gpu.device_names else None
    found = predict_memory(spec, device=device, variant=variant, open_step=open_step, model=model)
    return found if found.model else replace(found, model=facts_of(spec))


@contextmanager
def _open_traced(
    operators: list[Operator] | None, spec: StepSpec, workspace: Count, listen: Listener
) -> Iterator[Callable[[], None]]:
    """Open fake_step, or its trace from the cache on disk. `operators` gets the last run's operators, and none of
    compiled code.
    """

    def trace(tell: Listener) -> AbstractContextManager[Callable[[], None]]:
        from steplab.fake_step.step import fake_step

        return fake_step(spec, workspace, tell, compiled=True)

    runs: list[list[Event]] = []
    with _recorded(kept(spec, f"memory {workspace.value}", trace), runs, listen) as run:
        yield run
        if operators is not None and spec.compile == "off":
            operators.extend(event for event in runs[-1] if isinstance(event, Operator))


_DEEP = 12
"""Models with at least this many blocks are traced with only two."""


def _deep_model(spec: StepSpec) -> ForeignModel | None:
    """The model by a trace of two blocks, which stand for its many equal ones; None: trace the whole model. The
    optimizer must need no temporary memory.
    """
    if spec.model.kind != "hf" or spec.optimizer not in ("adamw_fused", "sgd"):
        return None
    if spec.updates_in_backward or spec.micro_steps > 1:
        return None
    with suppress(Unsupported):
        model = spread_model(spec)
        return model if model is not None and model.num_layers >= _DEEP else None
    return None


def operators_of(spec: StepSpec) -> Iterable[Operator]:
    """Operators of a traced model's second eager step, in order. Raises Unsupported for a model that cannot run on
    tensors without content.
    """
    deep = _deep_model(spec)
    if deep is None:
        return _operators_of(spec, None, None)
    of_two, of_three = (_operators_of(spec, blocks, deep.spread.layers_in_config) for blocks in (2, 3))
    return RepeatedBlocks(of_two, of_three, deep.num_layers)


def _operators_of(spec: StepSpec, blocks: int | None, of: int | None) -> tuple[Operator, ...]:
    def trace(tell: Listener) -> AbstractContextManager[Callable[[], None]]:
        from steplab.fake_step.spread import with_blocks
        from steplab.fake_step.step import fake_step

        if blocks is None:
            return fake_step(spec, Count(0, ""), tell)
        return with_blocks(spec, tell, blocks=blocks, of=of, with_state=True)

    found: list[Event] = []
    with kept(spec, f"operators {blocks}", trace)(found.append) as run:
        if blocks is None:
            run()  # makes the optimizer's state
        found.clear()
        run()
        return tuple(event for event in found if isinstance(event, Operator))


def spread_model(spec: StepSpec) -> ForeignModel | None:
    """The parts of a third-party model that layouts divide, from a trace of a few seconds; None for other models."""
    if not is_traced(spec):
        return None
    known = _known(spec)
    if known.spread is None:
        instead = "measure it with `steplab run`, or plan one process"
        raise Unsupported(f"planning layouts of {spec.model.label}", known.why_not, instead)
    trace = partial(_trace_two_blocks, known.spread.layers_in_config)
    split = partial(_spread_over, known, spec)
    return ForeignModel(facts=known.facts, spread=known.spread, trace=trace, split=split)


def _spread_over(whole: Known, spec: StepSpec, tp: int) -> Spread:
    found = _known(spec, tp, whole)
    if found.spread is None or whole.spread is None:
        raise UserError(found.why_not)
    return replace(found.spread, num_layers=whole.spread.num_layers)


def facts_of(spec: StepSpec) -> ModelFacts | None:
    """Model sizes; None if a trace must find them, and torch or transformers is not installed."""
    if spec.model.shape is not None:
        return own_facts(spec.model.shape)
    return _known(spec).facts if is_traced(spec) else None


def sizes_for_accounting(spec: StepSpec) -> Sizes:
    """Sizes that accounting needs. Raises Unsupported for a model with unknown or unequal blocks."""
    if spec.model.shape is not None:
        return sizes_of(spec.model.shape)
    what, instead = f"an accounting for {spec.model.label}", "use `steplab plan memory` and `steplab plan layout`"
    if spec.model.kind != "hf" or not is_traced(spec):
        why = "its sizes are known only by building it"
        raise Unsupported(what, why, "install torch and transformers, or replace the sizes of a built-in model")
    known = _known(spec)
    facts, spread = known.facts, known.spread
    if spread is None or not (known.inner_width and known.key_width):
        raise Unsupported(what, known.why_not or "its widths are not known", instead)
    matrices = [each for each in spread.block if min(each.rows, each.row_elements) > 1]
    return Sizes(
        width=spread.embedding[0].row_elements,
        inner=known.inner_width,
        num_layers=spread.num_layers,
        num_parameters=facts.num_parameters,
        matrices=elements(matrices),
        kinds=f"{len(matrices)} of them",
        key_width=known.key_width,
        experts=known.experts,
        num_active=facts.num_active_parameters or facts.num_parameters,
    )


def _known(spec: StepSpec, tp: int = 1, whole: Known | None = None) -> Known:
    def find() -> Known:
        from steplab.fake_step.spread import known_of

        try:
            return known_of(alone, whole.spread.layers_in_config if whole and whole.spread else None)
        except SteplabError as error:
            if whole is None:
                raise
            return replace(whole, spread=None, why_not=str(error))  # kept too, for a search tries many sizes of tp

    alone = replace(spec, layout=Layout(tp=tp), compile="off", checkpointing="none", **ALONE)
    if spec.model.kind != "hf":
        return find()
    path = _path(alone, "known")
    known = _read(path, Known)
    if known is None:
        known = find()
        _keep(path, known)
    return known


def _trace_two_blocks(of: int | None, spec: StepSpec, listen: Listener, *, compiled: bool) -> None:
    def trace(tell: Listener) -> AbstractContextManager[Callable[[], None]]:
        from steplab.fake_step.spread import with_blocks

        return with_blocks(spec, tell, blocks=2, of=of, compiled=compiled)

    with kept(spec, f"two blocks {compiled}", trace)(listen) as run:
        run()


def is_traced(spec: StepSpec) -> bool:
    needed = {"hf": ("torch", "transformers"), "factory": ("torch",)}.get(spec.model.kind, ())
    return bool(needed) and all(importlib.util.find_spec(name) is not None for name in needed)
