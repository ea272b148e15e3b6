import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from steplab.cli.app import app
from steplab.cli.options import OutputOptions
from steplab.errors import UserError
from steplab.lab.sweeping import jobs_of
from steplab.specs.attention import ATTENTION
from steplab.specs.benchmark import DOCTOR, Benchmark
from steplab.specs.comm import COMM
from steplab.specs.ddp import DDP, DdpStudy
from steplab.specs.model import MODEL_SIZES, PLANNING_ONLY
from steplab.specs.resolve import Grid, resolve_step
from steplab.specs.study import BENCHMARKS, STEP_PARTS, STUDIES, fitted, load_study, preset_names, study_from_grids
from steplab.store.selection import part_key, study_fingerprint


def written(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(source: str) -> str:
    with pytest.raises(UserError) as error:
        load_study(source, {})
    return str(error.value)


# --- expansion --------------------------------------------------------------------------------------------


def test_a_grid_is_the_product_of_its_values_and_its_first_field_varies_slowest() -> None:
    study = study_from_grids("s", "d", [{"context": [32, 64], "precision": ["fp32", "bf16"], "batch": [1]}])
    found = [(cell.context, cell.precision, cell.batch) for cell in study.cells]
    assert found == list(itertools.product([32, 64], ["fp32", "bf16"], [1]))
    assert (study.name, study.description) == ("s", "d")


def test_a_cell_that_several_grids_name_is_measured_once_at_its_first_place() -> None:
    grids: list[Grid] = [{"context": [32, 64, 32]}, {"context": [64, 128], "batch": [4]}, {"context": ["128"]}]
    assert [cell.context for cell in study_from_grids("s", "", grids).cells] == [32, 64, 128]


def test_a_cell_is_what_its_fields_resolve_to() -> None:
    study = study_from_grids("s", "", [{"model": ["tiny"], "model.num_layers": ["1"], "pass": ["forward"]}])
    assert study.cells == (resolve_step({"model": "tiny", "model.num_layers": 1, "pass": "forward"}),)


@pytest.mark.parametrize("grids", [[], [{"context": []}]])
def test_a_study_without_cells_is_refused(grids: Sequence[Grid]) -> None:
    with pytest.raises(UserError, match="study 'empty' has no cells; give at least one"):
        study_from_grids("empty", "", grids)


# --- what comes with steplab ------------------------------------------------------------------------------

CELLS = {
    "attention": 3 * (2 + 4) + 5,  # sizes x (plain eager and compiled, four fused), and five at a longer context
    "compiled": 5 * 2 * 3,  # sizes x contexts x passes
    "quick": 2 * 2 + 2 + 1 + 1,  # contexts x precisions, two other passes, another attention, a compiled step
    "sizes": 5 * 4 * 2 * 3,  # sizes x contexts x precisions x passes
    "assignment": 0,  # all of those it includes
    "warmup": 2 * 4,  # sizes x numbers of warm-up steps
    "single-gpu": 5 * 2,  # sizes, eager and compiled
    "multi-gpu": 4,  # layouts
    "full": 0,
}
PARTS = {
    "assignment": Counter({"precision": 2, "comm": 1}),
    "quick": Counter(doctor=1, profile=2, memory=2, precision=1, attention=1, comm=1, ddp=1),
    "single-gpu": Counter(doctor=1, profile=3 * 2 * 2, memory=3 * 3 * 2 + 1, precision=2, attention=2),
    "multi-gpu": Counter(comm=1, ddp=1),
}


def test_the_presets_are_those_expected() -> None:
    assert preset_names(STUDIES) == tuple(sorted(CELLS))


@pytest.mark.parametrize("name", sorted(CELLS))
def test_a_preset_is_valid_and_has_the_cells_its_description_promises(name: str) -> None:
    study = load_study(name, {})
    assert study.name == name
    assert study.description
    assert len(study.cells) == CELLS[name]
    assert Counter(part.kind for part in study.parts) == PARTS.get(name, Counter())
    assert not {cell.model.name for cell in study.cells} & set(PLANNING_ONLY)


def test_the_table_of_sizes_spans_every_size_that_is_measured_by_default() -> None:
    cells = load_study("sizes", {}).cells
    assert {cell.model.name for cell in cells} == set(MODEL_SIZES) - {"tiny", "8b", *PLANNING_ONLY}
    assert {cell.context for cell in cells} == {128, 256, 512, 1024}
    assert {(cell.warmup, cell.steps) for cell in cells} == {(5, 10)}


def test_the_warm_up_study_compares_the_default_with_fewer_steps() -> None:
    assert {cell.warmup for cell in load_study("warmup", {}).cells} == {0, 1, 2, 5}


# --- whole studies ----------------------------------------------------------------------------------------

WHOLE = """
description = "all kinds"
[[grid]]
model = "tiny"
context = [32, 64]
[[profile]]
context = 64
[[memory]]
context = [16, 32]
[[precision]]
model = "toy"
[[attention]]
sequence = [64, 128]
[[doctor]]
[[comm]]
"""


def test_a_study_has_parts_of_every_kind_the_ceilings_first(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, WHOLE), {})
    assert [part.kind for part in study.parts] == [
        "doctor",
        "profile",
        *["memory"] * 2,
        "precision",
        "attention",
        "comm",
    ]
    assert [part.step.context for part in study.parts if part.step] == [64, 16, 32, 128]
    assert dict(study.parts[5].options) == {"sequence": [64, 128]}
    assert len(study) == 2 + 7


