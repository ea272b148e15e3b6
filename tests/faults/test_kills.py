from pathlib import Path

from tests.faults.kills import attack

TRIES = (("comm", "kill"), ("import", "kill"), ("ddp", "terminate"), ("sweep", "interrupt twice"))
DURATIONS_S = {"comm": 1.5, "import": 0.2, "ddp": 1.5, "sweep": 1.5}


def test_what_is_ended_leaves_a_whole_store_and_nothing_else(tmp_path: Path) -> None:
    outcome = attack(tmp_path, TRIES, seed=0, durations_s=DURATIONS_S)
    assert outcome.problems == []
    assert outcome.tries.total() == len(TRIES)
