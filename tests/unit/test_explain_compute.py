"""Precision, fusing and casts: what the device does that it need not."""

import dataclasses

import pytest
from tests.runs import ENVIRONMENT
from tests.unit.explaining import BYTES_PER_S, FP32, MS, TF32, case, foreign, kernel_of, op, own, profile, timing

from steplab.explain.chains import chains
from steplab.explain.fp32_matmul import fp32_matmul
from steplab.explain.fusable_elementwise import fusable_elementwise
from steplab.explain.weight_casts import weight_casts

# --- fp32_matmul ------------------------------------------------------------------------------------------

LARGE = op("aten::mm", "matmul", 80.0, dtype="fp32", flops=4e12, moved=1e9)
NARROW = op("aten::mm", "matmul", 10.0, dtype="fp32", phase="backward", flops=1e11, moved=2e10)
OTHER = op("aten::add", "elementwise", 10.0, where="blocks.*")


def test_fp32_products_gain_the_ratio_of_the_peaks_until_memory_bounds_them() -> None:
    run = own({"precision": "fp32"}, profile([LARGE, NARROW, OTHER]), timing(101.0))
    found = fp32_matmul(case(run))
    assert found is not None
    # The large one becomes 80 ms x 67 / 494.5 = 10.84 ms; the narrow one cannot end before its 20 GB have moved.
    large_s, narrow_s = 80 * MS * FP32 / TF32, 2e10 / BYTES_PER_S
    assert narrow_s == pytest.approx(5.787 * MS, rel=1e-3)
    assert found.saves_s == pytest.approx(90 * MS - large_s - narrow_s)
    assert found.fields == {"precision": "tf32"}
    assert "bf16" in found.note


def test_the_host_may_become_the_limit_and_is_named() -> None:
    seen = profile([LARGE, OTHER], waiting_ms={"forward": 2.0})
    slow = dataclasses.replace(seen, phases=tuple(dataclasses.replace(p, host_s=0.06) for p in seen.phases))
    found = fp32_matmul(case(own({"precision": "fp32"}, slow, timing(91.0))))
    assert found is not None
    assert "the host took 30.0 ms to launch a step" in found.prediction  # 60 ms in two steps
    quick = fp32_matmul(case(own({"precision": "fp32"}, seen, timing(91.0))))
    assert quick is not None
    assert "the host took" not in quick.prediction


def test_a_host_that_is_never_waited_for_is_not_said_to_be_slow() -> None:
    # Its queue is full throughout, so its time is the GPU's, and not what launching takes.
    seen = profile([LARGE, OTHER], waiting_ms={"forward": 0.5})
    full = dataclasses.replace(seen, phases=tuple(dataclasses.replace(p, host_s=0.18) for p in seen.phases))
    found = fp32_matmul(case(own({"precision": "fp32"}, full, timing(91.0))))
    assert found is not None
    assert "the host took" not in found.prediction


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


def test_a_chain_costs_its_dearest_call() -> None:
    seen = profile([MATMULS, SILU, MUL, *ROTARY])
    found = fusable_elementwise(case(own({"precision": "bf16"}, seen, timing(33.0))))
    assert found is not None
    # SwiGLU: silu goes into mul, 2.0 ms. Rotary: a cat is the dearest call (0.1 ms against 0.042 and 0.05): 5.2 ms.
    assert found.saves_s == pytest.approx((2.0 + 5.2) * MS)
    assert found.fields == {"compile": "default"}
    assert "blocks.*.attention forward 5.20 ms" in found.saw
    by_name = {e.what: e.value for e in found.evidence}
    assert by_name["elementwise, normalisation, softmax, reduction and copy"] == pytest.approx(12.6 * MS)
    assert by_name["kernels per step that fusing saves"] == 12 + 96 + 24


def test_a_launch_bound_step_lasts_as_long_as_its_launches() -> None:
    # 1000 launches a step, of which 132 go. Busy 32.6 ms of 80: what is left of the launches decides.
    seen = profile([MATMULS, SILU, MUL, *ROTARY], waiting_ms={"forward": 60.0})
    found = fusable_elementwise(case(own({"precision": "bf16"}, seen, timing(80.0, forward=80.0))))
    assert found is not None
    assert found.saves_s == pytest.approx(80 * MS * 132 / 1000)


def test_a_matmul_in_the_range_lies_between_two_chains() -> None:
    inside = op("aten::addmm", "matmul", 5.0, where="model.layer", calls=24)
    pointwise = [
        op(f"aten::{name}", "elementwise", ms, where="model.layer", calls=12)
        for name, ms in (("relu", 3.0), ("mul", 2.0), ("add", 1.0))
    ]
    [alone], [cut] = chains(profile(pointwise)), chains(profile([*pointwise, inside]))
    assert alone.saves_s / 2 == pytest.approx(3.0 * MS)
    assert cut.saves_s / 2 == pytest.approx(1.0 * MS)  # 24 calls stay: all of relu, all of mul
    assert cut.saves_kernels == 2 * 12


