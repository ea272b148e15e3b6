"""Categories of kernels and operators, by rules on their names. The first match decides, so specific rules come first.
Other names are `uncategorised`, and every report shows their time: add a rule, do not guess.
"""

import re
from functools import lru_cache

Rules = tuple[tuple[str, str], ...]

# Library kernels: nvjet, xmma, cutlass and cublas are matrix products (so are convolutions), as are AMD's Cijk,
# wvSplitK and igemm. `_of_inductor` reads Inductor's.
_KERNELS: Rules = (
    ("communication", r"nccl|nvshmem|symm(etric)?_mem|(put|wait)_signal|(one|two)_shot_all_reduce|multimem|rccl"),
    ("communication", r"\bgloo\b|^Memcpy PtoP|cross_device_reduce|all_?reduce_(one|two)_?shot"),
    ("copy", r"^Mem(cpy|set)\b|^\[CUDA mem|CatArrayBatchedCopy|copy_kernel|copy_device_to_device|transpose_readWrite"),
    ("copy", r"n\w{3}ToN\w{3}Kernel|^batched_transpose_|^transpose_\w+2\w+|amd_rocclr_(copy|fill)|reshape_and_cache"),
    ("copy", r"(store|set)_kv_?cache|copy_page_indices|copy_async_kernel|multi_tensor_apply.*\bCopy(Functor)?<"),
    ("elementwise", r"rotary|(^|[_:])rope_|_rope(_|\b)|cross_entropy_scale"),
    ("attention", r"flash|fmha|mha_|sdpa|flex_attention|attention_|Attention(Backward)?Kernel|attn_(fwd|bwd)|^sage_"),
    ("attention", r"[Ff]mha|^_?bwd_(kernel_d[kvq]|preprocess)|paged_attn|unified_attn|merge_attn|sdp_attention"),
    ("optimizer", r"adam|sgd_|FusedOptimizer|multi_tensor_apply|adagrad|lamb_|amp_update_scale|amp_non_finite"),
    ("matmul", r"nvjet|(?<!fb)gemm|Gemm|gemv|xmma|cutlass|cublas|scudnn|^(Custom_)?Cijk_|splitK|wvSplitK|wgmma|matmul"),
    ("matmul", r"\bdot_kernel|^bmm_\w+_Fp32_|fused_moe_kernel|reduce_1Block_kernel|^triton_(b?mm|addmm)\b|convolve"),
    ("matmul", r"conv2d|conv_depthwise|winograd|dgrad|wgrad|fprop|grouped_conv|naive_conv|AsmConv|igemm_"),
    ("softmax", r"softmax|SoftMax|^liger_cross_entropy|^_?kldiv|^_jsd_"),
    ("embedding", r"embedding|indexSelect|index_select|vectorized_gather_kernel|compute_grad_weight|sum_and_scatter"),
    ("embedding", r"krn_partial|compute_num_of_partial|EmbeddingBag|pooled_embs"),
    ("normalisation", r"layer_?norm|LayerNorm|rms_?norm|RMSNorm|Rmsnorm|batch_?norm|BatchNorm|GammaBeta"),
    ("normalisation", r"RowwiseMoments|group_?norm|\bbn_|Compute(Internal|Fused|Backward)\w*(Gradients|Params)"),
    ("other", r"distribution_|philox|Sort|sort_|radix|topk|TopK|index_|scatter|gather|unique|nonzero|bincount"),
    ("other", r"histogram|permute_(2D|1D|indices|sequence)|indexFunc|to_dense_representation|max_pool|avg_pool"),
    ("other", r"average_pool|pooling|upsample|nll_loss_backward|nllloss|im2col|Im2d2Col|col2im|nms_kernel|spin_kernel"),
    ("other", r"OffsetsKernel|fft|bounds_check|linearize_index|offsets_range|routing|moe_align|searchsorted|bucketize"),
    ("other", r"^(cast|cast_both|amax)_kernel$"),
    ("elementwise", r"elementwise|triu_tril|launch_clamp|dropout|fill_|arange|masked_|where_kernel|tanh|gelu"),
    ("elementwise", r"SubTensorOp|swiglu_|geglu_|(act|silu|gelu)_and_mul|^_?element_mul|quant(ize)?_(cuda_)?kernel"),
    ("elementwise", r"FP8rowwise|FP8_qparam|ScalePackedTensor|scalePackedTensor"),
    ("reduction", r"reduce|nll_loss_forward|cub::.*(Reduce|Scan)|scan_|cumsum|mean_|argmax|min_max|_sum_bitmatrix"),
    ("other", r"void cub::|thrust::"),
)

_INDUCTOR = re.compile(r"triton_(poi|red|per|tem|mix|for|foreach)_fused_(.*?)_*\d*$")
_LAYOUT = re.compile(
    r"^(_to_copy|clone|copy|t|transpose|view|permute|cat|constant_pad_nd|slice|select|expand|unsqueeze|squeeze|split|"
    r"as_strided|_unsafe_view|_)+$"
)
_INDUCTORS: Rules = (
    ("softmax", r"softmax"),
    ("normalisation", r"(layer|batch|group|rms)_norm|var_mean|mean\w*rsqrt|rsqrt\w*mean"),
    ("embedding", r"embedding_dense_backward|^embedding$"),
    ("reduction", ""),
)


