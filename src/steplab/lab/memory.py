"""Measure a step's memory by category, predict it, and import other programs' snapshots."""

import dataclasses
import functools
import os.path
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from steplab.errors import Unsupported
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.files import Destination, folder_for, raw_file, rescued
from steplab.lab.keeping import Place, checked_name, import_run, keep, open_store
from steplab.lab.machine import refuse_torchrun
from steplab.lab.measuring import asked_step, completed
from steplab.measurement.jobs import StepTask
from steplab.measurement.processes.launch import measure_in_child
from steplab.measurement.progress import OnProgress, Progress
from steplab.reading.bounded import read_bounded
from steplab.records.memory_profile import MemoryProfile
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.specs.step import StepSpec


def memory(
    spec: StepSpec | str | None = None,
    *,
    name: str = "",
    store: Path | str | None = None,
    snapshot: Path | str | None = None,
    force: bool = False,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    place: Place | None = None,
    **fields: object,
) -> Run:
    """Measure a step as `measure` does, then record the memory of one more.

    `spec` and `fields` are as in `measure`:

        run = steplab.memory("small", context=256, precision="bf16")
        run.memory_profile.at_peak  # bytes by category

    `snapshot` is a path for the raw history, such as step.pickle, which https://pytorch.org/memory_viz shows.
    step.marks.json next to it names the memory's owners; `import_snapshot("step.pickle")` reads both again. Files
    that steplab did not write are replaced only with `force`, the store never.

    A failed measurement is a record. If only the recorded step fails, the record has a note, and `run.memory_profile`
    is None. Raises UserError for an unsupported request, SteplabError if the store or the snapshot cannot be written,
    or the snapshot not read; the measurement is then stored and the snapshot kept.
    """
    refuse_torchrun("watch the memory of a step")
    chosen, name = choose_checkpointing(asked_step("memory", spec, fields)), checked_name(name)
    target = raw_file(snapshot, store, force, "snapshot", (".pickle", ".pkl"))
    marks_target = _marks_of(target)
    with open_store(store, write=True) as opened, folder_for(target) as folder:
        written = folder / "step.pickle"
        marks = marks_beside(written)
        task = StepTask(spec=chosen.spec, snapshot=str(written), marks=str(marks))
        run = measure_in_child(task, timeout_s=timeout_s, on_progress=on_progress)
        run = completed(run, name, chosen.notes, opened)
        try:
            if written.exists():
                with rescued(written, target, "snapshot", run, beside=marks_beside):
                    if marks_target:
                        marks_target.take(marks)
                    kept = target.take(written) if target else written
                    peak_bytes = run.peak.peak_allocated_bytes if run.peak else None
                    profile = read_memory(kept, on_progress, unwatched_peak_bytes=peak_bytes)
                run = dataclasses.replace(run, memory_profile=profile)
        finally:  # after Ctrl-C too: the measurement is made
            run = keep(opened, run, place)
        return run


def _marks_of(snapshot: Destination | None) -> Destination | None:
    if snapshot is None or snapshot.is_written_to:
        return None
    target = dataclasses.replace(snapshot, path=marks_beside(snapshot.path))
    target.check()
    return target


def predictions_of(runs: Sequence[Run], on_progress: OnProgress = lambda progress: None) -> dict[str, MemoryPrediction]:
    """Memory predictions by run id, for predictable runs with a memory profile on a CUDA device."""
    from steplab.plan.memory import predict_memory

    remembered = functools.cache(predict_memory)  # runs of one step share a dry run
    watched = [
        (run, dataclasses.replace(run.spec, device="auto"))
        for run in runs
        if run.spec and run.memory_profile and run.memory_profile.source == "cuda allocator"
    ]
    found = {}
    for number, (run, spec) in enumerate(watched, start=1):
        on_progress(Progress(stage="predict", done=number, total=len(watched)))
        with suppress(Unsupported):
            found[run.id] = remembered(spec, device=run.device_name)
    return found


def marks_beside(snapshot: Path) -> Path:
    """Path of the marks: step.marks.json for step.pickle, step.pickle.gz and step.pickle.xz."""
    return snapshot.with_name(f"{Path(snapshot.name.removesuffix('.gz').removesuffix('.xz')).stem}.marks.json")


def read_memory(snapshot: Path, on_progress: OnProgress, *, unwatched_peak_bytes: int | None = None) -> MemoryProfile:
    """Read a snapshot; marks next to it, if present, name the memory's owners.

    `unwatched_peak_bytes`: peak of the timed steps, whose memory was not recorded; None: unknown. Raises UserError for
    a file that is no snapshot, and for marks of another snapshot; SteplabError for a snapshot without allocations.
    """

    def tell(done_bytes: int, total_bytes: int) -> None:
        on_progress(Progress(stage="read snapshot", done=done_bytes, total=total_bytes))

    beside = marks_beside(snapshot)
    files = [snapshot, beside] if os.path.exists(beside) else [snapshot]
    options: dict[str, str | int | None] = {"unwatched_peak_bytes": unwatched_peak_bytes}
    return read_bounded("memory", MemoryProfile, files, options, tell)


def import_snapshot(
    path: Path | str,
    *,
    name: str | None = None,
    store: Path | str | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Run:
    """Store the memory profile of a snapshot: a pickle by torch.cuda.memory._dump_snapshot, plain or compressed by gzip
    or xz.

    The file is not executed: only containers, texts and numbers are admitted. `name`: default is the file's. With the
    marks that `memory` writes next to it (step.marks.json), categories are owners; else they only separate memory from
    before the history and since. Raises UserError for a file that is unreadable, no snapshot, too large, or without
    allocations.
    """
    path = Path(path)

    def read(run: Run) -> Run:
        found = dataclasses.replace(read_memory(path, on_progress), file=path.name)
        return dataclasses.replace(run, memory_profile=found, notes=("timing: an imported snapshot has no timing",))

    return import_run(path, name, store, read)
