from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from tests.documents import chapter_says
from tests.runs import ENVIRONMENT, make_run, recorder_run
from tests.stored_records import stored
from tests.sure import sure

from steplab.lab.utilization import PeakFigure, peak_figure, utilizations, with_given_flops, with_utilizations
from steplab.records.ceilings import Ceiling, Ceilings
from steplab.records.environment import DeviceInfo, Environment
from steplab.records.run import ModelFacts, Run
from steplab.specs.resolve import resolve_step
from steplab.store.database import Store

CPU = DeviceInfo(kind="cpu", name="a CPU", threads=4)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db", write=True) as opened:
        yield opened


def doctor(
    store: Store,
    day: int,
    flops_per_s: float,
    device: DeviceInfo = CPU,
    dtype: str = "fp32",
    seconds: tuple[float, ...] = (1.5, 1.0),
    environment: Environment = ENVIRONMENT,
) -> None:
    best = Ceiling(name="matmul", dtype=dtype, unit="FLOP/s", work=flops_per_s, seconds=seconds)
    environment = replace(environment, device=device)
    made = f"2026-11-{day:02}T08:00:00Z"
    record = Ceilings(
        id=f"{day:012}", created_utc=made, steplab_version="0.1.0", environment=environment, ceilings=(best,)
    )
    store.add(record)


def on_the_cpu(**fields: object) -> Run:
    return replace(make_run(fields), environment=replace(ENVIRONMENT, device=CPU), utilizations=())


def test_the_highest_ceiling_counts_and_is_named(store: Store) -> None:
    for day, flops_per_s in ((19, 2e11), (20, 3e11), (21, 1e11)):
        doctor(store, day, flops_per_s)
    peak = peak_figure(CPU, "fp32", store)
    assert peak.flops_per_s == 3e11
    assert (
        peak.source
        == "measured: fp32 matmul by steplab doctor, the highest of 3 records, 2026-11-20, record 000000000020"
    )


def test_a_single_record_is_no_choice(store: Store) -> None:
    doctor(store, 19, 2e11)
    assert (
        peak_figure(CPU, "fp32", store).source
        == "measured: fp32 matmul by steplab doctor, 2026-11-19, record 000000000019"
    )


def test_other_devices_threads_and_types_do_not_count(store: Store) -> None:
    doctor(store, 18, 1e11)
    doctor(store, 19, 9e11, device=replace(CPU, threads=8))
    doctor(store, 20, 8e11, device=replace(CPU, name="another CPU"))
    doctor(store, 21, 7e11, dtype="bf16")
    assert peak_figure(CPU, "fp32", store).flops_per_s == 1e11
    unknown = peak_figure(replace(CPU, threads=2), "fp32", store)
    assert unknown.flops_per_s is None
    assert "a CPU with 2 threads; `OMP_NUM_THREADS=2 steplab doctor` measures one" in unknown.source


def test_a_data_sheet_is_before_any_measurement(store: Store) -> None:
    doctor(store, 19, 1.0, device=ENVIRONMENT.device)
    assert (peak_figure(ENVIRONMENT.device, "fp32", store).flops_per_s or 0) > 1e13


def test_a_ceiling_below_what_the_step_reached_is_left_out(store: Store) -> None:
    doctor(store, 19, 1e11)
    told = with_utilizations(on_the_cpu(), store)
    assert {used.value for used in told.utilizations} == {None}
    assert told.utilizations[0].peak_source == (
        "the ceiling that was measured: fp32 matmul by steplab doctor, 2026-11-19, record 000000000019 is below what "
        "this step reached; run `steplab doctor` again on an idle machine"
    )


def test_doubtful_ceilings_are_left_out(store: Store) -> None:
    doctor(store, 19, 1e18)
    busy = replace(ENVIRONMENT, device=CPU, num_cpus=2, other_cpus=1.9)
    doctor(store, 20, 2e18, environment=busy)
    assert peak_figure(CPU, "fp32", store).flops_per_s == 1e18
    doctor(store, 21, 3e18, dtype="bf16", seconds=(1.0, 1.9, 1.8))
    unknown = peak_figure(CPU, "bf16", store)
    assert unknown.flops_per_s is None
    assert "Repeats of one product or copy took 1.5 times as long as others (bf16)." in unknown.source


def test_a_possible_share_has_no_note(store: Store) -> None:
    doctor(store, 19, 1e18)
    run = on_the_cpu()
    assert with_utilizations(run, store).notes == run.notes
    with_none = on_the_cpu(precision="bf16")
    assert with_utilizations(with_none, store).notes == with_none.notes


def test_a_stated_peak_is_not_blamed_on_doctor(store: Store) -> None:
    run = make_run()
    assert run.timing is not None
    phases = tuple(replace(p, device_s=tuple(s / 1e6 for s in p.best_s)) for p in run.timing.back_to_back)
    told = with_utilizations(replace(run, timing=replace(run.timing, back_to_back=phases)), store)
    (note,) = told.notes
    assert note.startswith("MFU and HFU over 100 %: the step exceeds the stated peak")


