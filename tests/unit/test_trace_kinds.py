"""Kinds of traces in the wild: accepted, left out, and reported as such. Each is rebuilt small from a public report;
values are counted by hand.
"""

import json
import sqlite3
from pathlib import Path

import pytest
from tests.traces import HandTrace

from steplab.errors import SteplabError, UserError
from steplab.reading.traces.digest import digest
from steplab.reading.traces.naming import called
from steplab.reading.traces.reading import read_trace
from steplab.records.profile import Profile
from steplab.report.kit.kernel_names import short_kernels

GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn"
COPY = "Memcpy HtoD (Pinned -> Device)"


def steps(num: int, *, lasts: float = 10_000) -> HandTrace:
    trace = HandTrace()
    for number in range(num):
        trace.range(f"ProfilerStep#{number + 1}", number * lasts, (number + 1) * lasts)
    return trace


def calls_of(profile: Profile) -> int:
    return sum(kernel.calls for kernel in profile.kernels)


def told(profile: Profile, text: str, *, doubt: bool = True) -> None:
    assert any(text in note for note in (profile.doubts if doubt else profile.notes)), profile.notes


def json_trace(path: Path, *events: dict[str, object], **more: object) -> Path:
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "pid": 1, "tid": 1, **event} for event in events], **more}))
    return path


def kernel(ts: float, dur: float, correlation: int, **more: object) -> dict[str, object]:
    args = {"correlation": correlation, "device": 0, "stream": 7}
    return {"cat": "kernel", "name": GEMM, "ts": ts, "dur": dur, "args": args, **more}


# --- the timeline begins at the earliest activity ---------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [2900.0, 3500.0], ids=["while a step computes", "before its last kernel"])
def test_a_copy_beside_the_step_before(ahead: float) -> None:
    trace = steps(2)
    for number in range(16):
        begin = 1000 + 1500 * number
        trace.kernel(GEMM, begin, begin + 1500, (100 + 1240 * number, 105 + 1240 * number))
    trace.kernel(COPY, 13_000 - ahead, 13_000 - ahead + 400, (10_010, 10_015), stream=14, call="cudaMemcpyAsync")
    if ahead > 2990:  # it cannot run before its launch
        trace.calls[-1] = (*trace.calls[-1][:1], 9_400_000, *trace.calls[-1][2:])
    profile = digest(trace.build())
    assert (profile.num_steps, calls_of(profile)) == (2, 17)
    assert profile.busy_s == profile.window_s == pytest.approx(24e-3)
    assert profile.timeline
    assert min(profile.timeline.start_ns) == 0


# --- steps by other names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("category", ["Operator", "cpu_op", "gpu_user_annotation", "UserAnnotation"])
def test_steps_of_other_categories(tmp_path: Path, category: str) -> None:
    events = [{"cat": category, "name": f"ProfilerStep#{n}", "ts": 1000 * n, "dur": 990} for n in (5, 6, 7)]
    launches = [
        {"cat": "Runtime", "name": "cudaLaunchKernel", "ts": 1000 * n + 10, "dur": 8, "args": {"correlation": n}}
        for n in (5, 6, 7)
    ]
    work = [kernel(1000 * n + 100, 190, n, cat="Kernel") for n in (5, 6, 7)]
    profile = digest(read_trace(json_trace(tmp_path / "t.json", *events, *launches, *work)))
    assert (profile.num_steps, calls_of(profile)) == (3, 3)
    assert profile.busy_s == pytest.approx(3 * 190e-6)


def test_ranges_that_are_steps_are_named_and_offered() -> None:
    trace = HandTrace()
    for number in range(3):
        trace.range(f"training_step_{number}", 1000 * number, 1000 * number + 900)
        trace.kernel(GEMM, 1000 * number + 100, 1000 * number + 200, (1000 * number + 10, 1000 * number + 15))
    told(digest(trace.build()), "pass --step-range, for example 'training_step_*' (3 of them)", doubt=False)
    assert digest(trace.build(), step_range="training_step_*").num_steps == 3
    with pytest.raises(UserError, match=r"no range matches train_\*; pass --step-range"):
        digest(trace.build(), step_range="train_*")


