import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from cyclopts import App
from tests.ddp_records import make_ddp_run
from tests.rendering import sheet_of
from tests.runs import make_run

import steplab.records
import steplab.specs
from steplab.cli.app import main
from steplab.cli.options import StepOptions
from steplab.errors import Remark, UserError
from steplab.lab.machine import device_kind_here
from steplab.lab.measuring import asked_step
from steplab.lab.planning import plan_time
from steplab.ops.attention.api import IMPLEMENTATIONS
from steplab.records.registry import summary_row
from steplab.records.rows import Row, run_row
from steplab.records.run import Run
from steplab.report.kit.document import Table
from steplab.report.kit.table import drawn, sheet
from steplab.report.run.cells import FIELDS as LABELLED
from steplab.report.run.cells import cells_of, label, varying
from steplab.report.run.columns import list_document
from steplab.report.run.effects import effects_of
from steplab.specs.changes import CHANGES, recipe_help, resolve_with_recipe
from steplab.specs.model import EXAMPLES, MEASURED, MODEL_SIZES, PLANNING_ONLY, ModelSpec, TransformerShape, model_spec
from steplab.specs.resolve import resolve_step
from steplab.specs.step import CHOICES, FIELDS, STEP_FIELDS, StepSpec
from steplab.specs.step_fields import Declared, StepField, declared_fields
from steplab.specs.study import load_study
from steplab.store.selection import cell_key

MODULES = [
    importlib.import_module(f"{package.__name__}.{found.name}")
    for package in (steplab.specs, steplab.records)
    for found in pkgutil.iter_modules(package.__path__)
]
DATACLASSES = [
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__
]
KEYS = {field.attribute: field.key for field in STEP_FIELDS}


def refusal(**fields: object) -> str:
    with pytest.raises(UserError) as error:
        resolve_step({name.replace("__", "."): value for name, value in fields.items()})
    message = str(error.value)
    assert "\n" not in message
    return message


def hf_config(folder: Path, **content: object) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **content}))
    return f"hf:{folder}/config.json"


# --- how specs and records are made -----------------------------------------------------------------------


def test_specs_and_records_are_frozen_and_take_keywords_alone() -> None:
    assert [cls for cls in DATACLASSES if not cls.__dataclass_params__.frozen] == []  # type: ignore[attr-defined]
    assert [cls for cls in DATACLASSES if not all(field.kw_only for field in dataclasses.fields(cls))] == []


