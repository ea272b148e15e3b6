"""Tunes flash_triton on this machine's GPU: compiles and checks all candidates at once, then times the correct ones.

Compiling takes seconds of CPU time per candidate, so all cores share it; Triton stores compiled kernels on disk, where
the timing process finds them. The timing process has the GPU to itself.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from steplab.errors import Unsupported
from steplab.measurement.attention.trial import CheckTask, TimeTask, check, time_candidates
from steplab.measurement.attention.workers import Lost, in_workers
from steplab.measurement.machine.device import open_device
from steplab.measurement.machine.environment import read_environment
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.ops.attention.triton_tuning import hopper_kernels_run
from steplab.records.attention_tuning import AttentionTuning, DroppedTiles, TileTrial
from steplab.specs.attention import AttentionSpec
from steplab.specs.attention_tuning import KERNELS, TileCandidate, TuningStudy, box_of, candidates, timed_shapes

OnStage = Callable[[str, int], None]
OnStep = Callable[[int], None]

_MOST_WORKERS = 16
"""The most worker processes: each has a context on the GPU, half a gigabyte."""
_CHECK_S, _TIME_S = 120.0, 120.0
"""The time limits of a check and of a timing; a task that takes longer is taken to hang."""
_CHECKED = AttentionSpec(batch=4, heads=4, queries=720)
"""The shape of the check: not a whole number of tiles and, like the timed shapes, a multiple of 16, for which
kernels are compiled."""
_PRODUCTS = {"forward": 2, "backward_kv": 4, "backward_q": 3}
"""The number of products that a kernel computes, each a multiply-add for each score and column."""


@dataclass(frozen=True, slots=True)
class Workers:
    """How tasks are run; tests run them in their own process."""

    check: Callable[[Sequence[CheckTask], OnStep], list[str | Lost]]
    time: Callable[[Sequence[TimeTask], OnStep], list[list[tuple[float, ...]] | Lost]]


def _check_in_workers(tasks: Sequence[CheckTask], on_step: OnStep) -> list[str | Lost]:
    num_workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    return in_workers(check, tasks, num_workers=num_workers, timeout_s=_CHECK_S, on_done=on_step)


def _time_in_a_worker(tasks: Sequence[TimeTask], on_step: OnStep) -> list[list[tuple[float, ...]] | Lost]:
    return in_workers(time_candidates, tasks, num_workers=1, timeout_s=_TIME_S, on_done=on_step)


IN_PROCESSES = Workers(_check_in_workers, _time_in_a_worker)


def tune_attention(study: TuningStudy, observer: Observer, world: World | None = None) -> AttentionTuning:
    """The candidates and their times; nothing is chosen yet. Raises Unsupported without a CUDA GPU."""
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        raise Unsupported("tuning attention here", f"flash_triton's kernels need CUDA, but {why}", "run it on a GPU")
    device = open_device(study.device).torch_device
    hopper = torch.cuda.get_device_capability(device) == (9, 0) and hopper_kernels_run()
    tuning = AttentionTuning(study=study, gpu=torch.cuda.get_device_name(device), environment=read_environment(device))
    return tried(tuning, str(device), hopper=hopper, on_stage=observer.on_stage, on_step=observer.on_step)


def tried(
    tuning: AttentionTuning,
    device: str,
    *,
    hopper: bool,
    on_stage: OnStage,
    on_step: OnStep,
    workers: Workers = IN_PROCESSES,
) -> AttentionTuning:
    """The tuning with the trials, and with notes on the candidates that failed."""
    study = tuning.study
    checks = [
        CheckTask(
            device=device,
            candidate=candidate,
            shape=dataclasses.replace(_CHECKED, dim=head_dim, causal=causal, dtype=study.dtype),
        )
        for head_dim in study.head_dims
        for candidate in candidates(box_of(head_dim), bits=study.bits, hopper=hopper, portable=study.portable)
        for causal in (True, False)
    ]
    on_stage("compiling tiles and checking them", len(checks))
    dropped: dict[TileCandidate, str] = {}
    for check_task, wrong in zip(checks, workers.check(checks, on_step), strict=True):
        if wrong:
            dropped.setdefault(check_task.candidate, _reason(check_task.shape, wrong))
    right = list(dict.fromkeys(task.candidate for task in checks if task.candidate not in dropped))
    tasks = [
        TimeTask(device=device, candidates=of_kernel, shape=shape)
        for head_dim in study.head_dims
        for shape in timed_shapes(head_dim, study.dtype)
        for kernel in KERNELS
        if (of_kernel := tuple(c for c in right if (c.kernel, c.box) == (kernel, box_of(head_dim))))
    ]
    on_stage("timing tiles", len(tasks))
    trials, lost = _timed(tasks, workers.time(tasks, on_step))
    # If one of several has hung or broken the device, timing each by itself shows which one.
    alone = [dataclasses.replace(task, candidates=(c,)) for task, _ in lost for c in task.candidates]
    if alone:
        on_stage("timing tiles one by one", len(alone))
        more, lost = _timed(alone, workers.time(alone, on_step))
        trials += more
        for task, why in lost:
            dropped.setdefault(task.candidates[0], _reason(task.shape, why))
    return dataclasses.replace(
        tuning,
        trials=tuple(trial for trial in trials if trial.candidate not in dropped),
        dropped=tuple(DroppedTiles(candidate=candidate, why=why) for candidate, why in dropped.items()),
    )


def _timed(
    tasks: Sequence[TimeTask], outcomes: Sequence[list[tuple[float, ...]] | Lost]
) -> tuple[list[TileTrial], list[tuple[TimeTask, Lost]]]:
    """The trials, and the tasks that were lost."""
    trials: list[TileTrial] = []
    lost: list[tuple[TimeTask, Lost]] = []
    for task, outcome in zip(tasks, outcomes, strict=True):
        if isinstance(outcome, Lost):
            lost.append((task, outcome))
            continue
        for candidate, device_s in zip(task.candidates, outcome, strict=True):
            flops = _PRODUCTS[candidate.kernel] * _flops_of_a_product(task.shape)
            trials.append(TileTrial(candidate=candidate, shape=task.shape, device_s=device_s, flops=flops))
    return trials, lost


def _flops_of_a_product(shape: AttentionSpec) -> float:
    flops = 2.0 * shape.batch * shape.heads * shape.queries * shape.num_keys * shape.dim
    return flops / 2 if shape.causal else flops


def _reason(shape: AttentionSpec, wrong: str | Lost) -> str:
    where = f"head dimension {shape.dim}, {'causal' if shape.causal else 'not causal'}"
    return f"{where}: {wrong.why if isinstance(wrong, Lost) else wrong}"
