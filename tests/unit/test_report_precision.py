"""What is shown of an audit: sentences and tables that say what the record says, in every format; what is stored."""

import csv
import dataclasses
import io
import json
from pathlib import Path
from statistics import median

import pytest
from tests.runs import ENVIRONMENT, make_run, out_of_memory

from steplab.errors import SteplabError, Unsupported, UserError
from steplab.lab import precision as lab
from steplab.lab.reporting import records_to_report
from steplab.measurement.progress import OnProgress
from steplab.records.codec import decode, encode
from steplab.records.failure import Failure
from steplab.records.numerics import (
    Accumulation,
    Audit,
    Binade,
    Elements,
    LossScaling,
    MatmulAudit,
    ModuleAudit,
    Numerics,
    OperationAudit,
)
from steplab.records.run import Run
from steplab.report.kit.rendering import render
from steplab.report.kit.table import sheet
from steplab.report.page import render_page
from steplab.report.precision import words
from steplab.report.precision.document import precision_document
from steplab.report.precision.figures import added, all_elements, module_groups
from steplab.report.precision.tables import loss_table, matmul_table, timing_rows, type_table
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec
from steplab.store.database import Store

NOTHING = Elements(
    num_elements=100,
    num_inf=0,
    num_nan=0,
    num_zero=0,
    num_subnormal=0,
    num_overflowed=0,
    num_underflowed=0,
    num_below_range=0,
    largest=2.0,
    smallest=0.5,
)
SOME = dataclasses.replace(
    NOTHING, num_inf=3, num_zero=9, num_subnormal=20, num_overflowed=3, num_underflowed=7, num_below_range=5
)


def layer(name: str, output: str = "float16", gradients: Elements = NOTHING) -> ModuleAudit:
    return ModuleAudit(
        module=name,
        kind="Linear",
        leaf=True,
        parameters=("float32",),
        inputs=("float32",),
        outputs=(output,),
        gradients=("float32",),
        output_gradients=(output,),
        output_elements=NOTHING,
        gradient_elements=NOTHING,
        output_gradient_elements=gradients,
    )


def product(name: str, phase: str, calls: int) -> MatmulAudit:
    low = ("float16", "float16")
    node = "MmBackward0" if phase == "backward" else None
    return MatmulAudit(
        module=name, phase=phase, op="aten::mm", node=node, inputs=low, outputs=("float16",), calls=calls
    )


AUDIT = Audit(
    loss_dtype="float32",
    loss=1.25,
    reference_loss=1.5,
    modules=(
        dataclasses.replace(layer(""), leaf=False, kind="Model", output_gradient_elements=SOME),
        *(layer(f"blocks.{index}.fc", gradients=SOME if index == 1 else NOTHING) for index in range(3)),
        layer("blocks.3.fc", output="float32"),
        layer("head<script>"),
    ),
    operations=(
        OperationAudit(op="linear", rule="low_precision", inputs=("float32",), outputs=("float16",), calls=5),
        OperationAudit(op="layer_norm", rule="fp32", inputs=("float16",), outputs=("float32",), calls=2),
        OperationAudit(
            op="cross_entropy",
            rule="fp32",
            inputs=("float16",),
            outputs=("float32",),
            calls=1,
            parts=("log_softmax", "nll_loss"),
        ),
    ),
    matmuls=(
        product("blocks.0.fc", "forward", 1),
        product("blocks.1.fc", "forward", 1),
        product("head", "backward", 2),
    ),
    gradient_exponents=((-30, 10), (-20, 30), (-3, 60)),
    loss_scaling=LossScaling(largest_gradient=0.125, suggested_scale=65536.0, unscaled=SOME, scaled=NOTHING),
)
SUM = Accumulation(
    accumulator="bfloat16",
    addend="bfloat16",
    cast=False,
    number=0.01,
    addend_value=0.010009765625,
    num_additions=1000,
    num_rounded=994,
    result=4.0,
    binades=(
        Binade(start=2.0, spacing=2.0**-6, num_additions=128, added=2.0**-6),
        Binade(start=4.0, spacing=2.0**-5, num_additions=650, added=0.0),
    ),
)