def undocumented(tree: ast.Module) -> Iterator[str]:
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef) or "dataclass" not in " ".join(map(ast.unparse, cls.decorator_list)):
            continue
        if not ast.get_docstring(cls):
            yield cls.name
        for statement, below in zip(cls.body, [*cls.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or "Declared(" in ast.unparse(statement.annotation):
                continue  # what is declared has a help text, which serves as its docstring
            if not (
                isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                yield f"{cls.name}.{ast.unparse(statement.target)}"


def test_every_field_of_a_spec_has_a_docstring_under_it() -> None:
    sources = (inspect.getsource(module) for module in MODULES if module.__name__.startswith("steplab.specs"))
    assert [name for source in sources for name in undocumented(ast.parse(source))] == []


def test_a_field_without_a_docstring_would_be_found() -> None:
    source = '@dataclass\nclass A:\n    """A."""\n    x: int\n    y: int\n    """Y."""\n'
    assert list(undocumented(ast.parse(source))) == ["A.x"]


# --- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "d_model", "d_ff", "layers", "heads", "head_dim", "vocab_size"),
    [
        ("small", 768, 3072, 12, 12, 64, 10_000),
        ("medium", 1024, 4096, 24, 16, 64, 10_000),
        ("large", 1280, 5120, 36, 20, 64, 10_000),
        ("xl", 1600, 6400, 48, 25, 64, 10_000),
        ("2.7b", 2560, 10240, 32, 32, 80, 10_000),
        ("8b", 4096, 11008, 34, 32, 128, 151_936),
    ],
)
def test_the_sizes_are_those_of_the_published_table(
    name: str, d_model: int, d_ff: int, layers: int, heads: int, head_dim: int, vocab_size: int
) -> None:
    shape = MODEL_SIZES[name]
    found = (shape.d_model, shape.d_ff, shape.num_layers, shape.num_heads, shape.head_dim, shape.vocab_size)
    assert found == (d_model, d_ff, layers, heads, head_dim, vocab_size)


def test_the_planning_size_has_feed_forward_blocks_alone() -> None:
    shape = MODEL_SIZES["xxl"]
    assert (shape.d_model, shape.d_ff, shape.num_layers) == (16384, 53248, 126)
    assert tuple(name for name, size in MODEL_SIZES.items() if size.num_heads == 0) == PLANNING_ONLY == ("xxl",)


def test_the_help_names_every_built_in_model() -> None:
    named = re.findall(r"[\w.]+", FIELDS["model"].help)
    assert {*MODEL_SIZES, *EXAMPLES} <= set(named)


# --- defaults and overrides -------------------------------------------------------------------------------


def test_what_is_left_out_takes_its_default() -> None:
    assert resolve_step({}) == StepSpec(model=model_spec("tiny"))
    spec = resolve_step({"model": "small"})
    assert spec == StepSpec(
        model=ModelSpec(name="small", kind="transformer", shape=MODEL_SIZES["small"]),
        batch=4,
        context=128,
        pass_name="train",
        precision="fp32",
        compile="off",
        attention="plain",
        optimizer="adamw_fused",
        warmup=5,
        steps=10,
        seed=0,
        device="auto",
    )


def test_text_and_numbers_mean_the_same() -> None:
    as_text = {"model": "small", "model.num_layers": "4", "batch": "2", "context": "64", "pass": "forward"}
    as_numbers = {"model": "small", "model.num_layers": 4, "batch": 2, "context": 64, "pass": "forward"}
    assert resolve_step(as_text) == resolve_step(as_numbers)
    assert resolve_step(as_text).tokens == 2 * 64


def test_an_override_changes_its_size_and_no_other() -> None:
    spec = resolve_step({"model": "small", "model.num_layers": 4, "model.vocab_size": 500})
    assert spec.model.shape == dataclasses.replace(MODEL_SIZES["small"], num_layers=4, vocab_size=500)
    assert spec.model.label == "small[vocab_size=500,num_layers=4]"
    assert MODEL_SIZES["small"].num_layers == 12
    assert resolve_step({"model": "small", "model.num_layers": 12}).model.label == "small"


def test_every_settable_field_is_one_of_the_step_or_of_the_model() -> None:
    sizes = [f"model.{f.name}" for f in dataclasses.fields(TransformerShape)]
    assert [field.attribute for field in STEP_FIELDS] == [field.name for field in dataclasses.fields(StepSpec)]
    assert list(FIELDS) == [*(field.key for field in STEP_FIELDS), *sizes]
    assert FIELDS["pass"].attribute == "pass_name"


def test_the_attention_choices_are_the_implementations_there_are() -> None:
    assert CHOICES["attention"] == tuple(IMPLEMENTATIONS)


@pytest.mark.parametrize(("field", "value"), [(name, value) for name, values in CHOICES.items() for value in values])
def test_every_choice_is_accepted(field: str, value: str) -> None:
    needs: dict[str, dict[str, object]] = {  # what fields that one process has no use for need, and one precision
        "bf16_master": {"optimizer": "adamw_triton"},
        "triton": {"model.projections": "merged"},
        "data_parallel": {"layout": "dp=2"},
        "reshard_after_forward": {"layout": "fsdp=2"},
        "pipeline_schedule": {"layout": "pp=2", "model.num_layers": 4},
    }
    assert getattr(resolve_step({KEYS[field]: value, **needs.get(field, {}), **needs.get(value, {})}), field) == value


@pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:0", "cuda:17"])
def test_a_device_name_is_accepted(device: str) -> None:
    assert resolve_step({"device": device}).device == device


# --- refusals ---------------------------------------------------------------------------------------------


def test_an_unknown_model_is_answered_with_all_there_are() -> None:
    message = refusal(model="smol")
    assert "'smol'" in message
    assert all(name in message for name in (*MEASURED, "hf:PATH/config.json", "package.module:function"))


@pytest.mark.parametrize("field", ["batch", "context", "warmup", "steps", "seed", "model__num_layers"])
@pytest.mark.parametrize("value", ["many", "", "1.5", 1.5, True, None, [1]])
def test_what_is_no_whole_number_is_refused_by_field(field: str, value: object) -> None:
    message = refusal(**{field: value})
    assert message.startswith(field.replace("__", "."))
    assert "whole number" in message
    assert str(value) in message


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [("batch", 0, 1), ("context", 0, 1), ("warmup", -1, 0), ("steps", 0, 1), ("seed", -1, 0),
     ("model__num_layers", 0, 1), ("model__d_ff", -4, 1), ("model__num_heads", -1, 0), ("model__vocab_size", 0, 1)],
)  # fmt: skip
def test_a_number_out_of_range_is_answered_with_the_least_there_may_be(field: str, value: int, least: int) -> None:
    message = refusal(**{field: value})
    assert f"{field.replace('__', '.')} must be at least {least}" in message
    assert f"not {value}" in message


@pytest.mark.parametrize(
    "field", ["batch", "context", "warmup", "steps", "seed", "model__d_model", "model__vocab_size"]
)
def test_a_number_that_no_machine_word_holds_is_refused_by_field(field: str) -> None:
    message = refusal(**{field: 2**63})
    assert message.startswith(field.replace("__", "."))
    assert str(2**63) in message


@pytest.mark.parametrize("field", [field.key for field in STEP_FIELDS if field.choices])
def test_an_unknown_choice_is_answered_with_the_valid_ones(field: str) -> None:
    message = refusal(**{field: "sideways"})
    assert f"{field} 'sideways'" in message
    assert all(choice in message for choice in FIELDS[field].choices)


@pytest.mark.parametrize("field", ["model", "precision", "device"])
@pytest.mark.parametrize("value", ["", 3, None, True])
def test_what_is_no_name_is_refused_by_field(field: str, value: object) -> None:
    message = refusal(**{field: value})
    assert message.startswith(f"{field} must be a name, not {value!r}")
    assert all(choice in message for choice in FIELDS[field].choices)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "auto:1", "mps:0", "CUDA", "cuda:²"])
