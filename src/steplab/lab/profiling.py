"""Profile a step after measuring it, or import the trace of another program."""

import dataclasses
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from steplab.costs.rates import gpu_named
from steplab.errors import SteplabError, UserError
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.files import folder_for, raw_file, rescued
from steplab.lab.keeping import Place, checked_name, import_run, keep, named_file, open_store
from steplab.lab.machine import refuse_torchrun
from steplab.lab.measuring import asked_step, completed
from steplab.lab.planning import DEFAULT_GPU
from steplab.lab.predicting import is_traced
from steplab.measurement.jobs import SharesTask, StepTask
from steplab.measurement.processes.launch import ask, measure_in_child
from steplab.measurement.profile.nsys import is_watched_by_nsys
from steplab.measurement.progress import OnProgress, Progress
from steplab.plan.time import compiled_shares
from steplab.reading.bounded import read_bounded
from steplab.records.profile import CompiledShares, Profile, TracedRanks
from steplab.records.run import Run
from steplab.specs.hardware import find_hardware
from steplab.specs.layout import SINGLE
from steplab.specs.step import StepSpec

_TRACES = (".json", ".json.gz", ".json.xz", ".sqlite")
LONGEST_S = 60.0
"""Timeout in seconds of a dry run; 32 layers take a few seconds."""


def profile(
    spec: StepSpec | str | None = None,
    *,
    name: str = "",
    store: Path | str | None = None,
    profiled_steps: int = 3,
    trace: Path | str | None = None,
    force: bool = False,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    place: Place | None = None,
    **fields: object,
) -> Run:
    """Measure a step as `measure` does, then profile further steps, and store one record of both.

    `spec` and `fields` are as in `measure`:

        run = steplab.profile("small", context=256, precision="bf16")
        run.profile.kernels[0]

    `trace` is a path for the raw trace, for Perfetto (compressed if it ends in .gz). A file other than an earlier trace
    is replaced only with `force`, the store never. Under `nsys profile` its report has the profiled steps, and the
    record has no profile.

    A failed measurement is a record. If only the profiling fails, the record has a note, and `run.profile` is None.
    Raises UserError for an unsupported request, SteplabError if the store or the trace cannot be written, or the trace
    not read; the measurement is then stored and the trace kept.
    """
    refuse_torchrun("profile a step")
    chosen, name = choose_checkpointing(asked_step("profile", spec, fields)), checked_name(name)
    if profiled_steps < 1:
        raise UserError(f"profiled steps must be at least 1, not {profiled_steps}")
    target = raw_file(trace, store, force, "trace", (".json", ".json.gz"))
    with open_store(store, write=True) as opened, folder_for(target) as folder:
        written = folder / ("steps.json.gz" if str(trace).endswith(".gz") else "steps.json")
        task = StepTask(spec=chosen.spec, profiled_steps=profiled_steps, trace=str(written))
        run = measure_in_child(task, timeout_s=timeout_s, on_progress=on_progress)
        run = completed(run, name, chosen.notes, opened)
        try:
            if written.exists():
                with rescued(written, target, "trace", run):
                    kept = target.take(written) if target else written
                    run = with_profile(run, read_profile(kept, "torch.profiler", on_progress))
                run = with_compiled_shares(run, on_progress)
        finally:  # after Ctrl-C too: the measurement is made
            run = keep(opened, run, place)
        return run


