"""Messages against computation in traces written by hand, and against a brute force that looks at every nanosecond."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.traces import AUTOGRAD, HandTrace

from steplab.errors import SteplabError
from steplab.reading.traces.categories import kernel_category
from steplab.reading.traces.communication import traced_steps
from steplab.records.ddp import COMMUNICATION_ROW, COMPUTE_ROW, TracedSteps

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
GEMM = "nvjet_tst_128x128_NNT"
END = 40
pairs = st.tuples(st.integers(0, END), st.integers(0, END)).map(sorted).filter(lambda pair: pair[0] < pair[1])
intervals = st.lists(pairs, max_size=6)


def covered(spans: list[list[int]]) -> set[int]:
    return {instant for start, end in spans for instant in range(start, end)}


@given(intervals.filter(bool), intervals)
def test_on_a_gpu_kernels_of_the_library_are_messages(computed: list[list[int]], sent: list[list[int]]) -> None:
    trace = HandTrace()
    trace.range("step", 0, 100)
    trace.range("backward", 0, 90)
    for name, stream, spans in ((GEMM, 7, computed), (NCCL, 20, sent)):
        for start, end in spans:
            trace.kernel(name, 50 + start, 50 + end, launch=(1, 2), stream=stream)
    found = traced_steps(trace.build())
    both = covered(computed) & covered(sent)
    assert found.communication_s == pytest.approx(len(covered(sent)) * 1e-6)
    assert found.overlapped_s == pytest.approx(len(both) * 1e-6)
    assert found.exposed_s == pytest.approx(len(covered(sent) - covered(computed)) * 1e-6)
    first = min(start for start, _ in (*computed, *sent))  # a GPU's step begins with its first piece of work
    assert drawn(found, COMMUNICATION_ROW, -first) == covered(sent)
    assert drawn(found, COMPUTE_ROW, -first) == covered(computed)


@given(intervals.filter(bool), intervals)
def test_on_a_cpu_they_are_what_gloo_marks_on_its_own_threads(computed: list[list[int]], sent: list[list[int]]) -> None:
    trace = HandTrace()
    trace.range("step", 0, 100)
    trace.range("backward", 5, 70)
    for thread, (start, end) in enumerate(computed):
        trace.op("aten::mm", 20 + start, 20 + end, thread=10 + thread)
    trace.op("c10d::allreduce_", 6, 8)
    for thread, (start, end) in enumerate(sent):
        trace.range("gloo:all_reduce", 20 + start, 20 + end, thread=20 + thread)
    found = traced_steps(trace.build())
    assert found.communication_s == pytest.approx(len(covered(sent)) * 1e-6)
    assert found.overlapped_s == pytest.approx(len(covered(sent) & covered(computed)) * 1e-6)
    assert drawn(found, COMPUTE_ROW, 20) == covered(computed)
    assert found.timeline.phases == (("backward", 5000, 70000),)


def drawn(found: TracedSteps, row: int, zero: int) -> set[int]:
    """The microseconds that a row of the picture covers, counted from `zero`."""
    timeline = found.timeline
    pieces = zip(timeline.stream, timeline.start_ns, timeline.duration_ns, strict=True)
    spans = [(start, start + lasts) for on, start, lasts in pieces if on == row]
    return {instant // 1000 - zero for start, end in spans for instant in range(start, end, 1000)}


def two_steps() -> HandTrace:
    """Two steps on a GPU, the messages of each half under its backward pass; a warm-up step that is not told."""
    trace = HandTrace()
    for number, name in enumerate(("warmup step", "step", "step")):
        zero = 1000 * number
        trace.range(name, zero, zero + 900)
        for phase, start, end in (("forward", 10, 200), ("backward", 200, 500), ("optimizer", 600, 700)):
            trace.range(phase, zero + start, zero + end)
            trace.kernel(GEMM, zero + start + 100, zero + end + 100, launch=(zero + start, zero + start + 1))
        trace.kernel(NCCL, zero + 400, zero + 700, launch=(zero + 300, zero + 301), stream=20, thread=AUTOGRAD)
    return trace


def test_figures_are_a_step_s_and_the_last_step_is_drawn_from_its_beginning() -> None:
    found = traced_steps(two_steps().build())
    assert found.num_steps == 2
    assert found.communication_s == pytest.approx(300e-6)
    assert found.overlapped_s == pytest.approx(200e-6)
    assert found.timeline.start_ns[0] == 0
    assert found.timeline.phases[0][0] == "forward"
    assert [name for name, *_ in found.timeline.phases] == ["forward", "backward", "optimizer"]


def test_the_time_between_two_steps_for_which_a_gpu_was_held_is_no_part_of_them() -> None:
    # From the first kernel at 110 to the last at 800; the steps begin 1000 apart, and what lies between is nobody's.
    assert traced_steps(two_steps().build()).step_s == pytest.approx(690e-6)


def test_copies_are_drawn_and_hide_nothing() -> None:
    trace = two_steps()
    trace.kernel("Memcpy DtoD (Device -> Device)", 2600, 2700, launch=(2302, 2303), stream=7)
    with_copy, without = traced_steps(trace.build()), traced_steps(two_steps().build())
    assert with_copy.exposed_s == without.exposed_s
    assert "copy" in with_copy.timeline.categories


def test_what_runs_on_a_stream_of_messages_is_part_of_them() -> None:
    """Gradients that are copied to the other GPUs are averaged there, between two signals."""
    trace = two_steps()
    # Between two GPUs, and yet a copy within one to the profiler, as it may be for mapped memory.
    for stream, name, start, end in (
        (21, "Memcpy DtoD (Device -> Device)", 2600, 2610),
        (22, "mean_kernel", 2700, 2800),
    ):
        trace.kernel(name, start, end, launch=(2302, 2303), stream=stream)
    found = traced_steps(trace.build())
    assert found.communication_s == pytest.approx((2 * 300 + 100) / 2 * 1e-6)  # the copy lies within a message
    assert found.exposed_s == pytest.approx((2 * 100 + 0) / 2 * 1e-6)  # the optimizer runs above the mean


def test_a_copy_between_gpus_is_a_message() -> None:
    assert kernel_category("Memcpy PtoP (Device -> Device)") == "communication"
    assert kernel_category("c10d::symmetric_memory::wait_signal_kernel(unsigned int**)") == "communication"
    assert kernel_category("Memcpy DtoD (Device -> Device)") == "copy"


def test_a_trace_without_steps_or_work_is_refused() -> None:
    with pytest.raises(SteplabError, match="marks no steps"):
        traced_steps(HandTrace().build())
    trace = two_steps().build()
    nothing = dataclasses.replace(trace, ranges=HandTrace().build().ranges)
    with pytest.raises(SteplabError, match="marks no steps"):
        traced_steps(nothing)
