"""The data-parallel study: measure the contenders, read their traces, store one record of all."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from steplab import __version__
from steplab.errors import SteplabError, Unsupported, UserError
from steplab.lab.ddp_model import overhead_model, with_expected
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.lab.machine import visible_gpus
from steplab.lab.processes import is_first_rank
from steplab.measurement.ddp_launch import ddp_in_children
from steplab.measurement.launch import OnProgress, Progress
from steplab.measurement.torchrun import torchrun_around
from steplab.records.codec import new_id, now_utc
from steplab.records.ddp import DdpCell, DdpFacts, DdpRun, TracedSteps
from steplab.records.environment import Environment
from steplab.specs.ddp import (
    COLLECTIVES,
    KINDS,
    SMALL_BUCKETS_MB,
    STUDY_BUCKETS_MB,
    DdpStudy,
    contenders_of,
    refuse_what_none_uses,
)
from steplab.specs.layout import process_count
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec
from steplab.store.database import Store
from steplab.units import counted

OnCell = Callable[[int, DdpCell], None]
DEFAULT_TIMEOUT_S = 600.0
DEFAULT_PROCESSES = 2
_SMALL_STEP = {"context": 64, "batch": 2}


def ddp_step(fields: Mapping[str, object], gpus: int | None, processes: int | None) -> tuple[StepSpec, int]:
    """The step of each rank, and how many ranks there are: as many as asked for, as torchrun started, or two on a CPU.

    On a CPU, what the fields leave out is small. Raises UserError for fields or numbers that do not go together.
    """
    around = torchrun_around()
    if around is not None and gpus is None and processes is None:
        return resolve_step({**({} if visible_gpus() else _SMALL_STEP), **fields}), around.size
    count, device = process_count(gpus, processes or (None if gpus else DEFAULT_PROCESSES))
    if around is not None and around.size != count:
        raise UserError(f"torchrun started {around.size} processes, not {count}; leave --gpus and --processes out")
    return resolve_step({**(_SMALL_STEP if device == "cpu" else {}), **fields, "device": device}), count


def ddp_study(
    step: StepSpec,
    *,
    processes: int,
    compile: str = "off",
    contenders: Sequence[str] = KINDS,
    bucket_sizes_mb: Sequence[float] | None = None,
    transports: Sequence[str] | None = None,
    profiled_steps: int = 2,
) -> DdpStudy:
    """The study of a step; without bucket sizes, of those that suit the device; without transports, by collectives.

    Raises UserError naming what is wrong with it, and what is valid; Unsupported for a transport that needs GPUs.
    """
    small = step.device == "cpu" or (step.device == "auto" and not visible_gpus())
    if small and transports and "peer_copy" in transports:
        raise Unsupported("transport peer_copy on a CPU", "it copies between GPUs of one host", "leave --transport out")
    sizes_mb = bucket_sizes_mb or (SMALL_BUCKETS_MB if small else STUDY_BUCKETS_MB)
    found = contenders_of(contenders, sizes_mb, transports or (COLLECTIVES,))
    refuse_what_none_uses(contenders, bucket_sizes_mb, transports)
    return DdpStudy(
        step=step,
        processes=processes,
        compile=compile,  # type: ignore[arg-type]
        contenders=found,
        profiled_steps=profiled_steps,
    )


def measure_ddp(
    study: DdpStudy,
    *,
    name: str = "",
    store: Path | str | None = None,
    traces: Path | str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: OnProgress = lambda progress: None,
    on_cell: OnCell = lambda number, cell: None,
) -> DdpRun:
    """Measure a study and store the record, which an interruption stores too, with the contenders that it has.

    `timeout_s` is how long one contender may take. A trace a contender is kept in the folder `traces`; None: in none.
    Under torchrun every process calls it, and the first one alone stores and reads traces. Raises UserError for a
    request that cannot be served, and SteplabError where the store cannot be written.
    """
    run = DdpRun(id=new_id(), created_utc=now_utc(), steplab_version=__version__, name=checked_name(name), study=study)
    heard = _Heard(run, on_cell)
    opening: AbstractContextManager[Store | None] = open_store(store, write=True) if is_first_rank() else nullcontext()
    with opening as opened, _folder(traces) as folder:
        try:
            ddp_in_children(
                study,
                traces=folder if study.profiled_steps else None,
                again=torchrun_around() is None,
                timeout_s=timeout_s,
                on_progress=on_progress,
                on_cell=heard.cell,
                on_environment=heard.environment,
                on_facts=heard.facts,
            )
            if opened is not None:
                heard.read_traces(folder, on_progress)
        except (KeyboardInterrupt, SteplabError) as error:
            if opened is None or not heard.num_cells:
                raise
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            keep(opened, heard.record(f"{why}: only the contenders that had ended by then are here"))
            told = f"record {run.id} has the {counted(heard.num_cells, 'contender')} that had ended"
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(told) from error
            raise SteplabError(f"{error}; {told}") from error
        result = heard.record()
        if opened is not None:
            keep(opened, result)
    return result


class _Heard:
    """What is known of a study so far."""

    def __init__(self, run: DdpRun, on_cell: OnCell) -> None:
        self._run, self._on_cell = run, on_cell
        self._cells: dict[int, DdpCell] = {}

    @property
    def num_cells(self) -> int:
        """How many contenders have ended."""
        return len(self._cells)

    def cell(self, number: int, cell: DdpCell) -> None:
        """A contender has ended."""
        self._cells[number] = cell
        self._on_cell(number, cell)

    def environment(self, environment: Environment) -> None:
        """Where the first rank runs."""
        self._run = dataclasses.replace(self._run, environment=environment)

    def facts(self, facts: DdpFacts) -> None:
        """The ranks and the model."""
        self._run = dataclasses.replace(self._run, facts=facts)

    def read_traces(self, folder: Path, on_progress: OnProgress) -> None:
        """Take in the traces, once nothing is measured any more that reading them would slow."""
        for done, (number, cell) in enumerate(self._cells.items()):
            on_progress(Progress(stage="traces", done=done, total=self.num_cells))
            self._cells[number] = _with_trace(cell, folder / self._run.study.trace_name(number))

    def record(self, *notes: str) -> DdpRun:
        """All of it."""
        run, study = self._run, self._run.study
        cells = tuple(with_expected(self._cells[number], study, run.facts) for number in sorted(self._cells))
        model = overhead_model(cells, run.facts)
        return dataclasses.replace(run, created_utc=now_utc(), cells=cells, model=model, notes=notes)


@contextmanager
def _folder(kept: Path | str | None) -> Iterator[Path]:
    """Where traces go: to the folder that keeps them, or to one that is gone afterwards."""
    if kept is None:
        with TemporaryDirectory(prefix="steplab-ddp-") as folder:
            yield Path(folder)
        return
    try:
        Path(kept).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write traces to {kept}: {error.strerror}") from error
    yield Path(kept).resolve()


def _with_trace(cell: DdpCell, trace: Path) -> DdpCell:
    if cell.failure or not trace.exists():
        return cell
    try:
        return dataclasses.replace(cell, traced=_read(trace))
    except SteplabError as error:  # what was measured stands without it
        return dataclasses.replace(cell, notes=(*cell.notes, f"trace: {error}"))


def _read(trace: Path) -> TracedSteps:
    from steplab.traces.communication import traced_steps
    from steplab.traces.reading import read_trace

    return traced_steps(read_trace(trace))
