"""The line of code that allocated memory: the innermost line of a stack that the reader may have written."""

import re
from collections.abc import Sequence
from functools import cache

from steplab.reading.snapshots.history import NONE, Frame

_LIBRARY = re.compile(
    r"/(site|dist)-packages/(torch|torch_\w+|triton|functorch)/"
    r"|/torch/(_\w+|nn|optim|utils|autograd|cuda|amp|distributed|fx|func|compiler|profiler|overrides\.py|functional\.py)"
    r"|/lib/python3\.\d+/(?!site-packages/|dist-packages/)"
)
"""torch, wherever it is installed, and Python's own library."""
_HARNESS = re.compile(r"/steplab/(measurement|cli|lab)/|/steplab/(__main__|model/workload)\.py$")
"""The code of steplab around the model."""
_STEP = re.compile(r"/steplab/measurement/(step/)?step\.py$")
"""In older snapshots the file lies in `measurement` itself."""
_GENERATED = re.compile(r"torchinductor|/inductor|^<eval_with_key>")
_WRITTEN = re.compile(r"\.py$|^<ipython-input")
_PARTS_SHOWN = 3


class SourceLines:
    """Source lines by the number of a stack."""

    def __init__(self, stacks: Sequence[tuple[Frame, ...]]) -> None:
        self._stacks = stacks
        self.of = cache(self._find)
        """Turns the number of a stack into `steplab/model/transformer.py:81 in forward`; None if it has no such
        line."""

    def _find(self, number: int) -> str | None:
        if number == NONE:
            return None
        frames = self._stacks[number]
        for is_told in (_is_users, _is_generated, _is_step):
            for frame in frames:
                if is_told(frame):
                    return _line(frame)
        return None


@cache
def _is_users(frame: Frame) -> bool:
    file = frame[0]
    foreign = _LIBRARY.search(file) or _HARNESS.search(file) or _GENERATED.search(file)
    return bool(_WRITTEN.search(file)) and not foreign


def _is_generated(frame: Frame) -> bool:
    """Whether torch.compile wrote the code, which is shown if the line that it came from is unknown."""
    return bool(_GENERATED.search(frame[0]))


def _is_step(frame: Frame) -> bool:
    """Whether the line is of the step itself, which is shown for memory that no line of the model allocates, such as
    the optimizer's."""
    return bool(_STEP.search(frame[0]))


def _line(frame: Frame) -> str:
    file, line, name = frame
    return f"{'/'.join(file.split('/')[-_PARTS_SHOWN:]).lstrip('/')}:{line} in {name}"