def test_a_name_with_brackets_is_offered_so_that_it_matches() -> None:
    trace = HandTrace()
    for number in range(3):
        trace.range(f"[param|model|{number}|forward]", 1000 * number, 1000 * number + 900)
        trace.kernel(GEMM, 1000 * number + 100, 1000 * number + 200, (1000 * number + 10, 1000 * number + 15))
    told(digest(trace.build()), "'[[]param|model|*|forward]' (3 of them)", doubt=False)
    assert digest(trace.build(), step_range="[[]param|model|*|forward]").num_steps == 3


# --- kernels without a launch -----------------------------------------------------------------------------------------


def lost_launches(launched: set[int]) -> HandTrace:
    trace = steps(2)
    for number in range(18):
        begin = 1000 + 900 * number + (number // 9) * 1000
        launch = ((number // 9) * 10_000 + 100 + 10 * (number % 9),) * 2
        trace.kernel(GEMM, begin, begin + 800, launch if number in launched else None)
    return trace


@pytest.mark.parametrize("launched", [{16, 17}, {0, 1}, {0, 9}, set[int](), set(range(1, 18, 2))])
def test_work_without_launches_lies_in_its_steps(launched: set[int]) -> None:
    profile = digest(lost_launches(launched).build())
    assert (profile.num_steps, calls_of(profile)) == (2, 18)
    told(profile, f"{18 - len(launched)} of 18", doubt=False)


def test_the_tail_of_the_step_before_is_left_out_and_said() -> None:
    trace = HandTrace()
    for begin in (900.0, 1000.0, 1100.0):  # launched before the profiler began, the first before its first step
        trace.kernel(GEMM, begin, begin + 90, None)
    trace.range("ProfilerStep#1", 950, 2000)
    trace.kernel(GEMM, 1200, 1300, (960, 965))
    profile = digest(trace.build())
    assert calls_of(profile) == 1
    assert profile.busy_s == pytest.approx(100e-6)
    told(profile, "3 kernels (270 µs) outside steps are left out", doubt=False)


# --- impossible times -------------------------------------------------------------------------------------------------


def ten_kernels() -> HandTrace:
    trace = steps(1)
    for number in range(10):
        begin = 1000 * (number + 1)
        trace.kernel(GEMM, begin, begin + 900, (100 + 10 * number, 105 + 10 * number))
    return trace


@pytest.mark.parametrize("lasts", [2e6, 1400.0], ids=["beyond all", "beyond the next start"])
def test_a_duration_beyond_the_next_start_is_cut(lasts: float) -> None:
    trace = ten_kernels()
    trace.work[3] = (*trace.work[3][:2], round(lasts * 1000), *trace.work[3][3:])
    profile = digest(trace.build())
    assert profile.busy_s == pytest.approx(9.1e-3)
    assert profile.window_s == pytest.approx(9.9e-3)
    told(profile, "1 of 10 kernels outlast the start of their stream's next kernel")


@pytest.mark.parametrize("begin", [0, -500_000_000, 20_000], ids=["at 0", "before the trace", "before its launch"])
def test_a_kernel_before_its_launch_has_no_time(begin: int) -> None:
    trace = ten_kernels()
    for number in range(3):
        trace.kernel(GEMM, 3000, 3000, (300 + 10 * number, 305 + 10 * number))
        trace.work[-1] = (trace.work[-1][0], begin, 0, *trace.work[-1][3:])
    profile = digest(trace.build())
    assert calls_of(profile) == 10
    assert profile.busy_s == pytest.approx(9e-3)
    told(profile, "3 of 13 kernels are left out")


def test_where_most_kernels_are_early_the_clocks_differ() -> None:
    trace = ten_kernels()
    trace.calls = [(name, start + 9_000_000, *rest) for name, start, *rest in trace.calls]
    profile = digest(trace.build())
    assert calls_of(profile) == 10
    told(profile, "the clocks of CPU and GPU differ")


def test_a_kernel_without_a_start_is_a_doubt(tmp_path: Path) -> None:
    lost = {key: value for key, value in kernel(0, 5, 2).items() if key != "ts"}
    told(digest(read_trace(json_trace(tmp_path / "t.json", kernel(10, 5, 1), lost))), "no start or duration: 1")


# --- devices, categories, graphs --------------------------------------------------------------------------------------


def test_a_device_that_is_not_known_is_no_cpu(tmp_path: Path) -> None:
    ops = [{"cat": "cpu_op", "name": "aten::mm", "ts": 100 * n, "dur": 90} for n in range(6)]
    work = [{"cat": "mtia_ccp_events", "name": "matmul", "ts": 100 * n, "dur": 70} for n in range(6)]
    with pytest.raises(SteplabError, match=r"6 of mtia_ccp_events"):
        digest(read_trace(json_trace(tmp_path / "t.json", *ops, *work)))
    others = [{**event, "cat": "hpu_op"} for event in work[:2]]
    told(
        digest(read_trace(json_trace(tmp_path / "u.json", *others, kernel(0, 5, 1)))),
        "2 events of the unknown category hpu_op",
    )


def test_graphs_without_kernels_are_no_waiting() -> None:
    trace = steps(1, lasts=100_000)
    for number in range(20):
        begin = 100 + 5000 * number
        trace.kernel(GEMM, begin + 100, begin + 4800, (begin, begin + 30), call="cudaGraphLaunch")
        if number not in (0, 19):
            *_, correlation = trace.work.pop()
            trace.calls[-1] = (*trace.calls[-1][:-1], 500 + correlation + number)
    profile = digest(trace.build())
    assert sum(phase.host_bound_s for phase in profile.phases) == 0
    told(profile, "18 launches of CUDA graphs have no kernel in the trace")


def test_correlations_that_are_all_zero_are_said(tmp_path: Path) -> None:
    call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 2, "args": {"correlation": 0}}
    profile = digest(read_trace(json_trace(tmp_path / "t.json", call, kernel(10, 5, 0), kernel(20, 5, 0))))
    told(profile, "all correlation ids are 0")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("aten::copy_, seq = 500, op_id = 9000, sizes = [[64, 64], []]", ("aten::copy_", 500, [[64, 64], []])),
        ("aten::add, op_id = 3", ("aten::add", None, [])),
        ("AddmmBackward0, seq = 7, sizes = [[2, 3]], input_op_ids = [(1, 0)]", ("AddmmBackward0", 7, [[2, 3]])),
        ("autograd::engine::evaluate_function: MmBackward0, seq = 7", (
            "autograd::engine::evaluate_function: MmBackward0", 7, [])),
        ("ProfilerStep#3, op_id = 12", None),
        ("forward, 2nd pass", None),
    ],
)  # fmt: skip
def test_the_texts_of_emit_nvtx(text: str, found: object) -> None:
    assert called(text) == found


