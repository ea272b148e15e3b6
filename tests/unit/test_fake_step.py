import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
from tests.first import first
from tests.sure import sure
from tests.unit.explaining import op, own, profile, timing
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.nn.functional import cross_entropy

from steplab.costs.rates import gpu_named
from steplab.errors import Unsupported
from steplab.explain.api import explain
from steplab.fake_step import shares, step
from steplab.fake_step.cuda import as_on_cuda
from steplab.fake_step.host_made import HostMade
from steplab.fake_step.step import fake_step, operators_of_fake
from steplab.lab import profiling
from steplab.lab.planning import plan_memory, plan_steps, plan_time
from steplab.lab.profiling import with_compiled_shares
from steplab.measurement.jobs import JOBS, StepTask
from steplab.measurement.observer import Observer
from steplab.measurement.processes.conversation import Listener
from steplab.model.build import build_workload
from steplab.model.workload import Workload
from steplab.plan.dry_run.allocator import Ledger, Peak
from steplab.plan.dry_run.events import MADE_BY_HOST, Event, Operator
from steplab.plan.dry_run.step import dry_step, memory_of, operators_of
from steplab.plan.memory import HOPPER_WORKSPACE, predict_memory
from steplab.plan.time import predict_step_time
from steplab.records.codec import decode, encode
from steplab.records.run import Run
from steplab.records.step_time import PlannedStep
from steplab.report.plan.steps import planned_table
from steplab.report.plan.time import time_document
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec
from steplab.store.database import Store
from steplab.units import MIB

SMALL = {"model": "small", "batch": "2", "context": "128", "model.num_layers": "1"}
STEPS = {
    "bf16": {"precision": "bf16", "attention": "sdpa_flash"},
    "fp32": {"precision": "fp32", "attention": "plain"},
    "gpt2": {
        "precision": "bf16",
        "model.norm": "layernorm",
        "model.feed_forward": "gelu",
        "model.biases": "all",
        "model.head": "tied",
        "model.learned_positions": "128",
        "attention": "sdpa_flash",
    },
    "masters": {
        "precision": "bf16_master",
        "attention": "sdpa_flash",
        "model.biases": "all",
        "optimizer": "adamw_triton",
        "pass": "forward_backward",
    },
    "recomputed": {
        "precision": "bf16",
        "attention": "sdpa_flash",
        "checkpointing": "first_1",
        "model.num_kv_heads": "4",
        "model.num_layers": "2",
    },
    "second products": {"precision": "bf16", "attention": "sdpa_flash", "checkpointing": "selective_2"},
    "micro-steps": {"precision": "bf16_pure", "attention": "sdpa_flash", "accumulation": "2"},
}


@pytest.fixture(params=first(4, ["gpt2", "masters", "recomputed", "micro-steps", "bf16", "fp32", "second products"]))
def spec(request: pytest.FixtureRequest) -> StepSpec:
    return resolve_step({**SMALL, **STEPS[request.param]})


def test_the_plain_transformer_has_the_operators_and_the_peak_of_the_dry_run(spec: StepSpec) -> None:
    dry = memory_of(spec, workspace=HOPPER_WORKSPACE).peak()
    ledger, theirs = Ledger(), list[Operator]()

    def listen(event: Event) -> None:
        ledger.listen(event)
        theirs.extend([event] if isinstance(event, Operator) else [])

    with fake_step(spec, HOPPER_WORKSPACE, listen) as run:
        run()
        theirs.clear()
        ledger.watch()
        run()
        fake = ledger.peak()
    assert fake.phase == dry.phase
    # beyond what the dry run has: the state of random numbers that attention keeps, and a quotient of each micro-step
    assert by_category(fake) == pytest.approx(by_category(dry), abs=100)
    assert fake.num_bytes == pytest.approx(dry.num_bytes, abs=2 * MIB)  # of blocks that are taken whole

    ours = operators_of(spec)
    assert sum(op.flops for op in ours if op.product) == sum(op.flops for op in theirs if op.product)
    assert Counter(map(told, ours)) == Counter(told(op) for op in theirs if op.name != "_foreach_add_")


