import dataclasses
import json
from pathlib import Path
from statistics import median

import pytest
from tests.precision_records import AUDIT, FAILED, RUNS, SOME, SUM, layer, record
from tests.rendering import render_page
from tests.sure import sure

from steplab.errors import Unsupported, UserError
from steplab.lab import precision as lab
from steplab.lab.choosing import records_to_report
from steplab.measurement.progress import OnProgress
from steplab.records.codec import decode, encode
from steplab.records.numerics import Numerics
from steplab.records.run import Run
from steplab.report.kit.rendering import render
from steplab.report.kit.table import sheet
from steplab.report.precision.document import precision_document
from steplab.report.precision.figures import added, all_elements, elements_of, module_groups
from steplab.report.precision.tables import loss_table, timing_rows, type_table
from steplab.specs.step import StepSpec
from steplab.store.database import Store

# --- figures and words --------------------------------------------------------------------------------------


def test_the_elements_of_modules_alike_add_up() -> None:
    group = module_groups(AUDIT)[1]
    found = sure(added(elements_of(module, "output gradients") for module in group))
    assert (found.num_elements, found.num_underflowed, found.num_subnormal) == (300, 7, 20)


def test_the_whole_model_counts_each_output_once() -> None:
    found = sure(all_elements(AUDIT, "output gradients"))
    assert (found.num_elements, found.num_underflowed) == (500, 7)  # five leaves; not the model around them


def test_a_count_that_one_part_lacks_the_sum_lacks() -> None:
    unknown = dataclasses.replace(SOME, num_overflowed=None)
    total = sure(added([SOME, None, unknown]))
    assert (total.num_overflowed, total.num_zero) == (None, 18)
    assert added([None]) is None


def test_a_star_is_explained_where_one_is_shown() -> None:
    assert type_table(AUDIT).caption.startswith("*: any layer.")
    assert "*" not in type_table(dataclasses.replace(AUDIT, modules=(layer("fc"),))).caption


def test_modules_that_lost_nothing_are_left_out_and_the_worst_kept() -> None:
    table = loss_table(AUDIT)
    assert [(row["module"], row["of"]) for row in table.rows] == [
        ("all", "outputs"),
        ("all", "output gradients"),
        ("all", "parameter gradients"),
        ("the model", "output gradients"),
        ("blocks.*.fc", "output gradients"),
    ]
    assert table.first is None
    worse = [dataclasses.replace(SOME, num_underflowed=number) for number in range(20)]
    modules = tuple(layer(f"layer{number}", gradients=found) for number, found in enumerate(worse))
    many = loss_table(dataclasses.replace(AUDIT, modules=modules))
    assert many.first == 3 + 12
    assert [row["num_underflowed"] for row in many.rows[3:]] == list(range(19, -1, -1))


def test_without_an_fp32_run_only_what_is_not_finite_is_counted() -> None:
    alone = dataclasses.replace(SOME, num_overflowed=None, num_underflowed=None, num_below_range=None)
    modules = (dataclasses.replace(layer("a"), output_elements=alone),)
    shown = sheet(loss_table(dataclasses.replace(AUDIT, modules=modules)))
    row = dict(zip([column.heading for column in shown.columns], shown.rows[0], strict=True))
    assert row["inf or NaN"] == "3"


# --- formats ------------------------------------------------------------------------------------------------


def test_json_is_base_units_under_the_fields_names() -> None:
    found = json.loads(render(precision_document([record(), FAILED], RUNS), "json"))
    assert list(found) == ["audit", "operations", "matmuls", "loss_scaling", "accumulation", "timings"]
    first = next(row for row in found["audit"] if row["module"] == "blocks.1.fc")
    assert (first["outputs"], first["output_gradients_num_underflowed"]) == ("float16", 7)
    assert found["audit"][-1]["failure"] == "asked for 8.00 GiB more (audit)"
    assert [row["loss_scale"] for row in found["loss_scaling"]] == [1.0, 65536.0]
    assert found["accumulation"][0]["result"] == 4.0


def test_speed_ups_are_over_fp32_and_a_failure_has_none() -> None:
    rows = timing_rows(RUNS)
    step = [median(run.timing.phase("step").best_s) if run.timing else None for run in RUNS]  # type: ignore[union-attr]
    assert step[0] is not None
    assert step[1] is not None
    assert rows[0]["speed_up"] == 1.0
    assert rows[1]["speed_up"] == step[0] / step[1]
    peaks = [row["peak_allocated_bytes"] for row in rows]
    assert rows[1]["memory_ratio"] == peaks[1] / peaks[0]  # type: ignore[operator]
    assert (rows[3]["speed_up"], rows[3]["memory_ratio"], rows[3]["status"]) == (None, None, "out_of_memory")
    assert all(row["speed_up"] is None for row in timing_rows(RUNS[1:]))


def test_a_page_has_the_part_on_precision_with_or_without_runs() -> None:
    runs = [dataclasses.replace(run, study="5") for run in RUNS]
    page = render_page([*runs, record(study="5"), FAILED], title="t").replace("\u00a0", " ")
    assert 'id="precision"' in page
    assert 'id="runs"' in page
    assert "<script>" not in page
    alone = render_page([record()], title="t")
    assert "fp16 autocast" in alone
    assert "NVIDIA H200" in alone
    assert 'id="runs"' not in alone
    assert 'id="precision"' not in render_page(RUNS, title="t")


