"""An optimizer with state sharded over ranks: stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).

The owner updates each parameter and keeps its state; owners then exchange parameters, (N - 1)/N of their bytes to each
rank. With `to_owners`, a step moves as many bytes as without sharding by peer copies, and up to N/(N - 1) as many by
collectives (flat_parameters.py).

A *full* state dict has torch's form. A *shard* has one rank's state and, under `shard`, its rank, the number of ranks,
and its positions.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .collectives import Collectives, check_alike, collectives_of
from .errors import Unsupported, UserError
from .flat_parameters import Exchange, FlatParameters, ParameterCopies, check_movable
from .peer_memory import PeerMemory, open_peer_memory
from .sizes import owners_of, runs_of

StateDict = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Sent:
    shape: tuple[int, ...]
    dtype: torch.dtype


def merge_shards(shards: Sequence[StateDict]) -> StateDict:
    """Merge all ranks' shards into the full state dict, without copies. Raises UserError unless each rank of one run is
    there exactly once.
    """
    if not all("shard" in shard for shard in shards) or not shards:
        raise UserError("only shards can be merged; give what state_dict() returned on each rank")
    marks = sorted((shard["shard"]["world_size"], shard["shard"]["rank"]) for shard in shards)
    size = marks[0][0]
    if marks != [(size, rank) for rank in range(size)]:
        had = ", ".join(f"rank {rank} of {world_size}" for world_size, rank in marks)
        raise UserError(f"these shards are not all of one run: {had}; give the shard of every rank, each once")
    state = {key: value for shard in shards for key, value in shard["state"].items()}
    return {"state": _in_order(state), "param_groups": shards[0]["param_groups"]}


def gather_shards(shard: StateDict, device: torch.device, ranks: Collectives) -> StateDict:
    """The full state dict in CPU memory on rank 0; empty elsewhere. All ranks call it. Tensors are sent one by one, so
    a device holds at most one more.
    """
    sent: list[Tensor] = []

    def described(tensor: Tensor) -> Any:
        if tensor.device != device:  # step counters stay on the CPU, where NCCL cannot read them: small, so pickled
            return tensor.detach().cpu()
        sent.append(tensor.detach())
        return _Sent(tuple(tensor.shape), tensor.dtype)

    described_state = tree_map_only(Tensor, described, shard["state"])
    following = iter(sent)
    state: dict[Any, Any] = {}
    for owner, description in enumerate(ranks.host_gather(described_state)):

        def received(mark: _Sent, owner: int = owner) -> Tensor | None:
            tensor = torch.empty(mark.shape, dtype=mark.dtype, device=device)
            if owner == ranks.rank:
                tensor.copy_(next(following))
            ranks.broadcast(tensor, source=owner).wait()
            return tensor.cpu() if ranks.rank == 0 else None

        state.update(tree_map_only(_Sent, received, description))
    return {"state": _in_order(state), "param_groups": shard["param_groups"]} if ranks.rank == 0 else {}


def _in_order(state: dict[Any, Any]) -> dict[Any, Any]:
    return dict(sorted(state.items(), key=lambda item: (not isinstance(item[0], int), str(item[0]).zfill(12))))


def pack(groups: Sequence[dict[str, Any]], position: Callable[[Any], int]) -> list[dict[str, Any]]:
    return [
        {**options(group, names=True), "params": [position(param) for param in group["params"]]} for group in groups
    ]


def options(group: dict[str, Any], names: bool = False) -> dict[str, Any]:
    hidden = ("params",) if names else ("params", "param_names")
    return {key: value for key, value in group.items() if key not in hidden}


def check_loadable(state_dict: StateDict, groups: Sequence[dict[str, Any]], owned: Sequence[int]) -> None:
    """Raise UserError unless the state dict has these parameter groups and this rank's state."""
    saved = [len(group["params"]) for group in state_dict.get("param_groups", [])]
    present = [len(group["params"]) for group in groups]
    if saved != present:
        raise UserError(
            f"the state to load has parameter groups of {saved} parameters, and this optimizer has {present}; "
            "build the optimizer with the groups it was saved with"
        )
    mark = state_dict.get("shard")
    if mark is not None and not set(owned) <= set(mark["params"]):
        raise UserError(
            f"this is the shard of rank {mark['rank']} of {mark['world_size']}, and parameters have other owners "
            "here; load the result of merge_shards or of state_dict(gather=True)"
        )


