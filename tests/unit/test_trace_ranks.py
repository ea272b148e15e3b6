import json
from pathlib import Path

import msgspec
import pytest
from tests.first import first

from steplab.errors import UserError
from steplab.explain.api import explain
from steplab.lab.profiling import import_trace
from steplab.reading.traces.ranks import rank_trace
from steplab.reading.traces.reading import read_trace
from steplab.records.run import Run
from steplab.report.kit.rendering import render
from steplab.report.profile.document import profile_document

pytestmark = pytest.mark.usefixtures("read_in_this_process")

GOLDEN = Path(__file__).parents[1] / "golden"
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MS = 1000
BYTES = 2 * 5_000_000


class RankFile:
    def __init__(self, rank: int, clock_us: float = 0.0) -> None:
        self.rank, self.clock_us = rank, clock_us
        self.events: list[dict[str, object]] = []

    def event(self, cat: str, name: str, start: float, lasts: float, **args: object) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": start + self.clock_us, "dur": lasts}
        self.events.append({**event, "args": args})

    def kernel(self, name: str, start: float, lasts: float, launch: float, *, stream: int = 7, **args: object) -> None:
        number = len(self.events)
        self.event("cuda_runtime", "cudaLaunchKernel", launch, 2, correlation=number)
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self.event(kind, name, start, lasts, correlation=number, device=0, stream=stream, **args)

    def all_reduce(
        self, start: float, end: float, launch: float, group: str = "[0, 1, 2, 3]", num: int = BYTES // 2
    ) -> None:
        args = {"Collective name": "allreduce", "In msg nelems": num, "Out msg nelems": num, "dtype": "BFloat16"}
        self.kernel(REDUCE, start, end - start, launch, stream=20, **args, **{"Process Group Ranks": group})

    def write(self, folder: Path) -> Path:
        path = folder / f"worker{self.rank}.pt.trace.json"
        world = {"distributedInfo": {"rank": self.rank, "world_size": 4}, "baseTimeNanoseconds": 1_790_857_026 * 10**9}
        path.write_text(json.dumps({**world, "traceEvents": self.events}))
        return path


def four_ranks(folder: Path, *, late: dict[int, float], extra: dict[int, float] | None = None) -> Run:
    """Four ranks with clocks seconds apart: three steps of 20 ms that end with an all-reduce of 4 ms, some late or
    busier.
    """
    for rank in range(4):
        file = RankFile(rank, clock_us=1e6 * rank)
        for step in range(3):
            begin = 40 * MS * step
            file.event("user_annotation", f"ProfilerStep#{step + 5}", begin, 39 * MS)
            wait, more = late.get(rank, 0.0), (extra or {}).get(rank, 0.0)
            file.kernel(GEMM, begin + wait + 100, 10 * MS + more, begin + wait + 50)
            arrives = begin + wait + more + 10.2 * MS
            last = begin + 14.2 * MS + max(late.get(r, 0.0) + (extra or {}).get(r, 0.0) for r in range(4))
            file.all_reduce(arrives, last, begin + wait + 60)
        file.write(folder)
    return import_trace(folder, store=folder / "store.db")


@pytest.mark.parametrize("rank", first(1, [0, 2]))
def test_a_planted_delay_is_found_with_its_rank_and_size(tmp_path: Path, rank: int) -> None:
    delay_ms = {0: 1.7, 2: 5.0}[rank]
    run = four_ranks(tmp_path, late={rank: delay_ms * MS})
    seen = run.traced_ranks
    assert seen
    [meeting] = seen.meetings
    assert (meeting.last_rank, meeting.num_steps, meeting.size_bytes) == (rank, 3, BYTES)
    assert meeting.late_s == pytest.approx(delay_ms * 1e-3, rel=0.01)
    assert meeting.transfer_s == pytest.approx(4e-3, rel=0.01)
    assert meeting.bus_bytes_per_s == pytest.approx(BYTES * 2 * 3 / 4 / 4e-3, rel=0.01)
    assert seen.clock_error_s == pytest.approx(0.0, abs=1e-6)
    assert [times.num_last for times in seen.ranks] == [3 * (each == rank) for each in range(4)]
    assert {part.rank for part in seen.path} == {rank}
    found = {finding.kind: finding for finding in explain(run)}
    assert found["straggler"].title == f"Rank {rank} comes last to 3 of 3 collectives"
    assert found["straggler"].saves_s == pytest.approx(delay_ms * 1e-3, rel=0.1)
    assert "imbalance" not in found
    assert found["late_message"].saves_s == pytest.approx(4e-3, rel=0.01)
    assert f"rank {rank} work" in render(profile_document(run), "table", width=140)


