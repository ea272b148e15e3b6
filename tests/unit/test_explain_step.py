import dataclasses
from statistics import median

import pytest
from tests.runs import ENVIRONMENT, make_run
from tests.stored_records import stored
from tests.sure import sure
from tests.unit.explaining import BF16, BYTES_PER_S, H200, MS, SHARES, case, foreign, op, own, profile, timing

from steplab.costs.kernel_time import streaming_s
from steplab.explain.batch_too_small import batch_too_small
from steplab.explain.communication_exposed import communication_exposed
from steplab.explain.compile_in_the_loop import compile_in_the_loop
from steplab.explain.optimizer_not_fused import FUSED_BYTES, STEPWISE_BYTES, optimizer_not_fused
from steplab.explain.vocabulary import loss_share, vocabulary_padding
from steplab.records.profile import Communication, OpStats
from steplab.records.run import ModelFacts, Run
from steplab.records.timing import PhaseSamples, Timing


@pytest.fixture(scope="module")
def recorded() -> list[Run]:
    return [run for run in stored("step_h200", Run) if run.spec and run.timing]


# --- optimizer_not_fused ----------------------------------------------------------------------------------

FACTS = ModelFacts(num_parameters=100_000_000)


@pytest.mark.parametrize("optimizer", ["adamw_loop", "adamw_foreach"])
def test_adamw_in_parts_is_predicted_by_the_bytes_it_must_move(optimizer: str) -> None:
    run = make_run({"optimizer": optimizer}, timing=timing(20.0, optimizer=5.0), model=FACTS)
    found = sure(optimizer_not_fused(case(run)))
    assert found.saves_s == pytest.approx(5 * MS - 28 * 1e8 / (SHARES["_fused_adamw_"] * BYTES_PER_S), rel=1e-3)
    assert found.fields == {"optimizer": "adamw_fused"}


def test_in_pure_bf16_it_moves_half() -> None:
    fields = {"optimizer": "adamw_loop", "precision": "bf16_pure"}
    found = sure(optimizer_not_fused(case(make_run(fields, timing=timing(20.0, optimizer=5.0), model=FACTS))))
    assert found.saves_s == pytest.approx(5 * MS - 14 * 1e8 / (SHARES["_fused_adamw_"] * BYTES_PER_S), rel=1e-3)


@pytest.mark.parametrize(
    "fields",
    [{"optimizer": "adamw_fused"}, {"optimizer": "sgd"}, {"optimizer": "adamw_loop", "pass": "forward_backward"}],
    ids=str,
)
def test_other_steps_of_ones_own_are_silent(fields: dict[str, object]) -> None:
    assert optimizer_not_fused(case(make_run(fields, timing=timing(20.0, optimizer=5.0), model=FACTS))) is None


def test_a_gain_within_the_noise_is_silent() -> None:
    fused_ms = 28e8 / (SHARES["_fused_adamw_"] * BYTES_PER_S) / MS
    run = make_run({"optimizer": "adamw_foreach"}, timing=timing(20.0, optimizer=fused_ms + 0.1), model=FACTS)
    assert optimizer_not_fused(case(run)) is None


def test_the_share_of_the_bandwidth_is_what_recorded_fused_steps_reached(recorded: list[Run]) -> None:
    """28 bytes per parameter, at the fitted share of the stated bandwidth, give the measured time."""
    checked = 0
    for run in recorded:
        phase = run.timing.phase("optimizer") if run.timing else None
        busy = run.spec and run.spec.precision == "fp32"  # in the shorter bf16 steps the host limits some optimizers
        if phase is None or not busy or run.model is None:
            continue
        predicted_s = streaming_s("_fused_adamw_", 28 * run.model.num_parameters, H200)
        assert predicted_s == pytest.approx(median(phase.best_s), rel=0.04), run.id
        checked += 1
    assert checked >= 20


def test_the_bytes_of_adamw_are_those_that_torch_touches() -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    size = 4096
    weight = torch.nn.Parameter(torch.randn(size))
    weight.grad = torch.randn(size)
    optimizer = torch.optim.AdamW([weight], foreach=True)
    optimizer.step()  # makes the state

    class Count(TorchDispatchMode):
        moved = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            def big(values: object) -> set[int]:
                leaves = tree_leaves(values)
                return {t.data_ptr() for t in leaves if isinstance(t, torch.Tensor) and t.numel() == size}

            given = big((args, kwargs))
            out = func(*args, **(kwargs or {}))
            in_place = func._schema.name.endswith("_")
            Count.moved += 4 * (len(given) + (1 if in_place else len(big(out)))) * bool(given)
            return out

    with Count():  # type: ignore[no-untyped-call]
        optimizer.step()
    assert Count.moved == STEPWISE_BYTES
    assert FUSED_BYTES == 4 * (4 + 3)


