"""Decides between flash_triton's kernels in bf16 and fp16: Hopper kernels in Gluon, or portable ones.

Gluon's interface changes with Triton's versions. With an untested version, triton_trial tests the kernels at their
first call. This file imports neither torch nor Triton, so that plans can read it.
"""

import importlib.metadata

OLDEST = (3, 6)
"""Oldest Triton with all parts of Gluon that the Hopper kernels use."""
OLDEST_TORCH = "2.10"
"""The first torch that requires Triton 3.6."""
TRIED = ((3, 6), (3, 7), (3, 8), (3, 9))
"""Triton versions that compile every Hopper kernel (tests/golden/hopper_kernels.json)."""


def release(version: str) -> tuple[int, int]:
    parts = version.split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdecimal, parts)) else (0, 0)


def too_old(version: str) -> bool:
    return release(version) < OLDEST


def is_tried(version: str) -> bool:
    return release(version) in TRIED


def remedy(version: str) -> str:
    """Advice on the version to install if the Hopper kernels do not run."""
    first, last = (".".join(map(str, tried)) for tried in (TRIED[0], TRIED[-1]))
    if too_old(version):
        return f"install torch {OLDEST_TORCH} or newer, which brings Triton {first} or newer"
    return f"install a torch that brings Triton {first} to {last}"


def installed_triton() -> str | None:
    """The installed version of Triton without importing it; None if absent."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def planned_on(gpu: str) -> bool:
    """True if plans for a GPU of this name (H200 SXM, NVIDIA H100 80GB HBM3) assume the Hopper kernels.

    They do on Hopper GPUs, unless the Triton installed here is too old.
    """
    words = gpu.removeprefix("NVIDIA ").split()
    installed = installed_triton()
    return bool(words) and words[0].startswith(("H1", "H2", "H8", "GH")) and not (installed and too_old(installed))
