import contextlib
import gzip
import lzma
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.traces import HandTrace

from steplab.errors import SteplabError
from steplab.explain.api import explain
from steplab.explain.case import case_of
from steplab.lab.profiling import read_ranks
from steplab.reading.traces.digest import digest
from steplab.reading.traces.reading import read_trace
from steplab.reading.traces.trace import Inputs
from steplab.records.codec import decode, new_head
from steplab.records.finding import Finding
from steplab.records.run import Run

ROOT = Path(__file__).parents[2]
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<{}> >"
COPY = "Memcpy HtoD (Pinned -> Device)"


def findings(trace: HandTrace) -> dict[str, Finding]:
    return {finding.kind: finding for finding in explain(Run(**new_head(), profile=digest(trace.build())))}


def offloaded() -> HandTrace:
    trace = HandTrace()
    trace.range("ProfilerStep#1", 0, 110_000)
    for number in range(20):
        begin, call = 500 + 5100 * number, 100 + 60 * number
        trace.kernel(COPY, begin, begin + 5000, (call, call + 6), call="cudaMemcpyAsync")
        trace.kernel(GEMM, begin + 5000, begin + 5100, (call + 30, call + 35))
    trace.kernel(GEMM, 98_000, 102_000, (1300, 1305), stream=8)
    return trace


def test_copies_that_nothing_runs_beside_are_told() -> None:
    found = findings(offloaded())["copies_exposed"]
    assert found.saves_s == pytest.approx(96e-3, rel=0.01)


def test_copies_beside_kernels_are_none_of_it() -> None:
    trace = HandTrace()
    trace.range("ProfilerStep#1", 0, 110_000)
    trace.kernel(GEMM, 500, 100_000, (10, 15))
    for number in range(20):
        begin, call = 1000 + 4900 * number, 100 + 60 * number
        trace.kernel(COPY, begin, begin + 4800, (call, call + 6), stream=14, call="cudaMemcpyAsync")
    assert "copies_exposed" not in findings(trace)


def held_back() -> HandTrace:
    trace = HandTrace()
    trace.range("ProfilerStep#1", 0, 500_000)
    for number in range(101):
        begin = 1000 + 21 * number + (478_000 if number == 100 else 0)
        trace.op("aten::add", 98 + 10 * number, 107 + 10 * number)
        trace.kernel(ADD.format("float"), begin, begin + 20, (100 + 10 * number, 105 + 10 * number))
    return trace


def test_a_hole_is_no_gap_that_fusing_closes() -> None:
    found = findings(held_back())["fusable_elementwise"]
    assert found.saves_s is not None
    assert found.saves_s <= 2.02e-3 + 101 * 5e-6


def waits_shortly() -> HandTrace:
    trace = HandTrace()
    trace.range("ProfilerStep#1", 0, 100_000)
    trace.kernel("Memcpy HtoD (Pageable -> Device)", 30, 32, (10, 21), call="cudaMemcpyAsync")
    for number in range(900):
        begin = 110 + 100 * number
        trace.op("aten::mm", begin - 12, begin - 3)
        trace.kernel(GEMM, begin, begin + 12, (begin - 10, begin - 5))
    return trace


def test_a_short_wait_saves_no_more_than_it_takes() -> None:
    found = findings(waits_shortly())
    assert "launch_bound" in found
    assert "host_copies_and_syncs" not in found  # 11 us of 90 ms


def waits_long() -> HandTrace:
    trace = HandTrace()
    trace.range("ProfilerStep#1", 0, 60_000)
    trace.kernel(GEMM, 10, 50_000, (1, 5))
    trace.call("cudaStreamSynchronize", 6, 50_005)
    trace.kernel(GEMM, 53_010, 59_000, (53_000, 53_005))
    return trace


def test_a_long_wait_saves_no_more_than_the_device_is_idle() -> None:
    assert 0 < (findings(waits_long())["host_copies_and_syncs"].saves_s or 0) <= 3.01e-3


def doubles() -> HandTrace:
    trace = HandTrace()
    trace.range("ProfilerStep#1", 0, 1000)
    trace.op("aten::add", 0, 9, inputs=Inputs(shapes=((64, 64),) * 2, dtypes=("double",) * 2))
    trace.kernel(ADD.format("double"), 20, 320, (5, 8))
    trace.kernel(GEMM, 320, 420, (15, 18))
    return trace


def test_doubles_are_told() -> None:
    assert findings(doubles())["fp64_work"].saves_s == pytest.approx(150e-6)


def tiny(*names: str) -> HandTrace:
    trace = HandTrace()
    trace.range("ProfilerStep#1", 0, 50_000)
    for number in range(2000):
        begin = 20 * number
        trace.op(names[number % len(names)], begin, begin + 10)
        trace.kernel("index_elementwise_kernel", begin + 12, begin + 14, (begin + 2, begin + 8))
    return trace


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (("aten::add",), "aten::add launches 2000"),
        (("aten::nonzero", "aten::index", "aten::mm", "aten::index_add_"), "The loop over experts launches 1500"),
    ],
)
def test_a_python_loop_over_elements_or_experts_is_told(names: tuple[str, ...], title: str) -> None:
    assert findings(tiny(*names))["tiny_kernels"].title.startswith(title)


