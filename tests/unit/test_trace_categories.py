import re
from pathlib import Path

import pytest

from steplab.reading.traces.categories import kernel_category, op_category
from steplab.records.profile import CATEGORIES

OPS_FOLDER = Path(__file__).parents[2] / "src" / "steplab" / "ops"

KERNELS = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "matmul",
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off": "matmul",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>(cutlass_80_simt_sgemm::Params)": "matmul",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams)": "matmul",
    "triton_tem_fused_mm_3": "matmul",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, true>": "attention",
    "attention_backward": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128": "attention",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>": "softmax",
    "at::native::cunn_SoftMaxForward<4, float, float, float, at::native::Epilogue>": "softmax",
    "triton_per_fused__softmax_mul_2": "softmax",
    "at::native::vectorized_layer_norm_kernel<float, float, true>": "normalisation",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1": "normalisation",
    "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >": "elementwise",
    "triton_poi_fused_mul_silu_4": "elementwise",
    "at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float> > >": "reduction",
    "triton_red_fused_sum_7": "reduction",
    "at::native::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>": "embedding",
    "at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4> >": "optimizer",
    "multi_tensor_apply_kernel<UnaryOpFunctor<float, 2, 1, 1>, at::native::Copy<float, float>>": "copy",
    "at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>": "copy",
    "at::native::elementwise_kernel<128, 4, at::native::bfloat16_copy_kernel_cuda>": "copy",
    "triton_poi_fused__to_copy_5": "copy",
    "Memcpy DtoH (Device -> Pinned)": "copy",
    "Memset (Device)": "copy",
    "cast_both_kernel": "other",
    "amax_kernel": "other",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "at::native::distribution_elementwise_grid_stride_kernel<float, 4>": "other",
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<policy, false, long, int>": "other",
    "my_very_own_kernel": "uncategorised",
    # Inductor also lists neighbouring operators.
    "triton_poi_fused__scaled_dot_product_flash_attention_cat_transpose_view_10": "elementwise",
    "triton_red_fused__scaled_dot_product_flash_attention_native_layer_norm_2": "normalisation",
    "triton_poi_fused__to_copy_add_addmm_cat_mean_mul_pow_rsqrt_view_9": "elementwise",
    "triton_poi_fused__unsafe_view_clone_slice_transpose_11": "copy",
    "triton_poi_fused_0": "elementwise",
    "triton_tem_fused_flex_attention_1": "attention",
    "triton_for_fused_0": "optimizer",
    "triton_per_fused_native_group_norm_backward_3": "normalisation",
    # Attention of Triton, vLLM, sglang, AMD.
    "attn_fwd": "attention",
    "_attn_bwd": "attention",
    "bwd_kernel_dk_dv": "attention",
    "bwd_kernel_dq": "attention",
    "_bwd_preprocess": "attention",
    "kernel_unified_attention_2d": "attention",
    "sage_fwd": "attention",
    "void paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16, __hip_bfloat16>": "attention",
    "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS": "attention",
    # Rotary embeddings look nothing up.
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)": "elementwise",
    "_triton_rope": "elementwise",
    # Liger.
    "liger_cross_entropy_kernel": "softmax",
    "_rms_norm_backward_kernel": "normalisation",
    "_swiglu_forward_kernel": "elementwise",
    "_geglu_tanh_forward_kernel": "elementwise",
    "element_mul_kernel": "elementwise",
    # AMD's and MIOpen's, cuDNN's, TensorRT-LLM's.
    "Cijk_Ailk_Bjlk_BBS_BH_Bias_HAS_SAV_UserArgs_MT128x128x64_MI16x16x1": "matmul",
    "Custom_Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_NTD_UserArgs_MT256x256x64": "matmul",
    "_ZN2ck16tensor_operation6device12_GLOBAL__N_149kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffleINS_34": "matmul",
    "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1": "matmul",
    "MIOpenBatchNormFwdTrainSpatial": "normalisation",
    "batched_transpose_32x32_half": "copy",
    "__amd_rocclr_copyBuffer": "copy",
    "_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePassINS": "normalisation",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>": "normalisation",
    "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>": "copy",
    "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false>": "matmul",
    "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1": "matmul",
    "fused_moe_kernel": "matmul",
    "void at::native::(anonymous namespace)::ComputeInternalGradientsCUDAKernel<float>(long)": "normalisation",
    "void moe::dev::routing::routingIndicesHistogramKernel<moe::dev::routing::KernelParams>": "other",
    "void fbgemm_gpu::permute_2D_data_kernel<false, int, int, decltype(nullptr)>(int, int, int, int const*)": "other",
    "void fbgemm_gpu::permute_indices_weights_kernel<true, int, float>(int, int, int, int const*)": "other",
    "void at::native::indexFuncLargeIndex<float, int, unsigned int, 1, 1, -2, true>": "other",
    "triton__0d1d2d3d4d5d6d": "uncategorised",
    "void vllm::act_and_mul_kernel<c10::BFloat16, vllm::silu_kernel>": "elementwise",
}

OPS = {
    "aten::mm": "matmul",
    "aten::_softmax_backward_data": "softmax",
    "aten::_fused_rms_norm": "normalisation",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::silu_backward": "elementwise",
    "aten::add_": "elementwise",
    "aten::_fused_adamw_": "optimizer",
    "aten::embedding_dense_backward": "embedding",
    "aten::copy_": "copy",
    "aten::sum": "reduction",
    "steplab::fp8_cast_both": "other",
    "steplab::amax": "reduction",
    "aten::nan_to_num": "elementwise",
    "record_param_comms": "communication",
    "fbgemm::permute_sparse_features": "other",
    "aten::transpose": "other",
    "autograd::engine::evaluate_function: MmBackward0": "other",
    "mylib::op": "uncategorised",
    "TorchDynamo Cache Lookup": "other",
    "MmBackward0": "other",
    # All kinds of generated code: to call them anything would be a guess.
    "CompiledFunction": "uncategorised",
    "CompiledFunctionBackward": "uncategorised",
    "Torch-Compiled Region: 0/0": "uncategorised",
    "autograd::engine::evaluate_function: CompiledFunctionBackward": "other",
}


@pytest.mark.parametrize(("name", "category"), KERNELS.items(), ids=lambda text: text[:40])
def test_kernels(name: str, category: str) -> None:
    assert kernel_category(name) == category
    assert category in CATEGORIES


OWN = {
    "adamw": {"optimizer"},
    "attention": {"attention"},
    "block": {"normalisation", "elementwise"},
    "cross_entropy": {"softmax", "elementwise"},
}


@pytest.mark.parametrize("operator", OWN)
def test_kernels_of_this_repository(operator: str) -> None:
    texts = [
        path.read_text(encoding="utf-8")
        for path in [*OPS_FOLDER.glob(f"{operator}_kernels.py"), *OPS_FOLDER.glob(f"{operator}/*.py")]
    ]
    started = {name for text in texts for name in re.findall(r"\n@(?:triton|gluon)\.jit.*?\ndef (\w+)\(", text, re.S)}
    kernels = {name for name in started if name.endswith("_kernel") or name.startswith("attention_")}
    assert kernels
    assert {kernel_category(name) for name in kernels} == OWN[operator]


@pytest.mark.parametrize(("name", "category"), OPS.items())
def test_operators(name: str, category: str) -> None:
    assert op_category(name) == category