def test_a_step_that_is_watched_is_not_timed_a_second_time(tmp_path: Path) -> None:
    study = fitted(load_study(written(tmp_path, WHOLE), {}), 0)
    assert study.cells == (), "64 is profiled, 32 is watched"
    assert len(study.parts) == 7


def test_every_part_has_a_key_of_its_own(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, WHOLE + "[[profile]]\ncontext = 32\n[[comm]]\nsize = '1kB'\n"), {})
    keys = [part_key(part) for part in study.parts]
    assert len(set(keys)) == len(keys)
    assert {key.partition(":")[0] for key in keys} <= {*STEP_PARTS, *BENCHMARKS}
    again = load_study(written(tmp_path, WHOLE), {})
    assert study_fingerprint(again) == study_fingerprint(load_study(written(tmp_path, WHOLE), {}))
    assert study_fingerprint(again) != study_fingerprint(study)


def test_overrides_reach_steps_that_are_watched(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, WHOLE), {"steps": ["2"]})
    assert {part.step.steps for part in study.parts if part.step} == {2}


def test_what_needs_more_gpus_than_there_are_is_left_out_and_named() -> None:
    full = load_study("full", {})
    quick = fitted(full, 0)
    assert {part.kind for part in quick.parts} >= {"profile", "memory", "ddp"}
    assert (
        "not measured: single-gpu, which needs 1 GPU; not measured: multi-gpu, which needs 2 GPUs" in quick.description
    )
    one, two = fitted(full, 1), fitted(full, 2)
    assert "multi-gpu" in one.description
    assert "not measured" not in two.description
    assert len(quick) < len(one) < len(two)
    assert set(quick.cells) - {part.step for part in one.parts} <= set(one.cells)


def test_a_study_that_needs_a_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(UserError, match="study 'multi-gpu' needs 2 GPUs, and this machine has 1"):
        fitted(load_study("multi-gpu", {}), 1)


# --- benchmarks with the options of their commands ----------------------------------------------------------

NOT_MEASURING = {
    *(field.name for field in dataclasses.fields(OutputOptions)),
    *("name", "timeout"),  # the whole study's
    *("against", "derive", "gpu"),  # what is shown of a benchmark of attention
}


@pytest.mark.parametrize("declared", [DOCTOR, ATTENTION, COMM, DDP], ids=BENCHMARKS)
def test_a_benchmark_takes_the_measuring_options_of_its_command_and_no_others(declared: Benchmark[Any]) -> None:
    arguments = app[declared.name].assemble_argument_collection(parse_docstring=False)
    names = {argument.name for argument in arguments if argument.name.startswith("--")}
    options = {name.removeprefix("--").replace("-", "_") for name in names}
    assert declared.names == options - NOT_MEASURING


def job_of(folder: Path, text: str) -> Any:
    (job,) = jobs_of(load_study(written(folder, text), {}))
    return job.measure


def test_options_of_data_parallelism_reach_what_is_measured(tmp_path: Path) -> None:
    measure = job_of(
        tmp_path,
        """
[[ddp]]
processes = 3
variants = ["flat", "bucketed"]
bucket_sizes = [2, 5.5]
transport = "collectives"
profiled_steps = 1
traces = "kept"
pass = "train"
steps = 3
model.num_layers = 1
""",
    )
    (study,) = measure.args
    assert isinstance(study, DdpStudy)
    assert [variant.label for variant in study.contenders] == [
        "no communication", "flat", "bucketed 2 MB", "bucketed 5.5 MB"
    ]  # fmt: skip
    assert (study.processes, study.profiled_steps, study.step.steps) == (3, 1, 3)
    assert study.step.model.label == "tiny[num_layers=1]"
    assert measure.keywords == {"traces": "kept"}


