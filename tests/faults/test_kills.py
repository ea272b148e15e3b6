import itertools
from pathlib import Path

import pytest
from tests.faults.kills import COMMANDS, ENDS, attack

TRIES = (("comm", "kill"), ("import", "kill"), ("ddp", "terminate"), ("sweep", "interrupt twice"))
DURATIONS_S = {"comm": 1.5, "import": 0.2, "ddp": 1.5, "sweep": 1.5}


def test_what_is_ended_leaves_a_whole_store_and_nothing_else(tmp_path: Path) -> None:
    outcome = attack(tmp_path, TRIES, seed=0, durations_s=DURATIONS_S)
    assert outcome.problems == []
    assert outcome.tries.total() == len(TRIES)


@pytest.mark.release
def test_every_command_is_ended_in_every_way(tmp_path: Path) -> None:
    tries = 2 * list(itertools.product(COMMANDS, ENDS))
    outcome = attack(tmp_path, tries, seed=1)
    assert outcome.problems == []
    assert outcome.in_time > 0.3 * len(tries), "most signals came after the command was over"
