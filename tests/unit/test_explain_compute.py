import dataclasses
from typing import Any

import pytest
from tests.runs import ENVIRONMENT
from tests.sure import sure
from tests.unit.explaining import FP32, MS, STEPS, TF32, case, foreign, kernel_of, op, own, profile, timing

from steplab.explain.casts import weight_casts
from steplab.explain.fp8_casts import fp8_casts
from steplab.explain.fp32_matmul import fp32_matmul
from steplab.explain.fusing import MOST_LEFT, fusable_elementwise
from steplab.records.profile import CompiledShares, OpStats, Profile
from steplab.records.timing import Timing

# --- fp32_matmul ------------------------------------------------------------------------------------------

SQUARE = "fp32[8192, 8192]"
LARGE = op("aten::mm", "matmul", 80.0, dtype="fp32", inputs=f"{SQUARE} {SQUARE}", flops=4e12, moved=1e9)
NARROW = op("aten::mm", "matmul", 10.0, dtype="fp32", phase="backward", inputs=f"fp32[16, 8192] {SQUARE}", flops=1e11)
OTHER = op("aten::add", "elementwise", 10.0, where="blocks.*")


def test_fp32_products_gain_the_ratio_of_the_peaks_until_memory_bounds_them() -> None:
    run = own({"precision": "fp32"}, profile([LARGE, NARROW, OTHER]), timing(101.0))
    found = sure(fp32_matmul(case(run)))
    # The large one becomes 80 ms x 67 / 494.5 = 10.84 ms; of the narrow one, which moves as many bytes, far less goes.
    alone = sure(fp32_matmul(case(own({"precision": "fp32"}, profile([LARGE, OTHER]), timing(101.0)))))
    assert alone.saves_s is not None
    assert alone.saves_s == pytest.approx(80 * MS * (1 - FP32 / TF32), rel=0.01)
    assert 0 <= sure(found.saves_s) - alone.saves_s < 0.7 * 10 * MS
    assert found.fields == {"precision": "tf32"}
    assert "bf16" in found.note


def test_the_host_may_become_the_limit_and_is_named() -> None:
    seen = profile([LARGE, OTHER], waiting_ms={"forward": 2.0})
    slow = dataclasses.replace(seen, phases=tuple(dataclasses.replace(p, host_s=0.06) for p in seen.phases))
    found = sure(fp32_matmul(case(own({"precision": "fp32"}, slow, timing(91.0)))))
    assert "Python took 30.0 ms to launch a step" in found.prediction  # 60 ms in two steps
    quick = sure(fp32_matmul(case(own({"precision": "fp32"}, seen, timing(91.0)))))
    assert "Python took" not in quick.prediction


def test_of_a_launch_bound_step_the_host_is_the_limit_already() -> None:
    seen = profile([LARGE, OTHER], waiting_ms={"forward": 60.0})
    slow = dataclasses.replace(seen, phases=tuple(dataclasses.replace(p, host_s=0.3) for p in seen.phases))
    found = sure(fp32_matmul(case(own({"precision": "fp32"}, slow, timing(150.0, forward=150.0)))))
    assert found.prediction.endswith("Python already limits the step, so it may save less.")


def test_a_host_that_is_never_waited_for_is_not_said_to_be_slow() -> None:
    # Its queue is full throughout, so its time is the GPU's, and not what launching takes.
    seen = profile([LARGE, OTHER], waiting_ms={"forward": 0.5})
    full = dataclasses.replace(seen, phases=tuple(dataclasses.replace(p, host_s=0.18) for p in seen.phases))
    found = sure(fp32_matmul(case(own({"precision": "fp32"}, full, timing(91.0)))))
    assert "Python took" not in found.prediction


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_products_that_use_tensor_cores_are_silent(precision: str) -> None:
    assert fp32_matmul(case(own({"precision": precision}, profile([LARGE, OTHER]), timing(91.0)))) is None


