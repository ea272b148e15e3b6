"""A data-parallel study in processes of its own: one set of ranks for all contenders, and a new one after a failure."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec

from steplab.measurement.launch import Listener, OnProgress, converse
from steplab.measurement.messages import Request
from steplab.records.ddp import DdpCell, DdpFacts
from steplab.records.environment import Environment
from steplab.records.run import Failure
from steplab.specs.ddp import DdpStudy

OnCell = Callable[[int, DdpCell], None]
Converse = Callable[[Request, "DdpListener", float | None], Failure | None]


class DdpListener(Listener):
    """Hears results contender by contender."""

    def __init__(
        self,
        on_progress: OnProgress,
        on_cell: OnCell,
        on_environment: Callable[[Environment], None],
        on_facts: Callable[[DdpFacts], None],
    ) -> None:
        super().__init__(on_progress)
        self._on_cell, self._on_environment, self._on_facts = on_cell, on_environment, on_facts
        self.ended = False
        self.at = 0
        """The contender that rank 0 began last; all ranks begin with the baseline, measured already or not."""

    def hear(self, kind: str, value: msgspec.Raw) -> None:
        """One message."""
        if kind == "at":
            self.at = msgspec.json.decode(value, type=int)
            self.renew()
        elif kind == "cell":
            self._on_cell(*msgspec.json.decode(value, type=tuple[int, DdpCell]))
        elif kind == "facts":
            self._on_facts(msgspec.json.decode(value, type=DdpFacts))
        elif kind == "end":
            self.ended = True
        else:
            super().hear(kind, value)
        if kind == "environment" and self.environment:
            self._on_environment(self.environment)

    @property
    def answered(self) -> bool:
        """Whether the child has said its last word."""
        return self.ended or super().answered


def ddp_in_children(
    study: DdpStudy,
    *,
    traces: Path | None,
    again: bool,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_cell: OnCell,
    on_environment: Callable[[Environment], None] = lambda environment: None,
    on_facts: Callable[[DdpFacts], None] = lambda facts: None,
    converse: Converse = converse,
) -> None:
    """Measure a study: `on_cell` is called with the number and the result of each contender as it ends.

    A contender that its ranks do not survive is a failure and, with `again`, the others go on in new ones; not so if it
    is the baseline, without which there is nothing to compare. Where new ranks get to no contender, their failure is
    that of all that are left, since others would fare no better. Rank 0 writes a trace a contender into `traces`.
    `timeout_s` is how long the ranks may be without beginning another contender.

    Raises UserError (or the SteplabError that a rank named) for a request that cannot be served.
    """
    left = list(range(len(study.contenders)))

    def keep(number: int, cell: DdpCell) -> None:
        left.remove(number)
        on_cell(number, cell)

    while left:
        before = len(left)
        listener = DdpListener(on_progress, keep, on_environment, on_facts)
        request = Request(
            ddp=study,
            contenders=list(left),
            traces=str(traces) if traces else None,
            processes=study.processes,
            device=study.step.device,
        )
        failure = converse(request, listener, timeout_s)
        if failure is None and len(left) == before:
            # Ranks that end well without a result would be followed by others like them for ever.
            failure = Failure(kind="error", message="the processes gave no result")
        if failure is not None and left:  # what fails once all have ended costs nobody
            guilty = _blamed(study, left, failure, listener.at)
            over = not again or guilty == 0 or (guilty is None and len(left) == before)
            if guilty is not None:
                keep(guilty, DdpCell(contender=study.contenders[guilty], failure=failure))
            elif over:
                failure = dataclasses.replace(failure, message=f"its ranks did not get to it: {failure.message}")
                for number in tuple(left):
                    keep(number, DdpCell(contender=study.contenders[number], failure=failure))
            if over:
                return


def _blamed(study: DdpStudy, left: list[int], failure: Failure, at: int) -> int | None:
    """The contender that the failing rank named as its stage; rank 0 may be elsewhere, as ranks are heard one by one.

    Where that is none, or the baseline, which is timed around others too: the one that rank 0 was at. None: it has
    ended.
    """
    stage = failure.phase or ""
    named = next((n for n, contender in enumerate(study.contenders) if stage.startswith(f"{contender.label}: ")), 0)
    guilty = named or at
    return guilty if guilty in left else None
