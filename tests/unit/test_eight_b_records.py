"""What the blocks of examples/eight_b.py keep, traced at full size on tensors without content, and its tables."""

from pathlib import Path

from benchmarks import eight_b_table
from benchmarks.eight_b_kept import kept_by
from benchmarks.page_tables import marks

ROOT = Path(__file__).parents[2]


def test_a_compiled_block_keeps_rotated_heads_and_not_the_product_they_are_made_of() -> None:
    kept = kept_by("products")
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


def test_the_committed_tables_are_made_of_the_records() -> None:
    page = (ROOT / "docs/layout.md").read_text(encoding="utf-8")
    begin, end = marks("eight_b_table.py")
    assert page.partition(begin)[2].partition(end)[0].strip() == eight_b_table.written()