def test_a_delay_planted_in_a_run_with_nccl_is_found(tmp_path: Path) -> None:
    """Two H200 of one host, traced by tests/distributed/planted.py: rank 1 sleeps 5 ms before each of 20 all-reduces,
    and was ready 5.056 ms after rank 0 by the host's clock.
    """
    run = import_trace(GOLDEN / "planted_nccl_202611", store=tmp_path / "store.db")
    assert run.traced_ranks
    [meeting] = run.traced_ranks.meetings
    assert (meeting.last_rank, meeting.num_steps, meeting.group, meeting.size_bytes) == (1, 20, "[0, 1]", 18_417_600)
    assert meeting.late_s == pytest.approx(5.056e-3, rel=0.01)
    assert meeting.bus_bytes_per_s == pytest.approx(229e9, rel=0.01)
    assert run.traced_ranks.clock_error_s == pytest.approx(0.0, abs=1e-6)
    found = {finding.kind: finding for finding in explain(run)}["straggler"]
    assert found.title == "Rank 1 comes last to 20 of 20 collectives"
    assert found.saves_s == pytest.approx(5e-3, rel=0.1)


def test_a_rank_that_computes_more_is_an_imbalance(tmp_path: Path) -> None:
    run = four_ranks(tmp_path, late={}, extra={3: 4.0 * MS})
    found = {finding.kind: finding for finding in explain(run)}
    assert found["imbalance"].saves_s == pytest.approx(3e-3)
    assert run.traced_ranks
    assert run.traced_ranks.imbalance == pytest.approx(14 / 11 - 1)
    assert "straggler" not in found


def test_a_slow_group_is_told_from_a_fast_one(tmp_path: Path) -> None:
    for rank in range(2):
        file = RankFile(rank)
        file.event("user_annotation", "ProfilerStep#1", 0, 20 * MS)
        file.kernel(GEMM, 100, 5 * MS, 10)
        file.all_reduce(6 * MS, 7 * MS, 20, group="[0, 1]")
        file.all_reduce(8 * MS, 14 * MS, 30, group="dp")
        file.write(tmp_path)
    run = import_trace(tmp_path, store=tmp_path / "store.db")
    found = {finding.kind: finding for finding in explain(run)}
    assert found["slow_group"].saves_s == pytest.approx(5e-3)
    assert "Process group dp" in found["slow_group"].title


def test_a_folder_without_traces_or_with_a_rank_twice(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no trace"):
        import_trace(tmp_path, store=tmp_path / "store.db")
    run = RankFile(1)
    run.event("user_annotation", "ProfilerStep#1", 0, 20)
    run.kernel(GEMM, 5, 10, 1)
    run.write(tmp_path).rename(tmp_path / "other.json")
    run.write(tmp_path)
    with pytest.raises(UserError, match="two traces are of one rank"):
        import_trace(tmp_path, store=tmp_path / "store.db")


def test_what_is_kept_of_a_file_does_not_grow_with_it(tmp_path: Path) -> None:
    kept = []
    for num_steps, num_kernels in ((20, 50), (60, 500)):
        file, lasts = RankFile(0), 20 * MS
        for step in range(num_steps):
            begin = step * lasts
            file.event("user_annotation", f"ProfilerStep#{step}", begin, lasts)
            for kernel in range(num_kernels):
                at = begin + 100 + kernel * 10 * MS / num_kernels
                file.kernel(GEMM, at, 10 * MS / num_kernels - 1, at - 50)
            file.all_reduce(begin + 11 * MS, begin + 12 * MS, begin + 10 * MS)
        kept.append(len(msgspec.json.encode(rank_trace(read_trace(file.write(tmp_path))))))
    assert kept[1] < 1.1 * kept[0] < 10_000