def test_scale_mask_and_softmax_are_one_chain_between_the_products_of_attention() -> None:
    at = "blocks.*.attention"
    ops = [
        op("aten::bmm", "matmul", 5.0, where=f"{at}.scores", calls=12),
        op("aten::mul", "elementwise", 1.0, where=f"{at}.scores", calls=12),
        op("aten::masked_fill", "elementwise", 1.5, where=f"{at}.scores", calls=12),
        op("aten::_softmax", "softmax", 2.0, where=f"{at}.softmax", calls=12),
        op("aten::copy_", "copy", 0.5, where=f"{at}.values", calls=12),
        op("aten::bmm", "matmul", 5.0, where=f"{at}.values", calls=12),
    ]
    [chain] = chains(profile(ops))
    assert chain.range == f"{at}.scores"
    assert chain.saves_s / 2 == pytest.approx(3.0 * MS)


def test_the_optimizers_step_is_not_compiled_with_the_model() -> None:
    update = [dataclasses.replace(o, phase="optimizer") for o in (SILU, MUL)]
    assert chains(profile(update)) == []


def test_a_small_gain_is_not_worth_compiling_for() -> None:
    long = dataclasses.replace(MATMULS, device_s=50 * MATMULS.device_s)
    assert fusable_elementwise(case(own({"precision": "bf16"}, profile([long, SILU, MUL]), timing(1010.0)))) is None


def test_on_a_cpu_the_profilers_slowness_is_taken_out() -> None:
    seen = profile([MATMULS, SILU, MUL, *ROTARY], device="cpu")  # 32.6 ms a step
    found = fusable_elementwise(case(own({"precision": "bf16"}, seen, timing(16.3))))
    assert found is not None
    assert found.saves_s == pytest.approx((2.0 + 5.2) / 2 * MS)
    faster = fusable_elementwise(case(own({"precision": "bf16"}, seen, timing(65.2))))
    assert faster is not None
    assert faster.saves_s == pytest.approx((2.0 + 5.2) * MS)


def test_what_is_compiled_or_has_no_chains_is_silent() -> None:
    seen = profile([MATMULS, SILU, MUL, *ROTARY])
    assert fusable_elementwise(case(own({"compile": "default"}, seen, timing(33.0)))) is None
    triton = kernel_of(SILU, "triton_poi_fused_mul_silu_0")
    assert fusable_elementwise(case(foreign(dataclasses.replace(seen, kernels=(triton,))))) is None
    assert fusable_elementwise(case(foreign(profile([MATMULS, MUL])))) is None
    no_ranges = [dataclasses.replace(o, range="") for o in (MATMULS, SILU, MUL)]
    assert fusable_elementwise(case(foreign(profile(no_ranges)))) is None


def test_batches_on_their_way_to_the_device_are_no_chain() -> None:
    copies = [op("aten::copy_", "copy", 5.0 + n, where="load", inputs=f"fp32[{n}]") for n in (1, 2)]
    assert len(chains(profile(copies))) == 1
    over_the_bus = {"aten::copy_": "Memcpy HtoD (Pageable -> Device)"}
    assert chains(profile(copies, kernel_names=over_the_bus)) == []


# --- weight_casts -----------------------------------------------------------------------------------------

DOWN = op("aten::copy_", "copy", 1.5, where=f"{BLOCK}.gate", inputs="bf16[3072, 768] fp32[3072, 768]", calls=12)
UP = op("aten::copy_", "copy", 1.0, phase="backward", where=f"{BLOCK}.gate",
        inputs="fp32[3072, 768] bf16[3072, 768]", calls=12)  # fmt: skip
UPDATE = op("aten::_fused_adamw_", "optimizer", 4.0, phase="optimizer")


def test_casts_go_and_nothing_else_where_the_optimizer_keeps_masters() -> None:
    seen = profile([MATMULS, DOWN, UP, UPDATE])
    found = weight_casts(case(own({"precision": "bf16"}, seen, timing(27.0, optimizer=4.0))))
    assert found is not None
    assert found.saves_s == pytest.approx((1.5 + 1.0) * MS)
    assert not found.at_most
    assert found.fields == {"precision": "bf16_master", "optimizer": "adamw_triton"}
    assert "--precision bf16_master --optimizer adamw_triton" in found.change
    already = weight_casts(case(own({"precision": "bf16", "optimizer": "adamw_triton"}, seen, timing(27.0))))
    assert already is not None
    assert already.fields == {"precision": "bf16_master"}


@pytest.mark.parametrize("fields", [{"accumulation": 2}, {"layout": "dp=2"}, {"precision": "fp16"}], ids=str)
def test_where_no_masters_can_be_kept_casts_go_and_the_optimizer_moves_half_in_pure_bf16(
    fields: dict[str, object],
) -> None:
    seen = profile([MATMULS, DOWN, UP, UPDATE])
    found = weight_casts(case(own({"precision": "bf16"} | fields, seen, timing(27.0, optimizer=4.0))))
    assert found is not None
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
    found = weight_casts(case(run))
    assert found is not None
    assert found.saves_s == pytest.approx(2.5 * MS)


def test_weights_kept_in_the_type_they_are_used_in_are_silent() -> None:
    for precision in ("fp32", "bf16_pure"):
        assert weight_casts(case(own({"precision": precision}, profile([MATMULS, DOWN]), timing(22.0)))) is None


def test_a_trifle_of_casts_is_silent() -> None:
    long = op("aten::mm", "matmul", 300.0)
    assert weight_casts(case(own({"precision": "bf16"}, profile([long, DOWN, UP]), timing(303.0)))) is None
