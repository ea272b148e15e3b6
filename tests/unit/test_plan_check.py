import dataclasses
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from benchmarks import fit_rates
from benchmarks.fit_rates import as_toml, borrowers, committed_records, records_to_fit, source_of
from benchmarks.rates_of_kernels import product_times
from tests.documents import chapter_says
from tests.first import first
from tests.stored_records import stored

from steplab.cli.app import main
from steplab.costs.rates import AttentionRates, ProductRates, fitted_rates, gpu_named
from steplab.errors import UserError
from steplab.lab.planning import check_plan, predicted
from steplab.plan.check import Predicted, check_runs
from steplab.plan.dry_run.step import operators_of
from steplab.plan.host_pace import host_paces, phase_cells, waited
from steplab.plan.kernel_time import widens
from steplab.records.run import Run
from steplab.records.step_time import TimeCheck
from steplab.specs.hardware import hardware_named
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec
from steplab.store.database import Store

ROOT = Path(__file__).parents[2]
H200 = gpu_named("H200 SXM")


@cache
def golden_runs() -> tuple[Run, ...]:
    return tuple(stored("step_h200", Run))


def errors(checks: Iterable[TimeCheck]) -> list[float]:
    return [abs(check.error) for check in checks if check.error is not None]


# --- stored runs --------------------------------------------------------------------------------------------------


predicted_once = cache(predicted)


WAITED = "hf:examples/hf/llama-small.json"


def chosen_runs(label: str = "") -> list[Run]:
    wanted = {("xl", 512, "bf16", "default"), ("small", 1024, "fp32", "off"), ("medium", 128, "bf16", "off")}
    found = []
    for run in golden_runs():
        spec = run.spec
        key = (spec.model.name, spec.context, spec.precision, spec.compile) if spec else None
        if (key in wanted and spec and spec.pass_name == "train") or (spec and spec.model.name == label):
            found.append(run)
    return found


def test_the_chapter_tells_how_far_off_steps_on_a_gpu_without_a_fit_are() -> None:
    runs = stored("other_gpu_h100", Run)
    checks = check_runs(runs, predicted)
    assert not any(check.fitted for check in checks)
    beforehand = {run.id for run in runs if run.name == "other GPU"}
    ahead = [check for check in checks if not check.device_waited]
    rows = {
        "predicted beforehand, Python always ahead": [check for check in ahead if check.id in beforehand],
        "of a search by `advise`, Python always ahead": [check for check in ahead if check.id not in beforehand],
        "all others, where the GPU may have waited": [check for check in checks if check.device_waited],
    }
    for name, of_row in rows.items():
        off, inside = errors(of_row), sum(check.inside is True for check in of_row)
        assert len(off) == len(of_row)
        figures = len(off), f"{median(off):.1%}", f"{max(off):.1%}", inside
        chapter_says("plan_time", f"| {' | '.join([name, *map(str, figures)])} |".replace("%", " %"))
    peaks = [
        abs(check.predicted_peak_bytes / check.measured_peak_bytes - 1)
        for check in checks
        if check.predicted_peak_bytes and check.measured_peak_bytes
    ]
    told = f"{median(peaks):.2%} off in the median of {len(peaks)} steps, {max(peaks):.1%} at worst"
    chapter_says("plan_time", told.replace("%", " %"))


@pytest.mark.parametrize("label", first(1, ["", WAITED, "hf:examples/hf/llama-2.7b.json"]))
def test_a_check_of_runs_tells_what_was_fitted_and_what_waited(label: str) -> None:
    runs = chosen_runs(label)
    told: list[tuple[int, int]] = []
    found = {
        check.id: check for check in check_runs(runs, predicted_once, lambda done, total: told.append((done, total)))
    }
    assert set(found) == {run.id for run in runs}
    assert told == [(done, len(runs)) for done in range(len(runs))]
    for run in runs:
        assert run.spec is not None
        check = found[run.id]
        if run.spec.model.kind == "hf":
            assert not check.fitted
            assert check.inside
            assert check.predicted_peak_bytes == pytest.approx(check.measured_peak_bytes, rel=0.02)
            assert check.device_waited == (label == WAITED)
            if not check.device_waited:
                assert check.error == pytest.approx(0, abs=0.03)
            continue
        assert check.fitted == (run.spec.model.name == "small")
        assert check.predicted_peak_bytes == pytest.approx(check.measured_peak_bytes, rel=0.03)
        if run.spec.model.name == "xl":
            assert check.error == pytest.approx(0, abs=0.1)
            assert check.inside
            assert not check.device_waited


