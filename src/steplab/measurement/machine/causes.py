"""Remedies for errors of GPUs, NCCL and gloo.

Texts are cudaGetErrorString's and torch's process groups'. An Xid is the driver's number for a GPU fault:
https://docs.nvidia.com/deploy/xid-errors/.
"""

import re
from dataclasses import dataclass

from steplab.records.failure import FailureKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    words: str
    kind: FailureKind
    """Kind `error` for faults of the code; crashed or timeout for the machine's, which `--resume` measures again."""


_XID = "`dmesg | grep Xid` has the driver's reason"
_CAUSES: tuple[tuple[str, FailureKind, str], ...] = (
    (r"GPU is lost|device is lost|fallen off the bus", "crashed", f"the GPU no longer answers: {_XID}"),
    (r"uncorrectable.* ECC error|ECC error", "crashed", f"the GPU's memory has an uncorrectable error: {_XID}"),
    (r"unspecified launch failure", "crashed", f"a kernel or the GPU under it failed: {_XID}"),
    (r"NVLink error|hardware stack error", "crashed", f"the GPU failed: {_XID}"),
    (
        r"illegal memory access|misaligned address|device-side assert",
        "error",
        "a kernel used a wrong address or index: CUDA_LAUNCH_BLOCKING=1 names the line that started it",
    ),
    (
        r"CUDA-capable device.* busy or unavailable",
        "crashed",
        "another process holds the GPU for itself: nvidia-smi names it",
    ),
    (
        r"Watchdog caught collective operation timeout|collective operation timed out",
        "timeout",
        "a collective of NCCL did not end: a rank did not take part, or the network between the GPUs failed",
    ),
    (
        r"Timed out waiting \d+\s?ms for \w+ operation",
        "timeout",
        "a collective of gloo did not end: a rank did not take part, or the network failed",
    ),
)


def cause_of(text: str) -> Cause | None:
    """Cause and remedy for an error's text or a process's last lines; None if unknown."""
    for pattern, kind, words in _CAUSES:
        if re.search(pattern, text, re.IGNORECASE):
            return Cause(words=words, kind=kind)
    return None
