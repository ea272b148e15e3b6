from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.program import Program, wait_until
from tests.distributed.test_launch import processes_in


@pytest.fixture
def steplab(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    program.write("faulty.py", Path(__file__).with_name("faulty.py").read_text(encoding="utf-8"))
    yield program
    program.end_all()
    wait_until(lambda: not processes_in(tmp_path), "the end of all processes", timeout_s=10)