def test_json_has_a_row_for_each_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from steplab.records.codec import encode

    runs = chosen_runs()
    (tmp_path / "runs.jsonl").write_bytes(b"\n".join(map(encode, runs)))
    store = str(tmp_path / "store.db")
    assert main(["import", str(tmp_path / "runs.jsonl"), "--store", store]) == 0
    capsys.readouterr()
    assert main(["plan", "check", "--store", store, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["id"] for row in rows} == {run.id for run in runs}
    for row in rows:
        assert {
            *("id", "predicted_step_time_s", "low_s", "high_s", "measured_step_time_s"),
            *("predicted_peak_bytes", "measured_peak_bytes", "unsupported"),
        } <= row.keys()
        assert (row["unsupported"] is None) == (row["predicted_step_time_s"] is not None)
        assert row["unsupported"] is None or row["unsupported"].startswith("unsupported: ")


def test_a_store_without_runs_is_refused(tmp_path: Path) -> None:
    Store.open(tmp_path / "store.db", write=True).close()
    with pytest.raises(UserError, match="steplab import"):
        check_plan(tmp_path / "store.db")


# --- fits of figures that are known -------------------------------------------------------------------------------


def test_a_phase_much_longer_than_its_kernels_tells_the_pace_of_its_host() -> None:
    cells = phase_cells([run for run in golden_runs() if run.spec and run.spec.model.name == "small"], H200)
    paces = host_paces(cells)
    assert paces
    assert all(1e-6 < pace < 1e-4 for pace in paces.values())
    slow = [cell for cell in cells if cell.measured_s > 1.4 * cell.device_s]
    assert slow
    assert all(waited(cell, paces) for cell in slow)


def test_the_table_was_fitted_to_the_committed_records() -> None:
    for rates in fitted_rates():
        hardware = hardware_named(rates.name)
        fitted = records_to_fit(committed_records(), hardware, rates.held_out, rates.until_utc)
        assert source_of(fitted, hardware) == rates.source, "python -m benchmarks.fit_rates would print another table"
        assert fitted[-1].created_utc == rates.until_utc
        for name, known in rates.borrowers.items():
            steps = (record for record in committed_records() if isinstance(record, Run))
            own = [run for run in steps if (run.device_name or "") in hardware_named(name).device_names]
            tried = borrowers([run for run in own if run.created_utc <= known.until_utc], rates)[name]
            assert (tried.steps, tried.until_utc) == (known.steps, known.until_utc)
            assert tried.spread == pytest.approx(known.spread, rel=1e-3)  # of rounded rates
        runs = [record for record in fitted if isinstance(record, Run)]
        passes = {len(each) for each in rates.attention.values()}
        chapter_says(
            "plan_time",
            f"{len(ProductRates.__struct_fields__)} for each of {', '.join(rates.products)}",
            f"{len(product_times(runs))} products of eager profiles, by shape",
            f"3, and a share for each of {len(rates.streaming.shares)} kinds of operators",
            f"{len(AttentionRates.__struct_fields__)} for each of {passes.pop()} passes of {len(rates.attention)} "
            "implementations",
            f"{len(runs)} steps of steplab's own Transformer by one process, and {len(fitted) - len(runs)} benchmarks",
        )


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_the_fit_prints_the_committed_table(capsys: pytest.CaptureFixture[str]) -> None:
    fit_rates.main([])
    assert capsys.readouterr().out == as_toml(fitted_rates())


def test_runs_that_differ_in_how_they_were_measured_are_predicted_once() -> None:
    run = next(run for run in chosen_runs() if run.spec and run.spec.model.kind == "transformer" and run.timing)
    assert run.spec is not None
    asked = list[StepSpec]()

    def counting(spec: StepSpec, gpu: str) -> Predicted:
        asked.append(spec)
        return predicted(spec, gpu)

    changes: list[dict[str, Any]] = [{}, {"seed": 7}, {"warmup": 2, "steps": 20}, {"context": run.spec.context // 2}]
    runs = [
        dataclasses.replace(run, id=f"{number}", spec=dataclasses.replace(run.spec, **change))
        for number, change in enumerate(changes)
    ]
    peaks = [check.predicted_peak_bytes for check in check_runs(runs, counting)]
    assert peaks[0] == peaks[1] == peaks[2] != peaks[3]
    assert len(asked) == 2


def test_a_step_in_tf32_that_no_fit_has_seen_is_predicted_by_the_share_that_fp32_reaches() -> None:
    [run] = [r for r in stored("plan_time_h200", Run) if r.spec and r.spec.precision == "tf32"]
    [check] = check_runs([run], predicted)
    assert check.error == pytest.approx(0, abs=0.03)


def test_kernels_that_widen_what_they_read_are_told_from_others() -> None:
    """Autocast's additions to a residual stream, rotations and conversions run at half the bandwidth."""
    operators = [op for op in operators_of(resolve_step({"precision": "bf16"})) if op.kind == "streaming"]
    assert {op.name for op in operators if widens(op)} == {"add", "copy", "mul"}
    full = [op for op in operators_of(resolve_step({"precision": "fp32"})) if op.kind == "streaming"]
    assert not any(widens(op) for op in full)
    shares = H200.rates.streaming.shares
    assert all(shares[f"{name} widening"] < 0.7 * shares[name] for name in ("add", "copy", "mul"))


def test_the_file_of_rates_reads_back() -> None:
    text = as_toml(fitted_rates())
    assert text == (ROOT / "src" / "steplab" / "costs" / "rates.toml").read_text(encoding="utf-8")
