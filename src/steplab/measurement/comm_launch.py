"""A benchmark of collectives in processes of its own: a set of them for all cells, and a new one after each cell that
they do not survive."""

from collections.abc import Callable

import msgspec

from steplab.measurement.launch import Listener, OnProgress, converse
from steplab.measurement.messages import Request
from steplab.measurement.torchrun import torchrun_around
from steplab.records.comm import CommCell, CommRun
from steplab.records.environment import Environment
from steplab.records.run import Failure
from steplab.specs.comm import CommStudy

OnCell = Callable[[int, CommCell], None]
OnEnvironment = Callable[[Environment], None]
Converse = Callable[[Request, "CommListener", float | None], Failure | None]


class CommListener(Listener):
    """Hears results cell by cell, from rank 0."""

    def __init__(self, on_progress: OnProgress, on_cell: OnCell, on_environment: OnEnvironment) -> None:
        super().__init__(on_progress)
        self._on_cell, self._on_environment = on_cell, on_environment
        self.under_way: int | None = None
        """The cell that is to blame if the processes die now."""

    def hear(self, kind: str, value: msgspec.Raw) -> None:
        """One message."""
        if kind == "at":
            self.under_way = msgspec.json.decode(value, type=int)
            self.renew()
        elif kind == "cell":
            self._on_cell(*msgspec.json.decode(value, type=tuple[int, CommCell]))
        else:
            super().hear(kind, value)
        if kind == "environment" and self.environment:
            self._on_environment(self.environment)


def comm_in_ranks(
    study: CommStudy,
    *,
    device: str,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_cell: OnCell,
    on_environment: OnEnvironment = lambda environment: None,
    converse: Converse = converse,
) -> CommRun | None:
    """Measure a study's cells: `on_cell` is called with the number and the result of each as it ends.

    Gives what the ranks say of themselves: a record of the last processes' cells; None: they never came to say it.
    A cell that the processes do not survive is a failure, and the others go on in new ones; where torchrun has started
    this process, there can be no new ones, and the others are failures too. `timeout_s` is how long a cell may take.

    Raises UserError (or the SteplabError a process named) for a request that cannot be served.
    """
    results: dict[int, CommCell] = {}

    def keep(index: int, cell: CommCell) -> None:
        if index not in results:
            results[index] = cell
            on_cell(index, cell)

    def fail(index: int, failure: Failure) -> None:
        spec = study.cells[index]
        keep(index, CommCell(spec=spec, message_bytes=spec.message_bytes, failure=failure))

    around, said = torchrun_around(), None
    numbers = {cell: index for index, cell in enumerate(study.cells)}
    while left := [index for index in range(len(study.cells)) if index not in results]:
        listener = CommListener(on_progress, keep, on_environment)
        request = Request(comm=study, cells=left, processes=study.num_processes, device=device)
        # Only the first process of torchrun's hears of a cell as it ends, and has a use for its time.
        failure = converse(request, listener, timeout_s if around is None or around.is_first else None)
        if isinstance(listener.record, CommRun):
            said = listener.record
            for cell in said.cells:
                keep(numbers[cell.spec], cell)
        if failure is None and not any(index in results for index in left):
            # Processes that end well without a result would be followed by others like them for ever.
            failure = Failure(kind="error", message="the processes gave no result")
        if failure is None:
            continue
        guilty = listener.under_way
        if guilty is not None and guilty not in results:
            fail(guilty, failure)
            failure = Failure(kind="error", message=f"not measured: the processes ended in {study.cells[guilty].label}")
        if guilty is None or around is not None:
            for index in left:
                fail(index, failure)
    return said
