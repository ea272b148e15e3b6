import dataclasses
import math
import statistics
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from tests.runs import make_run
from tests.sure import sure
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from steplab.costs.flops import num_embedding_parameters, num_parameters
from steplab.errors import Unsupported, UserError
from steplab.lab.utilization import PeakFigure, utilizations
from steplab.measurement import step_job as session
from steplab.measurement.clock import Phase
from steplab.measurement.jobs import AuditTask
from steplab.measurement.observer import Observer
from steplab.measurement.precision import session as audit_session
from steplab.measurement.step_job import measure_here
from steplab.model.build import build_workload
from steplab.model.workload import Workload, loss_of
from steplab.records.environment import Environment
from steplab.records.run import ModelFacts, Run
from steplab.records.timing import curve
from steplab.report.run.cells import cells_of
from steplab.report.run.one_run import gaps
from steplab.report.run.verdict import run_cautions, runs_verdict
from steplab.specs.attention_kernels import refuse_unserved_kernels
from steplab.specs.resolve import resolve_step
from steplab.specs.step import CHOICES

PHASES = {
    "forward": ["forward"],
    "forward_backward": ["forward", "backward"],
    "train": ["forward", "backward", "optimizer"],
}
TINY: dict[str, object] = {
    "model": "tiny", "model.num_layers": 1, "model.d_model": 16, "model.d_ff": 24, "model.num_heads": 2,
    "model.vocab_size": 31, "batch": 2, "context": 5, "warmup": 1, "steps": 2, "device": "cpu",
}  # fmt: skip
HUGE_BYTES = 2**62 + 3

pytestmark = pytest.mark.usefixtures("torch_settings_put_back")


@dataclasses.dataclass
class Watched:
    module: nn.Module
    before: dict[str, Tensor]
    gradients: dict[str, list[Tensor]]

    def changed(self) -> set[str]:
        return {name for name, value in self.module.state_dict().items() if not torch.equal(value, self.before[name])}


def keep_a_copy(kept: list[Tensor], gradient: Tensor) -> None:
    kept.append(gradient.detach().clone())


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    seen: list[Watched] = []

    def build(spec: Any, device: torch.device) -> Workload:
        workload = build_workload(spec, device)
        assert workload.module is not None
        watched = Watched(
            workload.module, {name: value.clone() for name, value in workload.module.state_dict().items()}, {}
        )
        for name, parameter in workload.module.named_parameters():
            watched.gradients[name] = []
            parameter.register_hook(partial(keep_a_copy, watched.gradients[name]))
        seen.append(watched)
        return workload

    monkeypatch.setattr(session, "build_workload", build)
    return seen


def measured(observer: Observer | None = None, /, **fields: object) -> Run:
    return measure_here(
        resolve_step(TINY | {k.replace("__", "."): v for k, v in fields.items()}), observer or Observer()
    )


def succeeded(run: Run) -> Run:
    assert run.failure is None, run.failure
    return run


# --- what a pass does -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_name", CHOICES["pass_name"])
def test_a_pass_has_its_phases_and_a_sample_a_step(pass_name: str) -> None:
    run = succeeded(measured(**{"pass": pass_name}))
    assert run.timing is not None
    for phases, count in ((run.timing.warmup, 1), (run.timing.back_to_back, 2)):
        assert [phase.phase for phase in phases] == [*PHASES[pass_name], "step"]
        assert all(phase.device_s is None and len(phase.best_s) == count for phase in phases)
    assert run.timing.synchronised == ()
    assert run.timing.first_step_s is None
    assert run.tokens_per_step == 10


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_step_is_the_sum_of_its_phases(warmup: int) -> None:
    timing = sure(succeeded(measured(warmup=warmup)).timing)
    *parts, step = timing.back_to_back
    for of_parts, whole in zip(zip(*(part.best_s for part in parts), strict=True), step.best_s, strict=True):
        # Each figure is a whole number of nanoseconds, divided: one rounding each, and one an addition.
        assert math.fsum(of_parts) == pytest.approx(whole, rel=5 * 2**-52, abs=0)
    assert len(curve(timing)) == warmup + 2
    assert sum(step.best_s) <= (timing.back_to_back_host_s or 0)


