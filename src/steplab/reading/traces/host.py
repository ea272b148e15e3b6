"""The host's activity at an instant: its step, phase, range of the model and operator.

Everything on the device is attributed by the host call that launched it, so only this file knows how traces name
things.
"""

import re

import numpy as np

from steplab.reading.traces.naming import phase_marked_by
from steplab.reading.traces.nesting import Nesting
from steplab.reading.traces.steps import step_ranges
from steplab.reading.traces.trace import NONE, Column, Trace
from steplab.records.profile import OUTSIDE, PHASES

_UNNAMED = re.compile(r"^warmup step$|^## Call CompiledFxGraph \w+ ##$")
"""Ranges without information on the place in the model: those of the compiler name its cache entry."""
_LONGEST_PATH = 1000
"""Characters of a path from which on it is not continued: ranges deeper in it count as the one around them."""
_BACKWARD_NODE = "autograd::engine::evaluate_function: "


class Host:
    """The steps, phases, ranges and operators of one trace, looked up by instant and thread."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        ops, ranges = trace.ops, trace.ranges
        self.op_nesting = Nesting(ops.start_ns, ops.duration_ns, ops.thread)
        self._range_nesting = Nesting(ranges.start_ns, ranges.duration_ns, ranges.thread)
        steps = step_ranges(trace)
        self.steps = ranges.start_ns[steps], (ranges.start_ns + ranges.duration_ns)[steps]
        """Start and end of each step on the host's clock, in order; empty if the trace marks none."""
        self.phase_names, self._range_phase = self._phases()
        self.paths: list[str] = [""]
        """The text of each path number that `path_at` returns."""
        self._range_path = self._name_paths()
        self._backward_node = self._backward_nodes()
        self._forward_path = self._paths_of_sequences()

    def step_at(self, time_ns: Column) -> Column:
        """The number of the step at each instant; NONE outside all of them. Without marks everything is step 0."""
        starts, ends = self.steps
        if not len(starts):
            return np.zeros(len(time_ns), dtype=np.int64)
        return _last_begun(starts, ends, time_ns)

    def phase_at(self, time_ns: Column, thread: Column) -> Column:
        """The number of the phase in `phase_names` at each instant.

        A marked phase holds for every thread, because the backward pass runs on a thread of autograd's while the
        calling thread waits. Where none is marked, work under an autograd node is backward, work of the same step
        before its first such node is forward, and the rest is outside.
        """
        marked = self._marked_phase(time_ns)
        backward = self._node_at(time_ns, thread) != NONE
        inferred = np.full(len(time_ns), self.phase_names.index(OUTSIDE))
        step = self.step_at(time_ns)
        for number in np.unique(step[backward]):
            first_ns = time_ns[backward & (step == number)].min()
            inferred[(step == number) & (time_ns < first_ns)] = self.phase_names.index("forward")
        inferred[backward] = self.phase_names.index("backward")
        return np.where(marked == NONE, inferred, marked)

    def path_at(self, time_ns: Column, thread: Column) -> Column:
        """The number in `paths` of the innermost range at each instant; for a backward node, that of its forward
        operator."""
        path = self._path_of_range_at(time_ns, thread)
        node = self._node_at(time_ns, thread)
        for index in np.flatnonzero((path == 0) & (node != NONE)):
            sequence = int(self._trace.ops.sequence[node[index]])
            path[index] = self._forward_path.get(sequence, 0)
        return path

    def op_at(self, time_ns: Column, thread: Column) -> Column:
        """The number of the innermost operator at each instant; NONE for none."""
        return self.op_nesting.innermost(time_ns, thread)

    def phase_seconds(self) -> dict[str, float]:
        """The host time inside the marked ranges of each phase, within the steps."""
        ranges, found = self._trace.ranges, dict[str, float]()
        outermost = self._outermost_marks()
        within = self.step_at(ranges.start_ns) != NONE
        for number, name in enumerate(self.phase_names):
            mine = (self._range_phase == number) & outermost & within
            if mine.any():
                found[name] = float(ranges.duration_ns[mine].sum()) / 1e9
        return found

    def _phases(self) -> tuple[list[str], Column]:
        """The names of phases, and the phase that each range marks (NONE if it marks none)."""
        names = [*PHASES, OUTSIDE]
        by_name = np.full(len(self._trace.names) or 1, NONE)
        for number, text in enumerate(self._trace.names):
            if found := phase_marked_by(text):
                by_name[number] = names.index(found)
        return names, by_name[self._trace.ranges.name]

    def _outermost_marks(self) -> Column:
        """The phase marks that lie in no other: DistributedDataParallel.forward within forward is one phase."""
        parent, phase = self._range_nesting.parent, self._range_phase
        marked_above = np.zeros(len(parent), dtype=bool)
        for index, above in enumerate(parent.tolist()):
            if above != NONE:
                marked_above[index] = marked_above[above] or phase[above] != NONE
        return (phase != NONE) & ~marked_above

    def _marked_phase(self, time_ns: Column) -> Column:
        ranges = self._trace.ranges
        marks = np.flatnonzero(self._outermost_marks())
        if not len(marks):
            return np.full(len(time_ns), NONE)
        starts, ends = ranges.start_ns[marks], (ranges.start_ns + ranges.duration_ns)[marks]
        at = _last_begun(starts, ends, time_ns)
        return np.where(at == NONE, NONE, self._range_phase[marks[at]])

    def _name_paths(self) -> Column:
        """Each range's path: its own dotted name if that continues its parent's, else appended to it.

        Steps and phases are left out, and a number between dots, which is a layer's, becomes *.
        """
        names, ranges = self._trace.names, self._trace.ranges
        numbers: dict[str, int] = {"": 0}
        texts: list[str] = []
        for index, above in enumerate(self._range_nesting.parent.tolist()):
            name = names[ranges.name[index]]
            around = texts[above] if above != NONE else ""
            is_mark = self._range_phase[index] != NONE or self._trace.steps.match(name) or _UNNAMED.match(name)
            if is_mark or len(around) > _LONGEST_PATH:
                texts.append(around)
            elif not around or name.startswith(around + "."):
                texts.append(name)
            else:
                texts.append(f"{around}.{name}")
        wild = [".".join("*" if part.isdigit() else part for part in text.split(".")) for text in texts]
        found = np.array([numbers.setdefault(text, len(numbers)) for text in wild], dtype=np.int64)
        self.paths = list(numbers)
        return found

    def _backward_nodes(self) -> Column:
        """For each operator the autograd node that it runs under (or itself, if it is one); NONE outside the
        backward pass."""
        ops = self._trace.ops
        is_node = self._trace.named(ops.name, lambda name: name.startswith(_BACKWARD_NODE))
        found: list[int] = []
        for index, above in enumerate(self.op_nesting.parent.tolist()):
            found.append(index if is_node[index] else found[above] if above != NONE else NONE)
        return np.array(found, dtype=np.int64)

    def _node_at(self, time_ns: Column, thread: Column) -> Column:
        op = self.op_at(time_ns, thread)
        return np.where(op == NONE, NONE, self._backward_node[op]) if len(self._backward_node) else op

    def _path_of_range_at(self, time_ns: Column, thread: Column) -> Column:
        innermost = self._range_nesting.innermost(time_ns, thread)
        return np.where(innermost == NONE, 0, self._range_path[innermost]) if len(self._range_path) else innermost * 0

    def _paths_of_sequences(self) -> dict[int, int]:
        """The path of the forward operator that carries each sequence number.

        An operator reads the number that the next autograd node will get, so several may carry one; the last of them
        made the node.
        """
        ops = self._trace.ops
        forward = np.flatnonzero((ops.sequence != NONE) & (self._backward_node == NONE))
        paths = self._path_of_range_at(ops.start_ns[forward], ops.thread[forward])
        return dict(zip(ops.sequence[forward].tolist(), paths.tolist(), strict=True))


def _last_begun(starts: Column, ends: Column, time_ns: Column) -> Column:
    """The number of the interval that began last before each instant; NONE if it has ended, or none has begun.

    `starts` ascend, and there is at least one.
    """
    at = np.searchsorted(starts, time_ns, side="right") - 1
    return np.where((at >= 0) & (time_ns < ends[at]), at, NONE)
