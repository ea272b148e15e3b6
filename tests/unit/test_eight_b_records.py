"""What the blocks of examples/eight_b.py keep, traced at full size on tensors without content, and its tables."""

from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_compiled_block_keeps_rotated_heads_and_not_the_product_they_are_made_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    kept = import_module("eight_b_kept").kept_by("products")
    tokens, width, inner, heads = 32_768, 4096, 11_008, 32
    shapes = sorted(tuple(tensor.shape) for name, tensor in kept.items() if "primals" not in name)
    assert shapes == sorted(
        [
            *[(1, tokens, heads, width // heads)] * 3,  # queries, keys and values
            (1, heads, tokens, width // heads),  # what attention gives, and its row sums
            (1, heads, tokens),
            (tokens, width),  # the product after attention
            (tokens, 2 * inner),  # gate and up
        ]
    )


def test_the_committed_tables_are_made_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table = import_module("eight_b_table")
    page = (BENCHMARKS.parent / "docs/layout.md").read_text(encoding="utf-8")
    begin, end = import_module("page_tables").marks("eight_b_table.py")
    tables = (table.steps(table.recorded()), table.parts(table.profiles()))
    assert page.partition(begin)[2].partition(end)[0].strip() == "\n\n".join(map(table.markdown_table, tables))
