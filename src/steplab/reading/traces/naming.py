"""Parse names in traces: old torch records ranges as operators; NVTX ranges may be operators."""

import re

import msgspec

STEP = re.compile(r"^(step|ProfilerStep#\d+)$")
"""Names of step ranges, unless the user gives others."""
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
"""Operator from an emit_nvtx range: name, autograd's sequence number, input shapes."""
_OPERATOR = re.compile(r"\w+::\w|autograd::engine|\w+Backward\d*$")


def phase_marked_by(name: str) -> str | None:
    return next((phase for pattern, phase in _PHASES if pattern.match(name)), None)


def is_range(name: str) -> bool:
    return bool(STEP.match(name) or _LOADING.match(name) or phase_marked_by(name))


def called(text: str) -> Call | None:
    """Parse an NVTX range's text as an operator; None if it is none. Texts are `NAME[, seq = N][, op_id = N][, sizes =
    [[2, 3], []]]`; other suffixes remain in the name.
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
