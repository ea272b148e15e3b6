"""Marks of a recorded step: the allocations that hold its objects and the tensors that autograd saves.

A mark names an allocation by its number in the step's history. No tensor is kept alive or wrapped, so the step runs
unchanged. Saved tensors are read from autograd's graph after forward; a node belongs to a module if its
sequence number was given during the module's forward.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from steplab.measurement import compat
from steplab.measurement.memory.allocation_events import AllocationEvents, MemoryEvent, Range
from steplab.measurement.step.spans import Place, around_calls, modules_for_hooks
from steplab.measurement.step.step import ModelStep
from steplab.measurement.tensors import dtype_name, tensors_in
from steplab.records.memory_marks import Made, Marks, Owned, Saved, Stretch


class StepSightings:
    """Notes the addresses of a step's objects at numbered moments. Each moment is a range in the profiler's events, by
    which `StepMarks` replaces its number by a number of allocations.
    """

    def __init__(self, step: ModelStep, device: torch.device) -> None:
        self._step, self._device = step, device
        self._num_moments = 0
        self._place = Place()
        self.owners: list[Owned] = []
        self.kept: list[Saved] = []
        """Tensors saved for backward in the last micro-step, in the order of their nodes."""
        self.kept_moment: int | None = None
        self.loss_address: int | None = None
        self.block_inputs: dict[str, tuple[tuple[int, ...], str]] = {}
        self.block_input_addresses: dict[str, int] = {}

    @property
    def module_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._step.module.named_modules() if name)

    @property
    def parameter_names(self) -> dict[int, str | None]:
        return self._storages(self._step.module.named_parameters())

    @contextmanager
    def watching(self, *, modules: bool) -> Iterator[None]:
        self._step.on_gradients = self.see_gradients
        try:
            with self._around_modules() if modules else nullcontext():
                yield
        finally:
            self._step.on_gradients = lambda: None

    def see_what_is_there(self) -> None:
        step, moment = self._step, self._next_moment()
        self._own(moment, "parameters", [*step.module.named_parameters(), *step.module.named_buffers()])
        state = [] if step.optimizer is None else [step.optimizer.state, step.optimizer.param_groups]
        held = {id(parameter) for parameter in step.module.parameters()}
        tensors = tensors_in([state, vars(step.scaler)])
        self._own(moment, "optimizer_state", [(None, tensor) for tensor in tensors if id(tensor) not in held])
        self._own(moment, "inputs", [(None, tensor) for tensor in tensors_in(step.batches)])

    def see_gradients(self) -> None:
        parameters = self._step.module.named_parameters()
        gradients = [(name, parameter.grad) for name, parameter in parameters if parameter.grad is not None]
        self._own(self._next_moment(), "gradients", gradients)

    def begin_forward(self) -> None:
        """Forget tensors of the previous micro-step, whose memory is reused."""
        self.kept.clear()
        self.block_inputs.clear()
        self.block_input_addresses.clear()

    def see_graph(self) -> None:
        loss = self._step.loss
        if loss is None or loss.grad_fn is None:
            return
        self.kept_moment = self._next_moment()
        self.loss_address = loss.untyped_storage().data_ptr()
        for node, kept in sorted(
            compat.saved_tensors(loss.grad_fn), key=lambda saved: compat.sequence_number(saved[0])
        ):
            if self._has_storage(kept):
                self.kept.append(
                    Saved(
                        address=kept.untyped_storage().data_ptr(),
                        position=self.kept_moment,
                        storage_bytes=kept.untyped_storage().nbytes(),
                        module=self._place.module_of(compat.sequence_number(node)),
                        op=node.name(),
                        shape=tuple(kept.shape),
                        dtype=dtype_name(kept.dtype),
                    )
                )

    @contextmanager
    def _around_modules(self) -> Iterator[None]:
        modules, _ = modules_for_hooks(self._step.module)
        with around_calls(modules, self._place.enter, self._place.leave), ExitStack() as hooks:
            for name, module in modules.items():
                for child, block in module.named_children() if isinstance(module, nn.ModuleList) else ():
                    full = f"{name}.{child}" if name else child
                    if full in modules:
                        hook = block.register_forward_pre_hook(self._see_input_of(full), with_kwargs=True)
                        hooks.callback(hook.remove)
            yield

    def _see_input_of(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def see(module: nn.Module, arguments: Any, named: Any) -> None:
            first = next(tensors_in([arguments, named]), None)
            if first is not None and name not in self.block_inputs:
                self.block_inputs[name] = (tuple(first.shape), dtype_name(first.dtype))
                if self._has_storage(first):
                    self.block_input_addresses[name] = first.untyped_storage().data_ptr()

        return see

    def _own(self, moment: int, category: str, tensors: Iterable[tuple[str | None, Tensor]]) -> None:
        for address, name in self._storages(tensors).items():
            self.owners.append(Owned(position=moment, address=address, category=category, name=name))

    def _storages(self, tensors: Iterable[tuple[str | None, Tensor]]) -> dict[int, str | None]:
        names: dict[int, str | None] = {}
        for name, tensor in tensors:
            if self._has_storage(tensor):
                names.setdefault(tensor.untyped_storage().data_ptr(), name)
        return names

    def _has_storage(self, tensor: Tensor) -> bool:
        there = tensor.device.type == self._device.type and (tensor.device.index or 0) == (self._device.index or 0)
        return there and tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() != 0

    def _next_moment(self) -> int:
        with record_function(f"{MOMENT}{self._num_moments}"):
            self._num_moments += 1
        return self._num_moments - 1


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
        """Match sightings with allocations. `sightings` None: a step without phases. `autocast`: it casts weights."""
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
        """Memory kept for backward: first tensors saved by autograd's nodes, then what checkpointing or the model keeps
        otherwise. Of the latter, a block's input is under the block, anything else under the module that allocated it.
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
        """Index of the latest allocation at each address before its position, because addresses are reused."""
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

    def _stretch(self, name: str, marked: Range, *, in_backward: bool = False) -> Stretch:
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
