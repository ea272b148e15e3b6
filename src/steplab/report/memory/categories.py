from collections.abc import Iterable

from steplab.records.memory_profile import MEMORY_CATEGORIES, UNNAMED_CATEGORIES
from steplab.report.kit.charts import CATEGORY_COLORS, color_number
from steplab.report.kit.document import Legend

_ORDER = tuple(dict.fromkeys((*MEMORY_CATEGORIES[:-1], *UNNAMED_CATEGORIES)))
_WORDS = {
    "optimizer_state": "optimizer state",
    "autocast_copies": "autocast copies",
    "rounding": "block rounding",
    "before": "allocated before the history",
    "during": "allocated during the history",
}
_COLORS = {
    "parameters": 0,
    "gradients": 3,
    "optimizer_state": 5,
    "activations": 2,
    "autocast_copies": 1,
    "inputs": 6,
    "workspaces": 7,
    "communication": 8,
    "temporaries": 4,
    "rounding": 10,
    "before": 0,
    "during": 2,
}
_UNKNOWN_COLOR = 11


def in_order(categories: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(categories))
    return sorted(found, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), found.index(name)))


def category_word(category: str) -> str:
    return _WORDS.get(category, category)


def color_of(category: str) -> str:
    return CATEGORY_COLORS[_COLORS.get(category, _UNKNOWN_COLOR)]


def legend_of(categories: Iterable[str]) -> Legend:
    return tuple((color_number(color_of(name)), "■", category_word(name)) for name in in_order(categories))
