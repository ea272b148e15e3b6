import dataclasses
import gc
import os
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import msgspec
import pytest
import torch
from benchmarks.fit_rates import fit_hidden_update
from tests.runs import make_run
from tests.stored_records import stored
from tests.sure import sure
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import steplab
from steplab.costs.rates import gpu_named, with_rates
from steplab.measurement.step.step import ModelStep
from steplab.model.build import build_workload
from steplab.ops.errors import Unsupported, UserError
from steplab.ops.update import UpdateByParts, UpdateInBackward
from steplab.plan.memory import predict_memory
from steplab.plan.time import predict_step_time
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Turns
from steplab.specs.resolve import resolve_step

pytestmark = pytest.mark.usefixtures("torch_settings_put_back")
H200 = gpu_named("H200 SXM")
SMALL = {
    "model": "tiny",
    "model.num_layers": 2,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.d_ff": 32,
    "model.vocab_size": 40,
    "batch": 2,
    "context": 8,
    "device": "cpu",
}


def trained(fields: dict[str, Any], update: str) -> tuple[list[str], list[Tensor], dict[str, Any]]:
    spec = resolve_step(SMALL | fields | {"update": update})
    torch.manual_seed(0)
    step = ModelStep(build_workload(spec, torch.device("cpu")), spec, torch.device("cpu"))
    for _ in range(3):
        step.run()
    assert all(parameter.grad is None for parameter in step.module.parameters())
    return [phase.name for phase in step.phases], list(step.module.parameters()), sure(step.optimizer).state_dict()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model.head": "tied", "accumulation": 2},
        {"checkpointing": "full", "precision": "bf16"},
        {"optimizer": "adamw_foreach", "compile": "off"},
        {"optimizer": "sgd", "precision": "bf16_pure"},
        {"optimizer": "adamw_triton", "precision": "bf16_master", "loss": "chunked"},
    ],
)
def test_a_step_that_updates_in_its_backward_pass_trains_the_same(fields: dict[str, Any]) -> None:
    if fields.get("optimizer") == "adamw_triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    after, expected, expected_state = trained(fields, "after")
    phases, found, state = trained(fields, "overlapped")
    assert after == [*phases, "optimizer"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.third.requires_grad_(False)

    def forward(self, x: Tensor, *, both: bool = True) -> Tensor:
        x = self.first(x)
        return self.third(self.second(x) if both else x).square().mean()


def made() -> tuple[Layers, torch.optim.Optimizer, UpdateInBackward]:
    torch.manual_seed(1)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, UpdateInBackward(optimizer, [model.first, model.second])


def test_an_update_comes_before_the_backward_pass_is_over_and_what_got_no_gradient_stays() -> None:
    model, optimizer, update = made()
    second, seen = model.second.weight.clone(), []
    model.first.weight.register_hook(lambda _: seen.append(torch.equal(model.second.weight, second)))
    x = torch.ones(2, 4, dtype=torch.float64)
    model(x).backward()
    assert seen == [False]  # the second layer is updated when the first has its gradient
    update.finish()
    optimizer.zero_grad()
    first, second = model.first.weight.clone(), model.second.weight.clone()
    model(x, both=False).backward()
    update.finish()
    assert not torch.equal(model.first.weight, first)
    assert torch.equal(model.second.weight, second)


def test_gradients_of_paused_passes_are_added_up() -> None:
    (model, _, update), alone = made(), Layers()
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    batches = torch.randn(3, 2, 4, dtype=torch.float64)
    for batch in batches:
        alone(batch).backward()
    optimizer.step()
    with update.paused():
        for batch in batches[:2]:
            model(batch).backward()
    model(batches[2]).backward()
    update.finish()
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()), rtol=0, atol=0)


def test_a_parameter_that_is_no_longer_frozen_is_updated() -> None:
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    update = UpdateInBackward(optimizer, [model.first, model.second, model.third])
    before = model.third.weight.clone()
    model.third.requires_grad_(True)
    model(torch.ones(2, 4, dtype=torch.float64)).backward()
    update.finish()
    assert not torch.equal(model.third.weight, before)


def test_one_that_another_took_the_place_of_updates_no_more() -> None:
    model, optimizer, update = made()
    del update
    later = torch.optim.SGD(model.parameters(), lr=0.5)
    update = UpdateInBackward(later, [model.first])
    model(torch.ones(2, 4, dtype=torch.float64)).backward()
    update.finish()
    assert optimizer.state == {}


