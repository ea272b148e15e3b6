"""The colours of the categories of kernels, the same in every picture."""

from collections.abc import Sequence

from steplab.records.profile import CATEGORIES
from steplab.report.kit.charts import CATEGORY_COLORS, SERIES

Legend = tuple[tuple[int, str, str], ...]


def category_color(category: str) -> str:
    """The stand-in of a category's colour, the same in every picture."""
    return CATEGORY_COLORS[CATEGORIES.index(category)]


def category_legend(categories: Sequence[str]) -> Legend:
    """Legend of these categories."""
    return tuple((len(SERIES) + 1 + CATEGORIES.index(name), "■", name) for name in categories)