def record(precision: str = "fp16", **changes: object) -> Numerics:
    values: dict[str, object] = {
        "id": precision.encode().hex()[:12].ljust(12, "0"),
        "created_utc": "2026-11-21T07:30:00Z",
        "steplab_version": "0.1.0",
        "spec": resolve_step({"model": "toy", "precision": precision, "device": "cpu"}),
        "environment": ENVIRONMENT,
        "audit": AUDIT,
        "accumulations": (SUM,),
    }
    return Numerics(**(values | changes))  # type: ignore[arg-type]


FAILED = record("bf16", audit=None, failure=Failure(kind="out_of_memory", message="asked for 8.00 GiB more (audit)"))
RUNS = [make_run({"context": 128, "precision": p}) for p in ("fp32", "bf16", "fp16")]
RUNS.append(out_of_memory({"context": 128, "precision": "bf16_pure"}))


# --- figures and words --------------------------------------------------------------------------------------


def test_modules_alike_share_a_row_and_their_elements_add_up() -> None:
    rows = sheet(type_table(AUDIT)).rows
    assert [row[:2] for row in rows] == [
        ("the model", "1"),
        ("blocks.*.fc", "3"),
        ("blocks.*.fc", "1"),
        ("head<script>", "1"),
    ]
    assert rows[1][3:] == ("fp32", "fp32", "fp16", "fp32", "fp16")
    group = module_groups(AUDIT)[1]
    found = group.elements("output gradients")
    assert found is not None
    assert (found.num_elements, found.num_underflowed, found.num_subnormal) == (300, 7, 20)


def test_the_whole_model_counts_each_output_once() -> None:
    found = all_elements(AUDIT, "output gradients")
    assert found is not None
    assert (found.num_elements, found.num_underflowed) == (500, 7)  # five leaves; not the model around them


def test_a_count_that_one_part_lacks_the_sum_lacks() -> None:
    unknown = dataclasses.replace(SOME, num_overflowed=None)
    total = added([SOME, None, unknown])
    assert total is not None
    assert (total.num_overflowed, total.num_zero) == (None, 18)
    assert added([None]) is None


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


def test_shares_of_what_was_lost_are_of_all_elements() -> None:
    rows = {(row["module"], row["of"]): row for row in loss_table(AUDIT).rows}
    row = rows["blocks.*.fc", "output gradients"]
    assert (row["num_elements"], row["underflowed_share"], row["subnormal_share"]) == (300, 7 / 300, 20 / 300)


def test_without_an_fp32_run_only_what_is_not_finite_is_counted() -> None:
    alone = dataclasses.replace(SOME, num_overflowed=None, num_underflowed=None, num_below_range=None)
    modules = (dataclasses.replace(layer("a"), output_elements=alone),)
    shown = sheet(loss_table(dataclasses.replace(AUDIT, modules=modules)))
    row = dict(zip([column.heading for column in shown.columns], shown.rows[0], strict=True))
    assert row["inf or NaN"] == "3"


def test_products_alike_share_a_row() -> None:
    assert sheet(matmul_table(AUDIT)).rows == (
        ("forward", "blocks.*.fc", "2", "mm", "–", "fp16 × fp16", "fp16", "2"),
        ("backward", "head", "1", "mm", "MmBackward0", "fp16 × fp16", "fp16", "2"),
    )