SMALL_KERNELS = [
    op("aten::mul_", "elementwise", 2.0, phase="optimizer", calls=300),
    op("aten::addcdiv_", "elementwise", 2.0, phase="optimizer", calls=150),
]
MODEL = op("aten::mm", "matmul", 20.0, calls=300)


def test_a_foreign_adam_of_many_kernels_is_fused_to_its_share_of_the_bytes() -> None:
    found = sure(optimizer_not_fused(case(foreign(profile([MODEL, *SMALL_KERNELS], waiting_ms={"optimizer": 3.0})))))
    assert found.saves_s == pytest.approx(7 * MS - 4 * MS * 28 / 80)
    assert found.fields == {}
    assert "fused=True" in found.change


def test_the_same_on_a_cpu_is_of_operators() -> None:
    found = sure(optimizer_not_fused(case(foreign(profile([MODEL, *SMALL_KERNELS], device="cpu")))))
    assert found.saves_s == pytest.approx(4 * MS * (1 - 28 / 80))
    assert "is 450 operators, none of them fused" in found.saw


def test_a_foreign_sgd_of_many_kernels_loses_its_waiting() -> None:
    sgd = [op("aten::add_", "elementwise", 2.0, phase="optimizer", calls=300)]
    found = sure(optimizer_not_fused(case(foreign(profile([MODEL, *sgd], waiting_ms={"optimizer": 3.0})))))
    assert found.saves_s == pytest.approx(3 * MS)


def test_foreign_optimizers_that_are_fused_or_of_few_kernels_are_silent() -> None:
    fused = op("aten::_fused_adamw_", "optimizer", 4.0, phase="optimizer", calls=160)
    assert optimizer_not_fused(case(foreign(profile([MODEL, fused], waiting_ms={"optimizer": 3.0})))) is None
    few = [dataclasses.replace(SMALL_KERNELS[1], calls=20, kernels=20)]
    assert optimizer_not_fused(case(foreign(profile([MODEL, *few], waiting_ms={"optimizer": 3.0})))) is None


# --- batch_too_small --------------------------------------------------------------------------------------


def test_what_is_paid_once_a_step_is_spread_over_more_tokens() -> None:
    # small at batch 4 and context 128 needs 2.6 GB of 150 GB, so eight times the batch fits.
    run = make_run({"precision": "bf16"}, timing=timing(20.0, forward=6.0, backward=9.0, optimizer=5.0))
    found = sure(batch_too_small(case(run)))
    assert found.saves_s == pytest.approx(5 * MS * (1 - 1 / 8))
    assert found.fields == {"batch": "32"}


def test_casts_and_narrow_products_are_paid_once_as_well() -> None:
    cast = op("aten::copy_", "copy", 2.0, inputs="bf16[768, 768] fp32[768, 768]")
    # 1e9 FLOPs take 1 µs of the peak and 1e9 bytes 289 µs of the memory: bound by its weights.
    narrow = op("aten::mm", "matmul", 4.0, dtype="bf16", flops=1e9, moved=1e9)
    wide = op("aten::mm", "matmul", 9.0, dtype="bf16", flops=1e13, moved=1e9)
    run = own({"precision": "bf16"}, profile([cast, narrow, wide]), timing(20.0, optimizer=5.0))
    found = sure(batch_too_small(case(run)))
    assert found.saves_s == pytest.approx((5 + 2 + 4) * MS * 7 / 8)


def test_the_batch_proposed_fits() -> None:
    run = make_run({"model": "xl", "precision": "bf16"}, timing=timing(20.0, optimizer=5.0))
    assert run.memory is not None
    peak = sure(run.memory.peak("step"))
    found = sure(batch_too_small(case(run)))
    factor = int(found.fields["batch"]) // 4
    assert factor in (2, 4)
    assert factor * peak.peak_allocated_bytes <= 0.9 * 150_000_000_000 < 2 * factor * peak.peak_allocated_bytes
    full = dataclasses.replace(run.memory, total_bytes=int(1.5 * peak.peak_allocated_bytes))
    assert batch_too_small(case(dataclasses.replace(run, memory=full))) is None


