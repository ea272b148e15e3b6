"""Find the host's step, phase, model range and operator at any time. Device work is attributed by its launching host
call, so only this file knows the names in traces.
"""

import re

import numpy as np

from steplab.reading.traces.intervals import Nesting
from steplab.reading.traces.naming import phase_marked_by
from steplab.reading.traces.steps import step_ranges
from steplab.reading.traces.trace import NONE, Column, Trace
from steplab.records.profile import OUTSIDE, PHASES

_UNNAMED = re.compile(r"^warmup step$|^## Call CompiledFxGraph \w+ ##$")
"""Ranges that belong to no part of the model, such as the compiler's cache look-up."""
_LONGEST_PATH = 1000
"""Most characters of a path; deeper ranges count as the surrounding one."""
_BACKWARD_NODE = "autograd::engine::evaluate_function: "


class Host:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        ops, ranges = trace.ops, trace.ranges
        self.op_nesting = Nesting(ops.start_ns, ops.duration_ns, ops.thread)
        self._range_nesting = Nesting(ranges.start_ns, ranges.duration_ns, ranges.thread)
        steps = step_ranges(trace)
        self.steps = ranges.start_ns[steps], ranges.end_ns[steps]
        """Start and end of each step on the host, in order; empty without marks."""
        self.phase_names, self._range_phase = self._phases()
        self.paths: list[str] = [""]
        """Paths by the numbers that `path_at` returns."""
        self._range_path = self._name_paths()
        self._backward_node = self._backward_nodes()
        self._forward_path = self._paths_of_sequences()

    def step_at(self, time_ns: Column) -> Column:
        """Index of the step at each time; NONE outside. Without marks all is step 0."""
        starts, ends = self.steps
        if not len(starts):
            return np.zeros(len(time_ns), dtype=np.int64)
        return _last_begun(starts, ends, time_ns)

    def phase_at(self, time_ns: Column, thread: Column) -> Column:
        """Index into `phase_names` at each time. Phase marks apply to every thread: backward runs on autograd's.
        Without marks, work under an autograd node is backward, earlier work in the step forward, the rest outside.
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
        """Index into `paths` of the innermost range at each time; backward nodes have their forward operator's path."""
        path = self._path_of_range_at(time_ns, thread)
        node = self._node_at(time_ns, thread)
        for index in np.flatnonzero((path == 0) & (node != NONE)):
            sequence = int(self._trace.ops.sequence[node[index]])
            path[index] = self._forward_path.get(sequence, 0)
        return path

    def op_at(self, time_ns: Column, thread: Column) -> Column:
        return self.op_nesting.innermost(time_ns, thread)

    def phase_seconds(self) -> dict[str, float]:
        ranges, found = self._trace.ranges, dict[str, float]()
        outermost = self._outermost_marks()
        within = self.step_at(ranges.start_ns) != NONE
        for number, name in enumerate(self.phase_names):
            mine = (self._range_phase == number) & outermost & within
            if mine.any():
                found[name] = float(ranges.duration_ns[mine].sum()) / 1e9
        return found

    def _phases(self) -> tuple[list[str], Column]:
        names = [*PHASES, OUTSIDE]
        by_name = np.full(len(self._trace.names) or 1, NONE)
        for number, text in enumerate(self._trace.names):
            if found := phase_marked_by(text):
                by_name[number] = names.index(found)
        return names, by_name[self._trace.ranges.name]

    def _outermost_marks(self) -> Column:
        """Phase marks not within another mark: DistributedDataParallel.forward within forward is one phase."""
        parent, phase = self._range_nesting.parent, self._range_phase
        marked_above = np.zeros(len(parent), dtype=bool)
        for index, above in enumerate(parent.tolist()):
            if above != NONE:
                marked_above[index] = marked_above[above] or phase[above] != NONE
        return (phase != NONE) & ~marked_above

    def _marked_phase(self, time_ns: Column) -> Column:
        ranges = self._trace.ranges
        marks = np.flatnonzero(self._outermost_marks())
        at = _last_begun(ranges.start_ns[marks], ranges.end_ns[marks], time_ns)
        return np.append(self._range_phase[marks], NONE)[at]

    def _name_paths(self) -> Column:
        """Path of each range: its dotted name if it extends its parent's, else both joined. Steps and phases are
        omitted; layer numbers become *.
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
        ops = self._trace.ops
        is_node = self._trace.named(ops.name, lambda name: name.startswith(_BACKWARD_NODE))
        found: list[int] = []
        for index, above in enumerate(self.op_nesting.parent.tolist()):
            found.append(index if is_node[index] else found[above] if above != NONE else NONE)
        return np.array(found, dtype=np.int64)

    def _node_at(self, time_ns: Column, thread: Column) -> Column:
        op = self.op_at(time_ns, thread)
        return np.append(self._backward_node, NONE)[op]

    def _path_of_range_at(self, time_ns: Column, thread: Column) -> Column:
        innermost = self._range_nesting.innermost(time_ns, thread)
        return np.append(self._range_path, 0)[innermost]

    def _paths_of_sequences(self) -> dict[int, int]:
        """Path of the forward operator for each autograd sequence number. Operators carry the next node's number, so
        several may share one; the last one made the node.
        """
        ops = self._trace.ops
        forward = np.flatnonzero((ops.sequence != NONE) & (self._backward_node == NONE))
        paths = self._path_of_range_at(ops.start_ns[forward], ops.thread[forward])
        return dict(zip(ops.sequence[forward].tolist(), paths.tolist(), strict=True))


def _last_begun(starts: Column, ends: Column, time_ns: Column) -> Column:
    """Index of the last interval begun before each time; NONE if it has ended or none began. `starts` ascend."""
    at = np.searchsorted(starts, time_ns, side="right") - 1
    return np.where((at >= 0) & (time_ns < np.append(ends, 0)[at]), at, NONE)
