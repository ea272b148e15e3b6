from pathlib import Path
from statistics import median

import pytest
from benchmarks import tables_attention, tables_fast
from benchmarks.tables import ROOT, between_marks, markdown, tables
from tests.attention_records import make_benchmark

from steplab.costs.flops import num_parameters
from steplab.records.advice import Advice
from steplab.records.attention import AttentionCell, AttentionRun
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples
from steplab.report.kit.markup import markdown_table
from steplab.specs.attention import AttentionSpec, AttentionStudy, cells_of_grid
from steplab.specs.model import MODEL_SIZES
from steplab.specs.study import load_study


@pytest.fixture(scope="module")
def found() -> tuple[list[Run], list[Advice]]:
    parts: tuple[list[Run], list[Advice]] = tables_fast.measured()
    return parts


@pytest.fixture(scope="module")
def runs(found: tuple[list[Run], list[Advice]]) -> list[Run]:
    return found[0]


@pytest.mark.parametrize("name", ["steps", "fast", "eight_b", "attention", "attention_bounds"])
def test_the_committed_tables_are_made_of_the_records(name: str) -> None:
    make, page = tables()[name]
    assert between_marks(page, name) == markdown(make())


def test_each_size_has_its_fastest_step_first(runs: list[Run]) -> None:
    _, _, _, first, *_ = tables_fast.fast()
    assert not isinstance(first, str)
    [large] = [row for row in first.rows if str(row["model"]).startswith("large")]
    times = [median(run.samples_s) for run in runs if run.spec and run.spec.model.name == "large"]
    assert large["step_time_s"] == min(times)


def test_the_floor_of_a_step_is_that_of_the_stated_figures(runs: list[Run]) -> None:
    """6 FLOPs per non-embedding parameter and token, 6 L d T per token, 28 bytes per parameter."""
    [run] = [run for run in runs if run.id == "bbcb1adea94b"]  # 2.7b at 2,048 positions
    size, tokens = MODEL_SIZES["2.7b"], 4 * 2048
    num = num_parameters(size)
    floor = 6 * (num - 10_000 * 2560) * tokens / 990e12, 6 * 32 * 2560 * 2048 * tokens / 990e12, 28 * num / 4.8e12
    [row] = tables_fast.floors([run]).rows
    told = [float(str(row[str(place)])) for place in (3, 4, 5, 6)]
    assert told == pytest.approx([1e3 * each for each in (*floor, sum(floor))], rel=0.005)


def test_the_parts_of_a_profiled_step_are_all_of_it(runs: list[Run]) -> None:
    profiled = [run for run in runs if run.profile]
    assert profiled
    signs = {"products": 1, "AdamW": 1, "attention": 1, "other kernels": 1, "at once": -1, "idle": 1}
    table = tables_fast.shares(profiled)
    for run, row in zip(profiled, table.rows, strict=True):
        assert run.profile is not None
        told = {column.heading: float(str(row[column.key])) for column in table.columns if column.heading in signs}
        found = sum(sign * told[title] for title, sign in signs.items())
        assert found == pytest.approx(run.profile.window_s / run.profile.num_steps * 1e3, rel=0.01)


def cell(milliseconds: float, **sizes: int) -> AttentionCell:
    spec = AttentionSpec(**{"heads": 32, "queries": 4096, "causal": True, "implementation": "flash_triton", **sizes})  # type: ignore[arg-type]
    return AttentionCell(spec=spec, passes=(PhaseSamples(phase="forward", device_s=(milliseconds / 1e3,) * 4),))


def run_of(id: str, *cells: AttentionCell) -> AttentionRun:
    study = AttentionStudy(name=tables_attention.GRID, cells=tuple(cell.spec for cell in cells))
    return make_benchmark(id=id, study=study, cells=cells)


def test_times_are_beside_those_between_64_and_128_and_of_heads_of_their_own() -> None:
    run = run_of(
        "a" * 12,
        cell(1.0, dim=64),
        cell(2.0, dim=128),
        cell(1.375, dim=80),
        cell(1.35, dim=96),
        cell(0.95, dim=64, kv_heads=8),
    )
    table = tables_attention.dims_table([run])
    lines = markdown_table(table).splitlines()
    forward = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in lines if "flash" in line}
    assert forward == {
        "1×32×4096×64": "1.00",
        "1×32×4096×128": "2.00",
        "1×32×4096×80": "1.38 (+10%)",  # of 1.25
        "1×32×4096×96": "1.35 (-10%)",  # of 1.5
        "1×32/8×4096×64": "0.950 (-5%)",
    }


def test_compared_cells_are_of_the_newest_record_that_has_them_all() -> None:
    earlier = [cell(1.0, dim=64), cell(2.0, dim=128), cell(1.0, dim=64, queries=64), cell(2.0, dim=128, queries=64)]
    later = [cell(1.5, dim=64), cell(2.5, dim=128), cell(1.5, dim=64, queries=64)]
    table = tables_attention.dims_table([run_of("a" * 12, *earlier), run_of("b" * 12, *later)])
    text = markdown_table(table)
    assert [line.split("|")[3].strip() for line in text.splitlines() if "flash" in line] == [
        "1.50",
        "2.50",
        "1.00",
        "2.00",
    ]
    assert "Records: bbbbbbbbbbbb, aaaaaaaaaaaa." in text


def test_the_grid_has_what_each_of_its_cells_is_set_beside() -> None:
    name, _, specs = cells_of_grid(str(ROOT / "benchmarks" / "attention_dims.toml"), {})
    assert name == tables_attention.GRID
    times = {spec: {"forward": 1.0} for spec in specs}
    without = {(spec.dim, spec.heads) for spec in specs if tables_attention._expected(spec, "forward", times) is None}
    assert without == {(64, 16), (128, 16), (64, 32), (128, 32), (256, 16)}, "those that others are set beside, and 256"
    assert {spec.dim for spec in specs} == {64, 80, 96, 112, 128, 256}
    assert {spec.num_kv_heads for spec in specs if spec.heads == 32} == {32, 8, 4}


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STUDIES = sorted({*BENCHMARKS.glob("*.toml")} - {BENCHMARKS / "attention_dims.toml"})


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_loads_and_takes_all_gpus(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BENCHMARKS.parent)
    study = load_study(str(path), {})
    sizes = {cell.layout.world_size for cell in study.cells} | {part.options.get("gpus", 1) for part in study.parts}
    assert sizes == {study.gpus}
