"""A rank's times held against HolisticTraceAnalysis (HTA) 0.5.0, a program of others with the same definitions.

The figures are those of its get_temporal_breakdown and get_comm_comp_overlap with include_last_profiler_step=True and
HTA_DISABLE_NS_ROUNDING=1. STEPLAB_TRACES is a folder that holds HTA's tests/data (github.com/facebookresearch/
HolisticTraceAnalysis), at any depth.
"""

import os
import random
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.unit.test_trace_ranks import GEMM, REDUCE, RankFile

from steplab.reading.traces.ranks import RankTrace, rank_trace
from steplab.reading.traces.reading import read_trace

NCCL = Path(__file__).parents[1] / "golden" / "planted_nccl_202611"
PUBLIC = Path(os.environ.get("STEPLAB_TRACES", "without"))


class Hta(NamedTuple):
    """In us, and per cent of communication during computation; idle, compute and non-compute sum to the kernel time."""

    idle: float
    compute: float
    non_compute: float
    overlap: float


MADE = [
    Hta(362, 1894, 526, 74.69),
    Hta(205, 1992, 467, 72.79),
    Hta(400, 2107, 427, 79.05),
    Hta(215, 1937, 462, 72.43),
    Hta(256, 1745, 609, 70.99),
]
OF_NCCL = [Hta(12_406.952, 54_395.528, 103_750.319, 0), Hta(114_728.437, 54_356.449, 1621.433, 0)]
OF_ITS_DATA = {
    "trace_filter/sampled_rank-0.json.gz": Hta(675_191, 210_320, 337_336, 14.95),
    "trace_filter/sampled_rank-1.json.gz": Hta(651_136, 271_973, 308_077, 19.93),
    "df_index_resolver/df_index_resolver.json.gz": Hta(732_352, 620_516, 380_097, 0),
    "trace_diff/control/control.json.gz": Hta(76_007, 281_336, 107_251, 46.24),
    "ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz": Hta(7574.79, 468_153.60, 4300.84, 0),
    "nccl_parser_config/nccl_data.json.gz": Hta(503_050.99, 115_655.85, 41_844.17, 15.61),
}


def agrees(seen: RankTrace, hta: Hta) -> None:
    kernel_time_ns = sum(hta[:3]) * 1000
    assert seen.window_ns == pytest.approx(kernel_time_ns, abs=100)
    assert seen.idle_ns == pytest.approx(hta.idle * 1000, abs=100)
    assert seen.compute_ns == pytest.approx(hta.compute * 1000, abs=100)
    assert 100 * seen.hidden_ns / max(seen.communication_ns, 1) == pytest.approx(hta.overlap, abs=0.006)


@pytest.mark.parametrize("seed", range(len(MADE)))
def test_the_times_of_made_traces_are_htas(tmp_path: Path, seed: int) -> None:
    chance, file = random.Random(seed), RankFile(0)
    file.event("user_annotation", "ProfilerStep#1", 0, 10_000)
    for stream, name in ((7, GEMM), (8, GEMM), (20, REDUCE), (30, "Memcpy HtoD (Pinned -> Device)")):
        at = 10
        for _ in range(40):
            at += chance.randrange(1, 60)
            lasts = chance.randrange(1, 60)
            file.kernel(name, at, lasts, 1, stream=stream)
            at += lasts
    agrees(rank_trace(read_trace(file.write(tmp_path))), MADE[seed])


@pytest.mark.parametrize("rank", range(len(OF_NCCL)))
def test_the_times_of_ranks_with_nccl_are_htas(rank: int) -> None:
    agrees(rank_trace(read_trace(NCCL / f"rank{rank}.pt.trace.json.gz")), OF_NCCL[rank])


@pytest.mark.parametrize("name", OF_ITS_DATA)
def test_the_times_of_its_own_data_are_htas(name: str) -> None:
    path = next((path for path in PUBLIC.rglob(Path(name).name) if path.as_posix().endswith(name)), None)
    if path is None:
        pytest.skip("needs HTA's tests/data in STEPLAB_TRACES")
    agrees(rank_trace(read_trace(path)), OF_ITS_DATA[name])