def test_a_model_that_is_dropped_with_its_update_is_freed() -> None:
    model, optimizer, update = made()
    parameter = ref(model.first.weight)
    model(torch.ones(2, 4, dtype=torch.float64)).backward()
    del model, optimizer, update
    gc.collect()  # it does not follow the hooks of tensors
    assert parameter() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gradient_that_comes_after_its_update_is_refused(reentrant: bool) -> None:
    model, _, update = made()
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    if reentrant:
        used_twice = checkpoint(model.first, checkpoint(model.first, x, use_reentrant=True), use_reentrant=True)
        loss = used_twice.square().mean()
    else:
        model(x).backward()
        loss = model(x)
    with pytest.raises(UserError, match="a gradient came after the update of its parameter: call finish"):
        loss.backward()
    update.finish()


def test_gradients_that_other_ranks_have_a_part_in_are_not_updated_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = Layers()
    with pytest.raises(
        Unsupported, match=r"of 2 processes is not supported: .* averaged later; use UpdateByParts with"
    ):
        UpdateInBackward(torch.optim.SGD(model.parameters()), [model.first])


class Around(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(list(parameters), {})
        self.inner = torch.optim.SGD([p for group in self.param_groups for p in group["params"]])


class Counting(torch.optim.Optimizer):
    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if with_gradient:
                group["step"] = group.get("step", 0) + 1
            for parameter in with_gradient:
                parameter.sub_(parameter.grad, alpha=group["lr"] / (group["step"] + self.num_steps))


def test_steps_that_an_optimizer_counts_in_its_groups_are_counted_once_for_all_parts() -> None:
    model, whole = Layers(), Layers()
    whole.load_state_dict(model.state_dict())
    optimizers = [
        Counting([{"params": net.first.parameters()}, {"params": net.second.parameters(), "lr": 0.2}])
        for net in (model, whole)
    ]
    update = UpdateByParts(optimizers[0])
    x = torch.ones(2, 4, dtype=torch.float64)
    for step in range(4):
        for net, optimizer in zip((model, whole), optimizers, strict=True):
            optimizer.zero_grad()
            net(x, both=step != 1).backward()
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        for parameter in (*model.second.parameters(), *model.first.parameters()):
            update.of([parameter])
        optimizers[1].step()
        assert all(map(torch.equal, model.parameters(), whole.parameters()))
        counts = [[o.num_steps, *(group.get("step") for group in o.param_groups)] for o in optimizers]
        assert counts == [[step + 1, step + 1, step or 1]] * 2


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (lambda group: group["count"].add_(1), "each step changes a tensor in its parameter groups"),
        (lambda group: group.update(seen=group["params"][0].numel()), "its seen depends on the parameters that a step"),
    ],
)
def test_an_update_that_parts_would_change_is_refused(counts: Callable[[dict[str, Any]], Any], said: str) -> None:
    model = Layers()

    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            counts(self.param_groups[0])

    def updated_in_parts() -> None:
        for parameter in model.first.parameters():
            update.of([parameter])

    update = UpdateByParts(Odd([{"params": model.first.parameters(), "count": torch.zeros(())}]))
    with pytest.raises(Unsupported, match=f"updating some parameters by Odd is not supported: {said}"):
        updated_in_parts()
    assert list(model.first.parameters()) == update._optimizer.param_groups[0]["params"]


def test_a_rate_that_was_changed_holds_for_an_update_of_other_parameters_than_the_last() -> None:
    one, two, three = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = torch.optim.SGD([one, two, three], lr=0.1)
    update = UpdateByParts(optimizer)
    for parameter in (one, two, three):
        parameter.grad = torch.ones(1)
    update.of([one])
    optimizer.param_groups[0]["lr"] = 0.5
    for parameter in (two, three):
        update.of([parameter])
    assert [parameter.item() for parameter in (two, three)] == [-0.5, -0.5]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_what_needs_all_gradients_first_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"LBFGS is not supported: .*; use another optimizer"):
        UpdateByParts(torch.optim.LBFGS(Layers().parameters()))
    with pytest.raises(Unsupported, match="by Around is not supported: it leaves the step to an optimizer within it"):
        UpdateByParts(Around(Layers().parameters()))
    for fields, said in (
        ({"precision": "fp16"}, r"update overlapped with precision fp16 is not supported: its gradient scaler .* bf16"),
        ({"layout": "fsdp=2"}, "with layout fsdp=2 is not supported: .*; use dp=2, or --update after"),
        ({"layout": "dp=2", "data_parallel": "flat"}, "with data_parallel flat .* use --data-parallel bucketed"),
        ({"compile": "default"}, "with compile default is not supported: .* use --compile block"),
    ):
        with pytest.raises(steplab.Unsupported, match=said):
            resolve_step({"update": "overlapped"} | fields)
    assert resolve_step({"update": "overlapped", "pass": "forward", "precision": "fp16"})
    assert not resolve_step({"update": "overlapped", "layout": "dp=2"}).updates_in_backward


