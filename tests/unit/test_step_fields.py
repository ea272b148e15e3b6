"""A field of a step is declared once: every place that should know a field knows each of them."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from cyclopts import App
from tests.ddp_records import make_ddp_run
from tests.rendering import sheet_of
from tests.runs import make_run

from steplab.cli.options import StepOptions
from steplab.records.ddp import ddp_row
from steplab.records.rows import Row, run_row
from steplab.records.run import Run
from steplab.report.kit.document import Table
from steplab.report.kit.table import drawn, sheet
from steplab.report.run.attention_steps import attention_step_rows
from steplab.report.run.cells import FIELDS as LABELLED
from steplab.report.run.cells import axis_name, cells_of, label, varying
from steplab.report.run.effects import effects_of
from steplab.report.run.listing import list_document
from steplab.report.run.narrative import facts
from steplab.specs.model import MODEL_SIZES, TransformerShape
from steplab.specs.resolve import resolve_step
from steplab.specs.step import FIELDS, StepSpec
from steplab.specs.step_fields import Declared, StepField, declared_fields
from steplab.specs.study import load_study
from steplab.store.cells import cell_key

AROUND: dict[str, dict[str, object]] = {
    "block_ops": {"model.projections": "merged"},
    "data_parallel": {"layout": "dp=2"},
    "bucket_size_mb": {"layout": "dp=2"},
    "reshard_after_forward": {"layout": "fsdp=2"},
    "pipeline_schedule": {"layout": "pp=2", "model.num_layers": 4},
    "microbatches": {"layout": "pp=2"},
}
"""A step on which a field has an effect, where the default one is none."""
VALUES: dict[str, tuple[object, object]] = {
    "model": ("small", "medium"),
    "checkpointing": ("none", "every_2"),
    "device": ("cuda:0", "cuda:1"),
    "layout": ("dp=2", "fsdp=2"),
    "bucket_size_mb": (10.0, 25.0),
    "model.num_heads": (4, 8),
    "model.num_kv_heads": (1, 2),
    "model.learned_positions": (128, 256),
    "model.d_model": (64, 128),
}
"""Two valid values; of choices the first two will do, and of other numbers 2 and 4."""
SIZES = tuple(f"model.{size.name}" for size in dataclasses.fields(TransformerShape))
FOLLOWING = {
    "model": SIZES,
    "pass": ("checkpointing", "optimizer", "accumulation"),
    "layout": ("data_parallel", "bucket_size_mb", "reshard_after_forward"),
} | dict.fromkeys(SIZES, ("model",))
"""Columns that may change with a field: sizes of a model, and what has an effect for one of its values alone."""


def pair(field: StepField) -> tuple[object, object]:
    one, other = VALUES.get(field.key) or field.choices[:2] or (2, 4)
    return one, other


def specs(field: StepField) -> tuple[StepSpec, StepSpec]:
    """Two specs that differ in the field alone."""
    one, other = (resolve_step({**AROUND.get(field.key, {}), field.key: value}) for value in pair(field))
    return one, other


def runs(field: StepField) -> list[Run]:
    """A run of each, measured on one machine."""
    return [dataclasses.replace(make_run(), id=str(index), spec=spec) for index, spec in enumerate(specs(field))]


def read_at_80_columns(rows: Sequence[Row]) -> set[str]:
    """The different texts of these rows in a list on a narrow terminal, without their ids."""
    (table,) = (block for block in list_document(rows).sections[0].blocks if isinstance(block, Table))
    seen = drawn(sheet(table), 80)
    assert seen.header, "a table, and not a block for each row"
    begins = max(len(str(row["id"])) for row in rows)
    return {"\n".join(line[begins:] for line in lines) for lines in seen.rows}


each_field = pytest.mark.parametrize("field", FIELDS.values(), ids=lambda field: field.key)


@each_field
def test_two_specs_that_differ_in_a_field_alone_differ_wherever_steps_are_told_apart(field: StepField) -> None:
    one, other = specs(field)
    assert one != other
    assert cell_key(one) != cell_key(other)
    both = runs(field)
    rows = [run_row(run) for run in both]
    differing = {name for name in rows[0] if rows[0][name] != rows[1][name]} - {"id"}
    assert {field.column} <= differing <= {field.column, *FOLLOWING.get(field.key, ())}
    cells = cells_of(both)
    labels = [label(cell, varying(cells)) for cell in cells]
    assert len(set(labels)) == 2
    assert not any(" run " in f" {text}" for text in labels), "told apart by its value, not by a number"
    shown = "model" if field.about.group == "sizes" else field.column
    assert len(read_at_80_columns(rows)) == 2
    table = sheet_of(rows)
    (index,) = (index for index, column in enumerate(table.columns) if column.key == shown)
    assert len({cells[index] for cells in table.rows}) == 2


def test_a_list_of_steps_that_differ_in_any_field_tells_all_of_them_apart() -> None:
    every = [run for field in FIELDS.values() for run in runs(field)]
    rows = [run_row(run) | {"id": f"{number:012}"} for number, run in enumerate(every)]
    different = {tuple((key, value) for key, value in row.items() if key != "id") for row in rows}
    assert len(read_at_80_columns(rows)) == len(different)


@pytest.mark.parametrize(
    "field",
    [f for f in FIELDS.values() if f.about.group != "processes" and f.key not in ("pass", "cuda_graph")],
)
def test_data_parallel_studies_of_different_steps_are_told_apart(field: StepField) -> None:
    made = make_ddp_run()
    studies = [
        dataclasses.replace(made, id=str(number), study=dataclasses.replace(made.study, step=spec))
        for number, spec in enumerate(specs(field))
    ]
    assert len(read_at_80_columns([ddp_row(study) for study in studies])) == 2


@each_field
def test_a_field_has_an_option_with_a_help_a_header_and_a_name_on_an_axis(field: StepField) -> None:
    app = App(result_action="return_value")

    @app.default
    def command(*, step: StepOptions = StepOptions()) -> dict[str, object]:  # noqa: B008
        return step.fields()

    text = str(pair(field)[1])
    assert app([f"--{field.key.replace('_', '-')}", text], exit_on_error=False) == {field.key: text}
    assert field.about.help[0].isupper()
    assert not field.about.help.endswith(".")
    assert all(choice in field.help for choice in field.choices)
    if field.about.group != "sizes":  # the model says its own
        assert "[default: " in field.help
        assert axis_name(field.column)
        assert field.column in LABELLED
    assert field.header


@each_field
def test_a_field_says_the_same_on_the_command_line_in_a_study_and_in_a_record(field: StepField, tmp_path: Path) -> None:
    for value, spec in zip(pair(field), specs(field), strict=True):
        assert msgspec.json.decode(msgspec.json.encode(spec), type=StepSpec) == spec
        given = {**AROUND.get(field.key, {}), field.key: value}
        assert resolve_step({name: str(text) for name, text in given.items()}) == spec
        study = tmp_path / "study.toml"
        lines = [f"{json.dumps(name)} = [{json.dumps(text)}]" for name, text in given.items()]
        study.write_text("\n".join(["[[grid]]", *lines]))
        assert load_study(str(study), {}).cells == (spec,)


@each_field
def test_every_spec_is_a_key(field: StepField) -> None:
    one, other = specs(field)
    assert len({one, other, dataclasses.replace(one)}) == 2


def test_a_field_with_its_default_leaves_a_key_as_it_is() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Longer(StepSpec):
        invented: Annotated[float, Declared(help="Largest norm of the gradients")] = 0.0

    spec = resolve_step({"context": 64})
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    assert cell_key(Longer(**values)) == cell_key(spec)
    assert cell_key(Longer(**values, invented=1.0)) != cell_key(spec)


def test_what_is_not_declared_is_refused_with_what_to_write() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Forgetful:
        invented: float = 0.0

    with pytest.raises(TypeError, match=r"Forgetful.invented is not declared: write Annotated"):
        declared_fields(Forgetful)


def test_a_default_that_goes_without_saying_has_no_column_and_no_word_in_a_caption() -> None:
    rows = [run_row(make_run({"context": context})) for context in (64, 128)]
    sheet = sheet_of(rows)
    quiet = {field.column for field in FIELDS.values() if field.about.quiet}
    assert quiet >= {"seed", "layout", "requested_device"}
    assert quiet.isdisjoint(column.key for column in sheet.columns)
    assert not any(word in sheet.caption for word in ("seed", "one process", "auto"))
    seeded = sheet_of([run_row(make_run({"context": context, "seed": 3})) for context in (64, 128)])
    assert "seed 3" in seeded.caption


def test_the_summary_compares_with_the_declared_baselines() -> None:
    told = [fact.text for fact in facts(cells_of([make_run({"optimizer": name}) for name in ("adamw_loop", "sgd")]))]
    assert any("sgd instead of adamw_loop" in text for text in told)


def test_a_device_that_was_asked_for_by_another_name_is_still_compared() -> None:
    runs = [make_run({"device": "auto"}), make_run({"device": "cuda", "precision": "bf16"})]
    assert [effect.choice for effect in effects_of(cells_of(runs))] == ["bf16 instead of fp32"]


def test_steps_of_a_transformers_model_are_compared_by_their_attention(tmp_path: Path) -> None:
    """The configuration is a dict in the spec, and a dict is no key."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 32}')
    shown = []
    for name in ("plain", "sdpa"):
        spec = resolve_step({"model": f"hf:{tmp_path}", "attention": name})
        shown.append(dataclasses.replace(make_run(), id=name, spec=spec))
    assert [row["attention"] for row in attention_step_rows(shown)] == ["plain", "sdpa"]


def test_sizes_default_to_those_of_the_model() -> None:
    row = run_row(make_run({"model": "small", "model.num_layers": 2}))
    assert (row["model"], row["model.num_layers"], row["model.d_ff"]) == (
        "small[num_layers=2]",
        2,
        MODEL_SIZES["small"].d_ff,
    )