def late(what: str) -> HandTrace:
    trace = HandTrace()
    for step in range(2):
        begin = 10_000 * step
        trace.range(f"ProfilerStep#{step}", begin, begin + 10_000)
        trace.range(what, begin, begin + 8000)
        trace.kernel(GEMM, begin + 8100, begin + 9000, (begin + 8050, begin + 8055))
    return trace


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "data_loading"),
        ("compile_fx.<locals>.fw_compiler_base (dynamo_timed)", "compile_in_the_loop"),
    ],
)
def test_the_host_is_late_for_a_reason(what: str, kind: str) -> None:
    found = findings(late(what))[kind]
    assert found.at_most
    assert 4e-3 <= (found.saves_s or 0) <= 8e-3


@pytest.mark.parametrize("triangle", [False, True])
def test_attention_is_offered_a_causal_mask_only_if_it_has_one(triangle: bool) -> None:
    trace = HandTrace()
    trace.range("ProfilerStep#1", 0, 1000)
    square = Inputs(shapes=((2, 8, 256, 256),), dtypes=("float",))
    for begin, name in enumerate(("aten::_softmax", *(("aten::tril",) if triangle else ()))):
        trace.op(name, 10 * begin, 10 * begin + 9, inputs=square)
        trace.kernel(f"softmax_{name}", 100 + 200 * begin, 300 + 200 * begin, (10 * begin + 1, 10 * begin + 5))
    found = findings(trace)["scores_materialised"]
    assert ("is_causal=True" in found.change + found.note) == triangle


# --- no saving exceeds the time behind it ---


def recorded() -> Iterator[Run]:
    for folder in ("tests/golden", "benchmarks/results"):
        for path in sorted((ROOT / folder).glob("*.jsonl*")):
            unpacked = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)(path.read_bytes())
            for line in unpacked.splitlines():
                record = None if b'"steplab.findings/1"' in line else decode(line)
                if isinstance(record, Run) and record.failure is None:
                    yield record


def made() -> Iterator[Run]:
    traces = (
        offloaded(),
        held_back(),
        waits_shortly(),
        waits_long(),
        doubles(),
        tiny("aten::add"),
        *map(late, ("enumerate(DataLoader)#x", "f (dynamo_timed)")),
    )
    for trace in traces:
        yield Run(**new_head(), profile=digest(trace.build()))


def of_ranks() -> Iterator[Run]:
    profile, ranks = read_ranks(ROOT / "tests" / "golden" / "planted_nccl_202611")
    yield Run(**new_head(), profile=profile, traced_ranks=ranks)


def public() -> Iterator[Run]:
    """Traces of others in the folder STEPLAB_TRACES: HTA's, TraceLens's and the TensorBoard plugin's test data."""
    for path in sorted(Path(os.environ["STEPLAB_TRACES"]).rglob("*")):
        if path.name.endswith((".json", ".json.gz", ".sqlite")):
            with contextlib.suppress(SteplabError):  # without a trace, or of another device
                yield Run(**new_head(), profile=digest(read_trace(path)))


def allowed_s(run: Run, finding: Finding) -> float:
    case = case_of(run, None)
    length_s, busy_s = case.length_s, case.busy_s
    idle_s = max(length_s - busy_s, 0.0)
    seconds = {evidence.what: evidence.value for evidence in finding.evidence if evidence.unit == "s"}
    own_s = sum(s for what, s in seconds.items() if what not in ("device busy", "step, unprofiled"))
    if finding.kind == "straggler":
        return min(seconds.values())
    if finding.kind == "host_copies_and_syncs":
        return min(seconds["Python's time in them"], seconds["GPU idle in the phases of these calls and the next"])
    if finding.kind == "fusable_elementwise":
        products_s = max(seconds.get("device time that matrix products save", 0.0), 0.0)
        kernels = sum(each.value for each in finding.evidence if each.unit == "")
        gaps_s = min(idle_s, 5e-6 * kernels) if run.timing is None else idle_s  # a launch-bound step waits for launches
        return next(iter(seconds.values())) + products_s + gaps_s
    if finding.kind == "weight_casts":  # half of autocast's fp32 work goes too
        return busy_s
    return min(own_s, length_s)


@pytest.mark.parametrize(
    "runs",
    [
        recorded,
        made,
        of_ranks,
        pytest.param(
            public,
            marks=pytest.mark.skipif("STEPLAB_TRACES" not in os.environ, reason="needs traces in STEPLAB_TRACES"),
        ),
    ],
)
def test_no_saving_exceeds_the_time_behind_it_nor_all_together_the_step(runs: object) -> None:
    num = 0
    for run in runs():  # type: ignore[operator]
        found = [finding for finding in explain(run) if finding.saves_s is not None]
        step_s = case_of(run, None).length_s if run.profile else run.median_s
        parts = {finding.includes for finding in found}
        of_step = sum(f.saves_s or 0.0 for f in found if f.tokens_ratio == 1 and f.kind not in parts)
        assert not found or (step_s is not None and of_step <= step_s * 1.0001), run.id
        for finding in found if run.profile else ():
            num += 1
            assert (finding.saves_s or 0.0) <= 1.001 * allowed_s(run, finding), (run.id, finding.kind)
    assert num >= (2 if runs is of_ranks else 6)