def test_a_plan_leaves_out_what_the_backward_pass_hides_and_the_peak_is_the_same() -> None:
    rates = msgspec.structs.replace(H200.rates.step, hidden_update=0.25)
    gpu = with_rates(H200, step=rates)
    fields = {"model": "small", "context": 512, "precision": "bf16_master", "optimizer": "adamw_triton"}
    specs = [resolve_step(fields | {"compile": "block", "update": update}) for update in ("after", "overlapped")]
    after, overlapped = (predict_step_time(spec, gpu) for spec in specs)
    assert [times.phase for times in overlapped.phases] == ["forward", "backward", "step"]
    update_s = next(times.device_s for times in after.phases if times.phase == "optimizer")
    assert overlapped.step.device_s == pytest.approx(after.step.device_s - 0.25 * update_s)
    assert "25% of it is hidden" in " ".join(overlapped.notes)
    fused = [
        predict_step_time(dataclasses.replace(spec, precision="bf16", optimizer="adamw_fused"), gpu) for spec in specs
    ]
    assert fused[1].step.device_s == pytest.approx(fused[0].step.device_s)
    assert "no record shows how much it hides" in " ".join(fused[1].notes)
    fields = {"model": "small", "context": 16, "batch": 1, "optimizer": "adamw_foreach"}
    peaks = [predict_memory(resolve_step(fields | {"update": update})) for update in ("after", "overlapped")]
    assert peaks[0].peak_bytes == peaks[1].peak_bytes
    assert (peaks[0].peak_phase, peaks[1].peak_phase) == ("optimizer", "backward")


def test_the_hidden_share_is_fitted_to_steps_that_differ_in_their_update_alone() -> None:
    def run(step_s: float, update: str, session: str = "s", **fields: object) -> Run:
        phases = {"step": step_s} | ({"optimizer": 0.02} if update == "after" else {})
        samples = tuple(PhaseSamples(phase=name, device_s=(seconds,) * 3) for name, seconds in phases.items())
        made = make_run({"update": update, **fields})
        timing = dataclasses.replace(sure(made.timing), back_to_back=samples)
        return dataclasses.replace(made, timing=timing, turns=Turns(session=session, label=update))

    pair = [run(0.1, "after"), run(0.094, "overlapped")]
    assert fit_hidden_update(pair) == pytest.approx(0.3)
    assert fit_hidden_update([*pair, run(0.05, "overlapped", context=64)]) == pytest.approx(0.3)
    assert fit_hidden_update([*pair, run(0.05, "overlapped", "another day")]) == pytest.approx(0.3)
    assert fit_hidden_update(pair[:1]) == 0


def test_the_share_in_the_table_is_what_steps_in_turns_show() -> None:
    """Records of xl on an H200 of two days, outside the fit: single sizes hid 7 to 24 %, so xl's step is true to
    1.5 %.
    """
    records = (*stored("overlapped_update_h200", Run), *stored("walk_h200", Run))
    recorded = [run for run in records if run.spec and run.spec.model.name == "xl"]
    hidden = fit_hidden_update(recorded)
    assert 0.07 < hidden < 0.24
    for run in recorded:
        if run.spec is not None and run.spec.updates_in_backward:
            after = predict_step_time(dataclasses.replace(run.spec, update="after"), H200)
            [update_s] = [phase.seconds for phase in after.phases if phase.phase == "optimizer"]
            saved_s = after.central_s - predict_step_time(run.spec, H200).central_s
            assert saved_s == pytest.approx(hidden * update_s, abs=0.015 * after.central_s)