class ShardedOptimizer(torch.optim.Optimizer):
    """Any torch optimizer that treats each parameter independently, with its state sharded over the ranks of a group.

    Every rank builds it with the same parameters, after the model is on its device. Gradients must be the same on all
    ranks at `step` (averaged by `DataParallel`, say); only the owner's are read. Parameters move into buffers for the
    exchange but stay the same objects; gradients stay in place.

    Learning-rate schedulers, step hooks and `zero_grad` work as on any optimizer: `param_groups` holds all parameters
    and the options in use. A weight used in several places counts once. Frozen parameters are not exchanged as long as
    no initially frozen one is trained.

    With `owners` gradients differ between ranks, so a gradient scaler must combine all ranks' overflows: call
    `unscale_` and then `step` of torch's ShardedGradScaler.
    """

    found_inf: Tensor
    grad_scale: Tensor | None
    """Set while a gradient scaler calls `step`: the divisor that gradients still need; None if unscaled."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | Collectives | None = None,
        *,
        bucket_size_mb: float = math.inf,
        exchange: Exchange | PeerMemory = "auto",
        owners: Mapping[Tensor, int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Shard the parameters; a collective call.

        Args:
            params, kwargs: as for `optimizer_cls`.
            group: None: all processes.
            bucket_size_mb: exchange in buckets of about that size (1e6 bytes), in the order of `params`, so that the
                next forward pass can begin after the first (`overlap_with`); default: one bucket a dtype.
            exchange: `all_gather`, once per bucket; `broadcast`, once per bucket and owner; `auto`, the better for the
                device (flat_parameters.py); or `peer_copy` between one host's GPUs, with parameters outside torch's
                allocator (groups added later use collectives).
            owners: `DataParallel.owners`, if it was built with `to_owners`.

        Raises UserError without other processes, or if the ranks' parameters differ; Unsupported for optimizers over
        all parameters together (LBFGS), for parameters that share memory without being one `nn.Parameter`, and for
        peer_copy between GPUs that do not reach each other's memory.
        """
        if not isinstance(optimizer_cls, type):
            raise UserError("optimizer_cls must be a class, such as torch.optim.AdamW, with its options after it")
        if issubclass(optimizer_cls, torch.optim.LBFGS):
            raise Unsupported("sharding LBFGS", "it updates all parameters as one vector", "use another optimizer")
        if not bucket_size_mb > 0:
            raise UserError(f"bucket_size_mb must be above 0, and is {bucket_size_mb}")
        if isinstance(exchange, str) and exchange not in get_args(Exchange):
            raise UserError(f"exchange must be one of {', '.join(get_args(Exchange))}, and is {exchange!r}")
        self._local: torch.optim.Optimizer | None = None
        self._ranks = collectives_of(group)
        self._bucket_bytes, self._group = bucket_size_mb * 1e6, group
        self._exchange_by: Exchange = exchange if isinstance(exchange, str) else "peer_copy"
        self._copies_through = exchange
        self._copies: ParameterCopies | None = None
        self._given_owners = owners or {}
        # torch.amp.GradScaler then also calls `step` after an overflow, and passes its verdict.
        self._step_supports_amp_scaling = bool(self._given_owners) and self._ranks.size > 1
        self._loads, self._frozen_loads = [0] * self._ranks.size, [0] * self._ranks.size
        """Number of trained and frozen elements that each rank owns: at most (total + (size - 1) · largest) / size."""
        self._owner: dict[Tensor, int] = {}
        self._flats: list[FlatParameters] = []
        self._flat_of: dict[nn.Parameter, FlatParameters] = {}
        self._waited_for_later: set[nn.Parameter] = set()
        super().__init__(_each_once(params), {})
        self._take_in(self._all_params())
        self._local = optimizer_cls([self._owned_part(group) for group in self.param_groups], **kwargs)
        self.defaults = self._local.defaults
        self._take_from_local()

    # --- parameters ---------------------------------------------------------------------------------------

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's parameters that `peer_copy` holds outside torch's allocator."""
        return self._copies.shared_bytes if self._copies else 0

    def owner(self, param: Tensor) -> int:
        return self._owner[param]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; earlier parameters keep their owners. If one rank's optimizer refuses, all ranks raise."""
        if self._local is None:  # the base class is adding the first groups
            super().add_param_group(param_group)
            return
        self.wait()
        (once,) = _each_once([param_group])
        super().add_param_group(once)
        added, flats = self.param_groups[-1], list(self._flats)
        before = dict(self._owner), dict(self._flat_of), list(self._loads), list(self._frozen_loads)
        try:
            self._take_in(added["params"])
            self._add_to_local(added)
        except Exception:  # the optimizer continues without the group
            self.param_groups.pop()
            del self._local.param_groups[len(self.param_groups) :]
            self._flats = flats
            self._owner, self._flat_of, self._loads, self._frozen_loads = before
            raise
        self._take_from_local()

    def _add_to_local(self, added: dict[str, Any]) -> None:
        """Add the group on all ranks or none: otherwise ranks would wait for each other in the next exchange."""
        assert self._local is not None
        refused: Exception | None = None
        try:
            self._local.add_param_group(self._owned_part(added))
        except Exception as error:
            refused = error
        told = self._ranks.host_gather(None if refused is None else str(refused))
        if refused is not None:
            raise refused
        for rank, why in enumerate(told):
            if why is not None:
                raise UserError(f"the optimizer on rank {rank} refuses its part of the group: {why}")

    def _all_params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    def _owned(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [param for param in params if self._owner[param] == self._ranks.rank]

    def _owned_part(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**options(group), "params": self._owned(group["params"])}

    def _take_in(self, params: list[nn.Parameter]) -> None:
        check_movable([*self._flat_of, *params])
        numbered = [(f"parameter {number} of the optimizer", param) for number, param in enumerate(params)]
        check_alike(self._ranks, {}, numbered, "model")
        kinds: dict[tuple[torch.device, torch.dtype, bool], list[nn.Parameter]] = {}
        for param in params:
            # A frozen parameter may be trained later: balanced separately, it is balanced before and after.
            kinds.setdefault((param.device, param.dtype, param.requires_grad), []).append(param)
        by_copies = self._exchange_by == "peer_copy"
        copied = by_copies and bool(params) and not self._flats and self._ranks.size > 1
        way: Exchange = "auto" if by_copies and not copied else self._exchange_by
        added: list[FlatParameters] = []
        for (_, _, trained), alike in kinds.items():
            loads = self._loads if trained else self._frozen_loads
            for bucket in runs_of([param.nbytes for param in alike], self._bucket_bytes):
                members = [alike[index] for index in bucket]
                owners = self._owners_of(members, loads)
                flat = FlatParameters(members, owners, self._ranks, way)
                added.append(flat)
                for param, owner in zip(members, owners, strict=True):
                    self._owner[param], self._flat_of[param] = owner, flat
        if copied:
            with torch.cuda.device(params[0].get_device()):  # a CPU's is negative, which is no device
                memory = open_peer_memory(self._copies_through, self._ranks, self._group, params)
            self._copies = ParameterCopies(memory, [flat.num_bytes for flat in added])
        for place, flat in enumerate(added):
            flat.move_in(self._copies if copied else None, place)
        self._flats += added

    def _owners_of(self, params: Sequence[nn.Parameter], loads: list[int]) -> list[int]:
        found = {param: self._given_owners[param] for param in params if param in self._given_owners}
        for param, owner in found.items():
            loads[owner] += param.numel()
        others = [param for param in params if param not in found]
        found.update(zip(others, owners_of([param.numel() for param in others], loads), strict=True))
        return [found[param] for param in params]

    # --- stepping -----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update owned parameters and exchange them; `closure` is evaluated once, on every rank.

        Modules given to `overlap_with` wait for their parameters later. After an overflow a gradient scaler's step does
        nothing. Raises UserError if the scaler did not combine all ranks' overflows.
        """
        assert self._local is not None
        self.wait()
        if self._overflowed():
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mine, local in zip(self.param_groups, self._local.param_groups, strict=True):
            local.update(options(mine))
        self._local.step()
        self._take_from_local()  # some optimizers count in their groups
        self._exchange()
        return loss

    def _overflowed(self) -> bool:
        """True on all ranks alike: a rank that skipped a step alone would leave others waiting."""
        if not hasattr(self, "found_inf"):
            return False
        found = int(bool(self.found_inf))
        unscaled = self.grad_scale is None
        most, negated_least = self._ranks.host_maximum(torch.tensor([found, -found])).tolist()
        if unscaled and most == -negated_least:
            return bool(most)
        del self.found_inf, self.grad_scale  # the scaler does not delete them
        raise UserError(
            "gradients that are averaged on their owners need a gradient scaler that asks all ranks for "
            "overflows: use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, and call its "
            "unscale_(optimizer) before its step(optimizer)"
        )

    def overlap_with(self, *modules: nn.Module) -> None:
        """Let each module wait for its parameters before its forward pass, instead of in `step`.

        Name modules that use parameters in `forward`: the embedding, each block, the head. Otherwise call `wait` before
        reading parameters. It needs `bucket_size_mb`, because a bucket arrives as a whole.
        """
        for module in modules:
            flats = list(dict.fromkeys(self._flat_of[p] for p in module.parameters() if p in self._flat_of))
            # `step` waits for parameters that are added to the optimizer later.
            self._waited_for_later.update(p for p in module.parameters() if p in self._flat_of)

            # Compiled with its module it would recompile whenever the exchanges in transit change.
            @torch.compiler.disable  # type: ignore[untyped-decorator]
            def arrive(*_: object, flats: list[FlatParameters] = flats) -> None:
                for flat in flats:
                    flat.wait()

            module.register_forward_pre_hook(arrive)
            module.register_state_dict_pre_hook(arrive)

    def wait(self) -> None:
        """Wait until all parameters of the last step have arrived; on a GPU, only the current stream waits."""
        for flat in self._flats:
            flat.wait()

    def _exchange(self) -> None:
        if self._ranks.size == 1:
            return
        exchanged = [flat for flat in self._flats if flat.in_use()]
        for flat in exchanged:
            flat.bring_back()
        if self._copies:
            self._copies.begin()
        for flat in exchanged:
            flat.start_exchange()
        for flat in exchanged:
            if not self._waited_for_later.issuperset(flat.params):
                flat.wait()

    def _take_from_local(self) -> None:
        assert self._local is not None
        for mine, local in zip(self.param_groups, self._local.param_groups, strict=True):
            mine.update(options(local))
        self.state = self._local.state

    # --- state --------------------------------------------------------------------------------------------

    def __getstate__(self) -> Any:
        raise UserError("a ShardedOptimizer cannot be copied or pickled: build another, or save state_dict()")

    def state_dict(self, *, gather: bool = False) -> StateDict:
        """This rank's shard. With `gather`, a collective call, rank 0 gets the full state in CPU memory, others an
        empty dict.
        """
        assert self._local is not None
        position = {param: index for index, param in enumerate(self._all_params())}
        mine = [position[param] for group in self._local.param_groups for param in group["params"]]
        state = {
            mine[key] if isinstance(key, int) else key: value
            for key, value in self._local.state_dict()["state"].items()
        }
        mark = {"rank": self._ranks.rank, "world_size": self._ranks.size, "params": mine}
        groups = pack(self.param_groups, position.__getitem__)
        shard = {"state": state, "param_groups": groups, "shard": mark}
        device = next((flat.params[0].device for flat in self._flats), torch.device("cpu"))
        return gather_shards(shard, device, self._ranks) if gather else shard

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the options and this rank's state from a full state dict or this rank's shard. Raises UserError for
        other groups, or a shard without this rank's state.
        """
        assert self._local is not None
        position = {param: index for index, param in enumerate(self._all_params())}
        mine = [position[param] for group in self._local.param_groups for param in group["params"]]
        check_loadable(state_dict, self.param_groups, mine)
        here = {index: key for key, index in enumerate(mine)}
        state = {
            here.get(key, key): value
            for key, value in state_dict["state"].items()
            if key in here or not isinstance(key, int)
        }
        packed = pack(self._local.param_groups, lambda param: here[position[param]])
        groups = [
            {**options(saved), "params": local["params"]}
            for saved, local in zip(state_dict["param_groups"], packed, strict=True)
        ]
        self._local.load_state_dict({"state": state, "param_groups": groups})
        self._take_from_local()


def _each_once(params: Iterable[Any]) -> list[Any]:
    listed: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if listed and all(isinstance(item, dict) for item in listed):
        return [{**group, "params": _each_once(group["params"])} if "params" in group else group for group in listed]
    seen: dict[int, Any] = {}
    for item in listed:
        seen.setdefault(id(item[1] if isinstance(item, tuple) else item), item)
    return list(seen.values())