def import_trace(
    path: Path | str,
    *,
    name: str | None = None,
    store: Path | str | None = None,
    step_range: str | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Run:
    """Store the profile of a trace: a Kineto trace (.json, also .gz or .xz) or an nsys SQLite export; a folder with a
    trace per rank gives all ranks' profile.

    `name`: default is the file's. `step_range`: a shell pattern for names of step ranges; None: torch's and steplab's
    names. The record has only a profile: a trace lacks the spec and unprofiled step times. Raises UserError for a file
    that is unreadable, no trace, or too large.
    """
    path = Path(path)

    def read(run: Run) -> Run:
        if path.is_dir():
            found, ranks = read_ranks(path, on_progress, step_range)
            notes = (f"timing, memory: imported traces of {len(ranks.ranks)} ranks have only profiled steps",)
            return dataclasses.replace(run, profile=found, traced_ranks=ranks, notes=notes)
        found = dataclasses.replace(read_profile(path, None, on_progress, step_range), file=path.name)
        notes = ("timing, memory: an imported trace has only profiled steps",)
        return dataclasses.replace(run, profile=found, notes=notes)

    return import_run(path, name, store, read)


def read_ranks(
    folder: Path, on_progress: OnProgress = lambda progress: None, step_range: str | None = None
) -> tuple[Profile, TracedRanks]:
    """The first rank's profile, and a summary of all ranks, read in parallel. Raises UserError for a folder or file
    without a trace.
    """
    from steplab.reading.traces.ranks import RankTrace, side_by_side  # numpy, which other commands do without

    files = sorted(path for path in folder.iterdir() if path.name.endswith(_TRACES))
    if not files:
        raise UserError(f"{folder} holds no trace ({', '.join(_TRACES)})")
    files.sort(key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)[:1]])

    def read(path: Path) -> RankTrace:
        options: dict[str, str | int | None] = {"step_range": step_range, "whole": int(path == files[0])}
        with named_file(path):
            return read_bounded("rank", RankTrace, [path], options)

    traces = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for trace in pool.map(read, files):
            traces.append(trace)
            on_progress(Progress(stage="read", done=len(traces), total=len(files)))
    profile = traces[0].profile
    assert profile is not None
    with named_file(folder):
        return dataclasses.replace(profile, file=files[0].name), side_by_side(traces)


def is_recorded_elsewhere(run: Run) -> bool:
    return run.timing is not None and run.profile is None and is_watched_by_nsys()


def read_profile(
    path: Path,
    source: str | None,
    on_progress: OnProgress = lambda progress: None,
    step_range: str | None = None,
) -> Profile:
    """Read a trace. `source`: the program that wrote it; None: detect it. Raises UserError for no trace, or one too
    large.
    """

    def tell(done_bytes: int, total_bytes: int) -> None:
        on_progress(Progress(stage="read", done=done_bytes, total=total_bytes))

    return read_bounded("profile", Profile, [path], {"source": source, "step_range": step_range}, tell)


def with_profile(run: Run, found: Profile) -> Run:
    """Add a profile to the run, and move the run's notes on the trace into it."""
    moved = tuple(note for note in run.notes if note.startswith(("ranges: ", "kernels: ")))
    kept = tuple(note for note in run.notes if note not in moved)
    return dataclasses.replace(run, profile=dataclasses.replace(found, notes=moved + found.notes), notes=kept)


def with_compiled_shares(run: Run, on_progress: OnProgress = lambda progress: None) -> Run:
    """Add to an eager step on CUDA the shares of its time that torch.compile is predicted to leave, or a note why they
    are unknown. A user's model is traced in another process.
    """
    spec, profile = run.spec, run.profile
    if spec is None or profile is None or profile.device != "cuda" or spec.compile != "off":
        return run
    known = find_hardware(run.device_name or "")
    alone = dataclasses.replace(spec, device="auto", layout=SINGLE)
    try:
        found = _shares(alone, known.name if known else DEFAULT_GPU, on_progress)
    except SteplabError as error:
        notes = (*profile.notes, f"compiled: what compiling would save is not predicted: {error}")
        return dataclasses.replace(run, profile=dataclasses.replace(profile, notes=notes))
    return dataclasses.replace(run, profile=dataclasses.replace(profile, compiled=found))


def _shares(spec: StepSpec, gpu: str, on_progress: OnProgress) -> CompiledShares:
    if not is_traced(spec):
        return compiled_shares(spec, gpu_named(gpu))
    task = SharesTask(spec=spec, gpu=gpu)
    answer = ask("shares", task, device="cpu", timeout_s=LONGEST_S, on_progress=on_progress)
    shares: CompiledShares = answer.unless_failed("the dry run failed")
    return shares