def test_an_overlapped_update_has_its_peak_in_the_backward_pass() -> None:
    spec = resolve_step({**SMALL, **STEPS["bf16"], "update": "overlapped"})
    dry, fake = (memory_of(spec, workspace=HOPPER_WORKSPACE, open_step=each) for each in (dry_step, fake_step))
    assert dry.phase_peaks.keys() == fake.phase_peaks.keys() == {"forward", "backward"}
    assert fake.peak().phase == dry.peak().phase == "backward"
    assert fake.peak().num_bytes == pytest.approx(dry.peak().num_bytes, abs=2 * MIB)
    assert "optimizer" in {op.phase for op in operators_of_fake(spec)}  # its time is separate, for the hidden share


def by_category(peak: Peak) -> Counter[str]:
    found = Counter[str]()
    for piece in peak.pieces:
        found[piece.category] += piece.num_bytes
    return found


def told(op: Operator) -> tuple[object, ...]:
    return (op.phase, op.recomputed, op.kind, op.name, op.product, round(op.written_bytes, -2))


def test_torch_is_left_as_it_was() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        operators_of_fake(resolve_step({**SMALL, **STEPS["bf16"]}))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    x = torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.functional.layer_norm(x.bfloat16(), (4,)).dtype is torch.bfloat16
        assert cross_entropy(x.bfloat16(), torch.zeros(2, dtype=torch.int64)).dtype is torch.float32


def test_compiled_code_looks_its_kernels_up_anew_after_a_step_as_on_cuda() -> None:
    dropout, with_matmul = torch.ops.aten.dropout.default, torch.ops.aten.matmul.default
    with as_on_cuda(), FakeTensorMode(), enable_python_dispatcher():
        torch.matmul(torch.dropout(torch.ones(4, 4), 0.5, True), torch.ones(4, 4))
        assert dropout._dispatch_cache
        assert with_matmul._dispatch_cache
    assert not dropout._dispatch_cache
    assert not with_matmul._dispatch_cache


# --- models of others -------------------------------------------------------------------------------------


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, dim_feedforward=256, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(64, 1000)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        print("said by the model")
        x_BTC = self.embedding(tokens_BT)
        mask = nn.Transformer.generate_square_subsequent_mask(x_BTC.shape[1])
        for block in self.blocks:
            x_BTC = block(x_BTC, is_causal=True, src_mask=mask)
        return cross_entropy(self.head(x_BTC).flatten(0, 1), targets_BT.flatten())


