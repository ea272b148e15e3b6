"""Makes the marks of a step's history from its records, each mark at its number of allocations."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from steplab.measurement.memory.allocation_events import AllocationEvents, MemoryEvent, Operator, Range
from steplab.measurement.memory.sightings import StepSightings
from steplab.records.memory_marks import Made, Marks, Owned, Saved, Stretch

STEP = "steplab: step"
PHASE = "steplab: phase "
MOMENT = "steplab: moment "
LINE = "steplab: line "

_CAST = "aten::_to_copy"
_CAST_TO = ("bfloat16", "float16")
_NEVER = float("inf")
_Seen = TypeVar("_Seen", Owned, Saved)


class StepMarks:
    def __init__(self, events: AllocationEvents, sightings: StepSightings | None, *, autocast: bool) -> None:
        """`sightings` is None for a step without phases; `autocast`: weights are cast."""
        (step,) = [marked for marked in events.ranges if marked.name == STEP]
        self._events, self._sightings, self._autocast = events, sightings, autocast
        self._ranges = [m for m in events.ranges if step.start_ns <= m.start_ns and m.end_ns <= step.end_ns]
        names = sightings.module_names if sightings else frozenset()
        self._block_inputs = sightings.block_inputs if sightings else {}
        self._calls = [marked for marked in self._ranges if marked.name in names]
        self._moments_ns = {
            int(marked.name.removeprefix(MOMENT)): marked.start_ns
            for marked in self._ranges
            if marked.name.startswith(MOMENT)
        }
        self.memory = events.between(step.start_ns, step.end_ns)
        self.memory_before = events.between(0, step.start_ns)
        self.allocations = [event for event in self.memory if event.num_bytes > 0]
        self._times_ns = [event.time_ns for event in self.allocations]
        self._released_ns = _release_times(self.memory)

    def marks(self, counted: Marks) -> Marks:
        operators = {event.operator for event in self.allocations if event.operator}
        owned = self._owned()
        return replace(
            counted,
            phases=tuple(
                self._stretch(marked.name.removeprefix(PHASE), marked)
                for marked in self._ranges
                if marked.name.startswith(PHASE)
            ),
            modules=self._modules(),
            operators=tuple(
                self._stretch(operator.name, operator)
                for operator in sorted(operators, key=lambda operator: (operator.start_ns, -operator.end_ns))
            ),
            owned=owned,
            made=tuple(made for index in range(len(self.allocations)) if (made := self._made(index))),
            saved=self._saved(owned),
            block_bytes=tuple(event.num_bytes for event in self.allocations),
            block_inputs=self._block_inputs,
        )

    def _modules(self) -> tuple[Stretch, ...]:
        backward = [marked for marked in self._ranges if marked.name == f"{PHASE}backward"]
        return tuple(
            self._stretch(call.name, call, in_backward=any(b.start_ns <= call.start_ns < b.end_ns for b in backward))
            for call in self._calls
        )

    def _owned(self) -> tuple[Owned, ...]:
        if self._sightings is None:
            return ()
        seen = map(self._placed, self._sightings.owners)
        return (*seen, *(self._autocast_copies() if self._autocast else ()))

    def _autocast_copies(self) -> Iterator[Owned]:
        assert self._sightings is not None
        names = self._sightings.parameter_names
        for index, event in enumerate(self.allocations):
            cast = event.operator.first_address if event.operator and event.operator.name == _CAST else None
            made = self._made(index)
            if cast in names and made and made.dtype in _CAST_TO:
                yield Owned(address=event.address, position=index + 1, category="autocast_copies", name=names[cast])

    def _saved(self, owned: Sequence[Owned]) -> tuple[Saved, ...]:
        """Memory saved for backward: by autograd's nodes, then other memory kept from the forward pass by checkpointing
        or the model.

        There a block's input counts under the block, anything else under its producing module.
        """
        if self._sightings is None or self._sightings.kept_moment is None:
            return ()
        moment_ns = self._moments_ns[self._sightings.kept_moment]
        by_nodes = [self._placed(kept) for kept in self._sightings.kept]
        position = self._position(moment_ns)
        seen = [(saved.address, position) for saved in by_nodes] + [(o.address, o.position) for o in owned]
        known = self._alive([*seen, (self._sightings.loss_address or 0, position)])
        return (*by_nodes, *self._else_kept(moment_ns, known))

    def _alive(self, seen: Sequence[tuple[int, int]]) -> set[int]:
        """The step's allocations alive at these addresses, each at its position, because addresses are reused."""
        indices: dict[int, list[int]] = {}
        for index, event in enumerate(self.allocations):
            indices.setdefault(event.address, []).append(index)
        made = ((indices.get(address, []), position) for address, position in seen)
        return {at[before - 1] for at, position in made if (before := bisect_left(at, position))}

    def _else_kept(self, moment_ns: int, known: set[int]) -> Iterator[Saved]:
        position = self._position(moment_ns)
        for index, event in enumerate(self.allocations[:position]):
            if index in known or not moment_ns <= self._released_ns[index] < _NEVER:
                continue
            made, block = self._made(index), self._block_given(event)
            shape, dtype = (made.shape, made.dtype) if made else ((), "")
            if block is not None:
                shape, dtype = self._block_inputs[block]
            yield Saved(
                address=event.address,
                position=position,
                module=self._module_around(event) if block is None else block,
                op="",
                shape=shape,
                dtype=dtype,
                storage_bytes=event.num_bytes,
            )

    def _block_given(self, event: MemoryEvent) -> str | None:
        assert self._sightings is not None
        given = [name for name, address in self._sightings.block_input_addresses.items() if address == event.address]
        return next((c.name for c in self._calls if c.name in given and c.start_ns > event.time_ns), None)

    def _module_around(self, event: MemoryEvent) -> str:
        around = [call.name for call in self._calls if call.start_ns <= event.time_ns < call.end_ns]
        return around[-1] if around else ""

    def _made(self, index: int) -> Made | None:
        event = self.allocations[index]
        sighting = self._events.first_sighting(event, self._released_ns[index])
        if event.operator is None or sighting is None:
            return None
        return Made(
            address=event.address,
            position=index + 1,
            op=event.operator.name,
            shape=sighting.shape,
            dtype=sighting.dtype,
        )

    def _stretch(self, name: str, marked: Range | Operator, *, in_backward: bool = False) -> Stretch:
        start, end = self._position(marked.start_ns), self._position(marked.end_ns)
        return Stretch(name=name, start=start, end=end, in_backward=in_backward)

    def _placed(self, seen: _Seen) -> _Seen:
        return replace(seen, position=self._position(self._moments_ns[seen.position]))

    def _position(self, time_ns: int) -> int:
        return bisect_left(self._times_ns, time_ns)


def _release_times(memory: Sequence[MemoryEvent]) -> list[float]:
    released: list[float] = []
    at: dict[int, int] = {}
    for event in memory:
        if event.num_bytes > 0:
            at[event.address] = len(released)
            released.append(_NEVER)
        elif event.address in at:
            released[at.pop(event.address)] = event.time_ns
    return released