def test_a_convention_that_counts_too_much_is_blamed_alone(store: Store) -> None:
    run = on_the_cpu()
    shares = {u.convention: u.value or 0.0 for u in utilizations(run, PeakFigure(flops_per_s=1.0, source=""))}
    done, params = max(shares["causal"], shares["as_executed"]), shares["params"]
    assert params > done, "small looks its embedding up, and 'params' counts it as a product"
    doctor(store, 19, (done + params) / 2)
    (note,) = with_utilizations(run, store).notes
    assert note == "MFU over 100 %: the convention 'params' counts FLOPs that the step does not execute"


@pytest.mark.parametrize(
    ("name", "label"),
    [("hf:a/b/llama-small.json", "hf:llama-small"), ("hf:a/Llama-3.2-1B/config.json", "hf:Llama-3.2-1B")],
)
def test_a_configuration_is_called_by_its_file(
    tmp_path: Path, name: str, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name.removeprefix("hf:")
    path.parent.mkdir(parents=True)
    path.write_text('{"model_type": "llama"}')
    assert resolve_step({"model": name}).model.label == label
    if path.name == "config.json":
        assert resolve_step({"model": f"hf:{path.parent}"}).model.label == label
        monkeypatch.chdir(path.parent)
        assert resolve_step({"model": "hf:config.json"}).model.label == "hf:llama"


def test_a_model_of_ones_own_has_an_mfu_by_what_was_counted() -> None:
    spec = resolve_step({"model": "examples.my_model:build", "layout": "dp=2"})
    run = replace(make_run(), spec=spec, model=ModelFacts(num_parameters=1, needed_flops=8.0, counted_flops=12.0))
    mfu, hfu = utilizations(run, PeakFigure(flops_per_s=100.0, source="its sheet"))
    assert (mfu.kind, mfu.convention, mfu.flops, hfu.convention, hfu.flops) == ("mfu", "counted", 16, "as_executed", 24)
    assert mfu.value == pytest.approx(16 / (run.median_s or 0.0) / 200.0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loop_has_an_mfu_by_the_flops_that_it_was_given(store: Store, num_ranks: int) -> None:
    """The H200's dense bf16 peak is 989.5e12, half of its data sheet's 1,979 with sparsity."""
    run = replace(recorder_run(), environment=ENVIRONMENT)
    told = with_given_flops(run, 5e12, "bf16", num_ranks, store)
    (mfu,) = told.utilizations
    assert (mfu.kind, mfu.convention, mfu.flops, mfu.dtype, mfu.num_devices) == (
        "mfu",
        "given",
        5e12,
        "bf16",
        num_ranks,
    )
    assert told.mfu == pytest.approx(5e12 / (run.median_s or 0.0) / (num_ranks * 989.5e12))


def test_a_loop_that_was_given_too_many_flops_or_has_too_low_a_peak_is_warned(store: Store) -> None:
    doctor(store, 19, 1.0)
    run = with_given_flops(replace(recorder_run(), environment=on_the_cpu().environment), 5e12, "fp32", 1, store)
    assert run.notes[-1].startswith("MFU over 100 %: the FLOPs that the recorder was given are more than")
    assert run.notes[-1].endswith("; `steplab doctor` measures it again")


def test_a_loop_on_a_device_without_a_peak_says_so(store: Store) -> None:
    run = with_given_flops(replace(recorder_run(), environment=on_the_cpu().environment), 5e12, "bf16", 1, store)
    assert run.mfu is None
    assert run.notes[-1].startswith("MFU: no bf16 peak is known for a CPU; `steplab doctor` measures one")


@pytest.mark.parametrize(
    ("convention", "flops_per_step", "percent"),
    [
        ("causal", (6 * (3_406_809_600 - 25_600_000) + 6 * 32 * 2560 * 512) * 2048, "25.2"),
        ("full", (6 * (3_406_809_600 - 25_600_000) + 12 * 32 * 2560 * 512) * 2048, "25.5"),
        ("params", 6 * 3_406_809_600 * 2048, "25.1"),
    ],
)
def test_mfu_of_2_7b_agrees_with_the_hand_calculation_in_the_docs(
    convention: str, flops_per_step: int, percent: str
) -> None:
    [run] = [run for run in stored("step_h200", Run) if run.id == "5e7271880f12"]
    [mfu] = [u for u in run.utilizations if u.kind == "mfu" and u.convention == convention]
    step = sure(sure(run.timing).phase("step"))
    by_hand = flops_per_step / median(step.best_s) / 989.5e12
    assert mfu.flops == flops_per_step
    assert mfu.value == pytest.approx(by_hand, rel=1e-12)
    assert f"{100 * by_hand:.1f}" == percent
    chapter_says("mfu", f"{flops_per_step / 1e12:.3f}e12 / 0.16880 / 989.5e12 = {percent} %")
