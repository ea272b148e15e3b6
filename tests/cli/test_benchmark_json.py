"""Exports for pytest-benchmark and hyperfine, read back by the tool itself and as its scripts read them."""

import json
import statistics
import subprocess
import sys
from importlib.util import find_spec

import pytest
from tests.cli.program import Program, complaint
from tests.runs import make_run
from tests.unit.test_comparing import slower

from steplab.records.codec import encode

FAST = make_run({"steps": "12"}, id="aaaa00000000", name="fast")
SLOW = slower(make_run({"steps": "12"}, name="slow"), 2.0)


@pytest.fixture
def stored(steplab: Program) -> Program:
    """The program with two runs, one twice as slow as the other."""
    (steplab.cwd / "runs.jsonl").write_bytes(b"\n".join(map(encode, (FAST, SLOW))))
    assert steplab("import", "runs.jsonl").code == 0
    return steplab


@pytest.mark.skipif(find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed")
def test_pytest_benchmark_compares_the_export(stored: Program) -> None:
    assert stored("export", "--format", "pytest-benchmark", "--output", "benchmarks.json").code == 0
    compared = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest_benchmark",
            "compare",
            "benchmarks.json",
            "--sort=mean",
            "--columns=median,rounds",
        ],
        cwd=stored.cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert compared.returncode == 0, compared.stderr
    lines = [line for line in compared.stdout.splitlines() if " | small" in line]
    assert [line.split()[0] for line in lines] == ["fast", "slow"]
    assert "(2." in lines[1]  # its ratio to the fastest
    assert all(line.split()[-1] == "12" for line in lines)


def test_the_statistics_of_pytest_benchmark_are_those_of_the_samples(stored: Program) -> None:
    [found] = json.loads(stored("export", "aaaa", "--format", "pytest-benchmark").stdout)["benchmarks"]
    assert FAST.timing is not None
    samples = FAST.timing.back_to_back[0].best_s
    assert found["stats"]["data"] == list(samples)
    assert found["stats"]["mean"] == pytest.approx(statistics.fmean(samples))
    assert found["stats"]["stddev"] == pytest.approx(statistics.stdev(samples))
    assert found["stats"]["ops"] == pytest.approx(1 / statistics.fmean(samples))
    assert found["extra_info"] == {"record": "aaaa00000000"}


def test_hyperfine_s_scripts_find_what_they_read(stored: Program) -> None:
    """Its plot_whisker.py reads command and times of each result, plot_parametrized.py mean and stddev."""
    results = json.loads(stored("export", "--format", "hyperfine").stdout)["results"]
    assert [result["command"].split(" | ")[0] for result in results] == ["fast", "slow"]
    for result in results:
        assert len(result["times"]) == 12
        assert result["min"] <= result["median"] <= result["max"]
        assert result["mean"] == pytest.approx(statistics.fmean(result["times"]))
        assert result["stddev"] > 0


def test_records_without_times_are_refused(steplab: Program) -> None:
    from tests.runs import out_of_memory

    (steplab.cwd / "runs.jsonl").write_bytes(encode(out_of_memory()))
    assert steplab("import", "runs.jsonl").code == 0
    assert "none of these records has times" in complaint(steplab("export", "--format", "hyperfine"), 2)