def test_options_of_attention_reach_what_is_measured(tmp_path: Path) -> None:
    options = 'grid = "tiny"\ndim = 16\npass = "forward"\nrepeats = 3\nseed = 7\nerrors = false\ndevice = "cpu"\n'
    (study,) = job_of(tmp_path, f"[[attention]]\n{options}").args
    assert {cell.dim for cell in study.cells} == {16}
    assert (study.name, study.passes, study.seed, study.errors) == ("tiny", ("forward",), 7, False)
    assert (study.least_repeats, study.most_repeats) == (3, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[comm]]\nsizes = 1\n", r"\[\[comm\]\] has no option 'sizes'; choose one of backend, "),
        ('[[comm]]\nrepeats = "many"\n', r"\[\[comm\]\] repeats has the wrong type: Expected `int"),
        ('[[ddp]]\ndevice = "cpu"\n', "has no option 'device'"),
        ('[[ddp]]\nlayout = "dp=2"\n', "has no option 'layout'"),
        ('[[ddp]]\nbucket_sizes = "big"\n', "a bucket size must be a number of MB, not 'big'"),
        ("[[ddp]]\nmodel.layers = 2\n", "has no option 'model.layers'"),
    ],
)
def test_an_option_that_is_not_valid_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        job_of(tmp_path, text)


# --- files ------------------------------------------------------------------------------------------------


def test_a_file_is_a_study_named_after_itself(tmp_path: Path) -> None:
    source = written(
        tmp_path,
        'description = "how far?"\n[[grid]]\nmodel = "tiny"\ncontext = [32, 64]\n[[grid]]\nprecision = "bf16"\n',
    )
    study = load_study(source, {})
    assert (study.name, study.description) == ("mine", "how far?")
    assert [(cell.context, cell.precision) for cell in study.cells] == [(32, "fp32"), (64, "fp32"), (128, "bf16")]


@pytest.mark.parametrize("key", ["model.num_layers", '"model.num_layers"'])
def test_a_size_may_be_written_as_a_dotted_key(tmp_path: Path, key: str) -> None:
    study = load_study(written(tmp_path, f"[[grid]]\n{key} = [1, 3]\n"), {})
    assert [cell.model.shape.num_layers for cell in study.cells if cell.model.shape] == [1, 3]


def test_a_size_may_be_written_beside_the_model(tmp_path: Path) -> None:
    study = load_study(written(tmp_path, '[[grid]]\nmodel = "small"\n"model.num_layers" = 2\n'), {})
    assert [cell.model.label for cell in study.cells] == ["small[num_layers=2]"]


def test_overrides_take_the_place_of_a_field_in_every_grid(tmp_path: Path) -> None:
    source = written(tmp_path, "[[grid]]\ncontext = [32, 64]\nsteps = 7\n[[grid]]\ncontext = 128\n")
    study = load_study(source, {"context": ["16"], "steps": ["3"], "warmup": ["0", "1"]})
    assert [(cell.context, cell.steps, cell.warmup) for cell in study.cells] == [(16, 3, 0), (16, 3, 1)]


def test_overrides_reach_a_preset() -> None:
    study = load_study("sizes", {"context": [32], "steps": [1]})
    assert {(cell.context, cell.steps) for cell in study.cells} == {(32, 1)}
    assert len(study.cells) == CELLS["sizes"] // 4


def test_a_study_that_is_not_there_is_answered_with_the_presets() -> None:
    message = refusal("no-such-study")
    assert "'no-such-study'" in message
    assert all(name in message for name in preset_names(STUDIES))


def test_a_folder_or_a_binary_file_is_no_study(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(str(tmp_path))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "binary.toml" in refusal(str(tmp_path / "binary.toml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[grid]\n", "not valid TOML"),
        ("[[grid]]\ncontext = [32\n", "not valid TOML"),
        ("grids = 3\n", "unknown field `grids`; a study has the keys description, gpus, include, questions, grid, "),
        ("[grid]\ncontext = 32\n", "Expected `array`, got `object` - at `$.grid`"),
        ("grid = [1]\n", "Expected `object`, got `int` - at `$.grid[0]`"),
        ("", "has no cells"),
        ('description = "none"\n', "has no cells"),
        ("[[grid]]\ncontxt = 32\n", "unknown field 'contxt'; did you mean context?"),
        ('[[grid]]\ncontext = "many"\n', "context must be a whole number, not 'many'"),
        ("[[grid]]\nprecision = 16\n", "precision must be a name, not 16"),
        ("[[grid]]\ncontext = [[32]]\n", "context must be a whole number, not '[32]'"),
        ('[[grid]]\nprecision = ["fp32", "fp4"]\n', "precision 'fp4' is not known"),
    ],
)
def test_a_file_that_is_no_study_is_answered_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(written(tmp_path, text))


def test_a_field_without_values_is_refused_by_name(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, "[[grid]]\ncontext = []\n"))
    assert "context" in message
    assert "at least one value" in message