@pytest.mark.parametrize("pass_name", CHOICES["pass_name"])
def test_training_alone_changes_parameters_and_every_backward_pass_has_gradients_and_leaves_none(
    watch: list[Watched], pass_name: str
) -> None:
    succeeded(measured(**{"pass": pass_name}, warmup=1, steps=2))
    assert watch[0].changed() == (set(watch[0].before) if pass_name == "train" else set())
    expected = 0 if pass_name == "forward" else 3
    for name, parameter in watch[0].module.named_parameters():
        assert len(watch[0].gradients[name]) == expected, name
        assert parameter.grad is None, name


def test_gradients_do_not_accumulate_over_steps(watch: list[Watched]) -> None:
    """Without an optimizer parameters stay, and every second step has the same batch and gradient."""
    succeeded(measured(**{"pass": "forward_backward"}, warmup=0, steps=4))
    for name, (first, second, third, fourth) in watch[0].gradients.items():
        assert torch.equal(first, third), name
        assert torch.equal(second, fourth), name
        assert not torch.equal(first, second), name


def test_inference_keeps_no_graph(watch: list[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    grad_modes: list[bool] = []
    forward = nn.Linear.forward

    def note(self: nn.Linear, x: Tensor) -> Tensor:
        grad_modes.append(torch.is_grad_enabled())
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", note)
    succeeded(measured(**{"pass": "forward"}))
    assert set(grad_modes) == {False}
    assert not watch[0].module.training


def test_a_seed_decides_the_weights_and_the_batch(watch: list[Watched]) -> None:
    for seed in (3, 3, 4):
        succeeded(measured(**{"pass": "forward_backward"}, seed=seed))
    one, same, other = watch
    assert all(torch.equal(one.before[name], same.before[name]) for name in one.before if "norm" not in name)
    assert all(torch.equal(one.gradients[name][0], same.gradients[name][0]) for name in one.gradients)
    assert not any(torch.equal(one.before[name], other.before[name]) for name in one.before if "norm" not in name)


def test_the_gradients_are_those_of_the_model_by_itself(watch: list[Watched]) -> None:
    succeeded(measured(**{"pass": "forward_backward"}, warmup=0, steps=1, seed=5))
    workload = build_workload(resolve_step(TINY | {"seed": 5}), torch.device("cpu"))
    assert workload.module is not None
    workload.module(*sure(workload.make_batch)()).backward()
    for name, parameter in workload.module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(watch[0].gradients[name][0], parameter.grad)


def test_a_step_of_sgd_is_the_gradient_times_the_learning_rate(watch: list[Watched]) -> None:
    succeeded(measured(optimizer="sgd", warmup=0, steps=1))
    for name, parameter in watch[0].module.named_parameters():
        expected = watch[0].before[name] - 1e-4 * watch[0].gradients[name][0]
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("optimizer", [name for name in CHOICES["optimizer"] if name.startswith("adamw")])
def test_the_ways_to_compute_adamw_agree(watch: list[Watched], optimizer: str) -> None:
    succeeded(measured(optimizer=optimizer, warmup=0, steps=3))
    succeeded(measured(optimizer="adamw_loop", warmup=0, steps=3))
    one, reference = (watched.module.state_dict() for watched in watch)
    for name, value in one.items():
        torch.testing.assert_close(value, reference[name])


@pytest.mark.parametrize(
    ("optimizer", "fused", "foreach"),
    [("adamw_fused", True, False), ("adamw_foreach", False, True), ("adamw_loop", False, False)],
)
def test_the_implementation_of_adamw_is_the_one_asked_for(optimizer: str, fused: bool, foreach: bool) -> None:
    used = []
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: used.append(optimizer))
    try:
        succeeded(measured(optimizer=optimizer))
    finally:
        handle.remove()
    assert len(used) == 3
    assert all(isinstance(one, torch.optim.AdamW) for one in used)
    assert {(bool(one.defaults["fused"]), bool(one.defaults["foreach"])) for one in used} == {(fused, foreach)}


# --- precision --------------------------------------------------------------------------------------------


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    seen: set[torch.dtype] = set()
    forward = nn.Linear.forward

    def note(self: nn.Linear, x: Tensor) -> Tensor:
        out = forward(self, x)
        seen.add(out.dtype)
        return out

    monkeypatch.setattr(nn.Linear, "forward", note)
    return seen


@pytest.mark.parametrize(
    ("precision", "product", "weight"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float32),
        ("bf16_pure", torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("pass_name", CHOICES["pass_name"])
def test_a_precision_is_that_of_the_products_and_of_the_weights(
    watch: list[Watched],
    products: set[torch.dtype],
    precision: str,
    product: torch.dtype,
    weight: torch.dtype,
    pass_name: str,
) -> None:
    states: set[torch.dtype] = set()

    def note(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for state in optimizer.state.values():
            states.update({state["exp_avg"].dtype, state["exp_avg_sq"].dtype})

    handle = register_optimizer_step_post_hook(note)
    try:
        succeeded(measured(precision=precision, **{"pass": pass_name}))
    finally:
        handle.remove()
    assert products == {product}
    assert {parameter.dtype for parameter in watch[0].module.parameters()} == {weight}
    # bf16 has eight bits: positions beyond 256 would share angles of the rotary embedding.
    assert {buffer.dtype for buffer in watch[0].module.buffers()} == {torch.float32}
    assert {g.dtype for gradients in watch[0].gradients.values() for g in gradients} <= {weight}
    assert states == ({weight} if pass_name == "train" else set())


@pytest.mark.parametrize("pass_name", CHOICES["pass_name"])
def test_weights_with_masters_are_those_of_products_and_train_in_fp32(
    watch: list[Watched], products: set[torch.dtype], pass_name: str
) -> None:
    states: dict[str, set[torch.dtype]] = {}

    def note(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for state in optimizer.state.values():
            for name in set(state) - {"step"}:
                states.setdefault(name, set()).add(state[name].dtype)

    handle = register_optimizer_step_post_hook(note)
    try:
        run = succeeded(measured(precision="bf16_master", optimizer="adamw_triton", **{"pass": pass_name}))
    finally:
        handle.remove()
    assert products == {torch.bfloat16}
    in_fp32 = {name for name, p in watch[0].module.named_parameters() if p.dtype == torch.float32}
    assert in_fp32 == {name for name, _ in watch[0].module.named_parameters() if "norm" in name or "embedding" in name}
    trained = {name: {torch.float32} for name in ("master", "exp_avg", "exp_avg_sq")}
    assert states == (trained if pass_name == "train" else {})
    assert run.spec is not None
    used = utilizations(run, peak=PeakFigure(flops_per_s=1e12, source="given"))
    assert {each.dtype for each in used} == {"bf16"}


@pytest.mark.parametrize(("precision", "exponent"), [("fp32", 0), ("bf16", 0), ("fp16", 16)])
def test_only_fp16_scales_its_loss_by_the_scaler_that_torch_begins_with(
    watch: list[Watched], precision: str, exponent: int
) -> None:
    for chosen in (precision, "fp32"):
        succeeded(measured(precision=chosen, **{"pass": "forward_backward"}, warmup=0, steps=1))
    scaled, plain = (
        math.sqrt(sum(float(g.double().square().sum()) for gradients in one.gradients.values() for g in gradients))
        for one in watch
    )
    assert round(math.log2(scaled / plain)) == exponent


def test_training_in_fp16_undoes_the_scale_before_the_update(watch: list[Watched]) -> None:
    """SGD's update would otherwise be 65536 times as large."""
    for precision in ("fp16", "fp32"):
        succeeded(measured(precision=precision, optimizer="sgd", warmup=0, steps=1))
    updates = [
        math.sqrt(
            sum(float((p.detach() - one.before[n]).double().square().sum()) for n, p in one.module.named_parameters())
        )
        for one in watch
    ]
    assert round(math.log2(updates[0] / updates[1])) == 0


@pytest.mark.parametrize(("precision", "expected"), [("tf32", "high"), ("fp32", "highest"), ("bf16", "highest")])
@pytest.mark.parametrize("before", ["high", "highest"])
def test_tf32_is_allowed_where_it_was_asked_for_and_nowhere_else(precision: str, expected: str, before: str) -> None:
    from steplab.measurement.step.step import make_step

    torch.set_float32_matmul_precision(before)
    spec = resolve_step(TINY | {"precision": precision})
    make_step(build_workload(spec, torch.device("cpu")), spec, torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == expected
    assert torch.backends.cudnn.allow_tf32 == (expected == "high")


def test_tf32_on_a_device_that_has_none_is_refused() -> None:
    """The CPU would compute in fp32 under the name tf32."""
    with pytest.raises(Unsupported, match="tf32"):
        measured(precision="tf32")


# --- compilation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "given"), [("default", None), ("max-autotune", "max-autotune")])
def test_the_step_that_compiles_is_timed_apart(monkeypatch: pytest.MonkeyPatch, mode: str, given: str | None) -> None:
    now_ns = 0
    modes = []

    def compiled(module: nn.Module, *, mode: str | None) -> Callable[..., Any]:
        modes.append(mode)
        costs = iter([40, *[2] * 99])

        def run(*batch: Tensor) -> Any:
            nonlocal now_ns
            now_ns += next(costs) * 10**9
            return module(*batch)

        return run

    clock = SimpleNamespace(perf_counter=lambda: now_ns / 10**9, perf_counter_ns=lambda: now_ns)
    for name in ("clock", "machine.device"):
        monkeypatch.setattr(f"steplab.measurement.{name}.time", clock)
    monkeypatch.setattr(torch, "compile", compiled)
    run = succeeded(measured(compile=mode, warmup=1, steps=3))
    assert modes == [given]
    assert run.timing is not None
    assert run.timing.first_step_s == 40.0
    assert curve(run.timing) == (2.0, 2.0, 2.0, 2.0)
    assert run.timing.back_to_back_host_s == 6.0


# --- what is told on the way, and what the record says ----------------------------------------------------


@dataclasses.dataclass
class Log:
    events: list[object] = dataclasses.field(default_factory=list)

    def observer(self) -> Observer:
        def on_environment(environment: Environment) -> None:
            self.events.append(environment.device.kind)

        return Observer(
            on_environment=on_environment,
            on_stage=lambda stage, num_steps: self.events.append((stage, num_steps)),
            on_step=self.events.append,
        )


@pytest.mark.parametrize("compile", ["off", "default"])
def test_an_observer_sees_the_stages_and_their_steps_in_order(monkeypatch: pytest.MonkeyPatch, compile: str) -> None:
    compiler = Mock(side_effect=lambda module, mode: module)
    monkeypatch.setattr(torch, "compile", compiler)
    log = Log()
    succeeded(measured(log.observer(), compile=compile, warmup=2, steps=3))
    assert compiler.called == (compile != "off")
    compiling = [("compile", 1)] if compile != "off" else []
    assert log.events == ["cpu", ("build", 0), *compiling, ("warmup", 2), 0, 1, ("measure", 3), 0, 1, 2]


@pytest.mark.parametrize(("slower", "samples"), [(math.inf, 6), (0.0, 0)])
def test_a_step_on_a_cpu_is_tried_with_one_thread_and_told_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, slower: float, samples: int
) -> None:
    threads = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(session, "median", lambda steps: slower)
    run = succeeded(measured())
    assert run.timing is not None
    assert len(run.timing.one_thread_s) == samples
    assert threads == [4, 1, 4]
    assert run.environment is not None
    # On a busy machine the sentence begins otherwise.
    quiet = dataclasses.replace(run.environment, other_cpus=None, load_average=None)
    many = dataclasses.replace(run.timing.back_to_back[0], phase="step", device_s=None, host_s=(1.0,) * 10)
    for one_thread_s, said in (((0.1,) * 6, True), ((1.0,) * 6, False)):
        timing = dataclasses.replace(run.timing, back_to_back=(many,), one_thread_s=one_thread_s)
        told = " ".join(runs_verdict(cells_of([dataclasses.replace(run, timing=timing, environment=quiet)])).sentences)
        assert ("With one thread it takes 100 ms, 10.0× as fast: OMP_NUM_THREADS=1 steplab run" in told) == said


def test_measuring_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    succeeded(measured())
    assert capfd.readouterr() == ("", "")


def test_the_record_holds_the_sizes_of_the_model_as_built(watch: list[Watched]) -> None:
    run = succeeded(measured())
    assert run.spec is not None
    assert run.spec.model.shape is not None
    assert run.model is not None
    assert run.model.num_parameters == sum(p.numel() for p in watch[0].module.parameters())
    assert run.model.num_parameters == num_parameters(run.spec.model.shape)
    assert run.model.num_embedding_parameters == num_embedding_parameters(run.spec.model.shape) == 31 * 16
    assert (run.model.num_layers, run.model.attention_width) == (1, 16)


def test_a_cpu_has_no_peak_of_device_memory_and_the_record_says_so() -> None:
    run = succeeded(measured())
    assert run.memory is not None
    assert run.memory.peaks == ()
    assert run.memory.total_bytes is None
    assert run.memory.host_peak_bytes is None or run.memory.host_peak_bytes > 0
    assert any("high-water mark" in note for note in run.notes)


def test_the_planning_size_cannot_be_measured() -> None:
    with pytest.raises(Unsupported, match=r"xxl.*planning only"):
        measure_here(resolve_step({"model": "xxl", "device": "cpu"}), Observer())


# --- failures ---------------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


class Layers(nn.Module):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.layers, self.recompute = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))), recompute

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.layers, x, use_reentrant=False) if self.recompute else self.layers(x)
        return y.sum()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(*self.layer(x).chunk(3, -1)).sum()


class Failing(nn.Module):
    def __init__(self, at: int, fail: Callable[[], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.at, self.calls, self.fail = at, 0, fail

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.at:
            self.fail()
        return (self.weight * x).sum()


def explode() -> None:
    raise ZeroDivisionError("the model's own mistake\nwith a second line")


def allocate() -> None:
    torch.empty(HUGE_BYTES, dtype=torch.uint8)


def lack() -> None:
    raise Unsupported("this", "no kernel for it", "use another")


def refuse() -> None:
    raise UserError("not like this")


def batch() -> Tensor:
    return torch.ones(3)


def linear() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Linear(), lambda: torch.ones(5, 8)


def layers() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Layers(recompute=False), lambda: torch.ones(5, 8)


def recomputed_layers() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Layers(recompute=True), lambda: torch.ones(5, 8)


def attending() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Attending(), lambda: torch.ones(2, 3, 16, 8)


def giving_logits_too() -> tuple[nn.Module, Callable[[], Tensor]]:
    class Both(Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return x, super().forward(x)

    return Both(), lambda: torch.ones(5, 8)


def overflowing() -> tuple[nn.Module, Callable[[], Tensor]]:
    module = Linear()
    with torch.no_grad():
        next(module.parameters()).zero_()
    return module, lambda: torch.full((5, 8), 3e38)  # gradients sum to infinity over a batch


def needing_more(batch: int, ctx: int, *, width: int = 8) -> tuple[nn.Module, Callable[[], Tensor]]:
    return Linear(), lambda: torch.ones(5, width)


def exploding_at_once() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Failing(0, explode), batch


def exploding_later() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Failing(2, explode), batch


def exploding_after_the_measured_steps() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Failing(2 + 3, explode), batch


def exploding_in_the_factory() -> tuple[nn.Module, Callable[[], Tensor]]:
    explode()
    raise AssertionError


def allocating() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Failing(0, allocate), batch


def lacking() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Failing(0, lack), batch


def refusing() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Failing(0, refuse), batch


def own_step() -> Callable[[], object]:
    return lambda: torch.ones(3).sum()


def giving_a_batch() -> tuple[nn.Module, Tensor]:
    return Failing(0, refuse), torch.ones(3)


def taking_sizes(batch: int, context: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    module, _ = linear()
    width = next(module.parameters()).shape[-1]
    return module, lambda: torch.ones(batch, context, width)


def of_this_file(factory: Callable[[], object], **fields: object) -> Run:
    name = f"{factory.__module__}:{factory.__name__}"
    return measure_here(resolve_step({"model": name, "device": "cpu", "warmup": 2, "steps": 3} | fields), Observer())


def exiting() -> None:
    raise SystemExit("no --data was given")


def test_code_of_the_model_that_exits_is_a_failure_that_says_where_and_why() -> None:
    failure = sure(of_this_file(exiting).failure)
    line = exiting.__code__.co_firstlineno + 1
    assert failure.message == f"SystemExit: no --data was given (test_session.py:{line})"


@pytest.mark.parametrize(
    ("factory", "stage"),
    [(exploding_in_the_factory, "build"), (exploding_at_once, "warmup"), (exploding_later, "measure")],
)
def test_an_exception_of_the_model_is_a_failure_that_names_its_stage(factory: Callable[[], object], stage: str) -> None:
    run = of_this_file(factory)
    assert run.failure is not None
    assert (run.status, run.failure.phase) == ("error", stage)
    line = explode.__code__.co_firstlineno + 1
    assert run.failure.message == f"ZeroDivisionError: the model's own mistake (test_session.py:{line})"
    assert run.failure.last_lines == ("the model's own mistake", "with a second line")
    assert run.timing is None
    assert run.memory is None
    assert run.environment is not None
    assert (run.model is None) == (stage == "build")


def test_the_loss_of_a_model_that_returns_a_tuple_is_its_one_scalar() -> None:
    assert succeeded(of_this_file(giving_logits_too)).timing is not None
    with pytest.raises(
        UserError, match=r"returned a tuple of a tensor of shape \(\), a tensor of shape \(\); .* scalar"
    ):
        loss_of((torch.zeros(()), torch.ones(())))


def test_a_factory_that_needs_more_than_it_is_given_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"needing_more has parameters that steplab does not give \(missing a required .*'ctx'\); .* batch",
    ):
        of_this_file(needing_more)  # type: ignore[arg-type]


def test_tokens_are_those_of_a_factory_that_takes_batch_and_context_and_else_not_known() -> None:
    run = succeeded(of_this_file(linear))
    assert run.tokens_per_step is None
    assert "does not take batch and context, so the tokens of its batches are not known" in " ".join(run.notes)
    sized = succeeded(of_this_file(taking_sizes, batch=2, context=64))  # type: ignore[arg-type]
    assert sized.tokens_per_step == 128


def test_a_factory_that_gives_a_batch_in_place_of_what_makes_one_is_told_what_it_gave() -> None:
    with pytest.raises(UserError, match=r"returned \(Failing, Tensor\); .* calling make_batch\(\) makes one batch"):
        of_this_file(giving_a_batch)


def test_what_was_timed_is_kept_when_counting_the_flops_fails() -> None:
    run = succeeded(of_this_file(exploding_after_the_measured_steps))
    assert len(curve(sure(run.timing))) == 5
    assert sure(run.model).counted_flops is None
    assert any(note.startswith("MFU and HFU: ") for note in run.notes)


@pytest.mark.parametrize(("steps", "said"), [("train", 1), ("forward_backward", 0)])
def test_weights_that_training_made_nan_are_told_of_once(steps: str, said: int) -> None:
    run = succeeded(of_this_file(overflowing, **{"pass": steps}))
    told = "weights became infinite or NaN in these steps (the first is layer.weight)"
    assert sum(note.startswith(told) for note in run.notes) == said
    assert sum(words.startswith(f"Warning: {told}") for words in run_cautions(run)) == said
    assert not any(told in words for words in gaps(run)), "it is no gap"
    assert not [note for note in succeeded(of_this_file(giving_logits_too)).notes if note.startswith("weights ")]


def test_an_allocation_that_the_cpu_refuses_is_out_of_memory_to_the_byte() -> None:
    run = of_this_file(allocating)
    assert run.failure is not None
    assert (run.failure.kind, run.failure.phase) == ("out_of_memory", "warmup")
    assert run.failure.requested_bytes == HUGE_BYTES
    assert "\n" not in run.failure.message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention": "flash_triton"}, "attention flash_triton on cpu .*it is for cuda; use --attention sdpa"),
        ({"attention": "sdpa_cudnn"}, "attention sdpa_cudnn on cpu .*it is for cuda; use --attention sdpa"),
        ({"attention": "flex"}, "attention flex on cpu .*no backward pass there; use --attention sdpa"),
        ({"loss": "fused"}, "loss fused on cpu .*its kernel is for CUDA; use --loss chunked, or plain"),
    ],
)
def test_a_kernel_that_the_device_lacks_is_refused_before_a_model_is_built(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], said: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(session, "build_workload", None)
    monkeypatch.setattr(audit_session, "build_workload", None)
    with pytest.raises(Unsupported, match=said):
        measured(**fields)
    with pytest.raises(Unsupported, match=said):
        audit_session.audit_step(AuditTask(spec=resolve_step(TINY | fields), device="cpu"), Observer())


def test_a_kernel_that_a_test_may_run_on_a_cpu_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = resolve_step(TINY | {"attention": "flash_triton", "loss": "fused"})
    refuse_unserved_kernels(spec, "cpu")
    with pytest.raises(Unsupported, match="attention flash_triton on mps"):
        refuse_unserved_kernels(spec, "mps")


def test_an_operator_that_refuses_a_step_while_it_runs_is_a_failure_that_says_why() -> None:
    run = of_this_file(lacking)
    assert run.failure is not None
    assert (run.failure.kind, run.failure.phase) == ("error", "warmup")
    assert run.failure.message == "this is not supported: no kernel for it; use another"


def test_a_request_that_cannot_be_served_is_no_measurement() -> None:
    with pytest.raises(UserError, match="not like this"):
        of_this_file(refusing)


def test_a_step_of_ones_own_is_one_phase() -> None:
    run = succeeded(of_this_file(own_step))
    assert run.timing is not None
    assert [phase.phase for phase in run.timing.back_to_back] == ["step"]
    assert len(curve(run.timing)) == 5
    assert run.model is None


@pytest.mark.parametrize("field", [{"precision": "bf16"}, {"compile": "default"}, {"pass": "forward"}])
def test_an_option_that_a_step_of_ones_own_would_not_heed_is_refused(field: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match=next(iter(field))):
        of_this_file(own_step, **field)


# --- FLOPs of a model of one's own ------------------------------------------------------------------------


@pytest.mark.parametrize("pass_name", CHOICES["pass_name"])
def test_the_flops_of_a_model_of_ones_own_are_counted_as_it_runs(pass_name: str) -> None:
    """Five rows times an 8 x 4 matrix; backward only the matrix's gradient, as no input needs one."""
    run = succeeded(of_this_file(linear, **{"pass": pass_name}))
    assert run.model is not None
    assert run.model.num_parameters == 8 * 4
    product = 2 * 5 * 8 * 4
    assert run.model.counted_flops == (product if pass_name == "forward" else 2 * product)
    assert run.model.needed_flops == run.model.counted_flops, "no more than it executes"
    step = sure(sure(run.timing).phase("step"))
    _, found = utilizations(run, PeakFigure(flops_per_s=1e9, source="doctor"))
    assert (found.kind, found.convention, found.flops) == ("hfu", "as_executed", run.model.counted_flops)
    assert found.value == found.flops / statistics.median(step.best_s) / 1e9


def test_what_a_model_of_ones_own_needs_leaves_out_what_it_recomputes() -> None:
    """Four layers of five rows and 8 x 8: four products forward; backward four for matrices, three for inputs.
    Recomputation adds the first three layers'.
    """
    product = 2 * 5 * 8 * 8
    plain, recomputed = (succeeded(of_this_file(each)).model for each in (layers, recomputed_layers))
    assert plain is not None
    assert recomputed is not None
    assert (plain.counted_flops, plain.needed_flops) == ((4 + 7) * product, (4 + 7) * product)
    assert (recomputed.counted_flops, recomputed.needed_flops) == ((4 + 7 + 3) * product, 3 * 4 * product)


def test_a_compiled_model_on_several_ranks_is_not_run_eagerly_to_count_it() -> None:
    """It may not fit eagerly, and a failing rank would lose all measurements."""
    spec = resolve_step({"model": "mine:build", "compile": "block", "layout": "dp=2"})
    of_a_rank: Any = SimpleNamespace(spec=spec, world=object(), notes=[], model=None)
    phases = [Phase(name="forward", run=explode)]
    session._Cell.count_flops(of_a_rank, ModelFacts(num_parameters=1), phases)
    assert of_a_rank.model is None
    assert of_a_rank.notes[0].startswith("MFU and HFU: ")


def test_attention_is_not_left_out_of_the_count() -> None:
    """torch's counter may give 0 for a CPU's fused attention."""
    run = succeeded(of_this_file(attending, **{"pass": "forward"}))
    assert run.model is not None
    rows, square = 2 * 3 * 16, 2 * 3 * 16 * 16
    exact = 2 * rows * 8 * 24 + 2 * 2 * square * 8
    assert run.model.counted_flops == exact or (
        run.model.counted_flops is None and any(note.startswith("MFU and HFU") for note in run.notes)
    )


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_of_a_compiled_model_of_ones_own_what_it_needs_is_counted_and_not_what_it_executes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_module = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, mode: compile_module(module, backend="eager"))
    eager, compiled = (succeeded(of_this_file(layers, compile=mode)).model for mode in ("off", "default"))
    assert eager is not None
    assert compiled is not None
    assert compiled.needed_flops == eager.needed_flops
    assert compiled.counted_flops is None


# --- utilization ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["plain", "sdpa_flash"])
@pytest.mark.parametrize("pass_name", CHOICES["pass_name"])
def test_a_utilization_is_its_flops_over_the_median_time_and_the_peak(pass_name: str, attention: str) -> None:
    run = make_run({"model": "small", "context": 256, "pass": pass_name, "attention": attention, "precision": "bf16"})
    assert sure(run.spec).model.shape is not None
    assert run.model is not None
    step = sure(sure(run.timing).phase("step"))
    found = {u.convention: u for u in utilizations(run, PeakFigure(flops_per_s=9e14, source="a data sheet"))}

    N, E = run.model.num_parameters, run.model.num_embedding_parameters or 0
    linear, square = 2 * (N - E), 4 * 12 * 768 * 256  # FLOPs a token of one pass: small has 12 layers of width 768
    passes = 1 if pass_name == "forward" else 3
    kernels = {"plain": 1 if passes == 1 else 3, "sdpa_flash": 1 / 2 if passes == 1 else (1 + 5 / 2) / 2}
    tokens = 4 * 256
    expected = {
        "causal": passes * (linear + square / 2) * tokens,
        "full": passes * (linear + square) * tokens,
        "params": passes * 2 * N * tokens,
        "as_executed": (passes * linear + kernels[attention] * square) * tokens,
    }
    assert {convention: u.flops for convention, u in found.items()} == expected
    for convention, u in found.items():
        assert u.kind == ("hfu" if convention == "as_executed" else "mfu")
        assert u.value == u.flops / statistics.median(step.best_s) / 9e14
        assert (u.dtype, u.peak_flops_per_s, u.peak_source) == ("bf16", 9e14, "a data sheet")


def test_without_a_peak_the_flops_are_kept_and_the_reason_given() -> None:
    found = utilizations(make_run(), PeakFigure(flops_per_s=None, source="unknown card"))
    assert {u.convention for u in found} == {"causal", "full", "params", "as_executed"}
    assert all(u.value is None and u.flops > 0 and u.peak_source == "unknown card" for u in found)


@pytest.mark.parametrize("left_out", ["spec", "model", "timing"])
def test_a_run_that_lacks_what_a_utilization_is_made_of_has_none(left_out: str) -> None:
    missing: dict[str, Any] = {left_out: None}
    assert utilizations(make_run(**missing), PeakFigure(flops_per_s=1.0, source="")) == ()


@pytest.mark.parametrize(
    ("fields", "each"),
    [
        ({}, 16),  # weights, gradients, two moments
        ({"optimizer": "sgd"}, 8),
        ({"precision": "bf16_pure"}, 8),
        ({"pass": "forward"}, 4),
        ({"update": "overlapped"}, 12),
    ],
)
def test_a_step_larger_than_the_host_is_not_built(
    fields: dict[str, Any], each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolve_step({"model": "tiny", "context": 8, "steps": 1, "warmup": 0, "device": "cpu"} | fields)
    state = each * num_parameters(sure(spec.model.shape))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=0))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=state))
    assert measure_here(spec, Observer()).failure is None
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=state - 1))
    monkeypatch.setattr(session, "build_workload", None)
    failure = sure(measure_here(spec, Observer()).failure)
    assert failure.kind == "out_of_memory"
    assert "choose a smaller --model" in failure.message
