"""A low-precision cell alone in a store: what is said of its peak agrees with the fp32 cell that was measured."""

import dataclasses
import lzma
import re
from pathlib import Path

import pytest

from steplab.cli.app import main
from steplab.lab.memory_references import fp32_forecast, memory_references
from steplab.records.codec import decode
from steplab.records.memory_profile import MemoryProfile
from steplab.records.memory_references import Fp32Forecast
from steplab.records.run import Run
from steplab.report.memory.comparison import comparison_sentences, precision_sentences
from steplab.report.memory.forecast import forecast_sentence
from steplab.report.run.cells import cells_of
from steplab.store.database import Store

GOLDEN = Path(__file__).parents[1] / "golden" / "memory_h200_202611.jsonl.xz"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    records = map(decode, lzma.decompress(GOLDEN.read_bytes()).splitlines())
    return [record for record in records if isinstance(record, Run)]


@pytest.fixture(scope="module")
def pairs(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Every cell in low precision with the same in fp32."""
    by_spec = {run.spec: run for run in runs}
    low = [run for run in runs if run.spec and run.spec.precision not in ("fp32", "tf32")]
    twins = [(run, by_spec.get(dataclasses.replace(run.spec, precision="fp32"))) for run in low if run.spec]
    found = [(run, twin) for run, twin in twins if twin]
    assert len(found) >= 14
    return found


def memory_of(run: Run) -> MemoryProfile:
    assert run.memory_profile is not None
    return run.memory_profile


def change(run: Run, twin: Run) -> int:
    return memory_of(run).peak_bytes - memory_of(twin).peak_bytes


def size_in(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


def test_the_direction_told_of_a_cell_alone_is_that_of_the_measured_fp32_cell(pairs: list[tuple[Run, Run]]) -> None:
    directions = []
    for run, twin in pairs:
        first = next(precision_sentences(run, None, fp32_forecast(run)))
        truth = change(run, twin)
        if first.endswith("with bf16 autocast the peak is the same."):
            assert abs(truth) <= 2e-3 * memory_of(twin).peak_bytes, run.name
            continue
        told = re.search(r"predicts (\S+ \w+) in fp32: .* the peak is \S+ % (lower|higher), by (\S+ \w+)\.", first)
        assert told, f"{run.name}: {first}"
        assert told[2] == ("lower" if truth < 0 else "higher"), f"{run.name}: {first}"
        assert size_in(told[1]) == pytest.approx(memory_of(twin).peak_bytes, rel=7e-3)
        assert size_in(told[3]) == pytest.approx(abs(truth), abs=2e-3 * memory_of(twin).peak_bytes)
        directions.append(told[2])
    assert set(directions) == {"lower", "higher"}
    assert len(directions) >= len(pairs) - 1


def test_without_a_dry_run_no_direction_is_told_that_the_record_does_not_bear_out(
    pairs: list[tuple[Run, Run]], runs: list[Run]
) -> None:
    every = " ".join(text for run in runs for text in precision_sentences(run, None))
    assert not re.search(r"autocast lowers this peak(?! by at most)", every)
    for run, twin in pairs:
        told = " ".join(precision_sentences(run, None))
        temporaries = memory_of(twin).at_peak.get("temporaries", 0)
        if bound := re.search(r"would take (\S+ \w+) more, so autocast lowers this peak by at most that", told):
            assert -change(run, twin) <= size_in(bound[1]) * 1.01 + temporaries, run.name
        if "so autocast does not lower this peak" in told:
            assert -change(run, twin) <= temporaries, run.name
        if "does not raise it" in told:
            assert change(run, twin) <= 0, run.name


def test_a_cell_that_is_alone_in_a_store_is_set_against_its_prediction_and_else_against_the_stored_cell(
    pairs: list[tuple[Run, Run]], tmp_path: Path
) -> None:
    run, twin = next(pair for pair in pairs if pair[0].name == "2.7b-512-train-bf16")
    path = tmp_path / "store.db"
    with Store.open(path, write=True) as store:
        store.add(run)
    (cell,) = cells_of([run])
    alone = list(comparison_sentences(cell, [cell], memory_references([run], path)))
    assert alone[0].startswith(
        "The same cell in fp32 was not measured. The dry run of the step, which gives this peak within 0.01 %"
    )
    assert "with bf16 autocast the peak is 3.9 % higher, by 2.2" in alone[0]
    assert not any("Measure the same cell" in text for text in alone)
    other_card = dataclasses.replace(twin, id="another", environment=None)  # the newer, and of no known machine
    with Store.open(path, write=True) as store:
        store.add(twin)
        store.add(dataclasses.replace(other_card, created_utc="2030-01-01T00:00:00Z"))
    references = memory_references([run], path)
    assert ([other.id for other in references.others], dict(references.forecasts)) == ([twin.id], {})
    beside = next(comparison_sentences(cell, [cell], references))
    assert beside.startswith("With bf16 autocast the peak is 3.9 % higher")


def test_a_difference_within_the_dry_runs_own_error_has_no_direction(pairs: list[tuple[Run, Run]]) -> None:
    run, _ = pairs[0]
    forecast, profile = fp32_forecast(run), memory_of(run)
    assert forecast is not None

    def told(own_error: int, fp32_change: int) -> str:
        assert forecast is not None
        own = dataclasses.replace(forecast.own, peak_bytes=profile.peak_bytes + own_error)
        fp32 = dataclasses.replace(forecast.fp32, peak_bytes=profile.peak_bytes + fp32_change)
        return forecast_sentence("bf16 autocast", profile, Fp32Forecast(own=own, fp32=fp32))

    assert "which gives this peak exactly" in told(0, 2**30)
    assert "lower, by 1.00 GiB" in told(2**28, 2**30)
    assert "higher, by 1.00 GiB" in told(2**28, -(2**30))
    for change_bytes in (2**30, -(2**30)):
        assert told(2**29, change_bytes).endswith(
            "too close to this cell's peak to say whether bf16 autocast lowers or raises it."
        )
    assert told(0, 100).endswith("with bf16 autocast the peak is the same.")


def test_an_estimate_tells_a_direction_only_beyond_what_estimates_are_off_by(runs: list[Run]) -> None:
    found = {}
    for run in runs:
        if run.spec and run.spec.compile != "off" and (forecast := fp32_forecast(run)):
            text = forecast_sentence("bf16 autocast", memory_of(run), forecast)
            assert "The estimate of the step" in text
            change = abs(memory_of(run).peak_bytes / forecast.fp32.peak_bytes - 1)
            found["too close" in text] = True
            assert ("too close" in text) == (change <= 0.0305) or 0.028 < change < 0.07, text
            assert abs(forecast.own.peak_bytes / memory_of(run).peak_bytes - 1) < 0.03
    assert set(found) == {True, False}


def test_only_a_low_precision_step_on_cuda_has_a_forecast(pairs: list[tuple[Run, Run]]) -> None:
    run, twin = pairs[0]
    assert fp32_forecast(twin) is None
    on_cpu = dataclasses.replace(memory_of(run), source="cpu allocator")
    assert fp32_forecast(dataclasses.replace(run, memory_profile=on_cpu)) is None
    assert run.spec is not None
    flash = dataclasses.replace(run.spec, attention="sdpa_flash")
    assert fp32_forecast(dataclasses.replace(run, spec=flash)) is None  # no such kernel in fp32
    graphs = dataclasses.replace(run.spec, compile="reduce-overhead")
    assert fp32_forecast(dataclasses.replace(run, spec=graphs)) is None  # a lower bound


def test_a_page_of_some_runs_finds_the_fp32_cell_in_the_store(pairs: list[tuple[Run, Run]], tmp_path: Path) -> None:
    run, twin = next(pair for pair in pairs if pair[0].name == "small-512-train-bf16")
    with Store.open(tmp_path / "store.db", write=True) as store:
        store.add(run)
        store.add(twin)
    page = tmp_path / "page.html"
    assert main(["report", run.id, "--output", str(page), "--store", str(tmp_path / "store.db")]) == 0
    text = page.read_text(encoding="utf-8").replace("\u00a0", " ")
    lower = 100 * (1 - memory_of(run).peak_bytes / memory_of(twin).peak_bytes)
    assert f"With bf16 autocast the peak is {lower:.1f} % lower" in text
    assert "Measure the same cell" not in text
    assert twin.id not in text  # compared with, and not reported
