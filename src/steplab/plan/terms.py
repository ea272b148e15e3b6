"""Sums the bytes of a memory prediction: equal tensors in one term with its formula, by category."""

from collections.abc import Mapping, Sequence

from steplab.records.memory_profile import MEMORY_CATEGORIES
from steplab.records.prediction import Term

Alike = tuple[str, str, str, int]
"""(category, description, formula of the bytes of one tensor, bytes of one tensor)"""


def terms_of(counted: Mapping[Alike, int], rounding_bytes: int) -> tuple[Term, ...]:
    terms = [
        Term(category=category, what=what, formula=formula, num_bytes=num_bytes, count=count)
        for (category, what, formula, num_bytes), count in counted.items()
        if count
    ]
    terms.sort(key=lambda term: (MEMORY_CATEGORIES.index(term.category), -term.num_bytes * term.count, term.what))
    what = "up to 512 bytes, or up to 1 MiB not split off"
    return (*terms, Term(category="rounding", what=what, formula="blocks - asked", num_bytes=rounding_bytes))


def by_category(terms: Sequence[Term]) -> dict[str, int]:
    totals = {
        category: sum(term.num_bytes * term.count for term in terms if term.category == category)
        for category in MEMORY_CATEGORIES
    }
    return {category: total for category, total in totals.items() if total}