def test_a_gpu_without_tf32_is_silent() -> None:
    turing = dataclasses.replace(ENVIRONMENT.device, name="Tesla T4", compute_capability="7.5")
    run = own({"precision": "fp32"}, profile([LARGE, OTHER]), timing(91.0))
    environment = dataclasses.replace(ENVIRONMENT, device=turing)
    assert fp32_matmul(case(dataclasses.replace(run, environment=environment))) is None


def test_few_products_are_not_worth_it() -> None:
    small = dataclasses.replace(LARGE, device_s=1 * MS)
    assert fp32_matmul(case(own({"precision": "fp32"}, profile([small, OTHER]), timing(91.0)))) is None


@pytest.mark.parametrize(
    ("kernel", "fires"),
    [
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_tn_align1>(...)", True),
        ("ampere_sgemm_128x64_tn", True),
        ("cutlass_80_tensorop_s1688gemm_128x128_32x3_tn_align4", False),
        ("volta_sgemm_128x64_tn", False),  # of a GPU that has no TF32
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", False),
    ],
)
def test_a_foreign_trace_is_judged_by_its_kernels_names(kernel: str, fires: bool) -> None:
    seen = profile([LARGE, OTHER], kernel_names={"aten::mm": kernel})
    found = fp32_matmul(case(foreign(seen)))
    assert (found is not None) == fires
    assert found is None or "set_float32_matmul_precision" in found.change


def test_a_foreign_trace_that_allows_tf32_keeps_some_products_out_of_it_on_purpose() -> None:
    names = {"aten::mm": "ampere_sgemm_128x64_tn", "aten::bmm": "cutlass_80_tensorop_s1688gemm_64x64_tn_align4"}
    some = op("aten::bmm", "matmul", 1.0, dtype="fp32")
    assert fp32_matmul(case(foreign(profile([LARGE, some], kernel_names=names)))) is None


# --- fusable_elementwise ----------------------------------------------------------------------------------

BLOCK = "blocks.*.feed_forward"
MATMULS = op("aten::mm", "matmul", 20.0, where=f"{BLOCK}.gate", calls=36)
SILU = op("aten::silu", "elementwise", 2.0, where=BLOCK, calls=12, flops=5e9, moved=4e9)
MUL = op("aten::mul", "elementwise", 3.0, where=BLOCK, calls=12, flops=1e9, moved=6e9)
ROTARY = [
    op("aten::mul", "elementwise", 4.0, where="blocks.*.attention", calls=96),
    op("aten::add", "elementwise", 1.2, where="blocks.*.attention", calls=24),
    op("aten::cat", "copy", 2.4, where="blocks.*.attention", calls=24),
]


SHARES = CompiledShares(memory_bound=0.25, products=1.0, kernels=0.5, host=0.4)
LOW_MS = 2.0 + 3.0 + 4.0 + 1.2 + 2.4


def seen_with(*ops: OpStats, **fields: Any) -> Profile:
    return profile(ops or (MATMULS, SILU, MUL, *ROTARY), **({"compiled": SHARES} | fields))


def gain_of(seen: Profile, timed: Timing, **fields: object) -> float:
    found = sure(fusable_elementwise(case(own({"precision": "bf16"} | fields, seen, timed))))
    assert found.saves_s is not None
    return found.saves_s


def test_fusing_leaves_what_the_dry_run_says() -> None:
    found = sure(fusable_elementwise(case(own({"precision": "bf16"}, seen_with(), timing(33.0)))))
    assert found.saves_s == pytest.approx(0.75 * LOW_MS * MS)
    assert found.fields == {"compile": "default"}
    assert "blocks.*.attention forward 7.60 ms, blocks.*.feed_forward forward 5.00 ms" in found.saw
    assert "A dry run" in found.prediction
    by_name = {e.what: e.value for e in found.evidence}
    assert by_name["elementwise, normalisation, softmax, reduction and copy"] == pytest.approx(LOW_MS * MS)
    assert by_name["kernels per step that fusing saves"] == (36 + 2 * 12 + 96 + 2 * 24) / 2