def test_an_unknown_device_is_answered_with_the_valid_ones(device: str) -> None:
    message = refusal(device=device)
    assert f"device '{device}'" in message
    assert "auto, cpu, mps, cuda or cuda:N" in message


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("contxt", "context"), ("precison", "precision"), ("model.num_layer", "model.num_layers"), ("models", "model")],
)
def test_a_misspelled_field_is_answered_with_the_nearest(wrong: str, right: str) -> None:
    message = refusal(**{wrong: 1})
    assert f"unknown field '{wrong}'" in message
    assert f"did you mean {right}?" in message


def test_a_field_like_no_other_is_answered_with_all_there_are() -> None:
    message = refusal(zzz=1)
    assert "unknown field 'zzz'" in message
    assert all(field in message for field in FIELDS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 3}, "model.num_kv_heads 3 must divide the 4 attention heads; choose a divisor"),
        ({"num_kv_heads": 0}, "model.num_kv_heads must be at least 1"),
        ({"learned_positions": 64}, "context 128 is longer than the 64 positions of tiny; .* model.learned_positions"),
        ({"learned_positions": 128, "d_model": 130}, "cannot be split into 4 heads; choose a multiple of model.num_h"),
        ({"norm": "batchnorm"}, "model.norm 'batchnorm' is not known; choose one of rmsnorm, layernorm"),
        ({"feed_forward": "relu"}, "model.feed_forward 'relu' is not known; choose one of swiglu, gelu"),
        ({"num_heads": 0, "biases": "all"}, "model.biases all has no effect on a model without attention heads"),
    ],
)
def test_parts_of_a_model_that_do_not_fit_are_refused(fields: dict[str, object], message: str) -> None:
    assert re.search(message, refusal(**{f"model__{name}": value for name, value in fields.items()}))