def test_a_step_of_many_tokens_is_silent() -> None:
    assert batch_too_small(case(make_run({}, timing=timing(100.0, optimizer=5.0)))) is None
    assert batch_too_small(case(foreign(profile([MODEL])))) is None


# --- vocabulary_padding and loss_share --------------------------------------------------------------------

HEAD = "bf16[2048, 768] bf16[768, {0}]"


def head_and_rest(vocabulary: int, head_ms: float, loss_ms: float = 3.0) -> list[OpStats]:
    head_flops = 2.0 * 2048 * 768 * vocabulary
    return [
        op("aten::mm", "matmul", head_ms, where="head", inputs=HEAD.format(vocabulary), dtype="bf16", flops=head_flops),
        op("aten::_log_softmax", "softmax", loss_ms, where="loss", inputs=f"fp32[2048, {vocabulary}]"),
        op("aten::mm", "matmul", 10.0, where="blocks.*.feed_forward.up", dtype="bf16", flops=5e12,
           inputs="bf16[2048, 768] bf16[768, 3072]"),
    ]  # fmt: skip


def test_a_vocabulary_whose_products_are_slow_is_padded() -> None:
    # The others do 5e12 FLOPs in 10 ms, 500 TFLOP/s; the head's 158e9 FLOPs take 2 ms, 79 TFLOP/s.
    seen = profile(head_and_rest(50257, 2.0))
    run = own({"precision": "bf16", "context": 512, "model.vocab_size": 50257}, seen, timing(15.0))
    found = sure(vocabulary_padding(case(run)))
    padded_flops = 2 * 2048 * 768 * 50304
    assert found.saves_s == pytest.approx(2 * MS - padded_flops / 500e12)
    assert found.fields == {"model.vocab_size": "50304"}


def test_a_size_of_no_multiple_of_64_that_runs_well_is_silent() -> None:
    ms = 2 * 2048 * 768 * 10_000 / 500e12 / MS  # at the rate of the others
    seen = profile(head_and_rest(10_000, ms))
    run = own({"precision": "bf16", "context": 512}, seen, timing(14.0))
    assert run.spec is not None
    assert sure(run.spec.model.shape).vocab_size == 10_000
    assert vocabulary_padding(case(run)) is None


def test_without_a_profile_only_an_unaligned_vocabulary_is_told() -> None:
    found = sure(vocabulary_padding(case(own({"model.vocab_size": 50257}, None, timing(15.0)))))
    assert found.saves_s is None
    assert vocabulary_padding(case(own({"model.vocab_size": 50256}, None, timing(15.0)))) is None
    assert vocabulary_padding(case(own({"model.vocab_size": 50304}, None, timing(15.0)))) is None


def test_only_a_gpu_has_tensor_cores_to_pad_for() -> None:
    run = own({"model.vocab_size": 50257}, None, timing(15.0))
    on_cpu = dataclasses.replace(ENVIRONMENT, device=dataclasses.replace(ENVIRONMENT.device, kind="cpu"))
    assert vocabulary_padding(case(dataclasses.replace(run, environment=on_cpu))) is None
    seen = profile(head_and_rest(50257, 2.0), device="cpu")
    fields: dict[str, object] = {"precision": "bf16", "context": 512, "model.vocab_size": 50257}
    assert vocabulary_padding(case(own(fields, seen, timing(15.0)))) is None


@pytest.mark.parametrize(("classes", "fires"), [(20, False), (999, False), (1001, True)])
def test_a_classifier_has_no_vocabulary(classes: int, fires: bool) -> None:
    ops = [dataclasses.replace(o, range="") for o in head_and_rest(classes, 4.0, loss_ms=6.0)]
    run = foreign(profile(ops))
    assert (vocabulary_padding(case(run)) is not None) == fires
    assert (loss_share(case(run)) is not None) == fires


def test_a_large_share_of_the_loss_is_told_with_what_a_fused_one_saves() -> None:
    seen = profile(head_and_rest(151_936, 4.0, loss_ms=6.0))
    found = sure(
        loss_share(case(own({"context": 512, "model.vocab_size": 151_936, "precision": "bf16"}, seen, timing(21.0))))
    )
    # 2048 x 151936 logits in bf16, read once and their gradient written once; the product stays.
    assert found.saves_s == pytest.approx(
        6 * MS - 2 * 2048 * 151_936 * 2 / (SHARES["fused reduction"] * BYTES_PER_S), rel=1e-3
    )
    assert found.title == "The vocabulary takes 50.0 % of the device's busy time"
    assert found.fields == {"loss": "fused"}
    assert "--loss fused" in found.change


