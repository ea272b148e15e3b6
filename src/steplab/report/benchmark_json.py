"""Times of records in the JSON of two benchmarking tools, pytest-benchmark and hyperfine, for what reads their files.

Every cell with a time by which records are compared becomes one benchmark: its step time, or the times of its passes.
What those tools would know besides, such as the CPU time of a command, no record has, and it is left out.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from steplab import stats
from steplab.records.record import Record
from steplab.records.registry import kind_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedCell:
    """The times of one cell of a record."""

    record: Record
    """The record."""
    name: str
    """The cell in words, with the name of the record."""
    samples: tuple[float, ...]
    """Seconds of each step or repeat."""


def pytest_benchmark_json(records: Sequence[Record]) -> str:
    """The file that `pytest-benchmark compare FILE` reads.

    Quartiles and outliers are those of its own documentation: an outlier is beyond one standard deviation of the mean,
    or beyond 1.5 interquartile ranges of the quartiles.
    """
    benchmarks = [_pytest_benchmark(timed) for timed in timed_cells(records)]
    newest = max(records, key=lambda record: record.created_utc)
    env = newest.environment
    machine = {"system": env.host, "processor": env.cpu, "python_version": env.python} if env else {}
    whole = {
        "machine_info": machine | {"device": newest.device_name},
        "commit_info": {"id": env.git_commit.rstrip("+"), "dirty": env.git_commit.endswith("+")}
        if env and env.git_commit
        else {},
        "benchmarks": benchmarks,
        "datetime": newest.created_utc,
        "version": f"steplab {newest.steplab_version}",
    }
    return json.dumps(whole, indent=1)


def hyperfine_json(records: Sequence[Record]) -> str:
    """The file that hyperfine's --export-json writes and its scripts read; a cell's name stands for the command."""
    results = []
    for timed in timed_cells(records):
        told = stats.summarize(timed.samples)
        results.append(
            {
                "command": timed.name,
                "mean": told.mean,
                "stddev": told.stdev,
                "median": told.median,
                "min": told.minimum,
                "max": told.maximum,
                "times": list(timed.samples),
            }
        )
    return json.dumps({"results": results}, indent=1)


def timed_cells(records: Sequence[Record]) -> list[TimedCell]:
    """The times by which the records are compared, cell by cell."""
    found = []
    for record in records:
        cells = kind_of(record).cells
        for cell in cells(record) if cells else ():
            times = [figure for figure in cell.figures if figure.decides and figure.unit == "s"]
            for figure in times:
                told = (record.name, cell.label, figure.name if len(times) > 1 else "")
                name = " | ".join(filter(None, told))
                found.append(TimedCell(record=record, name=name, samples=figure.samples))
    return found


def _pytest_benchmark(timed: TimedCell) -> dict[str, object]:
    told = stats.summarize(timed.samples)
    spread = told.stdev or 0.0
    iqr = told.quartile_3 - told.quartile_1
    low, high = told.quartile_1 - 1.5 * iqr, told.quartile_3 + 1.5 * iqr
    inside = [sample for sample in timed.samples if low <= sample <= high]
    stddev_outliers = sum(abs(sample - told.mean) > spread for sample in timed.samples)
    iqr_outliers = len(timed.samples) - len(inside)
    return {
        "group": None,
        "name": timed.name,
        "fullname": f"{timed.record.id} {timed.name}",
        "params": None,
        "param": None,
        "extra_info": {"record": timed.record.id},
        "options": {"timer": "device"},
        "stats": {
            "min": told.minimum,
            "max": told.maximum,
            "mean": told.mean,
            "stddev": spread,
            "rounds": told.count,
            "median": told.median,
            "iqr": iqr,
            "q1": told.quartile_1,
            "q3": told.quartile_3,
            "iqr_outliers": iqr_outliers,
            "stddev_outliers": stddev_outliers,
            "outliers": f"{stddev_outliers};{iqr_outliers}",
            "ld15iqr": min(inside),
            "hd15iqr": max(inside),
            "ops": 1 / told.mean,
            "total": sum(timed.samples),
            "data": list(timed.samples),
            "iterations": 1,
        },
    }
