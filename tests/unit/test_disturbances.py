import dataclasses
import os
import time
from types import SimpleNamespace

import pytest
from tests.rendering import render_page, rows_text, run_text
from tests.runs import make_run

from steplab.measurement.machine import nvml
from steplab.measurement.machine.load import OtherProcesses
from steplab.records.codec import decode, encode
from steplab.records.disturbances import disturbances
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing, Turns
from steplab.report.turns.document import turns_document

QUIET = (1.0, 1.0, 1.01, 1.0, 0.99, 1.0, 1.0, 1.0, 1.01, 1.0)


def run_of(
    samples: tuple[float, ...] = QUIET, lead_s: float | None = None, cpu: bool = True, **environment: object
) -> Run:
    leads = None if lead_s is None else (lead_s,) * len(samples)
    step = PhaseSamples(phase="step", device_s=None if cpu else samples, host_s=samples if cpu else None, lead_s=leads)
    run = make_run()
    assert run.environment is not None
    device = dataclasses.replace(run.environment.device, threads=2 if cpu else None)
    changed = {"num_cpus": 2, "device": device} | environment
    return dataclasses.replace(
        run,
        timing=Timing(warmup=(), back_to_back=(step,)),
        environment=dataclasses.replace(run.environment, **changed),  # type: ignore[arg-type]
    )


def on_gpu(**device: object) -> Run:
    run = run_of(cpu=False, lead_s=0.5)
    assert run.environment is not None
    changed = dataclasses.replace(run.environment.device, **device)  # type: ignore[arg-type]
    return dataclasses.replace(run, environment=dataclasses.replace(run.environment, device=changed))


def words(run: Run) -> list[str]:
    return [disturbance.word for disturbance in disturbances(run)]


def test_a_steady_run_on_a_quiet_machine_has_no_warning() -> None:
    assert words(run_of(other_cpus=0.02, load_average=2.1)) == []
    assert words(on_gpu(clock_limits=("power limit",), other_processes=0)) == []


@pytest.mark.parametrize(("num_far", "word"), [(2, []), (3, ["outliers"])])
def test_a_quarter_of_the_steps_beyond_twice_the_median_is_a_warning(num_far: int, word: list[str]) -> None:
    # Far ones are apart, so that medians of three consecutive steps do not see them.
    samples = [1.0] * 10
    for index in range(num_far):
        samples[3 * index] = 2.1
    assert words(run_of(tuple(samples))) == word


def test_a_step_time_that_does_not_settle_is_a_warning() -> None:
    assert words(run_of((1.0, 1.2, 1.4, 1.6, 1.8, 1.9, 1.95, 2.0))) == ["unsteady"]


def test_a_gpu_that_waits_for_its_host_is_a_warning() -> None:
    assert words(run_of(lead_s=0.005, cpu=False)) == ["may wait for host"]
    assert words(run_of(lead_s=0.02, cpu=False)) == []


def test_the_side_that_waits_for_python_is_named_where_steps_alternate() -> None:
    runs = [
        dataclasses.replace(run_of(lead_s=lead_s, cpu=False), turns=Turns(session="s", label=label))
        for label, lead_s in (("A", 0.5), ("B", 0.005))
    ]
    (caution,) = turns_document([runs], [[None]], ["1", "2"]).verdict.cautions
    assert caution.startswith("Warning: in B the GPU may wait for Python")


@pytest.mark.parametrize(
    ("other_cpus", "load_average", "word"),
    [
        (1.0, 1.0, ["busy machine"]),
        (0.1, 9.0, []),  # others' real use is known; the load came from earlier measurements
        (None, 3.1, ["busy machine"]),
        (None, 2.9, []),
        (None, None, []),
    ],
)
def test_a_busy_machine_is_a_warning(other_cpus: float | None, load_average: float | None, word: list[str]) -> None:
    assert words(run_of(other_cpus=other_cpus, load_average=load_average)) == word


def test_spare_processors_may_be_busy() -> None:
    assert words(run_of(other_cpus=4.0, num_cpus=8)) == []
    assert words(run_of(other_cpus=6.5, num_cpus=8)) == ["busy machine"]


