"""The planned memory of fsdp and tp beside torch's own fully_shard and transformers' DTensors, which run on tensors
without content in a group without other ranks."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tests.first import first
from tests.unit.test_foreign_models import LLAMA, QWEN2, adapters_on, of_config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from steplab.fake_step.cuda import as_on_cuda
from steplab.fake_step.step import _conversion_by_data, _masks_as_they_are, blocks_of
from steplab.fake_step.storages import Storages
from steplab.fake_step.watching import Watcher
from steplab.lab.predicting import spread_model
from steplab.measurement.step.step import ModelStep
from steplab.model.build import build_workload
from steplab.parallel import layout
from steplab.plan.dry_run.sizes import Count
from steplab.plan.layout.memory import _Rank
from steplab.plan.layout.ranks import rank_groups
from steplab.plan.layout.sharing import sharing_of
from steplab.specs.layout import SINGLE
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec

RANKS = 4
CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 8,
                        "vocab_size": 3000}  # fmt: skip
EXPERTS = LLAMA | WIDE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {"untied": LLAMA | WIDE, "tied": QWEN2 | WIDE, "experts": EXPERTS}
OWN = {"model.d_model": 256, "model.d_ff": 704, "model.num_layers": 3, "model.num_heads": 8, "model.vocab_size": 3000}
PARTS = ("embedding", "block", "head")
_OF_THE_PART_BEFORE = ("AccumulateGrad", "RegisterPostBackward")


class Live(TorchDispatchMode):
    """The highest number of bytes in each phase and part, with each tensor rounded as CUDA's allocator rounds it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.highest: dict[tuple[str, str], int] = {}
        self.phase = ""
        self.watcher = Watcher("", lambda _: None, Storages(lambda _: None, Count(0, "")),
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
def tp_mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = layout.open_mesh({"fsdp": RANKS}, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "open_mesh", lambda *_: mesh)
        yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def seen(spec: StepSpec, monkeypatch: pytest.MonkeyPatch, tp: DeviceMesh | None = None) -> dict[tuple[str, str], int]:
    world = cast(Any, SimpleNamespace(rank=0, size=RANKS, device=SimpleNamespace(torch_device=CPU)))
    live = Live()
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda storage, size: live.resize(storage, size))
    with _conversion_by_data(), FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda(), live:
        workload = build_workload(spec, CPU)
        if tp is not None:
            split_by_transformers(cast(Any, workload.module), spec, tp)
            spec, world = replace(spec, layout=SINGLE), None
        step = ModelStep(workload, spec, CPU, world)
        live.watcher.follow(blocks_of(step.module))
        with _masks_as_they_are(traced=False):
            for _ in range(2):
                live.highest.clear()
                for phase in step.phases:
                    live.begin(phase.name)
                    phase.run()
    return live.highest


def split_by_transformers(model: Any, spec: StepSpec, mesh: DeviceMesh) -> None:
    model.to(torch.bfloat16 if spec.precision == "bf16_pure" else torch.float32)
    pytest.importorskip("transformers.distributed.tensor_parallel", reason="transformers lacks tp by DTensors")
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=RANKS))
    apply_tensor_parallelism(model, mesh, plan)


def planned(spec: StepSpec) -> dict[tuple[str, str], int]:
    sharing = sharing_of(spec, model=spread_model(spec))
    (group,) = rank_groups(spec, sharing.model.num_layers)
    found: dict[tuple[str, str], int] = {}
    for phase, where, holdings in _Rank(spec, group, sharing, 0)._moments():
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
    if name == "own":  # its blocks are gathered in bf16, and gradients averaged in fp32: param_dtype and reduce_dtype
        return resolve_step({"model": "tiny", **OWN, "attention": "sdpa_flash", **fields})
    return of_config(MODELS[name], attention="sdpa", **fields)


PURE = ("experts", "tied", "mixtral", "olmo2", "qwen3")


@pytest.mark.parametrize("name", first(2, ["experts", "own", "adapted", "untied", "tied"]))
def test_every_moment_of_fsdp_is_that_of_fully_shard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = step_of(name, precision="bf16_pure" if name in PURE else "bf16")
    real, plan = seen(spec, monkeypatch), planned(spec)
    assert set(plan) == {key for key in real if key != ("backward", "")}
    for moment, size in plan.items():
        at_first_block = name == "own" and moment == ("forward", "embedding")  # its weights arrive, never at the peak
        assert size == pytest.approx(real[moment], rel=0.06 if at_first_block else 0.03), moment


@pytest.mark.parametrize("kind", first(3, ["mixtral", "phi3", "olmo2", "llama", "qwen3"]))
def test_the_peak_of_tp_is_that_of_the_dtensors_of_transformers(
    kind: str, monkeypatch: pytest.MonkeyPatch, tp_mesh: DeviceMesh
) -> None:
    """Without the optimizer, whose kernels take no mixture of plain tensors and DTensors."""
    config = EXPERTS | {"model_type": kind, "num_key_value_heads": RANKS, "pad_token_id": None}
    fields: dict[str, object] = {"batch": 4, "context": 128, "layout": f"tp={RANKS}", "pass": "forward_backward"}
    spec = of_config(config, attention="sdpa", precision="bf16_pure" if kind in PURE else "bf16", **fields)
    assert max(planned(spec).values()) == pytest.approx(max(seen(spec, monkeypatch, tp_mesh).values()), rel=1e-3)