def test_without_a_dry_run_fusing_is_predicted_to_leave_the_largest_recorded_share() -> None:
    found = sure(fusable_elementwise(case(foreign(seen_with(compiled=None)))))
    assert found.saves_s == pytest.approx((1 - MOST_LEFT.memory_bound) * LOW_MS * MS)
    assert "This record has no dry run of compiling." in found.prediction
    assert not [each for each in found.evidence if "matrix products" in each.what]  # which is unknown


def test_of_a_cpu_nothing_is_known_of_what_fusing_saves() -> None:
    seen = seen_with(compiled=None, device="cpu")
    found = sure(fusable_elementwise(case(own({"precision": "bf16"}, seen, timing(33.0)))))
    assert (found.saves_s, found.fields) == (None, {"compile": "default"})
    assert "H200" not in found.prediction
    assert "may also cost time" in found.prediction
    assert not [each for each in found.evidence if "saves" in each.what]
    small = seen_with(MATMULS, op("aten::silu", "elementwise", 1.0, where=BLOCK), compiled=None, device="cpu")
    assert fusable_elementwise(case(own({"precision": "bf16"}, small, timing(21.0)))) is None


def test_a_launch_bound_step_lasts_as_long_as_its_launches() -> None:
    # Busy 32.6 ms of 80: what is left of the launches decides.
    launched = gain_of(seen_with(waiting_ms={"forward": 60.0}), timing(80.0, forward=80.0))
    assert launched == pytest.approx(0.6 * 80 * MS)


def test_fewer_kernels_have_fewer_gaps_between_them() -> None:
    seen = seen_with()
    [forward] = seen.phases
    forward = dataclasses.replace(forward, num_kernels=STEPS * 800)
    gaps = dataclasses.replace(seen, phases=(dataclasses.replace(forward, idle_s=STEPS * 4.0 * MS),))
    assert gain_of(gaps, timing(40.0)) == pytest.approx((0.75 * LOW_MS + 0.5 * 4.0) * MS)
    # At most the unprofiled step's time without kernels.
    assert gain_of(gaps, timing(33.6)) == pytest.approx((0.75 * LOW_MS + 0.5 * 1.0) * MS)
    # Gaps over 5 us have other causes: an event, another stream or process.
    held = dataclasses.replace(seen, phases=(dataclasses.replace(forward, idle_s=STEPS * 400.0 * MS),))
    assert gain_of(held, timing(440.0)) == pytest.approx((0.75 * LOW_MS + 0.5 * 800 * 5e-3) * MS)


def test_products_may_run_at_a_lower_clock_once_nothing_pauses_between_them() -> None:
    throttled = seen_with(compiled=dataclasses.replace(SHARES, products=1.1))
    assert gain_of(throttled, timing(33.0)) == pytest.approx((0.75 * LOW_MS - 0.1 * 20.0) * MS)


@pytest.mark.parametrize(("vocabulary", "saves_ms"), [(50257, 15.0), (50304, 0.0)])
def test_the_compiler_pads_the_products_with_an_odd_vocabulary(vocabulary: int, saves_ms: float) -> None:
    head = op("aten::mm", "matmul", 20.0, where="head", inputs=f"bf16[4096, 768] bf16[768, {vocabulary}]",
              dtype="bf16", flops=1e12)  # fmt: skip
    other = op("aten::addmm", "matmul", 20.0, where=BLOCK, dtype="bf16", flops=4e12)  # four times as fast
    seen = seen_with(head, other, SILU, MUL)
    found = gain_of(seen, timing(46.0), **{"model": "small", "model.vocab_size": vocabulary})
    assert found == pytest.approx((0.75 * 5.0 + saves_ms) * MS, rel=1e-3)


def test_the_optimizers_step_is_not_compiled_with_the_model() -> None:
    update = [dataclasses.replace(o, phase="optimizer") for o in (SILU, MUL)]
    assert fusable_elementwise(case(foreign(seen_with(MATMULS, *update)))) is None


