"""A benchmark of attention in processes of its own: one for all cells, and a new one after each it does not survive."""

from collections.abc import Callable, Sequence

import msgspec

from steplab.measurement.launch import Listener, OnProgress, converse
from steplab.measurement.messages import Request
from steplab.records.attention import AttentionCell
from steplab.records.environment import Environment
from steplab.records.run import Failure
from steplab.specs.attention_study import AttentionStudy

OnCell = Callable[[int, AttentionCell], None]
OnEnvironment = Callable[[Environment], None]
Converse = Callable[[Request, "CellListener", float | None], Failure | None]


class CellListener(Listener):
    """Hears results cell by cell."""

    def __init__(self, on_progress: OnProgress, on_cell: OnCell, on_environment: OnEnvironment) -> None:
        super().__init__(on_progress)
        self._on_environment = on_environment
        self.under_way: list[int] = []
        """The cells that may be to blame if the process dies now."""
        self.ended = False
        self.complete = False
        """Whether nothing that was asked for is left."""
        self._on_cell = on_cell

    def hear(self, kind: str, value: msgspec.Raw) -> None:
        """One message."""
        if kind == "at":
            self.under_way = msgspec.json.decode(value, type=list[int])
            self.renew()
        elif kind == "cell":
            self._on_cell(*msgspec.json.decode(value, type=tuple[int, AttentionCell]))
        elif kind == "end":
            self.ended, self.complete = True, msgspec.json.decode(value, type=bool)
        else:
            super().hear(kind, value)
        if kind == "environment" and self.environment:
            self._on_environment(self.environment)

    @property
    def answered(self) -> bool:
        """Whether the child has said its last word."""
        return self.ended or super().answered


def attention_in_children(
    study: AttentionStudy,
    *,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_cell: OnCell,
    on_environment: OnEnvironment = lambda environment: None,
    converse: Converse = converse,
) -> None:
    """Measure a study's cells: `on_cell` is called with the number and the result of each as it ends.

    A cell that its process does not survive is a failure, and the others go on in a new one; where several took turns
    as it died, each is measured by itself. `timeout_s` is how long a process may be without beginning another part.

    Raises UserError (or the SteplabError the child named) for a request that cannot be served.
    """
    results: dict[int, AttentionCell] = {}

    def keep(index: int, cell: AttentionCell) -> None:
        results[index] = cell
        on_cell(index, cell)

    left = [list(group) for group in _numbered(study)]
    while left:
        listener = CellListener(on_progress, keep, on_environment)
        before = len(results)
        failure = converse(Request(attention=study, groups=left), listener, timeout_s)
        if failure:
            left = _blamed(study, listener.under_way, failure, results, keep, left)
        elif len(results) == before:
            # A process that ends well without a result would be followed by another like it for ever.
            failure = Failure(kind="error", message="the process gave no result")
            left = _blamed(study, [], failure, results, keep, left)
        left = [rest for group in left if (rest := [index for index in group if index not in results])]


def _numbered(study: AttentionStudy) -> Sequence[Sequence[int]]:
    numbers = {cell: index for index, cell in enumerate(study.cells)}
    return [[numbers[cell] for cell in group] for group in study.groups()]


def _blamed(
    study: AttentionStudy,
    under_way: Sequence[int],
    failure: Failure,
    results: dict[int, AttentionCell],
    keep: OnCell,
    left: list[list[int]],
) -> list[list[int]]:
    """Lay a failure to the cell that was under way; several are asked one by one, and if none was, all have failed."""
    suspects = [index for index in under_way if index not in results]
    if len(suspects) > 1:
        return [[index] for index in suspects] + [[index for index in group if index not in suspects] for group in left]
    guilty = suspects or [index for group in left for index in group if index not in results]
    for index in guilty:
        keep(index, AttentionCell(spec=study.cells[index], failure=failure))
    return left
