"""The planned memory of fsdp beside torch's own fully_shard, which runs on tensors without content in a group without
other ranks."""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tests.unit.test_foreign_models import LLAMA, QWEN2, adapters_on, of_config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from steplab.fake_step.cuda import as_on_cuda
from steplab.fake_step.step import _conversion_by_data, _masks_as_they_are, blocks_of
from steplab.fake_step.storages import Storages
from steplab.fake_step.watching import Watcher
from steplab.lab.predicting import spread_model
from steplab.measurement.step import distribute
from steplab.measurement.step.step import ModelStep
from steplab.model.build import build_workload
from steplab.parallel.layout import open_mesh
from steplab.plan.dry_run.sizes import Count
from steplab.plan.layout.memory import _Rank
from steplab.plan.layout.ranks import rank_groups
from steplab.plan.layout.sharing import sharing_of
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec

RANKS = 4
CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 8,
                        "vocab_size": 3000}  # fmt: skip
EXPERTS = LLAMA | WIDE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {"untied": LLAMA | WIDE, "tied": QWEN2 | WIDE, "experts": EXPERTS}
PARTS = ("embedding", "block", "head")
_OF_THE_PART_BEFORE = ("AccumulateGrad", "RegisterPostBackward")
"""Nodes of autograd that finish a part: gradients arrive, and FSDP2 sends them."""


class Live(TorchDispatchMode):
    """The highest number of bytes in each phase and part, with each tensor rounded as CUDA's allocator rounds it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.highest: dict[tuple[str, str], int] = {}
        self.phase = ""
        self.watcher = Watcher("", lambda _: None, Storages(lambda _: None), Count(0, ""),
                               tf32=False, fused_optimizer=True, updates_in_backward=False)  # fmt: skip
        self.num_bytes = 0
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._sizes: dict[int, int] = {}
        self._place = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self._follow(getattr(each, "_local_tensor", each).untyped_storage())
        self.look()
        return made

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._numbers:
            number = self._numbers[storage] = len(self._sizes)
            self._set(number, storage.nbytes())
            weakref.finalize(storage, self._set, number, 0).atexit = False

    def _set(self, number: int, num_bytes: int) -> None:
        size = -(-num_bytes // 512) * 512
        self.num_bytes += size - self._sizes.get(number, 0)
        self._sizes[number] = size

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """As FSDP2 does with gathered weights."""
        torch._C.StorageBase.resize_(storage, num_bytes)  # type: ignore[attr-defined]
        if storage in self._numbers:
            self._set(self._numbers[storage], num_bytes)

    def begin(self, phase: str) -> None:
        self.phase, self._place = phase, ""
        self.watcher.begin(phase)

    def look(self) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is None or not any(name in node.name() for name in _OF_THE_PART_BEFORE):
            self._place = self.watcher.place() or self._place
        key = self.phase, "block" if self._place.startswith("block") else self._place.partition(" ")[0]
        self.highest[key] = max(self.highest.get(key, 0), self.num_bytes)


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """Its mesh has numbers as content, so it is made before tensors have none."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = open_mesh({"fsdp": RANKS}, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distribute, "open_mesh", lambda *_: mesh)
        yield
    dist.destroy_process_group()


def seen(spec: StepSpec, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], int]:
    """Of a step after the first."""
    world = cast(Any, SimpleNamespace(rank=0, size=RANKS, device=SimpleNamespace(torch_device=CPU)))
    live = Live()
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda storage, size: live.resize(storage, size))
    with _conversion_by_data(), FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda(), live:
        step = ModelStep(build_workload(spec, CPU), spec, CPU, world)
        live.watcher.follow(blocks_of(step.module))
        with _masks_as_they_are(traced=False):
            for _ in range(2):
                live.highest.clear()
                for phase in step.phases:
                    live.begin(phase.name)
                    phase.run()
    return live.highest


def planned(spec: StepSpec) -> dict[tuple[str, str], int]:
    model = spread_model(spec)
    assert model is not None
    (group,) = rank_groups(spec, model.num_layers)
    found: dict[tuple[str, str], int] = {}
    for phase, where, holdings in _Rank(spec, group, sharing_of(spec, model=model), 0)._moments():
        part = next((part for part in PARTS if part in where.partition(":")[0]), "")
        size = sum(bundle.num_bytes * count for bundle, count in holdings)
        found[phase, part] = max(size, found.get((phase, part), 0))
    return found


def adapted(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Any]:
    return adapters_on(of_config(LLAMA | WIDE, batch=batch, context=context, attention="sdpa"), device)


def step_of(name: str, **fields: object) -> StepSpec:
    fields |= {"batch": 4, "context": 128, "layout": f"fsdp={RANKS}"}
    if name == "adapted":
        return resolve_step({"model": f"{__name__}:adapted", **fields})
    return of_config(MODELS[name], attention="sdpa", **fields)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("experts", "bf16_pure"),
        ("adapted", "bf16"),
        pytest.param("untied", "bf16", marks=pytest.mark.release),
        pytest.param("tied", "bf16_pure", marks=pytest.mark.release),
    ],
)
def test_every_moment_of_fsdp_is_that_of_fully_shard(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = step_of(name, precision=precision)
    real, plan = seen(spec, monkeypatch), planned(spec)
    assert set(plan) == {key for key in real if key != ("backward", "")}
    for moment, size in plan.items():
        assert size == pytest.approx(real[moment], rel=0.03), moment