def test_a_small_gain_is_not_worth_compiling_for() -> None:
    long = dataclasses.replace(MATMULS, device_s=50 * MATMULS.device_s)
    assert fusable_elementwise(case(own({"precision": "bf16"}, profile([long, SILU, MUL]), timing(1010.0)))) is None


def test_on_a_cpu_the_profilers_slowness_is_taken_out() -> None:
    seen = seen_with(device="cpu", compiled=None)  # 32.6 ms a step
    for step_ms, share in ((16.3, 0.5), (65.2, 1.0)):
        found = sure(fusable_elementwise(case(own({"precision": "bf16"}, seen, timing(step_ms)))))
        assert found.evidence[0].value == pytest.approx(share * LOW_MS * MS)


def test_what_is_compiled_is_silent() -> None:
    seen = seen_with()
    assert fusable_elementwise(case(own({"compile": "default"}, seen, timing(33.0)))) is None
    triton = kernel_of(SILU, "triton_poi_fused_mul_silu_0")
    assert fusable_elementwise(case(foreign(dataclasses.replace(seen, kernels=(triton,))))) is None


def test_batches_on_their_way_to_the_device_are_not_fused() -> None:
    copies = [op("aten::copy_", "copy", 5.0 + n, where="load", inputs=f"fp32[{n}]") for n in (1, 2)]
    assert fusable_elementwise(case(foreign(seen_with(*copies)))) is not None
    over_the_bus = {"aten::copy_": "Memcpy HtoD (Pageable -> Device)"}
    assert fusable_elementwise(case(foreign(seen_with(*copies, kernel_names=over_the_bus)))) is None


# --- weight_casts -----------------------------------------------------------------------------------------

DOWN = op("aten::copy_", "copy", 1.5, where=f"{BLOCK}.gate", inputs="bf16[3072, 768] fp32[3072, 768]", calls=12)
UP = op("aten::copy_", "copy", 1.0, phase="backward", where=f"{BLOCK}.gate",
        inputs="fp32[3072, 768] bf16[3072, 768]", calls=12)  # fmt: skip
UPDATE = op("aten::_fused_adamw_", "optimizer", 4.0, phase="optimizer")


def test_casts_go_and_nothing_else_where_the_optimizer_keeps_masters() -> None:
    seen = profile([MATMULS, DOWN, UP, UPDATE])
    found = sure(weight_casts(case(own({"precision": "bf16"}, seen, timing(27.0, optimizer=4.0)))))
    assert found.saves_s == pytest.approx((1.5 + 1.0) * MS)
    assert not found.at_most
    assert found.fields == {"precision": "bf16_master", "optimizer": "adamw_triton"}
    assert "--precision bf16_master --optimizer adamw_triton" in found.change
    already = sure(weight_casts(case(own({"precision": "bf16", "optimizer": "adamw_triton"}, seen, timing(27.0)))))
    assert already.fields == {"precision": "bf16_master"}


@pytest.mark.parametrize("fields", [{"accumulation": 2}, {"layout": "dp=2"}, {"precision": "fp16"}], ids=str)
def test_where_no_masters_can_be_kept_casts_go_and_the_optimizer_moves_half_in_pure_bf16(
    fields: dict[str, object],
) -> None:
    seen = profile([MATMULS, DOWN, UP, UPDATE])
    found = sure(weight_casts(case(own({"precision": "bf16"} | fields, seen, timing(27.0, optimizer=4.0)))))
    assert found.saves_s == pytest.approx((1.5 + 1.0 + 4.0 / 2) * MS)
    assert found.fields == {"precision": "bf16_pure"}
    assert "numerics" in found.note
    # Twelve weights of 3072 x 768, each way 4 + 2 bytes an element.
    assert {e.what: e.value for e in found.evidence}["bytes they move"] == 2 * 12 * 3072 * 768 * 6


