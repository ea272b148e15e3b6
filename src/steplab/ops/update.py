"""Updates of some of an optimizer's parameters, while the gradients of others are still being made or averaged.

An optimizer that treats each parameter by itself, as AdamW and SGD do, changes it by the same numbers whenever that is
done after its gradient is final. Clipping by the norm of all gradients, a gradient scaler, and optimizers that look at
all parameters together (LBFGS) need all gradients first.
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
    """Steps of an optimizer that update some of its parameters each, and together what one step of all of them does.

    A parameter that comes again begins the next update, and so does a number that is changed between two parts, as by a
    scheduler of the learning rate. Some optimizers count steps in their parameter groups or their attributes: every
    part of an update finds the numbers from before it, which so change once in each.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Groups that are added to the optimizer later are not updated. Raises Unsupported for LBFGS, and for an
        optimizer around another one, as those are that shard its state."""
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
        """The numbers in each group, and in the attributes, as they were before the update."""
        self._counted: list[dict[str, float | None]] = []
        """Those that the update has changed."""
        self._left: list[dict[str, float | None]] = []
        """All of them after the last part."""

    def of(self, parameters: Sequence[Tensor]) -> None:
        """Update these that have gradients; any that are not the optimizer's stay as they are.

        Raises Unsupported, and the update is not a whole one, where a step changes a tensor in a parameter group, or
        numbers there depend on which parameters it updates.
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
        """Put back the numbers from before the update, which begins here if one of the parameters comes again, or if
        something other than a step has changed a number."""
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
        """Note which numbers the step has changed; a group without parameters in a part may not have been counted."""
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
    """The tensors among a group's options, and how often each was changed."""
    return [(name, id(value), value._version) for name, value in group.items() if isinstance(value, Tensor)]


class UpdateInBackward:
    """Updates of parameters that begin in the backward pass, beside the rest of it.

        update = UpdateInBackward(optimizer, model.blocks)
        stream = torch.cuda.Stream(priority=-1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for batch in batches:
                model(batch).mean().backward()  # updates each block as soon as all its gradients are there
                update.finish()
                optimizer.zero_grad()

    On a GPU the updates are launched on a stream of the lowest priority, behind the kernels of their gradients. They
    are bound by memory bandwidth, and run on the multiprocessors that the kernels of the backward pass leave free. For
    that its own stream needs a higher priority; the default stream has the lowest.

    To accumulate gradients over several batches, run all but the last backward pass within `paused()`. Any that comes
    after an update and before `finish` raises UserError: a second backward pass, or a second use of a parameter under
    reentrant checkpointing. Nothing else may read a parameter between its gradient and `finish`. It is for one process:
    averages over ranks come later, and steplab.parallel.DataParallel gives them in parts.
    After a backward pass that failed, call `zero_grad` and `finish` before the next.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
        """The trained parameters of each module are updated together, and so are those of the optimizer that none of
        the modules has. Raises Unsupported as UpdateByParts does, and where processes have joined a group."""
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
        """A context in which backward passes add to gradients, and nothing is updated."""
        before, self._active = self._active, False
        try:
            yield
        finally:
            self._active = before

    def finish(self) -> None:
        """Update parts of which some parameters got no gradient, and have the current stream wait for all updates.

        Call it after the last backward pass of a step.
        """
        for place, missing in enumerate(self._missing):
            if missing:
                self._launch(place)
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        if any(parameter.grad is not None for parameter in self._frozen):  # it was frozen, and no longer is
            self._update.of(self._frozen)
        self._begin()

    def _begin(self) -> None:
        self._missing = [set(part) for part in self._parts]
        self._made_on: list[set[torch.cuda.Stream]] = [set() for _ in self._parts]
        """The streams on which gradients of a part were made: a model may have several."""

    def _arrived(self, place: int, parameter: Tensor) -> None:
        """The hook of a parameter whose gradient has been accumulated."""
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
        with torch.cuda.stream(stream):  # of None, which is that of a CPU, it does nothing
            self._update.of(part)


def _hook(update: ReferenceType[UpdateInBackward], place: int) -> Callable[[Tensor], None]:
    """The hook of a parameter of one part. Hooks stay with a parameter; one that was replaced does no more."""

    def arrived(parameter: Tensor) -> None:
        in_use = update()
        if in_use is not None:
            in_use._arrived(place, parameter)

    return arrived
