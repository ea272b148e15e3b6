import pytest
from tests.traces import MAIN, OTHER_PROCESS, HandTrace, ns

from steplab.reading.traces.digest import digest
from steplab.reading.traces.trace import NONE


def step_of(trace: HandTrace, begin: float, *, thread: int, device: int) -> None:
    trace.range("step", begin, begin + 100, thread=thread)
    trace.range("forward", begin, begin + 100, thread=thread)
    trace.kernel("gemm", begin + 10, begin + 30, (begin + 1, begin + 3), thread=thread, device=device)
    trace.kernel("elementwise", begin + 50, begin + 60, (begin + 4, begin + 6), thread=thread, device=device)


def test_a_device_is_not_busy_while_another_one_works() -> None:
    alone, trace = HandTrace(), HandTrace()
    for made in (alone, trace):
        step_of(made, 0, thread=MAIN, device=1)
    trace.kernel("gemm", 30, 50, (3, 4), device=0)
    profile, expected = digest(trace.build()), digest(alone.build())
    assert profile.phases == expected.phases
    assert profile.phases[0].busy_s == pytest.approx(30e-6)
    assert (profile.kernels, profile.timeline) == (expected.kernels, expected.timeline)
    assert profile.num_launches == 2
    assert "devices: figures show cuda:1, with the most work; the trace also has cuda:0" in profile.notes


@pytest.mark.parametrize("device", [0, 1])
def test_steps_of_another_process_are_not_counted(device: int) -> None:
    """Processes with one GPU each may all call it 0."""
    alone, trace = HandTrace(), HandTrace()
    for made in (alone, trace):
        step_of(made, 0, thread=MAIN, device=0)
        step_of(made, 100, thread=MAIN, device=0)
    step_of(trace, 40, thread=OTHER_PROCESS, device=device)
    profile, expected = digest(trace.build()), digest(alone.build())
    assert profile.num_steps == expected.num_steps == 2
    assert (profile.phases, profile.window_s) == (expected.phases, expected.window_s)
    assert [note.split(":")[0] for note in profile.notes if note not in expected.notes] == [
        *(["devices"] if device else []),
        "processes",
    ]


def test_a_step_within_a_step_is_part_of_it() -> None:
    alone, trace = HandTrace(), HandTrace()
    for made in (alone, trace):
        for begin in (0, 200):
            step_of(made, begin + 20, thread=MAIN, device=0)
            made.kernel("Memcpy HtoD", begin + 6, begin + 8, (begin + 1, begin + 5))
            made.kernel("fill", begin + 150, begin + 160, (begin + 130, begin + 135))
    alone.ranges = [(alone.name("other"), *row[1:]) if alone.names[row[0]] == "step" else row for row in alone.ranges]
    for made in (alone, trace):
        made.range("ProfilerStep#3", 0, 180)
        made.range("ProfilerStep#4", 200, 380)
    profile, expected = digest(trace.build()), digest(alone.build())
    assert profile.num_steps == expected.num_steps == 2
    assert (profile.phases, profile.num_launches) == (expected.phases, 8)


@pytest.mark.parametrize("correlation", [NONE, 0])
def test_a_call_without_a_correlation_launched_nothing(correlation: int) -> None:
    trace = HandTrace()
    step_of(trace, 0, thread=MAIN, device=0)
    trace.work.append((trace.name("lost"), ns(70), ns(5), 0, 7, correlation))
    trace.calls.append((trace.name("cudaDeviceSynchronize"), ns(80), ns(10), MAIN, correlation))
    profile = digest(trace.build())
    [waited] = profile.host_calls
    assert waited.name == "cudaDeviceSynchronize"
    assert profile.num_launches == 2