def test_a_loss_that_is_fused_already_is_not_told_to_be() -> None:
    seen = profile(head_and_rest(151_936, 4.0, loss_ms=6.0))
    fields: dict[str, object] = {"context": 512, "model.vocab_size": 151_936, "precision": "bf16", "loss": "fused"}
    assert loss_share(case(own(fields, seen, timing(21.0)))) is None


def test_a_foreign_loss_is_known_by_its_vocabulary() -> None:
    ops = [dataclasses.replace(o, range="") for o in head_and_rest(32_000, 4.0, loss_ms=6.0)]
    look_up = op("aten::embedding", "embedding", 50.0, inputs="bf16[32000, 768] int64[4, 512]")
    update = op("aten::mul_", "elementwise", 50.0, phase="optimizer", inputs="fp32[32000, 768]")
    found = sure(loss_share(case(foreign(profile([*ops])))))
    assert {e.what: e.value for e in found.evidence}["loss and casts"] == pytest.approx(6 * MS)
    diluted = loss_share(case(foreign(profile([*ops, look_up, update]))))
    assert diluted is None


def test_a_container_with_logits_among_its_tensors_is_not_taken_for_the_loss() -> None:
    ops = [dataclasses.replace(o, range="") for o in head_and_rest(32_000, 4.0, loss_ms=6.0)]
    logits = "bf16[2048, 32000]"
    whole = [op(f"CompiledFunction{end}", "uncategorised", 80.0, inputs=logits) for end in ("", "Backward")]
    generated = op("triton_red_fused__log_softmax_0", "softmax", 1.0, inputs=logits)
    found = loss_share(case(foreign(profile([*ops, *whole, generated, op("aten::mm", "matmul", 1.0)]))))
    assert found is None  # 11 ms of 184
    found = sure(loss_share(case(foreign(profile([*ops, generated])))))
    assert {e.what: e.value for e in found.evidence}["loss and casts"] == pytest.approx(7 * MS)


@pytest.mark.parametrize(
    ("device", "kernel", "liger", "compiler"),
    [
        ("cuda", "nvjet", True, True),
        ("cuda", "triton_poi_fused_add_0", True, False),
        ("cpu", "aten::mm", False, True),
        ("cpu", "CompiledFunction", False, False),
        ("cpu", "Torch-Compiled Region: 0/0", False, False),
    ],
)
def test_a_large_loss_is_advised_what_its_device_can_do(device: str, kernel: str, liger: bool, compiler: bool) -> None:
    seen = profile(head_and_rest(32_000, 4.0, loss_ms=6.0), device=device, kernel_names={"aten::mm": kernel})
    found = sure(loss_share(case(foreign(seen))))
    advice = found.change + found.note
    assert ("Liger" in advice) == liger
    assert ("torch.compile" in advice) == compiler


def test_a_small_loss_is_silent() -> None:
    seen = profile([*head_and_rest(10_000, 0.5, loss_ms=0.5)])
    assert loss_share(case(own({"context": 512}, seen, timing(12.0)))) is None


def test_a_vocabulary_as_large_as_something_else_is_not_told_from_it() -> None:
    ops = [dataclasses.replace(o, range="") for o in head_and_rest(3072, 6.0, loss_ms=6.0)]
    run = own({"context": 512, "model.vocab_size": 3072}, profile([*ops]), timing(22.0))
    assert loss_share(case(run)) is None  # 3072 is d_ff as well


# --- compile_in_the_loop ----------------------------------------------------------------------------------


def with_steps(*steps_s: float, compile: str = "default") -> Run:
    samples = (PhaseSamples(phase="step", device_s=steps_s),)
    warmup = (PhaseSamples(phase="step", device_s=(9.0, 3.0)),)
    return make_run({"compile": compile}, timing=Timing(warmup=warmup, back_to_back=samples))


def test_a_step_as_long_as_a_compilation_is_one() -> None:
    found = sure(compile_in_the_loop(case(with_steps(0.02, 0.02, 2.02, 0.02, 0.02))))
    assert found.saves_s == pytest.approx(2.0 / 5)
    assert found.fields == {}


