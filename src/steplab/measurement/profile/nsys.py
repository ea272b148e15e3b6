"""Nsight Systems around a measurement."""

import os
import shutil
from pathlib import Path

from steplab.errors import Unsupported


def nsys_command(report: Path) -> list[str]:
    """The prefix of a command for recording it with nsys, from cudaProfilerStart to Stop, into `report`.sqlite.

    Raises Unsupported if nsys is not installed.
    """
    found = shutil.which("nsys")
    if found is None:
        raise Unsupported(
            "--nsys", "nsys is not on the PATH", "install Nsight Systems, or leave --nsys out to use torch.profiler"
        )
    return [
        found,
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--export=sqlite",
        "--force-overwrite=true",
        "-o",
        str(report),
    ]


def is_watched_by_nsys() -> bool:
    """nsys then has CUPTI to itself: torch.profiler would see no kernel."""
    return "NSYS_PROFILING_SESSION_ID" in os.environ
