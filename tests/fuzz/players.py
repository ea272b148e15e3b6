import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.comm_records import make_comm
from tests.fuzz import seeds
from tests.fuzz.ending import NotStarted

from steplab.records.comm import CommFacts
from steplab.records.ddp import DdpRun
from steplab.records.record import Benchmark
from steplab.records.run import Run

Message = dict[str, Any]


class Player(subprocess.Popen[bytes]):
    folder: ClassVar[Path]

    def __init__(self, words: Sequence[str], **options: Any) -> None:
        if words[1:3] != ["-P", "-c"]:
            NotStarted.__init__(self, words)  # type: ignore[arg-type]
        rank = (options.get("env") or {}).get("RANK", "0")
        told = str(self.folder / f"told-{rank}")
        super().__init__(["/bin/bash", "-c", 'exec cat "$0" >&"$1"', told, words[-1]], **options)


def conversations() -> dict[tuple[str, ...], list[Message]]:
    records = seeds.records()
    run, ddp, attention, audit = (records[name] for name in ("run", "ddp", "attention", "audit"))
    assert isinstance(run, Run)
    assert isinstance(ddp, DdpRun)
    comm = make_comm(ranks=2)
    begin = [_said("stage", ["joining", 0]), _said("environment", run.environment), _said("stage", ["build", 0])]
    timed = [*begin, _said("stage", ["measure", 10]), _said("step", 3), _said("measured", run)]
    ready = [_said("measured", run), _said("ready")]
    refused = [_said("refused", [2, "attention flash has no kernel for fp32"])]
    out_of_memory = [_said("failed", records["out of memory"].failure)]
    facts = CommFacts(ranks=comm.ranks, libraries=comm.libraries)
    two = ("--device", "cpu", "--processes", "2")
    small = ("--device", "cpu", "--model", "tiny", "--steps", "2")
    return {
        ("run", *small): [*timed, _said("result", run)],
        ("run", *small, "--warmup", "0"): [*begin, *refused],
        ("run", *small, "--layout", "dp=2"): [*timed, _said("result", run)],
        ("run", *small, "--layout", "dp=2", "--seed", "1"): [*timed, *out_of_memory],
        ("ab", *small, "--context 8", "--context 16"): [*timed, *ready * 20, _said("result", run)],
        ("precision", *small, "--only", "audit", "--precision", "bf16"): [*begin, _said("result", audit)],
        ("attention", "--grid", "tiny", "--device", "cpu"): [*begin, *_cells(attention), _said("result")],
        ("comm", "--size", "1KB,10KB", *two): [*begin, _said("facts", facts), *_cells(comm), _said("result")],
        ("ddp", "--model", "tiny", "--processes", "2"): [
            *begin, _said("facts", ddp.facts), *_cells(ddp), _said("result"),
        ],
        ("sweep", *small, "--context", "8,16"): [*timed, _said("result", run)],
    }  # fmt: skip


def _said(kind: str, value: object = None) -> Message:
    return {"kind": kind, "value": value}


def _cells(record: object) -> list[Message]:
    assert isinstance(record, Benchmark)
    ended = list[Message]()
    for number, cell in enumerate(record.cells[:4]):
        ended += [_said("at", [number]), _said("cell", [number, cell])]
    return ended
