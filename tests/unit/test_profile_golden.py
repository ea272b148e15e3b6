import itertools
import json
import lzma
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import pytest
from tests.stored_records import stored

from steplab.reading.traces.digest import digest
from steplab.reading.traces.reading import read_trace
from steplab.records.profile import Profile
from steplab.records.run import Run
from steplab.report.kit.kernel_names import short_kernels
from steplab.report.kit.rendering import render
from steplab.report.profile.document import profile_document
from steplab.report.profile.tables import phase_table

GOLDEN = Path(__file__).parents[1] / "golden"
CELLS = list(itertools.product(("small", "large", "2.7b"), (256, 1024), ("fp32", "bf16"), ("off", "default")))
Cell = tuple[str, int, str, str]


@pytest.fixture(scope="module")
def recorded() -> list[Run]:
    return [run for run in stored("profile_h200", Run) if run.profile]


@pytest.fixture(scope="module")
def runs(recorded: list[Run]) -> dict[Cell, Run]:
    return {
        (run.spec.model.name, run.spec.context, run.spec.precision, run.spec.compile): run
        for run in recorded
        if run.spec and run.name == "profiles"
    }


def profile_of(run: Run) -> Profile:
    assert run.profile is not None
    return run.profile


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_the_forward_pass_takes_as_long_as_events_say_or_waits_for_the_host(runs: dict[Cell, Run], cell: Cell) -> None:
    run = runs[cell]
    forward, timed = profile_of(run).phase("forward"), run.timing and run.timing.phase("forward")
    assert forward
    assert timed
    if forward.host_bound_s == 0:
        assert forward.window_s / profile_of(run).num_steps == pytest.approx(median(timed.best_s), rel=0.03)
    said = {row["phase"]: str(row["agreement"]) for row in phase_table(run, profile_of(run)).rows}["forward"]
    assert "agree" in said or "waits for host" in said


def test_different_kernels_of_a_profile_have_different_short_names(recorded: list[Run]) -> None:
    for run in recorded:
        names = {kernel.name for kernel in profile_of(run).kernels}
        for most in (20, 44, 60, 160):
            assert len(set(short_kernels(names, most).values())) == len(names)


def test_the_small_trace_gives_the_recorded_profile(runs: dict[Cell, Run], tmp_path: Path) -> None:
    trace = tmp_path / "steps.json"
    trace.write_bytes(lzma.decompress((GOLDEN / "trace_small_256_bf16.json.xz").read_bytes()))
    recorded = profile_of(runs["small", 256, "bf16", "off"])
    again = digest(read_trace(trace), source="torch.profiler")
    assert msgspec.to_builtins(again) == msgspec.to_builtins(recorded)