def _of_inductor(kind: str, operators: str) -> str:
    """Category of an Inductor kernel by its kind: pointwise, (persistent) reduction, template, list. Its name also
    lists neighbouring operators, so attention or products there do not count.
    """
    if kind == "tem":
        return "attention" if "flex_attention" in operators else "matmul"
    if kind in ("for", "foreach"):
        return "optimizer"
    if kind == "poi":
        if operators and _LAYOUT.match(f"{operators}_"):
            return "copy"
        return "embedding" if operators.strip("_") == "embedding" else "elementwise"
    return _first_match(_INDUCTORS, operators)


_OPS: Rules = (
    ("communication", r"^(c10d|gloo|nccl|_c10d_functional)\b|^record_param_comms|all_?reduce|all_?gather"),
    ("communication", r"reduce_?scatter"),
    ("attention", r"scaled_dot_product|_flash_attention|_efficient_attention|_cudnn_attention|flex_attention"),
    ("attention", r"^steplab::flash_"),
    ("optimizer", r"_fused_(adam|sgd|adagrad)|_foreach_|Optimizer\.|_amp_"),
    ("matmul", r"::(mm|addmm|_addmm\w*|bmm|baddbmm|matmul|linear|mv|addmv|dot|einsum|_scaled_mm|_int_mm)(_out)?$"),
    ("matmul", r"::(mkldnn_\w*linear\w*|mkl_linear|\w*convolution\w*)$|mkldnn::_?linear"),
    ("softmax", r"softmax"),
    ("embedding", r"embedding|index_select"),
    ("normalisation", r"(layer|rms|batch|group)_norm"),
    ("copy", r"::(copy_|_to_copy|to|clone|contiguous|cat|_cat|stack|type_as|_pin_memory)$"),
    ("copy", r"::(_local_scalar_dense|item|is_nonzero)$"),
    (
        "reduction",
        r"::(sum|mean|amax|amin|max|min|argmax|prod|norm|linalg_vector_norm|logsumexp|cumsum|all|any|std|var)$",
    ),
    ("reduction", r"::(nll_loss\w*forward|count_nonzero|equal)$"),
    ("other", r"^autograd::|^torch::|AccumulateGrad|^(?!CompiledFunction).*Backward|^detach$"),
    # Host work before a compiled function's call. The call itself has no category: its time contains all kinds of
    # generated code.
    ("other", r"^(TorchDynamo|Pregraph|AOTDispatcher)|^steplab::fp8_cast"),
    (
        "other",
        r"::(empty\w*|new_empty\w*|resize_|set_|view\w*|_?reshape\w*|_unsafe_view|t|transpose|permute|mT|numpy_T)$",
    ),
    (
        "other",
        r"::(expand\w*|select|slice|narrow|as_strided\w*|detach\w*|alias|unsqueeze|squeeze|chunk|split\w*|unbind)$",
    ),
    ("other", r"^fbgemm::permute"),
    ("other", r"::(unflatten|flatten|unfold|movedim|swapaxes|broadcast_\w+|resolve_\w+|result_type|lift_fresh|data)$"),
    ("other", r"::(index\w*|gather|scatter\w*|sort|topk|one_hot|triu_indices|\w*loss\w*|cross_entropy\w*|real|imag)$"),
    ("other", r"::(randn?|randint|random_|uniform_|normal_|bernoulli_|dropout|is_\w+|_has_\w+)$"),
    (
        "elementwise",
        r"::_?(mul|add|sub|rsub|div|pow|neg|exp|log|sqrt|rsqrt|reciprocal|abs|sign|clamp|floor|round|erf)_?$",
    ),
    ("elementwise", r"::(sigmoid|silu|gelu|relu|tanh|mish|hardtanh|softplus|threshold|native_dropout)(_backward)?_?$"),
    ("elementwise", r"::(sin|cos|log1p|expm1|maximum|minimum|remainder|addcmul|addcdiv|lerp)(_scalar)?_?$"),
    ("elementwise", r"::(isnan|isinf|nan_to_num|clamp_m(in|ax))(_scalar)?_?$"),
    (
        "elementwise",
        r"::(where|masked_fill|fill|zero|zeros|ones|full|zeros_like|ones_like|full_like|triu|tril|arange)_?$",
    ),
    ("elementwise", r"::(eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+)$|^triton_poi_|^steplab::(swiglu|rotary_heads)"),
    ("reduction", r"^triton_(red|per)_"),
)


@lru_cache(maxsize=1 << 16)
def kernel_category(name: str) -> str:
    if generated := _INDUCTOR.match(name):
        return _of_inductor(generated[1], generated[2])
    return _first_match(_KERNELS, name)


@lru_cache(maxsize=1 << 16)
def op_category(name: str) -> str:
    return _first_match(_OPS, name)


def _first_match(rules: Rules, name: str) -> str:
    return next((category for category, pattern in rules if re.search(pattern, name)), "uncategorised")