def test_as_many_heads_of_keys_as_of_queries_is_the_default_said_again() -> None:
    spec = resolve_step({"model.num_kv_heads": 4})
    assert spec == resolve_step({})
    assert cell_key(spec) == cell_key(resolve_step({}))


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, "5136b39a28a0079f"),
        ({"model": "xl", "context": 512}, "8e5fe0c68e325486"),
        ({"model": "small", "model.num_layers": 2}, "c229e8167aad27ee"),
        ({"model": "2.7b", "precision": "bf16", "layout": "fsdp=2"}, "4da0e1f8338cc315"),
    ],
)
def test_parts_at_their_defaults_leave_the_keys_of_cells_as_they_were(fields: dict[str, object], key: str) -> None:
    assert cell_key(resolve_step(fields)) == key


@pytest.mark.parametrize(("d_model", "num_heads"), [(100, 4), (96, 32), (128, 3), (2, 2)])
def test_heads_of_an_odd_width_are_refused_with_the_reason(d_model: int, num_heads: int) -> None:
    message = refusal(model__d_model=d_model, model__num_heads=num_heads)
    assert f"model.d_model {d_model}" in message
    assert f"{num_heads} heads" in message
    assert "multiple of 2 x model.num_heads" in message


def test_sizes_of_a_model_that_has_none_of_ours_are_refused() -> None:
    message = refusal(model="models:make", model__num_layers=2)
    assert "model.num_layers" in message
    assert "'models:make'" in message


def test_a_size_that_no_model_has_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.width is not a size of the model; choose one of vocab_size, d_model"):
        model_spec("tiny", {"width": 1})


# --- models of others -------------------------------------------------------------------------------------


def test_a_configuration_is_taken_into_the_spec(tmp_path: Path) -> None:
    name = hf_config(tmp_path, max_position_embeddings=64, hidden_size=32)
    spec = resolve_step({"model": name, "context": 64})
    assert spec.model.kind == "hf"
    assert spec.model.hf_config == {"model_type": "llama", "max_position_embeddings": 64, "hidden_size": 32}
    assert spec.model.label == f"hf:{tmp_path.name}"
    assert resolve_step({"model": f"hf:{tmp_path}", "context": 64}).model.hf_config == spec.model.hf_config


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_a_context_beyond_the_positions_is_refused_with_the_limit(tmp_path: Path, key: str) -> None:
    name = hf_config(tmp_path, **{key: 64})
    message = refusal(model=name, context=65)
    assert "context 65" in message
    assert "--context 64" in message
    assert name in message


def test_a_configuration_without_a_limit_takes_any_context(tmp_path: Path) -> None:
    assert resolve_step({"model": hf_config(tmp_path), "context": 10**6}).context == 10**6


@pytest.mark.parametrize("content", ["", "[]", "{", "{}", '{"model_type": 3}', "\x00"])
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    message = refusal(model=f"hf:{tmp_path}")
    assert str(tmp_path / "config.json") in message
    assert "is not a transformers configuration" in message


def test_a_configuration_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    message = refusal(model=f"hf:{tmp_path}/none.json")
    assert f"{tmp_path}/none.json" in message
    assert "No such file" in message


def test_a_factory_is_named_by_module_and_function() -> None:
    assert resolve_step({"model": "my.models:make"}).model == ModelSpec(name="my.models:make", kind="factory")
    assert "unknown model" in refusal(model="my.models:")
    for misspelt in ("xxx", "xxll"):
        assert "xxl," not in refusal(model=misspelt)
        assert "mean xxl?" not in refusal(model=misspelt)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tinny", "did you mean tiny?"),
        ("./train/mygpt.py:make", "did you mean train.mygpt:make,"),
        ("mygpt.py", "did you mean mygpt:build,"),
        ("my-gpt.py:build", "named as its module"),
        ("gpt2", "; choose one of tiny"),
    ],
)
def test_an_unknown_model_is_told_what_it_may_have_been_meant_for(name: str, hint: str) -> None:
    assert hint in refusal(model=name)


def test_the_loss_is_a_choice_of_built_in_models_alone() -> None:
    assert resolve_step({"loss": "fused"}).loss == "fused"
    with pytest.raises(UserError, match=r"loss has no effect here: .* computes its own loss; leave it out"):
        resolve_step({"model": "package.module:function", "loss": "plain"})