# --- large, context 1024, fp32: the report against the raw trace ------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    name: str
    seconds: float
    phase: str
    part: str


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    events = json.loads(lzma.decompress((GOLDEN / "excerpt_large_1024_fp32.json.xz").read_bytes()))["traceEvents"]
    launched = {e["args"]["correlation"]: e["ts"] for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")}
    ranges = defaultdict(list)
    for event in events:
        if event["cat"] == "user_annotation":
            ranges[event["name"]].append((event["ts"], event["ts"] + event["dur"]))

    def within(name: str, at: float) -> bool:
        return any(start <= at < end for start, end in ranges[name])

    found = []
    for event in events:
        if event["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = launched[event["args"]["correlation"]]
        if not within("step", at):
            continue  # the warm-up step's
        [phase] = [name for name in ("forward", "backward", "optimizer") if within(name, at)]
        part = next((name for name in ("scores", "softmax", "values") if within(name, at)), "")
        found.append(Kernel(event["name"], event["dur"] * 1e-6, phase, part))
    return found


END = "end of the report"


def stated(run: Run, heading: str, until: str) -> str:
    text = render(profile_document(run), width=240) + f"\n  {END}\n"
    return text[text.index(f"\n  {heading}\n") : text.index(f"\n  {until}\n")]


def seconds(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


STEPS = 3
TIME = r"([\d.]+ (?:s|ms|µs))"


@pytest.mark.parametrize(("phase", "named"), [("forward", "forward pass"), ("backward", "backward pass"), ("", "step")])
def test_top_kernel_calls_and_share(runs: dict[Cell, Run], kernels: list[Kernel], phase: str, named: str) -> None:
    chosen = [kernel for kernel in kernels if phase in ("", kernel.phase)]
    totals: dict[str, float] = defaultdict(float)
    for kernel in chosen:
        totals[kernel.name] += kernel.seconds
    top = max(totals, key=lambda name: totals[name])
    calls = sum(kernel.name == top for kernel in chosen) / STEPS
    share = totals[top] / sum(totals.values())

    told = " ".join(stated(runs["large", 1024, "fp32", "off"], "Top kernels", "Attention").split())
    pattern = rf"Top kernel of the {named}: (\S+), ([\d.]+) calls, {TIME}, ([\d.]+) %"
    found = re.search(pattern, told)
    assert found, told
    shown, said_calls, said_time, said_share = found.groups()
    assert re.search(".*".join(map(re.escape, shown.split("…"))), top)  # shown without its template's clothes
    assert float(said_calls) == calls
    assert seconds(said_time) == pytest.approx(totals[top] / STEPS, rel=0.005)
    assert float(said_share) == pytest.approx(100 * share, abs=0.051)


def is_matmul(kernel: Kernel) -> bool:
    return "gemm" in kernel.name or "splitK" in kernel.name


def test_share_of_matrix_multiplication(runs: dict[Cell, Run], kernels: list[Kernel]) -> None:
    def share(*phases: str) -> float:
        chosen = [kernel for kernel in kernels if kernel.phase in phases]
        return 100 * sum(k.seconds for k in chosen if is_matmul(k)) / sum(k.seconds for k in chosen)

    told = " ".join(stated(runs["large", 1024, "fp32", "off"], "Categories", "Top kernels").split())
    found = re.search(r"Matrix multiplication takes ([\d.]+) % of forward, .* ([\d.]+) % of the whole step", told)
    assert found, told
    assert float(found[1]) == pytest.approx(share("forward"), abs=0.15)
    assert float(found[2]) == pytest.approx(share("forward", "backward", "optimizer"), abs=0.15)


def test_softmax_against_the_score_product(runs: dict[Cell, Run], kernels: list[Kernel]) -> None:
    forward = [kernel for kernel in kernels if kernel.phase == "forward"]
    softmax_s = sum(k.seconds for k in forward if k.part == "softmax") / STEPS
    product_s = sum(k.seconds for k in forward if k.part == "scores" and is_matmul(k)) / STEPS
    layers, heads, batch, context, width = 36, 20, 4, 1024, 64
    scores = layers * batch * heads * context**2
    product_flops, softmax_flops = 2 * scores * width, 5 * scores  # compare, subtract, exponentiate, add, divide
    softmax_bytes = 2 * scores * 4  # read once, written once, fp32
    product_bytes = (scores + 2 * layers * batch * heads * context * width) * 4

    told = " ".join(stated(runs["large", 1024, "fp32", "off"], "Attention", END).split())
    row = re.search(rf"forward softmax {TIME} ([\d.]+) GFLOP ([\d.]+) GiB ([\d.]+)", told)
    assert row, told
    assert seconds(row[1]) == pytest.approx(softmax_s, rel=0.03)
    assert float(row[2]) == pytest.approx(softmax_flops / 1e9, rel=0.005)
    assert float(row[3]) == pytest.approx(softmax_bytes / 1024**3, rel=0.005)  # sizes are binary, as everywhere
    assert float(row[4]) == pytest.approx(softmax_flops / softmax_bytes, rel=0.005)
    said = re.search(
        rf"Softmax takes {TIME} of forward, ([\d.]+) times the {TIME} of the scores' matmul, with 1/(\d+) of its "
        r"FLOPs: it does ([\d.]+) FLOP for each byte it moves, the matmul ([\d.]+)\.",
        told,
    )
    assert said, told
    assert seconds(said[1]) == pytest.approx(softmax_s, rel=0.03)
    assert float(said[2]) == pytest.approx(softmax_s / product_s, rel=0.03)
    assert seconds(said[3]) == pytest.approx(product_s, rel=0.005)
    assert int(said[4]) == round(product_flops / softmax_flops)
    assert float(said[5]) == pytest.approx(softmax_flops / softmax_bytes, rel=0.005)
    assert float(said[6]) == pytest.approx(product_flops / product_bytes, rel=0.005)