def test_a_shared_and_a_hot_gpu_are_warnings() -> None:
    assert words(on_gpu(other_processes=1)) == ["shared GPU"]
    assert words(on_gpu(clock_limits=("power limit", "hardware thermal slowdown"))) == ["slowed clock"]


def test_a_run_without_timing_has_none() -> None:
    assert words(dataclasses.replace(run_of(other_cpus=2.0), timing=None)) == []


def test_a_machine_that_was_suspended_is_a_warning_and_every_sample_is_kept() -> None:
    run = run_of(suspended_s=12.0)
    assert words(run) == ["suspended"]
    assert "suspended for 12.0 s" in disturbances(run)[0].text
    assert words(run_of(suspended_s=0.001)) == []
    assert decode(encode(run)) == run


# --- where they are shown ---------------------------------------------------------------------------------


def test_a_warning_stands_beside_the_headline_in_tables_and_in_charts() -> None:
    busy, quiet = run_of(other_cpus=1.5), dataclasses.replace(run_of(), id="000000000002")
    text = run_text(busy)
    assert "Warning: Other processes kept 1.5 of 2 processors busy" in text
    assert "steplab run --model" in text
    assert "Warning" not in run_text(quiet)
    assert "busy machine" in rows_text([run_row(busy), run_row(quiet)], "table", width=80)
    both = rows_text([run_row(busy), run_row(dataclasses.replace(busy, id="000000000002"))], "table", width=80)
    assert "every row's warning: busy machine" in " ".join(both.split())
    alone = rows_text([run_row(busy)], "table", width=80)
    assert "busy machine" in " ".join(alone.split())
    assert "every row" not in alone
    page = render_page([busy, dataclasses.replace(quiet, spec=dataclasses.replace(quiet.spec, context=64))], title="t")  # type: ignore[type-var]
    assert "Hollow marks are runs with a warning." in page
    assert "warning: busy machine" in page


def test_an_interval_says_what_it_is() -> None:
    assert "(95 % interval 990 ms to 1.01 s, n = 10)" in run_text(run_of((*QUIET[:8], 0.99, 1.01)))
    assert "(95 % interval ± 50.0 µs, n = 10)" in run_text(run_of((1.0,) * 5 + (1.0001,) * 5))
    assert "(range 1.00 s to 1.20 s, n = 3)" in run_text(run_of((1.0, 1.1, 1.2)))
    assert "(a single sample)" in run_text(run_of((1.0,)))


# --- how they are found out -------------------------------------------------------------------------------


def test_records_without_the_new_fields_are_read() -> None:
    run = run_of()
    assert decode(encode(run)) == run


def test_own_work_is_not_that_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"elapsed": 0.0, "own": 0.0, "machine": 0.0}
    times = SimpleNamespace(_asdict=lambda: {"user": clock["machine"], "idle": 1e6, "guest": 50.0})
    monkeypatch.setattr("psutil.cpu_times", lambda: times)
    process = SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=clock["own"], system=0.0))
    monkeypatch.setattr("psutil.Process", lambda: process)
    monkeypatch.setattr(time, "perf_counter", lambda: clock["elapsed"])
    others = OtherProcesses()
    assert others.mean_cpus() is None
    clock.update(elapsed=2.0, own=4.0, machine=4.0)
    assert others.mean_cpus() == 0.0
    clock.update(elapsed=4.0, own=8.0, machine=10.0)
    assert others.mean_cpus() == 0.5


def test_what_is_counted_is_what_runs() -> None:
    before, until = OtherProcesses(), time.perf_counter() + 0.6
    while time.perf_counter() < until:
        sum(range(1000))
    found = before.mean_cpus()
    assert found is not None
    assert 0 <= found <= (os.cpu_count() or 1)


def test_nvml_names_other_processes_and_limits_of_the_clock() -> None:
    me = os.getpid()
    fake = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=me), SimpleNamespace(pid=me + 1)],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x1 | 0x4 | 0x40,
    )
    assert nvml._other_processes(fake, None) == 1
    assert nvml._clock_limits(fake, None) == ("power limit", "hardware thermal slowdown")