AROUND: dict[str, dict[str, object]] = {
    "block_ops": {"model.projections": "merged"},
    "data_parallel": {"layout": "dp=2"},
    "bucket_size_mb": {"layout": "dp=2"},
    "reshard_after_forward": {"layout": "fsdp=2"},
    "pipeline_schedule": {"layout": "pp=2", "model.num_layers": 4},
    "microbatches": {"layout": "pp=2"},
}
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
SIZES = tuple(f"model.{size.name}" for size in dataclasses.fields(TransformerShape))
FOLLOWING = {
    "model": SIZES,
    "pass": ("checkpointing", "optimizer", "accumulation"),
    "layout": ("data_parallel", "bucket_size_mb", "reshard_after_forward"),
} | dict.fromkeys(SIZES, ("model",))


def pair(field: StepField) -> tuple[object, object]:
    one, other = VALUES.get(field.key) or field.choices[:2] or (2, 4)
    return one, other


def specs(field: StepField) -> tuple[StepSpec, StepSpec]:
    one, other = (resolve_step({**AROUND.get(field.key, {}), field.key: value}) for value in pair(field))
    return one, other


def runs(field: StepField) -> list[Run]:
    """Untimed, because a row of a timed run has the number of its samples as `steps`."""
    untimed = dataclasses.replace(make_run(), timing=None)
    return [dataclasses.replace(untimed, id=str(index), spec=spec) for index, spec in enumerate(specs(field))]


def read_at_80_columns(rows: Sequence[Row]) -> set[str]:
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
    "field", [f for f in FIELDS.values() if f.about.group != "processes" and f.key not in ("pass", "cuda_graph")]
)
def test_data_parallel_studies_of_different_steps_are_told_apart(field: StepField) -> None:
    made = make_ddp_run()
    studies = [
        dataclasses.replace(made, id=str(number), study=dataclasses.replace(made.study, step=spec))
        for number, spec in enumerate(specs(field))
    ]
    assert len(read_at_80_columns([summary_row(study) for study in studies])) == 2


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
    effects = effects_of(cells_of([make_run({"optimizer": name}) for name in ("adamw_loop", "sgd")]))
    assert [effect.choice for effect in effects] == ["sgd instead of adamw_loop"]


def test_a_device_that_was_asked_for_by_another_name_is_still_compared() -> None:
    runs = [make_run({"device": "auto"}), make_run({"device": "cuda", "precision": "bf16"})]
    assert [effect.choice for effect in effects_of(cells_of(runs))] == ["bf16 instead of fp32"]


def test_steps_of_a_transformers_model_are_compared_by_their_attention(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 32}')
    shown = []
    for name in ("plain", "sdpa"):
        spec = resolve_step({"model": f"hf:{tmp_path}", "attention": name})
        shown.append(dataclasses.replace(make_run(), id=name, spec=spec))
    assert [effect.choice for effect in effects_of(cells_of(shown))] == ["sdpa attention instead of plain attention"]


def test_sizes_default_to_those_of_the_model() -> None:
    row = run_row(make_run({"model": "small", "model.num_layers": 2}))
    assert (row["model"], row["model.num_layers"], row["model.d_ff"]) == (
        "small[num_layers=2]",
        2,
        MODEL_SIZES["small"].d_ff,
    )