def test_operators_of_emit_nvtx_are_operators_with_shapes(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with sqlite3.connect(path) as export:
        export.executescript("""
            CREATE TABLE StringIds(id INTEGER, value TEXT); CREATE TABLE META_DATA_EXPORT(name TEXT, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start, end, deviceId, streamId, correlationId, globalPid,
                shortName);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME(start, end, globalTid, correlationId, nameId);
            CREATE TABLE NVTX_EVENTS(start, end, eventType, text, globalTid);
            INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'cudaLaunchKernel');""")
        export.execute("INSERT INTO NVTX_EVENTS VALUES (0, 100000, 59, 'ProfilerStep#1, op_id = 1', 1)")
        for n in range(4):
            at = 1000 + 20_000 * n
            name = f"aten::mm, seq = {n}, op_id = {90 + n}, sizes = [[64, 32], [32, 16]]"
            export.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, 1)", (at, at + 900, name))
            export.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 1, ?, 2)", (at + 100, at + 200, n + 1)
            )
            row = (at + 5000, at + 9000, 0, 7, n + 1, 0, 1)
            export.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    [op] = digest(read_trace(path)).ops
    assert (op.name, op.calls, op.inputs, op.flops) == (
        "aten::mm", 4, "tensor[64, 32] tensor[32, 16]", 4 * 2 * 64 * 32 * 16)  # fmt: skip
    assert op.moved_bytes is None


def test_a_kernel_is_not_told_without_its_name() -> None:
    body = "void at::native::gpu_kernel_impl_nocast<at::native::{}(at::TensorIteratorBase&)::{{lambda()#1}}>"
    names = [
        f"void at::native::{form}<{width}, {body.format(work)}>(int, long)"
        for form in ("vectorized_elementwise_kernel", "unrolled_elementwise_kernel")
        for width in (2, 4)
        for work in ("direct_copy_kernel_cuda_of_many_bytes", "float8_copy_kernel_cuda_of_many_bytes")
    ]
    assert {text[:7] for text in short_kernels(names, 60).values()} == {"vectori", "unrolle"}
