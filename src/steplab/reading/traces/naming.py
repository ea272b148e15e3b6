"""Meaning of names in traces: old torch records ranges as operators, NVTX holds operators as ranges."""

import re

import msgspec

STEP = re.compile(r"^(step|ProfilerStep#\d+)$")
"""Names of steps, unless the user names others."""
_PHASES = (
    (re.compile(r"^\W*forward\W*$|^(DistributedDataParallel|FullyShardedDataParallel)\.forward$", re.I), "forward"),
    (re.compile(r"^\W*backward\W*$", re.I), "backward"),
    (re.compile(r"^gradient sync$"), "gradient sync"),
    (re.compile(r"^\W*optimi[sz]er( step)?\W*$|^Optimizer\.(step|zero_grad)#", re.I), "optimizer"),
)
_LOADING = re.compile(r"^enumerate\(DataLoader\)#")
_CALLED = re.compile(
    r"(?P<name>.*?)(?:, seq = (?P<seq>-?\d+))?(?:, op_id = \d+)?(?:, sizes = (?P<sizes>\[.*?\]))?"
    r"(?:, input_op_ids = .*)?",
    re.S,
)
Call = tuple[str, int | None, list[list[int]]]
"""An operator from emit_nvtx: name, autograd's sequence number, input shapes."""
_OPERATOR = re.compile(r"\w+::\w|autograd::engine|\w+Backward\d*$")


def phase_marked_by(name: str) -> str | None:
    return next((phase for pattern, phase in _PHASES if pattern.match(name)), None)


def is_range(name: str) -> bool:
    return bool(STEP.match(name) or _LOADING.match(name) or phase_marked_by(name))


def called(text: str) -> Call | None:
    """The operator in an NVTX range's text; None for another range.

    Texts are `NAME[, seq = N][, op_id = N][, sizes = [[2, 3], []]]`; other suffixes stay.
    """
    found = _CALLED.fullmatch(text)
    if not found or not _OPERATOR.match(found["name"]):
        return None
    try:
        sizes = msgspec.json.decode(found["sizes"] or "[]", type=list[list[int]])
    except msgspec.DecodeError:
        sizes = []
    return found["name"], int(found["seq"]) if found["seq"] else None, sizes


def without_call(text: str) -> str:
    found = _CALLED.fullmatch(text) if ", " in text else None
    return found["name"] if found else text