def test_activations_and_logits_are_no_weights() -> None:
    activations = op("aten::copy_", "copy", 5.0, inputs="bf16[4, 512, 768] fp32[4, 512, 768]")
    logits = op("aten::copy_", "copy", 5.0, where="loss", inputs="fp32[2048, 10000] bf16[2048, 10000]")
    back = op("aten::copy_", "copy", 5.0, phase="backward", inputs="bf16[2048, 10000] fp32[2048, 10000]")
    seen = profile([MATMULS, activations, logits, back])
    assert weight_casts(case(own({"precision": "bf16"}, seen, timing(35.0)))) is None


def test_compiled_casts_name_what_they_read_first() -> None:
    inputs = "fp32[3072, 768] bf16[3072, 768]"
    compiled = op("triton_poi_fused__to_copy_3", "copy", 2.5, inputs=inputs, calls=12)
    run = own(
        {"precision": "bf16", "compile": "default", "pass": "forward"}, profile([MATMULS, compiled]), timing(23.0)
    )
    found = sure(weight_casts(case(run)))
    assert found.saves_s == pytest.approx(2.5 * MS)


def test_weights_kept_in_the_type_they_are_used_in_are_silent() -> None:
    for precision in ("fp32", "bf16_pure"):
        assert weight_casts(case(own({"precision": precision}, profile([MATMULS, DOWN]), timing(22.0)))) is None


def test_a_trifle_of_casts_is_silent() -> None:
    long = op("aten::mm", "matmul", 300.0)
    assert weight_casts(case(own({"precision": "bf16"}, profile([long, DOWN, UP]), timing(303.0)))) is None


# --- fp8_casts --------------------------------------------------------------------------------------------

SCALED = op("aten::_scaled_mm", "matmul", 150.0, calls=96)
OF_TORCHAO = {  # names as Inductor gives them to torchao's scaling by tensor
    "triton_red_fused_abs_max_2": ("reduction", 6.0),
    "triton_per_fused__to_copy_abs_clamp_max_mul_reciprocal_view_1": ("reduction", 0.5),
    "triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_t_view_4": ("elementwise", 20.0),
    "triton_poi_fused_add_mul_3": ("elementwise", 15.0),
}
COMPILED = {"compile": "block", "optimizer": "adamw_triton"}


def cast_by_torchao() -> Profile:
    kernels = [op(name, category, ms, calls=4) for name, (category, ms) in OF_TORCHAO.items()]
    return profile([SCALED, *kernels], kernel_names={name: name for name in OF_TORCHAO})


def test_torchaos_casts_are_told_and_bound_the_saving() -> None:
    run = own(COMPILED | {"precision": "fp8_torchao"}, cast_by_torchao(), timing(192.0))
    found = sure(fp8_casts(case(run)))
    assert found.saves_s == pytest.approx((6.0 + 0.5 + 20.0) * MS)
    assert found.at_most
    assert found.fields == {"precision": "fp8"}
    assert "--precision fp8 " in found.change
    assert {each.what: each.value for each in found.evidence}["their kernels per step"] == 12


def test_a_foreign_profile_with_fp8_products_is_advised_the_operator() -> None:
    found = sure(fp8_casts(case(foreign(cast_by_torchao()))))
    assert not found.fields
    assert "fp8_linear" in found.change


def test_a_layout_that_fp8_does_not_serve_gets_no_field() -> None:
    run = own({"precision": "bf16", "layout": "dp=2"}, cast_by_torchao(), timing(192.0))
    assert not sure(fp8_casts(case(run))).fields


def test_our_casts_are_no_finding() -> None:
    casts = [op("cast_both_kernel", "other", 20.0), op("amax_kernel", "other", 12.0)]
    seen = profile([SCALED, *casts], kernel_names={each.name: each.name for each in casts})
    assert fp8_casts(case(own(COMPILED | {"precision": "fp8"}, seen, timing(183.0)))) is None


def test_clamps_and_magnitudes_without_products_in_fp8_are_no_casts() -> None:
    seen = dataclasses.replace(cast_by_torchao(), ops=(), kernels=cast_by_torchao().kernels[1:])
    assert fp8_casts(case(own(COMPILED | {"precision": "bf16"}, seen, timing(45.0)))) is None
