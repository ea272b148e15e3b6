"""benchmarks/tables_attention.py: times of head dimensions beside what FLOPs in proportion say."""

from benchmarks import tables_attention
from benchmarks.tables import ROOT, between_marks, markdown
from tests.attention_records import make_benchmark

from steplab.records.attention import AttentionCell, AttentionRun
from steplab.records.timing import PhaseSamples
from steplab.report.kit.markup import markdown_table
from steplab.specs.attention import AttentionSpec
from steplab.specs.attention_study import AttentionStudy, cells_of_grid


def cell(milliseconds: float, **sizes: int) -> AttentionCell:
    """Forward alone was timed."""
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


def test_the_committed_tables_are_made_of_the_records() -> None:
    assert between_marks(ROOT / "docs/attention.md", "attention") == markdown(tables_attention.attention())