def test_the_sentences_say_what_the_record_says() -> None:
    told = " ".join(words.told(record(), AUDIT))
    assert "Parameters are fp32" in told
    assert "Kept in fp32 by autocast: layer_norm, cross_entropy." in told
    assert "The loss is fp32: 1.25; the fp32 run had 1.5." in told
    assert "backward pass: 2 in fp16 × fp16 → fp16." in told
    assert (
        "of 500 output gradients 3 overflowed, 7 became zero (5 of them below the type's range), 20 are subnorm" in told
    )
    assert "between 2^-30 and 2^-2: 10.0 % below 2^-24, fp16's smallest number, 30.0 % below 2^-14" in told
    assert "GradScaler(init_scale=65536)" in told


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        ("tf32", "TF32 is not a dtype of tensors"),
        ("fp32", "Parameters are fp32; autocast is off."),
        ("bf16", "all within bf16's normal numbers, which begin at 2^-126"),
    ],
)
def test_each_precision_is_told_in_its_own_way(precision: str, said: str) -> None:
    told = " ".join(words.told(record(precision), AUDIT))
    assert said in told
    assert ("Kept in fp32" in told) == (precision == "bf16")


def test_a_reason_is_given_for_what_is_kept_in_fp32() -> None:
    linear, norm, loss = AUDIT.operations
    assert words.why(linear, "fp16").startswith("a product of matrices")
    assert "squares leave fp16's range" in words.why(norm, "fp16")
    assert "exponentials" in words.why(loss, "fp16")
    assert words.why(loss, "fp16").endswith("; made of log_softmax and nll_loss")
    other = dataclasses.replace(norm, op="something_new")
    assert words.why(other, "fp16") == "on autocast's list of operations for fp32"


@pytest.mark.parametrize(
    "op",
    ["layer_norm", "softmax", "exp", "cross_entropy", "nll_loss", "sum", "prod", "pow", "rsqrt", "log", "tan"],
)
def test_bf16_is_never_given_the_reasons_of_fp16(op: str) -> None:
    operation = dataclasses.replace(AUDIT.operations[1], op=op)
    assert "fp16" not in words.why(operation, "bf16")
    assert "bf16" not in words.why(operation, "fp16")
    told = render(precision_document([record("bf16", accumulations=())]), width=140)
    assert "fp16's range" not in told


# --- whether to keep a norm in fp32 -------------------------------------------------------------------------


BF16_SUM, FP32_SUM = SUM, dataclasses.replace(SUM, accumulator="float32", addend="float32", result=10.000133)


def verdict(precision: str, **changes: object) -> str:
    audit = dataclasses.replace(AUDIT, **changes)  # type: ignore[arg-type]
    return " ".join(words.norm_answers(record(precision, audit=audit, accumulations=(BF16_SUM, FP32_SUM))))


def test_the_answer_is_yes_for_the_reasons_of_the_type_and_says_who_keeps_it() -> None:
    fp16, bf16 = verdict("fp16"), verdict("bf16")
    assert fp16.startswith("Yes, keep LayerNorm in fp32, because")
    assert bf16.startswith("Yes, keep LayerNorm in fp32, because")
    assert "infinite in fp16" in fp16
    assert "overflow is no reason, for bf16 has fp32's range" in bf16
    assert "fp16" not in bf16
    assert "0.01 added 1000 times gives 4.0000 in bf16 and 10.0001 in fp32" in bf16
    assert "added" not in fp16  # this record has no sum in fp16
    for told in (fp16, bf16):
        assert "Here autocast does so by itself." in told


@pytest.mark.parametrize(
    ("rule", "output", "said"),
    [
        ("none", "float32", "ran in fp32 because its inputs are fp32"),
        ("cast", "float32", "the model itself asks for it"),
        ("off", "bfloat16", "Here it ran in bf16."),
    ],
)
def test_the_answer_says_what_happened_here(rule: str, output: str, said: str) -> None:
    norm = dataclasses.replace(AUDIT.operations[1], op="rms_norm", rule=rule, outputs=(output,))  # type: ignore[arg-type]
    told = verdict("bf16_pure" if rule == "off" else "bf16", operations=(norm,))
    assert told.startswith("Yes, keep RMSNorm in fp32")
    assert said in told


