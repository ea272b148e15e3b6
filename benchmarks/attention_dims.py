"""The table of head dimensions and of grouped heads that benchmarks/attention_table.py shows.

A head dimension between 64 and 128 is set beside what its FLOPs say, which are in proportion to it: the time that lies
between those of 64 and of 128 as the dimension does. Grouped heads are set beside as many heads with keys of their own,
whose FLOPs are the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.attention_steps import milliseconds
from benchmarks.page_tables import table_of_texts

from steplab.records.attention import AttentionCell, AttentionRun
from steplab.report.attention.figures import PASS_WORDS, median_s
from steplab.report.kit.document import Table
from steplab.specs.attention import PASSES, AttentionSpec

GRID = "attention_dims"
"""Name of the benchmark, after benchmarks/attention_dims.toml."""
LEAST, MOST = 64, 128
"""Head dimensions that are powers of two, between which the others are."""
Times = dict[AttentionSpec, dict[str, float]]


def dims_table(runs: Sequence[AttentionRun]) -> Table | None:
    """A row for each shape and implementation: its times, and by how much each is longer than its FLOPs say."""
    own = [run for run in runs if run.study.name == GRID]
    cells = [(run, cell) for run, family in _families(own) for cell in family]
    times: Times = {cell.spec: _times(cell) for _, cell in cells if cell.spec.compile == "off"}
    rows = [(spec.sizes_label, spec.implementation, *(_text(spec, name, times) for name in PASSES)) for spec in times]
    if not rows:
        return None
    return table_of_texts(
        "table",
        headers=("B×H×S×D", "implementation", *(PASS_WORDS[name] for name in PASSES)),
        rows=tuple(rows),
        numeric=(False, False, *(True for _ in PASSES)),
        caption="bf16, causal; milliseconds, and by how much longer than FLOPs in proportion say: of a head dimension, "
        f"between the times of {LEAST} and of {MOST}; of 32 query heads on fewer key heads (32/8), as of 32 on 32. "
        f"Records: {', '.join(dict.fromkeys(run.id for run, _ in cells))}.",
    )


def _families(runs: Sequence[AttentionRun]) -> Iterator[tuple[AttentionRun, list[AttentionCell]]]:
    """Cells that are set beside each other, of the newest record that measured all of them: records of different days
    and GPUs do not compare."""
    families: dict[object, set[AttentionSpec]] = {}
    for run in runs:
        for cell in run.cells:
            families.setdefault(_family(cell.spec), set()).add(cell.spec)
    for family, specs in families.items():
        for run in reversed(runs):
            cells = [cell for cell in run.cells if _family(cell.spec) == family and _times(cell)]
            if {cell.spec for cell in cells} == specs:
                yield run, cells
                break


def _family(spec: AttentionSpec) -> object:
    return spec.batch, spec.heads, spec.queries, spec.dim > MOST


def _times(cell: AttentionCell) -> dict[str, float]:
    found = {name: median_s(cell, name) for name in PASSES}
    return {name: seconds for name, seconds in found.items() if seconds}


def _text(spec: AttentionSpec, name: str, times: Times) -> str:
    measured, expected = times[spec].get(name), _expected(spec, name, times)
    if measured is None:
        return "–"
    return milliseconds(measured) + (f" ({measured / expected - 1:+.0%})" if expected else "")


def _expected(spec: AttentionSpec, name: str, times: Times) -> float | None:
    """Seconds, of shapes that were measured beside it; None where they were not, and for those shapes themselves."""
    if spec.num_kv_heads < spec.heads:
        return times.get(replace(spec, kv_heads=spec.heads), {}).get(name)
    least, most = (times.get(replace(spec, dim=dim), {}).get(name) for dim in (LEAST, MOST))
    if least is None or most is None or not LEAST < spec.dim < MOST:
        return None
    return least + (most - least) * (spec.dim - LEAST) / (MOST - LEAST)
