import json
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from steplab.lab.measuring import measure
from steplab.lab.profiling import profile
from steplab.measurement.observer import Observer
from steplab.measurement.profile.profiler import StepProfiler
from steplab.measurement.step_job import measure_here
from steplab.records.run import Run
from steplab.specs.resolve import resolve_step

STEPS = 2


def recorded(trace: Path, **fields: object) -> Run:
    spec = resolve_step({"model": "tiny", "context": 128, "warmup": 2, "steps": 3} | fields)
    return measure_here(spec, Observer(), partial(StepProfiler, num_steps=STEPS, trace=trace))


def events(trace: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace.read_bytes())["traceEvents"] if event.get("cat") in kinds]


def kernels_within(trace: Path, name: str) -> list[list[str]]:
    launches = {event["args"]["correlation"]: event["ts"] for event in events(trace, "cuda_runtime", "cuda_driver")}
    kernels = sorted(events(trace, "kernel"), key=lambda event: event["ts"])
    found = []
    for marked in sorted(events(trace, "user_annotation"), key=lambda event: event["ts"]):
        if marked["name"] == name:
            end = marked["ts"] + marked["dur"]
            launched = [k for k in kernels if marked["ts"] <= launches.get(k["args"]["correlation"], -1) < end]
            found.append([kernel["name"] for kernel in launched])
    return found


def test_every_step_launches_the_same_kernels(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    run = recorded(trace)
    assert run.failure is None
    first, second = kernels_within(trace, "step")
    assert first
    assert first == second


def test_the_parts_of_attention_launch_kernels_in_every_layer(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    recorded(trace, **{"model.num_layers": 3})
    for part in ("scores", "softmax", "values"):
        launched = kernels_within(trace, part)
        assert len(launched) == 3 * (STEPS + 1)  # and the warm-up step
        assert all(launched)
    assert all(any("softmax" in kernel.lower() for kernel in kernels) for kernels in kernels_within(trace, "softmax"))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_is_profiled(tmp_path: Path, mode: str) -> None:
    run = profile(
        "tiny",
        compile=mode,
        precision="bf16",
        attention="sdpa",
        warmup=2,
        steps=3,
        profiled_steps=STEPS,
        store=tmp_path / "store.db",
    )
    assert run.failure is None
    assert run.profile is not None, run.notes
    assert (run.profile.device, run.profile.num_steps) == ("cuda", STEPS)
    assert any(note.startswith("ranges: ") for note in run.profile.notes)
    forward = run.profile.phase("forward")
    assert forward is not None
    assert forward.busy_s > 0


def test_where_the_gpu_is_busy_the_profiled_forward_takes_as_long_as_the_timed_one(tmp_path: Path) -> None:
    run = profile("small", context=1024, batch=8, profiled_steps=STEPS, store=tmp_path / "store.db")
    assert run.timing is not None
    assert run.profile is not None, run.notes
    timed, forward = run.timing.phase("forward"), run.profile.phase("forward")
    assert timed is not None
    assert forward is not None
    assert forward.busy_s > 0.98 * forward.window_s, "the step was to keep the GPU busy"
    assert forward.window_s / STEPS == pytest.approx(median(timed.best_s), rel=0.03)


def test_a_profile_leaves_the_timing_alone(tmp_path: Path) -> None:
    alone = measure("small", context=1024, batch=8, store=tmp_path / "store.db")
    watched = profile("small", context=1024, batch=8, profiled_steps=1, store=tmp_path / "store.db")
    assert alone.timing is not None
    assert watched.timing is not None
    steps = [timing.phase("step") for timing in (alone.timing, watched.timing)]
    first, second = (median(step.best_s) for step in steps if step)
    assert second == pytest.approx(first, rel=0.02)