@pytest.mark.parametrize(("largest", "said"), [(3.0, "its square within"), (300.0, "its square above")])
def test_the_answer_for_fp16_rests_on_the_largest_output(largest: float, said: str) -> None:
    outputs = dataclasses.replace(NOTHING, largest=largest)
    modules = (dataclasses.replace(layer("fc"), output_elements=outputs),)
    assert f"is {largest:g}, {said} fp16's range" in verdict("fp16", modules=modules)


def test_what_was_lost_in_the_norms_is_counted() -> None:
    norm = dataclasses.replace(layer("ln"), kind="LayerNorm", output_elements=SOME)
    assert "Of 100 outputs of norms here, 3 overflowed, 7 became zero" in verdict("fp16", modules=(layer("fc"), norm))


def test_without_a_norm_or_in_fp32_there_is_no_answer() -> None:
    assert verdict("fp16", operations=AUDIT.operations[:1]) == ""
    assert verdict("fp32") == verdict("tf32") == ""
    assert list(words.norm_answers(FAILED)) == []


# --- formats ------------------------------------------------------------------------------------------------


def test_the_terminal_shows_audits_sums_and_timings() -> None:
    text = render(precision_document([record(), FAILED], RUNS), width=140)
    for part in (
        "fp16 autocast",
        "Types by module",
        "Overflow and underflow",
        "Loss scaling",
        "bf16 += bf16",
        "4.0000",
    ):
        assert part in text
    assert "out of memory: asked for 8.00 GiB more" in text
    assert "0.01 added 1000 times" in text
    assert all(len(row) <= 140 for row in text.splitlines())


def test_a_record_is_shown_whole_and_sums_alone_as_sums() -> None:
    whole = render(precision_document([record()]), width=120)
    assert whole.startswith("Precision: fp16 autocast\n")
    assert "0.01 added 1000 times" in whole
    alone = render(precision_document([record(spec=None, audit=None)]), width=120)
    assert "4.0000" in alone
    assert "Types" not in alone


@pytest.mark.parametrize("format", ["json", "csv", "md", "latex"])
def test_every_format_carries_every_module(format: str) -> None:
    text = render(precision_document([record()], RUNS), format)
    for index in range(4) if format in ("json", "csv") else "*":
        assert f"blocks.{index}.fc" in text.replace("\\", "")
    if format != "csv":
        assert "994" in text
    if format == "md":
        assert "<script>" not in text


def test_json_is_base_units_under_the_fields_names() -> None:
    found = json.loads(render(precision_document([record(), FAILED], RUNS), "json"))
    assert list(found) == ["audit", "operations", "matmuls", "loss_scaling", "accumulation", "timings"]
    first = next(row for row in found["audit"] if row["module"] == "blocks.1.fc")
    assert (first["outputs"], first["output_gradients_num_underflowed"]) == ("float16", 7)
    assert found["audit"][-1]["failure"] == "asked for 8.00 GiB more (audit)"
    assert [row["loss_scale"] for row in found["loss_scaling"]] == [1.0, 65536.0]
    assert found["accumulation"][0]["result"] == 4.0


def test_csv_is_the_one_table_asked_for() -> None:
    rows = list(csv.DictReader(io.StringIO(render(precision_document([record()]), "csv"))))
    assert len(rows) == len(AUDIT.modules)
    assert rows[0]["module"] == "the model"
    assert rows[0]["outputs_num_overflowed"] == "0"


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
    for part in ("One step in each precision", "vs fp32", "fp16 autocast", "asked for 8.00", "bf16 += bf16"):
        assert part in page
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
    """Have audits answered at once; those of `refused` precisions are."""
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
    failure = kept[refused[0]].failure
    assert failure is not None
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


def test_a_store_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_text("no store")
    with pytest.raises(SteplabError, match="steplab"):
        lab.precision(store=tmp_path / "s.db")
