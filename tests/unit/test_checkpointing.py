from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.first import first
from tests.runs import make_run
from tests.sure import sure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from steplab.costs.flops import executed_flops_per_token
from steplab.errors import Unsupported, UserError
from steplab.lab.utilization import with_utilizations
from steplab.measurement.observer import Observer
from steplab.measurement.profile.profiler import StepProfiler
from steplab.measurement.step_job import measure_here
from steplab.model.build import build_workload
from steplab.model.workload import Workload, call, loss_of
from steplab.reading.traces.digest import digest
from steplab.reading.traces.reading import read_trace
from steplab.records.profile import Profile
from steplab.records.rows import run_row
from steplab.report.run.cells import cells_of, label, varying
from steplab.specs.checkpointing import CHECKPOINTING, is_recomputed, num_recomputed
from steplab.specs.resolve import resolve_step
from steplab.specs.step import describe
from steplab.store.database import Store

CHOSEN = ("full", "every_2", "every_5", "first_2", "selective", "selective_2")
CPU = torch.device("cpu")
LAYERS, WIDTH, INNER = 3, 16, 24
TINY: dict[str, object] = {
    "model": "tiny", "model.num_layers": LAYERS, "model.d_model": WIDTH, "model.d_ff": INNER, "model.num_heads": 2,
    "model.vocab_size": 31, "batch": 2, "context": 5, "warmup": 1, "steps": 1, "device": "cpu",
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "vocab_size": 31, "max_position_embeddings": 8,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("torch_settings_put_back")


class CountedOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def workload(**fields: object) -> Workload:
    return build_workload(resolve_step(TINY | fields), CPU)


def step(built: Workload, autocast: bool = False, module: Callable[..., Any] | None = None) -> list[Tensor]:
    assert built.module is not None
    torch.manual_seed(1)
    batch = sure(built.make_batch)()
    built.module.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(call(built.module if module is None else module, batch))
    loss.backward()
    gradients = [parameter.grad for parameter in built.module.parameters()]
    return [loss.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


def assert_identical(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["none", "full", "selective", "selective_2", "every_2", "every_48", "first_1", "first_12"]
)
def test_a_choice_is_accepted(name: str) -> None:
    assert resolve_step({"checkpointing": name}).checkpointing == name


@pytest.mark.parametrize("name", ["every_0", "every_N", "every_02", "selective_3", "every_²", "first_"])
def test_an_unknown_choice_is_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(UserError, match="is not known") as refused:
        resolve_step({"checkpointing": name})
    assert all(choice in str(refused.value) for choice in CHECKPOINTING)


def test_every_block_has_one_name_alone() -> None:
    with pytest.raises(UserError, match="use full"):
        resolve_step({"checkpointing": "every_1"})


@pytest.mark.parametrize(
    ("name", "blocks"), [("every_2", {0, 2, 4}), ("every_3", {0, 3}), ("every_9", {0}), ("first_2", {0, 1})]
)
def test_blocks_are_counted_from_the_first(name: str, blocks: set[int]) -> None:
    assert {block for block in range(6) if is_recomputed(name, block)} == blocks


@pytest.mark.parametrize("name", ["none", *CHOSEN])
@pytest.mark.parametrize("num_layers", [1, 2, 5, 6, 7])
def test_the_number_of_recomputed_blocks_is_their_count(name: str, num_layers: int) -> None:
    assert num_recomputed(name, num_layers) == sum(is_recomputed(name, block) for block in range(num_layers))


def test_labels_and_rows_say_it_where_it_applies() -> None:
    runs = [make_run({"checkpointing": name, "pass": "train"}) for name in ("selective", "full", "none")]
    cells = cells_of(runs)
    assert varying(cells) == ["checkpointing"]
    told = [label(cell, varying(cells)) for cell in cells]
    assert told == ["no checkpointing", "checkpointing full", "checkpointing selective"]
    assert run_row(runs[1])["checkpointing"] == "full"
    assert "checkpointing full" in describe(resolve_step({"checkpointing": "full"}))
    without_gradients = {"checkpointing": "full", "pass": "forward"}
    assert run_row(make_run(without_gradients))["checkpointing"] is None
    assert "checkpointing" not in describe(resolve_step(without_gradients))


# --- the same step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", CHOSEN)
def test_losses_and_gradients_are_the_same_bit_for_bit(checkpointing: str, autocast: bool, attention: str) -> None:
    expected = step(workload(attention=attention), autocast)
    assert len(expected) > 1
    assert_identical(step(workload(attention=attention, checkpointing=checkpointing), autocast), expected)


@pytest.mark.parametrize("checkpointing", first(1, ["selective_2", "selective", "full"]))
def test_a_compiler_takes_it_in_one_graph(checkpointing: str) -> None:
    few: dict[str, object] = {"model.num_layers": 2}
    expected = step(workload(**few))
    built = workload(**few, checkpointing=checkpointing)
    compiled = torch.compile(built.module, backend="aot_eager", fullgraph=True)
    for one, other in zip(step(built, module=compiled), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("checkpointing", "num_blocks"),
    [("full", LAYERS), ("every_2", 2), ("every_5", 1), ("first_2", 2), ("selective", 0)],
)
def test_what_backward_runs_again_is_all_but_the_last_matmul_of_a_block(checkpointing: str, num_blocks: int) -> None:
    def count(name: str) -> Counter[str]:
        with CountedOps() as counted:
            step(workload(checkpointing=name))
        return counted.counts

    before, after = count("none"), count(checkpointing)
    linear_layers, products = 7, 2
    assert before["mm"] == 3 * (linear_layers * LAYERS + 1)
    assert before["bmm"] == 3 * products * LAYERS
    assert after["mm"] - before["mm"] == (linear_layers - 1) * num_blocks
    assert after["bmm"] - before["bmm"] == products * num_blocks
    again = LAYERS if checkpointing == "selective" else num_blocks
    assert after["silu"] - before["silu"] == again
    assert after["_softmax"] - before["_softmax"] == again


@pytest.mark.parametrize("attention", ["plain", "sdpa_math"])
@pytest.mark.parametrize("checkpointing", CHOSEN)
def test_the_flops_are_those_torch_counts(checkpointing: str, attention: str) -> None:
    fields: dict[str, object] = {"attention": attention, "checkpointing": checkpointing}
    spec, built = resolve_step(TINY | fields), workload(**fields)
    assert built.module is not None
    with sdpa_kernel([SDPBackend.MATH]), FlopCounterMode(display=False) as counter:
        step(built)
    norms = sum(m.weight.numel() for m in built.module.modules() if isinstance(m, nn.RMSNorm))
    executed = sure(
        executed_flops_per_token(
            spec,
            num_parameters=sum(p.numel() for p in built.module.parameters()) - norms,
            num_embedding_parameters=31 * WIDTH,
            num_layers=LAYERS,
            attention_width=WIDTH,
        )
    )
    assert executed * spec.tokens == counter.get_total_flops()


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_flash"])
def test_a_fused_kernel_recomputes_half_the_square(attention: str) -> None:
    def executed(checkpointing: str) -> float:
        spec = resolve_step({"model": "small", "context": 256, "attention": attention, "checkpointing": checkpointing})
        return sure(
            executed_flops_per_token(
                spec, num_parameters=9, num_embedding_parameters=0, num_layers=12, attention_width=768
            )
        )

    linear = 12 * 2 * (4 * 768**2 + 2 * 768 * 3072)
    assert executed("full") - executed("none") == linear + 12 * 4 * 768 * 256 / 2
    assert executed("every_4") - executed("none") == (linear + 12 * 4 * 768 * 256 / 2) / 4
    assert executed("selective") == executed("none")


def torchtitans() -> Any:
    num_linear = Counter[bool]()

    def policy(context: Any, func: Any, *_: object, **__: object) -> CheckpointPolicy:
        is_linear = func is torch.ops.aten.mm.default
        num_linear[context.is_recompute] += is_linear
        to_save = func in TORCHTITANS and not (is_linear and num_linear[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if to_save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


TORCHTITANS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)


@pytest.mark.parametrize("projections", ["separate", "merged"])
def test_selective_2_runs_again_what_torchtitan_runs_again(projections: str) -> None:
    def count(built: Workload) -> Counter[str]:
        with CountedOps() as counted:
            step(built)
        return counted.counts

    fields: dict[str, object] = {"attention": "sdpa", "model.projections": projections}
    ours, theirs, none = workload(**fields, checkpointing="selective_2"), workload(**fields), workload(**fields)
    for block in cast(Any, theirs.module).blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=torchtitans)
    again = count(ours)
    assert again == count(theirs)
    assert again["mm"] - count(none)["mm"] == LAYERS * (3 if projections == "separate" else 1)


def test_mfu_counts_no_recomputation_and_hfu_does(tmp_path: Path) -> None:
    def used(checkpointing: str) -> dict[str, float]:
        with Store.open(tmp_path / "store.db", write=True) as store:
            run = with_utilizations(make_run({"model": "small", "checkpointing": checkpointing}), store)
        return {u.convention: u.flops for u in run.utilizations}

    before, after = used("none"), used("full")
    assert {name for name in before if before[name] != after[name]} == {"as_executed"}
    assert after["as_executed"] > before["as_executed"]


# --- other people's models --------------------------------------------------------------------------------


def hf_config(tmp_path: Path) -> str:
    import json

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return f"hf:{path}"


def hf_spec(tmp_path: Path, **fields: object) -> Any:
    return resolve_step({"model": hf_config(tmp_path), "batch": 2, "context": 5, "device": "cpu"} | fields)


@pytest.mark.parametrize("attention", ["plain", "sdpa_math"])  # the latter is not what torch would choose
def test_transformers_checkpoints_its_own_layers(tmp_path: Path, attention: str) -> None:
    def counted(checkpointing: str) -> tuple[list[Tensor], int]:
        built = build_workload(hf_spec(tmp_path, checkpointing=checkpointing, attention=attention), CPU)
        with CountedOps() as ops:
            return step(built), ops.counts["silu"]

    (expected, once), (found, twice) = counted("none"), counted("full")
    assert_identical(found, expected)
    assert (once, twice) == (2, 4)


@pytest.mark.parametrize(("checkpointing", "again"), [("selective", 0), ("selective_2", 2 * 3)])
def test_layers_of_transformers_keep_products(tmp_path: Path, checkpointing: str, again: int) -> None:
    def counted(checkpointing: str) -> tuple[list[Tensor], Counter[str]]:
        spec = hf_spec(tmp_path, checkpointing=checkpointing, attention="sdpa")
        with CountedOps() as ops:
            return step(build_workload(spec, CPU)), ops.counts

    (expected, once), (found, twice) = counted("none"), counted(checkpointing)
    assert_identical(found, expected)
    assert (twice["mm"] - once["mm"], twice["silu"] - once["silu"]) == (again, 2)


def test_what_transformers_does_not_offer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="use --checkpointing none, full, selective or selective_2"):
        build_workload(hf_spec(tmp_path, checkpointing="every_2"), CPU)


def test_the_hfu_of_a_checkpointed_transformers_model_is_missing_with_a_reason(tmp_path: Path) -> None:
    run = replace(make_run(), spec=hf_spec(tmp_path, checkpointing="full"))
    with Store.open(tmp_path / "store.db", write=True) as store:
        told = with_utilizations(run, store)
    assert {u.kind for u in told.utilizations} == {"mfu"}
    assert "HFU: steplab has no formula for recomputation in a transformers model" in told.notes


def a_model() -> tuple[nn.Module, Callable[[], Tensor]]:
    return nn.Linear(2, 1), lambda: torch.ones(1, 2)


def test_a_factory_is_told_to_do_it_itself() -> None:
    spec = resolve_step({"model": f"{__name__}:a_model", "checkpointing": "full"})
    with pytest.raises(Unsupported, match=r"checkpointing full for .*a_model.*apply it in the factory itself"):
        build_workload(spec, CPU)


# --- measured and profiled --------------------------------------------------------------------------------


def test_without_gradients_it_changes_nothing_and_the_record_says_so() -> None:
    run = measure_here(resolve_step(TINY | {"checkpointing": "full", "pass": "forward"}), Observer())
    assert run.failure is None
    assert any(note.startswith("checkpointing: no effect") for note in run.notes)


def test_in_a_trace_recomputation_is_backward_work_of_the_ranges_it_repeats(tmp_path: Path) -> None:
    def profile_of(checkpointing: str) -> Profile:
        trace = tmp_path / f"{checkpointing}.json"
        spec = resolve_step(TINY | {"checkpointing": checkpointing})
        measure_here(spec, Observer(), partial(StepProfiler, num_steps=1, trace=trace))
        return digest(read_trace(trace))

    def calls(profile: Profile, phase: str, name: str) -> Counter[str]:
        return Counter({o.range: o.calls for o in profile.ops if o.phase == phase and o.name == name})

    without, full = profile_of("none"), profile_of("full")
    for op in ("aten::silu", "aten::_softmax"):
        assert calls(full, "forward", op) == calls(without, "forward", op) == calls(full, "backward", op)
        assert not calls(without, "backward", op)
    ranges = {(o.phase, o.range) for o in without.ops}
    recomputed = {("backward", o.range) for o in without.ops if o.phase == "forward" and o.range.startswith("blocks.*")}
    assert {(o.phase, o.range) for o in full.ops} == ranges | recomputed