@pytest.mark.parametrize(
    "run",
    [
        with_steps(0.02, 0.02, 2.02, 0.02, 0.02, compile="off"),
        with_steps(0.02, 0.02, 0.2, 0.02, 0.02),  # ten times as long, and too short to have compiled
        with_steps(0.5, 0.5, 1.2, 0.5, 0.5),
        with_steps(0.02, 0.02),
    ],
    ids=["eager", "a hiccup", "a slow step", "the warm-up compiled"],
)
def test_other_long_steps_are_not(run: Run) -> None:
    assert compile_in_the_loop(case(run)) is None


def test_ranges_of_dynamo_are_compilation_and_its_look_ups_are_not() -> None:
    at = "_compile.compile_inner (dynamo_timed)"
    found = sure(compile_in_the_loop(case(foreign(profile([MODEL, op("aten::mul", "elementwise", 1.0, where=at)])))))
    assert at in found.saw
    running = [
        op("aten::mm", "matmul", 1.0, where="TorchDynamo Cache Lookup"),
        op("CompiledFunction", "other", 1.0, where="Torch-Compiled Region: 0/0"),
    ]
    assert compile_in_the_loop(case(foreign(profile(running)))) is None


# --- communication_exposed --------------------------------------------------------------------------------


def test_exposed_communication_is_what_hiding_it_could_save() -> None:
    seen = profile([MODEL], communication=Communication(total_s=20 * MS, overlapped_s=8 * MS))
    found = sure(communication_exposed(case(foreign(seen))))
    assert found.saves_s == pytest.approx(6 * MS)  # 12 ms in two steps
    assert "60.0 %" in found.saw
    assert found.at_most


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"data_parallel": "naive"}, "--data-parallel bucketed"),
        ({"data_parallel": "bucketed", "bucket_size_mb": 25.0}, "--bucket-size-mb 100"),
    ],
)
def test_what_to_change_is_an_option_where_the_gradients_are_averaged_by_steplab(
    fields: dict[str, object], option: str
) -> None:
    seen = profile([MODEL], communication=Communication(total_s=20 * MS, overlapped_s=8 * MS))
    run = make_run({"layout": "dp=2", **fields})
    found = sure(communication_exposed(case(dataclasses.replace(run, profile=seen))))
    assert option in found.change
    assert "--layout dp=2" in found.change
    assert found.change.count("--data-parallel") + found.change.count("--bucket-size-mb") == 1


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"layout": "fsdp=2"}, "steplab run --model small --layout fsdp=2 --reshard-after-forward never"),
        (
            {"layout": "dp=2,fsdp=2", "reshard_after_forward": "never"},
            "steplab run --model small --layout dp=2,fsdp=2 --reshard-after-forward never --batch 8",
        ),
        ({"layout": "tp=2"}, "steplab plan layout --model small --gpus 2 --global-batch 4 --gpu 'H200 SXM'"),
        (
            {"layout": "dp=2,pp=2", "microbatches": 2, "pipeline_schedule": "gpipe", "precision": "bf16"},
            "steplab plan layout --model small --precision bf16 --gpus 4 --global-batch 8 --gpu 'H200 SXM'",
        ),
    ],
)
def test_what_to_change_applies_to_the_layout(fields: dict[str, object], change: str) -> None:
    seen = profile([MODEL], communication=Communication(total_s=20 * MS, overlapped_s=8 * MS))
    found = sure(communication_exposed(case(dataclasses.replace(make_run({"model": "small", **fields}), profile=seen))))
    assert found.change == change
    assert "bucket" not in found.change + found.note


def test_gathered_parameters_in_a_trace_are_not_told_to_change_their_buckets() -> None:
    communication = Communication(total_s=20 * MS, overlapped_s=8 * MS)
    gather = op("c10d::_allgather_base_", "communication", 1.0)
    names = {gather.name: "ncclDevKernel_AllGather_RING_LL"}
    seen = profile([MODEL, gather], communication=communication, kernel_names=names)
    found = sure(communication_exposed(case(foreign(seen))))
    assert found.change.startswith("fully_shard(block")
    assert "bucket" not in found.change + found.note


@pytest.mark.parametrize(
    "communication", [None, Communication(total_s=20 * MS, overlapped_s=19 * MS)], ids=["none", "hidden"]
)
def test_hidden_communication_is_silent(communication: Communication | None) -> None:
    assert communication_exposed(case(foreign(profile([MODEL], communication=communication)))) is None


def test_peaks_used_here_are_those_of_the_catalogue() -> None:
    gpu = sure(case(make_run({})).gpu)
    assert (gpu.peaks["bf16"], gpu.bandwidth_bytes_per_s) == (BF16, BYTES_PER_S)