# --- kept ---------------------------------------------------------------------------------------------------


def test_a_record_survives_the_store_and_is_reported_with_its_study(tmp_path: Path) -> None:
    kept, path = record(study="5e5e5e5e5e5e", name="mine"), tmp_path / "store.db"
    assert decode(encode(kept)) == kept
    with Store.open(path, write=True) as store:
        store.add(kept)
        for run in RUNS:
            store.add(dataclasses.replace(run, study="5e5e5e5e5e5e"))
        assert store.get(kept.id) == kept
        (row,) = store.rows(kind="numerics")
        assert (row["model"], row["precision"], row["status"]) == ("toy", "fp16", "ok")
        assert len(store.rows()) == len(RUNS)
        (study,) = store.studies()
        assert (study["num_ok"], study["num_failed"]) == (3, 1)
        assert not any(isinstance(found, Run) for found in store.iterate(kind="numerics"))
    selection = records_to_report(store=path)
    assert (len(selection.of("run")), selection.of("numerics")) == (len(RUNS), (kept,))
    alone = records_to_report([kept.id], store=path)
    assert (alone.of("run"), alone.of("numerics")) == ((), (kept,))
    assert records_to_report(name="mine", store=path).of("numerics") == (kept,)


# --- asked for ----------------------------------------------------------------------------------------------


def serve(monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...] = ()) -> list[StepSpec | None]:
    asked: list[StepSpec | None] = []

    def answer(
        spec: StepSpec | None = None, *, device: str = "auto", timeout_s: float | None, on_progress: OnProgress
    ) -> Numerics:
        asked.append(spec)
        if spec is None:
            return record(spec=None, audit=None, id="0" * 12)
        if spec.precision in refused:
            raise Unsupported(f"precision {spec.precision}", "no", "use another")
        return record(spec.precision, spec=spec, id=f"{len(asked):012x}")

    monkeypatch.setattr(lab, "numerics_in_child", answer)
    return asked


def test_both_autocasts_are_audited_unless_others_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked, path = serve(monkeypatch), tmp_path / "store.db"
    result = lab.precision("toy", parts=("audit",), store=path, name="n")
    assert [spec.precision for spec in asked if spec] == ["fp16", "bf16"]
    assert (result.runs, result.study_id) == ((), None)
    with Store.open(path, write=False) as store:
        assert [found.name for found in store.iterate(kind="numerics") if isinstance(found, Numerics)] == ["n", "n"]
        assert store.studies() == []
    asked.clear()
    lab.precision(precisions=("fp32", "tf32", "fp32"), parts=("audit",), store=tmp_path / "other.db")
    assert [spec.precision for spec in asked if spec] == ["fp32", "tf32"]


def test_sums_alone_need_no_audit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = serve(monkeypatch)
    result = lab.precision(parts=("accumulation",), store=tmp_path / "s.db")
    assert asked == [None]
    assert result.numerics[0].accumulations == (SUM,)


@pytest.mark.parametrize("refused", [("fp16",), ("bf16",), ("fp16", "tf32")])
def test_a_refused_precision_is_a_record_among_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: tuple[str, ...]
) -> None:
    serve(monkeypatch, refused)
    result = lab.precision(precisions=("fp16", "tf32", "bf16"), parts=("audit",), store=tmp_path / "store.db")
    with Store.open(tmp_path / "store.db", write=False) as store:
        kept = {
            str(found.spec.precision): found for found in store.iterate() if isinstance(found, Numerics) and found.spec
        }
    assert {precision for precision, found in kept.items() if found.failure} == set(refused)
    assert [n.spec.precision for n in result.numerics if n.spec] == ["fp16", "tf32", "bf16"]
    failure = sure(kept[refused[0]].failure)
    assert "is not supported: no; use another" in failure.message


def test_where_every_precision_is_refused_nothing_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve(monkeypatch, ("fp16", "bf16"))
    with pytest.raises(Unsupported, match="precision fp16"):
        lab.precision(store=tmp_path / "store.db")
    with Store.open(tmp_path / "store.db", write=False) as store:
        assert store.rows(kind=None) == []
        assert store.studies() == []


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({}, {"precisions": ("int4",)}, "precision 'int4' is not known"),
        ({}, {"precisions": ("",)}, "precision must be a name"),
        ({}, {"parts": ("weights",)}, "part 'weights' is not known"),
        ({}, {"name": "a\nb"}, "a name must be one line of printable text, not"),
        ({"model": "toyy"}, {}, "unknown model 'toyy'; did you mean toy"),
        ({"model": "toy", "model.d_ff": 3}, {}, "applies to the built-in sizes only"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fields: dict[str, object], options: dict[str, object], said: str
) -> None:
    asked = serve(monkeypatch)
    with pytest.raises(UserError, match=said):
        lab.precision(store=tmp_path / "s.db", **fields, **options)  # type: ignore[arg-type]
    assert asked == []
