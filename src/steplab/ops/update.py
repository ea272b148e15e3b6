"""Updates some of an optimizer's parameters while gradients of others are still computed or averaged.

An optimizer that treats each parameter independently, as AdamW and SGD do, can update it at any time after its gradient
is final. Clipping by the norm of all gradients, a gradient scaler, and optimizers over all parameters together (LBFGS)
need all gradients first.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import Unsupported, UserError


class UpdateByParts:
    """Divides an optimizer's step into partial steps, which together equal one step over all parameters.

    The next step begins when a parameter comes again, or when a number such as the learning rate was changed between
    parts. Some optimizers change numbers themselves, such as a step count in a group or attribute. Every part starts
    from these numbers' values before the step, so that they change once a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameter groups added to the optimizer later are not updated.

        Raises Unsupported for LBFGS, and for an optimizer that wraps another, as sharding ones do.
        """
        self._optimizer = optimizer
        if isinstance(optimizer, torch.optim.LBFGS):
            raise self._unsupported("it updates all parameters as one vector")
        if any(isinstance(inner, torch.optim.Optimizer) for inner in vars(optimizer).values()):
            raise self._unsupported(
                "it leaves the step to an optimizer within it, which would update all parameters for each part"
            )
        self._group_of = {
            parameter: place for place, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        self._updated: set[Tensor] = set()
        self._before: list[dict[str, float | None]] = []
        self._counted: list[dict[str, float | None]] = []
        self._left: list[dict[str, float | None]] = []

    def of(self, parameters: Sequence[Tensor]) -> None:
        """Update the given parameters that have gradients; parameters of other optimizers are ignored.

        Raises Unsupported if a step changes a tensor in a parameter group, or if numbers there depend on the updated
        parameters. The update is then incomplete.
        """
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        parts: list[list[Tensor]] = [[] for _ in groups]
        for parameter in parameters:
            if parameter in self._group_of:
                parts[self._group_of[parameter]].append(parameter)
        self._begin_part([parameter for part in parts for parameter in part])
        try:
            for group, part in zip(groups, parts, strict=True):
                group["params"] = part
            versions = [_versions(group) for group in groups]
            self._optimizer.step()
            if versions != [_versions(group) for group in groups]:
                raise self._unsupported("each step changes a tensor in its parameter groups, which each part would do")
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        self._end_part()

    def _places(self) -> list[dict[str, Any]]:
        return [*self._optimizer.param_groups, vars(self._optimizer)]

    def _begin_part(self, parameters: Sequence[Tensor]) -> None:
        places = self._places()
        now = [_numbers(place) for place in places]
        if now != self._left or not self._updated.isdisjoint(parameters):
            self._updated.clear()
            self._before, self._counted = now, [{} for _ in places]
        self._updated.update(parameters)
        for place, before, counted in zip(places, self._before, self._counted, strict=True):
            for name in counted:
                if name in before:
                    place[name] = before[name]
                else:
                    del place[name]

    def _end_part(self) -> None:
        for place, before, counted in zip(self._places(), self._before, self._counted, strict=True):
            for name, value in _numbers(place).items():
                has_changed = value is not None and (name not in before or before[name] != value)
                if has_changed and counted.setdefault(name, value) != value:
                    raise self._unsupported(f"its {name} depends on the parameters that a step updates")
            place.update(counted)
        self._left = [_numbers(place) for place in self._places()]

    def _unsupported(self, why: str) -> Unsupported:
        what = f"updating some parameters by {type(self._optimizer).__name__}"
        return Unsupported(what, why, "use another optimizer")


def _numbers(place: dict[str, Any]) -> dict[str, float | None]:
    return {name: value for name, value in place.items() if value is None or isinstance(value, float | int)}


def _versions(group: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(name, id(value), value._version) for name, value in group.items() if isinstance(value, Tensor)]


class UpdateInBackward:
    """Updates parameters during the backward pass, as soon as their gradients are final.

        update = UpdateInBackward(optimizer, model.blocks)
        stream = torch.cuda.Stream(priority=-1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for batch in batches:
                model(batch).mean().backward()  # updates each block as soon as all its gradients are there
                update.finish()
                optimizer.zero_grad()

    On a GPU the updates run on a stream of the lowest priority, on multiprocessors that the backward pass leaves free.
    The backward pass therefore needs a stream of higher priority; the default stream has the lowest.

    To accumulate gradients over several batches, run all except the last backward pass within `paused()`. A gradient
    that comes after an update and before `finish` raises UserError: a second backward pass, or a second use of a
    parameter under reentrant checkpointing. Nothing else may read a parameter between its gradient and `finish`. It is
    for one process: ranks average later, and steplab.parallel.DataParallel has its own partial updates. After a failed
    backward pass, call `zero_grad` and `finish` before the next.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
        """Each module's trained parameters are updated together, and so are the optimizer's other parameters.

        Raises Unsupported as UpdateByParts does, and in a run of several processes.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            why = "it would use each rank's own gradients, which are averaged later"
            raise Unsupported(
                f"an update in the backward pass of {dist.get_world_size()} processes",
                why,
                "use UpdateByParts with steplab.parallel.DataParallel.finish_in_parts",
            )
        self._update = UpdateByParts(optimizer)
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self._frozen = [p for p in everything if not p.requires_grad]  # torch gives these no hooks
        left = dict.fromkeys(p for p in everything if p.requires_grad)
        parts: dict[tuple[int, torch.device], list[Tensor]] = {}
        for place, members in enumerate((*(list(module.parameters()) for module in modules), list(left))):
            for parameter in members:
                if parameter in left:
                    del left[parameter]
                    parts.setdefault((place, parameter.device), []).append(parameter)
        self._parts = list(parts.values())
        self._streams = {
            device: torch.cuda.Stream(device, priority=0)
            for device in dict.fromkeys(part[0].device for part in self._parts)
            if device.type == "cuda"
        }
        self._active = True
        self._lock = threading.Lock()  # autograd has a thread for each device, and all call hooks
        self._begin()
        for place, part in enumerate(self._parts):
            for parameter in part:
                parameter.register_post_accumulate_grad_hook(_hook(ref(self), place))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context where backward passes add to gradients, without updates."""
        before, self._active = self._active, False
        try:
            yield
        finally:
            self._active = before

    def finish(self) -> None:
        """Update modules that still lack some gradients, and make the current stream wait for all updates.

        Call it after the last backward pass of a step.
        """
        for place, missing in enumerate(self._missing):
            if missing:
                self._launch(place)
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        if any(parameter.grad is not None for parameter in self._frozen):  # it is trained now
            self._update.of(self._frozen)
        self._begin()

    def _begin(self) -> None:
        self._missing = [set(part) for part in self._parts]
        self._made_on: list[set[torch.cuda.Stream]] = [set() for _ in self._parts]
        """Streams that compute a part's gradients: a model may use several."""

    def _arrived(self, place: int, parameter: Tensor) -> None:
        with self._lock:
            missing = self._missing[place]
            if parameter.is_cuda:
                self._made_on[place].add(torch.cuda.current_stream(parameter.device))
            if not self._active:
                return
            if not missing:
                raise UserError(
                    "a gradient came after the update of its parameter: call finish() after each backward pass, and "
                    "run all but the last of a step within paused(); reentrant checkpointing is not supported"
                )
            missing.discard(parameter)
            if not missing:
                self._launch(place)

    def _launch(self, place: int) -> None:
        part = self._parts[place]
        stream = self._streams.get(part[0].device)
        if stream is not None:
            for other in {torch.cuda.current_stream(stream.device), *self._made_on[place]}:
                stream.wait_stream(other)
        with torch.cuda.stream(stream):  # None on a CPU: no-op
            self._update.of(part)


def _hook(update: ReferenceType[UpdateInBackward], place: int) -> Callable[[Tensor], None]:
    """A hook on a parameter's gradient. It stays with the parameter, but does nothing once `update` is deleted."""

    def arrived(parameter: Tensor) -> None:
        in_use = update()
        if in_use is not None:
            in_use._arrived(place, parameter)

    return arrived