def foreign(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Foreign(), lambda: tuple(torch.randint(1000, (batch, context), device=device) for _ in range(2))


class Reading(Foreign):
    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss = super().forward(tokens_BT, targets_BT)
        return loss if loss.item() > 0 else -loss


def reading(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Reading(), foreign(batch, context, device)[1]


class Logging(Foreign):
    total = 0.0

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss = super().forward(tokens_BT, targets_BT)
        self.total += loss.item()
        return loss


def logging(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Logging(), foreign(batch, context, device)[1]


class Printing(Foreign):
    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss = super().forward(tokens_BT, targets_BT)
        print(f"{loss.item():.3f}")
        return loss


def printing(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Printing(), foreign(batch, context, device)[1]


class Leaving(Foreign):
    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        tokens_BT.numpy()
        return super().forward(tokens_BT, targets_BT)


def leaving(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Leaving(), foreign(batch, context, device)[1]


def sparse(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    model, make_batch = foreign(batch, context, device)
    model.embedding = nn.Embedding(1000, 64, sparse=True)
    return model, make_batch


class Recurrent(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.rnn = nn.LSTM(64, 64, batch_first=True)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return cross_entropy(self.head(self.rnn(self.embedding(tokens_BT))[0]).flatten(0, 1), targets_BT.flatten())


def recurrent(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Recurrent(), foreign(batch, context, device)[1]


class Flat(Foreign):
    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return cross_entropy(self.head(self.embedding(tokens_BT)).flatten(0, 1), targets_BT.flatten())


def flat(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Flat(), foreign(batch, context, device)[1]


def whole_step() -> Callable[[], None]:
    return lambda: None


def test_a_factory_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_memory(f"{__name__}:foreign", precision="bf16", context=64)
    weights = sum(parameter.numel() for parameter in Foreign().parameters())
    assert found.kind == "traced"
    assert found.at_peak["parameters"] == 4 * weights
    assert found.at_peak["temporaries"] > 0
    assert found.at_peak["optimizer_state"] >= 8 * weights
    time = plan_time(f"{__name__}:foreign", precision="bf16", context=64, compile="default")
    products = [part for part in time.parts if part.kind == "matmul"]
    linear = 2 * 4 * 64 * (2 * 12 * 64 * 64 + 64 * 1000)  # of one forward pass; the backward pass has twice as many
    assert sum(part.flops for part in products) == 3 * linear
    assert any(part.what == "fused" for part in time.parts)
    printed = capsys.readouterr()
    assert "said by the model" not in printed.out
    assert "said by the model" in printed.err


def of_own_batches(device: torch.device) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return foreign(2, 8, device)


@cache
def planned(name: str) -> PlannedStep:
    (found,) = plan_steps([resolve_step({"model": f"{__name__}:{name}", "context": "64"})])
    return found


def test_tokens_of_batches_that_a_factory_sizes_itself_are_not_known() -> None:
    said = f"tokens per second: {__name__}:of_own_batches sizes its batches itself"
    for name, is_known in (("foreign", True), ("of_own_batches", False)):
        time = sure(planned(name).time)
        (row,) = planned_table([planned(name)]).rows
        verdict = sure(time_document(planned(name).spec, time).verdict)
        assert row["tokens_per_s"] == (4 * 64 / time.central_s if is_known else None)
        assert ("tokens/s on one GPU" in " ".join(verdict.sentences)) == is_known
        assert (said in time.notes) == (not is_known)


def test_memory_and_time_are_read_from_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = resolve_step({"model": f"{__name__}:foreign", "precision": "bf16", "context": "64"})
    memory, time, built = plan_memory(spec), plan_time(spec), list[StepSpec]()

    def build(spec: StepSpec, device: torch.device) -> Workload:
        built.append(spec)
        return build_workload(spec, device)

    monkeypatch.setattr(step, "build_workload", build)
    (found,) = plan_steps([spec])
    assert dataclasses.replace(sure(found.memory), notes=memory.notes) == memory  # which names no GPU
    assert found.time == time
    assert [each.pass_name for each in built] == ["train", "forward_backward"]  # the steps; the model's sizes


def _line_of(text: str) -> int:
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("reading", rf"at test_fake_step.py:{_line_of('loss.item() > 0')} it computes with values of tensors"),
        ("printing", rf"at test_fake_step.py:{_line_of('print(f')} it computes with values of tensors"),
        ("leaving", rf"at test_fake_step.py:{_line_of('tokens_BT.numpy()')} it fails on tensors without content"),
        ("sparse", "makes sparse tensors; their sizes depend on values"),
        ("recurrent", "the cost of operators like its mkldnn_rnn_layer is not known"),
        ("whole_step", "its factory returns a whole step"),
    ],
)
def test_what_cannot_be_traced_is_refused(factory: str, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        plan_time(f"{__name__}:{factory}", context=64)


def test_a_peak_outside_of_blocks_is_said_to_be_of_what_is_there() -> None:
    found = plan_memory(resolve_step({"model": f"{__name__}:flat", "context": 64, "pass": "forward_backward"}))
    assert found.peak_where.startswith("output of ")


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ("torch.ones(8, 8)", True),
        ("torch.tensor([[1.0, 0.0]])", True),
        ("torch.full((8, 8), 1.0, device=None)", True),
        ("torch.ones(8, 8, device=here)", False),
        ("torch.ones_like(there)", False),
        ("torch.tensor(1.0)", False),
    ],
)
def test_tensors_are_the_hosts_that_name_no_device(mask: str, said: bool) -> None:
    there, found = torch.zeros(8, 8), list[Tensor]()
    with HostMade(found.append):
        eval(mask, {"torch": torch, "there": there, "here": there.device})
    assert bool(found) == said


def test_the_line_that_makes_a_mask_in_each_step_is_named_and_costs_nothing() -> None:
    found = sure(planned("foreign").time)
    (note,) = (note for note in found.notes if "without naming a device" in note)
    line = _line_of("mask = nn.Transformer.generate")
    assert note.startswith(
        f"the model makes 1 tensor in a step without naming a device, at test_fake_step.py:{line}, which"
    )
    assert all(part.what != MADE_BY_HOST for part in found.parts)


def test_a_value_that_is_read_and_decides_nothing_is_no_hindrance() -> None:
    logged, silent = (sure(planned(name).time) for name in ("logging", "foreign"))
    (note,) = set(logged.notes) - set(silent.notes)
    place = f"test_fake_step.py:{_line_of('self.total += loss')}"
    assert note.startswith(f"the model reads 1 value off tensors in a step, as `.item()` does, at {place}: ")
    assert sum(part.flops for part in logged.parts if part.kind == "matmul") == sum(
        part.flops for part in silent.parts if part.kind == "matmul"
    )
    assert sure(planned("logging").memory).peak_bytes == sure(planned("foreign").memory).peak_bytes


def asked(factory: str, **fields: object) -> StepSpec:
    return resolve_step({"model": factory, "context": 64, "precision": "bf16", **fields})


def profiled(factory: str) -> Run:
    seen = profile([op("aten::mul", "elementwise", 3.0, where="blocks.*")])
    return dataclasses.replace(own({"model": "small"}, seen, timing(4.0)), spec=asked(factory))


def test_what_compiling_leaves_of_a_model_of_ones_own_becomes_part_of_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operators: list[Operator] = []

    def seen(spec: StepSpec) -> tuple[Operator, ...]:
        operators.extend(operators_of_fake(spec))
        return tuple(operators)

    monkeypatch.setattr(profiling, "ask", asked_here)
    monkeypatch.setattr(shares, "operators_of_fake", seen)
    run = with_compiled_shares(profiled(f"{__name__}:foreign"))
    assert run.profile is not None
    assert run.profile.compiled is not None
    eager, compiled = (
        predict_step_time(asked(f"{__name__}:foreign", compile=mode), gpu_named("H200 SXM"), operators)
        for mode in ("off", "default")
    )
    kernels = [sum(part.kernels for part in each.parts if part.phase != "optimizer") for each in (eager, compiled)]
    assert run.profile.compiled.kernels == kernels[1] / kernels[0]
    assert run.profile.compiled.host == pytest.approx(compiled.step.host_s / eager.step.host_s)
    assert 0 < run.profile.compiled.memory_bound < 1
    assert decode(encode(run)) == run
    [finding] = explain(run)
    assert finding.saves_s == pytest.approx(3.0e-3 * (1 - run.profile.compiled.memory_bound))


def test_a_model_that_cannot_be_run_dry_has_a_record_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "ask", asked_here)
    run = with_compiled_shares(profiled("missing_module:build"))
    assert run.profile is not None
    assert run.profile.compiled is None
    [note] = run.profile.notes
    assert "compiled: what compiling would save is not predicted: cannot import missing_module" in note


def test_a_fault_of_the_dry_run_costs_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = profiled("missing_module:build")

    def measured(task: StepTask, **others: object) -> Run:
        Path(sure(task.trace)).write_bytes(b"{}")
        return dataclasses.replace(whole, profile=None)

    def faulty(*arguments: object) -> Run:
        raise ArithmeticError("of the dry run")

    monkeypatch.setattr(profiling, "measure_in_child", measured)
    monkeypatch.setattr(profiling, "read_profile", lambda *arguments: whole.profile)
    monkeypatch.setattr(profiling, "with_compiled_shares", faulty)
    with pytest.raises(ArithmeticError, match="of the dry run"):
        profiling.profile("small", store=tmp_path / "store.db")
    with Store.open(tmp_path / "store.db", write=False) as store:
        [record] = store.iterate()
    assert isinstance(record, Run)
    assert record.profile == whole.profile


@pytest.mark.parametrize("changed", [{"device": "cpu"}, {"compile": "block"}])
def test_nothing_is_predicted_of_another_device_and_of_what_is_compiled(changed: dict[str, str]) -> None:
    run = own({"model": "small"} | changed, profile([], device=changed.get("device", "cuda")), None)
    assert with_compiled_shares(run) is run


def asked_here(job: str, task: object, **options: object) -> Listener:
    result = JOBS[job].do(msgspec.Raw(encode(task)), Observer(), None)
    listener = Listener(JOBS[job])
    listener.result = msgspec.json.decode(encode(result), type=JOBS[job].result)
    return listener


@pytest.fixture
def gpt2(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    path = tmp_path / "gpt2.json"
    sizes = '"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_positions": 128'
    path.write_text(f'{{"model_type": "gpt2", {sizes}}}')
    return f"hf:{path}"


def test_masters_are_traced_without_their_optimizer_and_refused_where_there_are_no_linear_layers(gpt2: str) -> None:
    own: dict[str, object] = {"context": "64", "precision": "bf16_master", "optimizer": "adamw_triton"}
    with pytest.raises(Unsupported, match="it has a kernel of its own; use --pass forward_backward"):
        plan_memory(resolve_step(own | {"model": gpt2}))
    for compiled in ("off", "default"):
        with pytest.raises(Unsupported, match=r"it has no linear layer .*; use --precision bf16$"):
            plan_memory(resolve_step(own | {"model": gpt2, "pass": "forward_backward", "compile": compiled}))
    fields = {"model": f"{__name__}:foreign", "pass": "forward_backward"}
    traced, autocast = (plan_memory(resolve_step(own | fields | {"precision": p})) for p in ("bf16_master", "bf16"))
    linear = 2 * (2 * 64 * 256 + 256 + 64) + 64 * 1000 + 1000  # the layers of its attention are subclasses
    assert traced.at_peak["parameters"] == autocast.at_peak["parameters"] - 2 * linear


def test_a_configuration_of_transformers_is_traced(gpt2: str) -> None:
    spec = resolve_step({"model": gpt2, "context": "64", "attention": "sdpa"})
    traced = plan_memory(spec)
    assert traced.kind == "traced"
    with pytest.raises(Unsupported, match="its operators are known by a trace alone"):
        predict_memory(spec)
    module = sure(build_workload(spec, torch.device("meta")).module)
    for category, copies in (("parameters", 1), ("optimizer_state", 2)):
        of_weights = copies * 4 * sum(parameter.numel() for parameter in module.parameters())
        assert traced.at_peak[category] == pytest.approx(of_weights, rel=1e-2), "besides step numbers and tables"
    tokens = spec.tokens_of_all
    weights = [p.numel() for name, p in module.named_parameters() if p.dim() == 2 and "wpe" not in name]
    by_trace = sum(op.flops for op in operators_of_fake(spec) if op.kind == "matmul")
    assert by_trace == 6 * tokens * sum(weights), "2 FLOPs a weight and token, in three products"


def test_experts_are_predicted_in_fp32_too(tmp_path: Path) -> None:
    """torch refuses their grouped product in fp32 only without content."""
    path = tmp_path / "moe.json"
    path.write_text('{"model_type": "mixtral", "num_local_experts": 8, "num_hidden_layers": 2}')
    (found,) = plan_steps([resolve_step({"model": f"hf:{path}"})])
    assert sure(found.time).central_s > 0
    assert sure(found.memory).peak_bytes > 0