def resolved(kind: str, **fields: object) -> tuple[StepSpec, str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        spec = resolve_with_recipe({"recipe": "fast"} | fields, lambda name: kind)
    (remark,) = found
    assert remark.category is Remark
    return spec, str(remark.message)


def test_on_a_gpu_the_spec_is_that_of_the_options_that_it_names() -> None:
    spec, said = resolved("cuda", model="small")
    fields = {"precision": "bf16_master", "attention": "auto", "compile": "block", "cuda_graph": "step"}
    fields |= {"optimizer": "adamw_triton", "update": "overlapped"}
    fields |= {"model.projections": "merged", "block_ops": "triton"}
    assert spec == resolve_step({"model": "small"} | fields)
    assert said.startswith("recipe fast on cuda sets --precision bf16_master --attention auto --compile block ")
    assert said.endswith("which made steps faster on an H200; --precision bf16_master changes the numbers")


def test_on_a_cpu_it_sets_what_serves_there() -> None:
    spec, said = resolved("cpu", model="small", device="cpu")
    assert spec == resolve_step({"model": "small", "device": "cpu", "attention": "sdpa"})
    assert said == "recipe fast on cpu sets --attention sdpa, which made steps faster on a CPU"
    assert resolved("mps")[1] == "recipe fast on mps sets nothing"


def test_what_is_given_wins_even_if_it_is_a_default() -> None:
    spec, said = resolved("cuda", compile="off", precision="fp32", optimizer="sgd")
    assert (spec.compile, spec.precision, spec.optimizer, spec.cuda_graph) == ("off", "fp32", "sgd", "step")
    sets = "--attention auto --model.projections merged --block-ops triton --cuda-graph step --update overlapped"
    assert said == f"recipe fast on cuda sets {sets}, which made steps faster on an H200"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"optimizer": "adamw_fused"}, "the optimizer has to keep fp32 masters"),
        ({"accumulation": 2}, "gradients of micro-steps would be added up in bf16"),
        ({"layout": "dp=2"}, "ranks would add up their gradients in bf16"),
        ({"model": "mine:build"}, ""),
    ],
)
def test_precision_is_bf16_where_weights_cannot_have_masters(fields: dict[str, object], why: str) -> None:
    spec, said = resolved("cuda", **fields)
    assert spec.precision == "bf16"
    assert said.startswith("recipe fast on cuda sets --precision bf16 ")
    assert (f"--precision bf16_master is left out: {why}" in said) == bool(why)


@pytest.mark.parametrize(
    ("fields", "left_out"),
    [
        ({"precision": "fp16"}, ["--cuda-graph step is left out: its gradient scaler waits"]),
        ({"compile": "reduce-overhead"}, ["--cuda-graph step is left out: that mode records its own CUDA graphs"]),
        (
            {"layout": "fsdp=2"},
            [f"--{field} is left out:" for field in ("block-ops triton", "optimizer adamw_triton", "cuda-graph step")],
        ),
    ],
)
def test_what_a_step_does_not_support_is_left_out_and_said(fields: dict[str, object], left_out: list[str]) -> None:
    spec, said = resolved("cuda", **fields)
    assert spec.cuda_graph == "off"
    assert all(part in said for part in left_out)
    assert "--attention auto" in said


def test_a_model_of_the_users_gets_what_every_model_bears() -> None:
    spec, _ = resolved("cuda", model="mine:build")
    assert spec == resolve_step({"model": "mine:build", "precision": "bf16", "compile": "default"})


def test_without_gradients_no_optimizer_is_set() -> None:
    assert "--optimizer" not in resolved("cuda", **{"pass": "forward"})[1]


def test_a_later_row_of_a_field_refines_the_earlier_one_and_the_help_names_both() -> None:
    for kind in ("cuda", "cpu", "mps"):
        for model in ("transformer", "hf", "factory"):
            before = dict[str, str]()
            for change in CHANGES:
                if model in change.fast.get(kind, ()):
                    assert change.field not in before or before[change.field] in change.replaces
                    before[change.field] = change.value
    assert "on cuda --precision bf16_master or bf16, --attention auto, --compile block" in recipe_help()
    assert "on cpu --attention sdpa" in recipe_help()


def test_a_recipe_is_a_field_for_python_and_a_plan_is_of_a_gpu() -> None:
    with pytest.warns(Remark, match="recipe fast on cuda"):
        planned = plan_time("small", context=512, recipe="fast")
    assert planned.spec is not None
    assert (planned.spec.compile, planned.spec.cuda_graph) == ("block", "step")
    with pytest.warns(Remark, match="recipe fast on cpu sets --attention sdpa"):
        assert asked_step("measure", "tiny", {"recipe": "fast", "device": "cpu"}).attention == "sdpa"
    with pytest.raises(UserError, match="recipe 'quick' is not known; choose one of fast"):
        asked_step("measure", "tiny", {"recipe": "quick"})
    assert device_kind_here("cuda:1") == "cuda"


def test_the_command_line_says_what_it_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "time", "--model", "small", "--recipe", "fast", "--optimizer", "adamw_fused"]) == 0
    out, said = capsys.readouterr()
    assert said.startswith("steplab: recipe fast on cuda sets --precision bf16 --attention auto")
    assert "adamw_triton" not in said
    assert "replayed as CUDA graphs" in out
