"""A rank that is delayed on purpose is found, with its number and the size of the delay."""

from pathlib import Path

import pytest
from tests.distributed.planted import Planted, trace_steps
from tests.distributed.ranks import on_ranks

from steplab.explain.api import explain
from steplab.lab.profiling import import_trace


@pytest.mark.parametrize(
    "planted",
    [
        # Other work on a machine of few cores delays ranks by tens of milliseconds.
        Planted(world=4, rank=2, delay_s=0.1, seed=1),
        pytest.param(Planted(world=2, rank=1, delay_s=0.1, seed=0), marks=pytest.mark.release),
        pytest.param(Planted(world=2, rank=0, delay_s=0.005, seed=2), marks=pytest.mark.release),
    ],
    ids=lambda planted: f"{planted.world} ranks, {planted.delay_s * 1000:.0f} ms",
)
def test_the_delayed_rank_is_found(tmp_path: Path, planted: Planted) -> None:
    on_ranks(planted.world, trace_steps, planted, tmp_path)
    run = import_trace(tmp_path, store=tmp_path / "store.db")
    assert run.traced_ranks
    [meeting] = (meeting for meeting in run.traced_ranks.meetings if meeting.collective == "all_reduce")
    assert meeting.last_rank == planted.rank
    assert meeting.size_bytes >= 4 * 10_000
    assert meeting.late_s == pytest.approx(planted.measured_s(tmp_path), rel=0.1)
    found = {finding.kind: finding for finding in explain(run)}
    assert found["straggler"].title.startswith(f"Rank {planted.rank} comes last")
    assert found["straggler"].saves_s == pytest.approx(planted.measured_s(tmp_path), rel=0.1)
