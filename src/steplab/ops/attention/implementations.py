"""The table of attention implementations. Choices, help, refusals, `auto`, plans, FLOPs and memory follow from it.

A new implementation is a row, its code, and the name of its function in api.py. This file imports nothing, so that
plans work without torch. Limits are the CUDA kernels', and assumed for ROCm. torch's are from its
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, for NVIDIA GPUs from Ampere on;
tests/gpu/test_attention_table_on_gpu.py tests them all.
"""

from dataclasses import dataclass

FP32, BF16, FP16, FP64 = "fp32", "bf16", "fp16", "fp64"
_HALVES = (BF16, FP16)
_ALL = (FP32, BF16, FP16, FP64)
ITEM_BYTES = {FP32: 4, BF16: 2, FP16: 2, FP64: 8}
DTYPES = {"float32": FP32, "bfloat16": BF16, "float16": FP16, "float64": FP64}


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """float32 memory that a backward pass needs while it runs: `times` tensors of `shape`.

    Each has one number for a row of scores, or for an element of queries, keys or values.
    """

    what: str
    tokens: int = 1
    """Multiple to which the number of tokens is rounded up."""
    width: int | None = None
    """Multiple to which the head dimension is rounded up. None: one number a row, unless there are `widths`."""
    widths: tuple[int, ...] = ()
    """The head dimension is rounded up to the next of these. fp32, and heads wider than the last, need no workspace."""
    times: int = 1
    of_shared_keys: bool = False
    """True if only grouped-query heads need it; `heads` and `tokens` of its shape are then those of the keys."""

    def shape(self, batch: int, heads: int, tokens: int, head_dim: int) -> tuple[int, ...]:
        rows = batch, heads, _rounded_up(tokens, self.tokens)
        if self.widths:
            return *rows, next(width for width in self.widths if width >= head_dim)
        return rows if self.width is None else (*rows, _rounded_up(head_dim, self.width))

    def taken(self, number_bytes: int, head_dim: int, *, shared: bool) -> bool:
        """True if tensors with elements of `number_bytes` need this workspace; `shared`: grouped-query heads."""
        if self.of_shared_keys and not shared:
            return False
        return not self.widths or (number_bytes == 2 and head_dim <= self.widths[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedOperator:
    """A fused attention operator of torch, and the argument layout from which its cost is computed."""

    name: str
    """For example aten::_flash_attention_forward."""
    causal: int
    """Index of the argument with the causal flag or the kind of mask."""
    heads_last: bool = False
    """True if tensors are [B, S, H, D] instead of [B, H, S, D]."""
    backward: bool = False
    """True for a backward operator: its first argument is the output's gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    name: str
    summary: str
    devices: tuple[str, ...] = ("cuda", "rocm", "cpu", "mps")
    """Supported kinds of devices; rocm means AMD GPUs, which torch calls cuda."""
    trains_on_cpu: bool = True
    """True if it has a backward pass on a CPU."""
    package: str | None = None
    """Package that must be installed in addition to torch."""
    dtypes: tuple[str, ...] = _ALL
    widest: int | None = None
    """Largest supported head dimension; None: no limit."""
    row_bytes: int = 1
    """The bytes of one head of one token must be a multiple of this."""
    empty: bool = True
    """True if it accepts zero queries or zero keys."""
    single_token: bool = True
    """True if it accepts one query with one key."""
    causal_offset: bool = True
    """True if it accepts a causal mask with unequal numbers of queries and keys."""
    grouped: bool = True
    materialises_scores: bool = False
    """True if scores and softmax [B, H, S, K] are in memory. Otherwise backward recomputes them from saved queries,
    keys, values, output and log-sum-exp.
    """
    deterministic: bool | None = None
    """True if CUDA gradients have the same bits every time; atomic additions of dQ prevent that.

    None if unknown, or if it chooses among other implementations. Measured on an H100 with torch 2.11 in bf16.
    """
    saved_rows: int = 1
    """Multiple to which the tokens of the saved log-sum-exp are rounded up."""
    output_heads_together: bool = False
    """True if the output is [B, S, H, D] in memory, which the output projection takes without a copy."""
    copies_below: int = 1
    """Inputs and gradients are copied and padded unless one head of one token has a multiple of this many bytes."""
    workspaces: tuple[Workspace, ...] = ()
    expands_groups: bool = False
    """True if backward computes gradients of keys and values for every query head, then sums them."""
    memory_estimate: str = ""
    """Why its predicted memory is only an estimate; empty if it is exact."""
    chosen_by_sdpa: str = ""
    """Remark on a prediction for `sdpa`, which assumes the first row with a remark that takes the inputs. Empty if
    torch never chooses this implementation.
    """
    benchmarked_on: tuple[str, ...] = ()
    """Kinds of devices on which `steplab attention` measures it by default."""
    operators: tuple[FusedOperator, ...] = ()
    """Operators that identify it in a trace; empty if a trace shows matmuls and a softmax."""

    @property
    def saved(self) -> str:
        return "the weights, S × K a head" if self.materialises_scores else "q, k, v, o, log-sum-exp"


_ROW_SUMS = Workspace(what="row sums within the kernel")
_FLASH_BACKWARD = (
    Workspace(what="row sums within the kernel", tokens=128),
    Workspace(what="gradient of the rotated query, gathered within the kernel", tokens=128, width=32),
)
"""Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp."""


def _own(name: str) -> tuple[FusedOperator, ...]:
    return (
        FusedOperator(name=f"steplab::{name}_forward", causal=3),
        FusedOperator(name=f"steplab::{name}_backward", causal=6, backward=True),
    )


TABLE = (
    Implementation(
        name="plain",
        summary="scores materialised",
        deterministic=True,
        materialises_scores=True,
        benchmarked_on=("cpu", "mps"),
    ),
    Implementation(name="sdpa", summary="torch chooses", benchmarked_on=("cpu", "mps")),
    Implementation(
        name="sdpa_flash",
        summary="torch's FlashAttention-2",
        deterministic=False,
        devices=("cuda", "rocm", "cpu"),
        dtypes=_HALVES,
        widest=256,
        empty=False,
        causal_offset=False,
        workspaces=_FLASH_BACKWARD,
        expands_groups=True,
        chosen_by_sdpa="assumed to be the flash kernel; if torch prefers cuDNN's, its workspace is not known",
        benchmarked_on=("cuda",),
        operators=(
            FusedOperator(name="aten::_flash_attention_forward", causal=8, heads_last=True),
            FusedOperator(name="aten::_flash_attention_backward", causal=11, heads_last=True, backward=True),
            FusedOperator(name="aten::_scaled_dot_product_flash_attention_for_cpu", causal=4),
            FusedOperator(name="aten::_scaled_dot_product_flash_attention_for_cpu_backward", causal=7, backward=True),
        ),
    ),
    Implementation(
        name="sdpa_cudnn",
        summary="cuDNN's",
        deterministic=False,
        devices=("cuda",),
        dtypes=_HALVES,
        widest=256,
        row_bytes=16,
        empty=False,
        single_token=False,
        workspaces=_FLASH_BACKWARD,
        memory_estimate="cuDNN's workspace is not known; the flash kernel's is assumed",
        benchmarked_on=("cuda",),
        operators=(
            FusedOperator(name="aten::_cudnn_attention_forward", causal=10),
            FusedOperator(name="aten::_cudnn_attention_backward", causal=14, backward=True),
        ),
    ),
    Implementation(
        name="sdpa_efficient",
        summary="torch's memory-efficient kernel",
        deterministic=False,
        devices=("cuda", "rocm"),
        dtypes=(FP32, BF16, FP16),
        row_bytes=16,
        empty=False,
        grouped=False,
        saved_rows=32,
        output_heads_together=True,
        # aten/src/ATen/native/transformers/cuda/attention_backward.cu
        workspaces=(Workspace(what="gradient times output, within the kernel", width=1), _ROW_SUMS),
        chosen_by_sdpa="assumed to be the memory-efficient kernel, torch's first for this step",
        operators=(
            FusedOperator(name="aten::_efficient_attention_forward", causal=9, heads_last=True),
            FusedOperator(name="aten::_efficient_attention_backward", causal=14, heads_last=True, backward=True),
        ),
    ),
    Implementation(
        name="sdpa_math",
        summary="torch's composition of operators",
        deterministic=True,
        materialises_scores=True,
        chosen_by_sdpa="assumed to be torch's own composition, because no fused kernel takes such heads",
    ),
    Implementation(
        name="flex",
        summary="torch's FlexAttention",
        deterministic=True,
        devices=("cuda", "rocm", "cpu"),
        trains_on_cpu=False,
        empty=False,
        workspaces=(_ROW_SUMS,),
        memory_estimate="its workspace is assumed to be one number a row of scores",
        benchmarked_on=("cuda",),
    ),
    Implementation(
        name="flash_reference",
        summary="FlashAttention-2 in tiled PyTorch",
        deterministic=True,
        workspaces=(
            Workspace(what="rotated query, widened, within the function", width=1),
            Workspace(what="gradient of the output, widened, within the function", width=1),
            Workspace(what="gradient of the rotated query, gathered, within the function", width=1),
            _ROW_SUMS,
        ),
        memory_estimate="its tiles, which are freed at once, are not counted",
        benchmarked_on=("cpu", "mps"),
        operators=_own("flash_reference"),
    ),
    Implementation(
        name="flash_triton",
        summary="FlashAttention-2 in steplab's Triton kernels",
        deterministic=True,
        devices=("cuda",),
        package="triton",
        dtypes=(FP32, BF16, FP16),
        widest=256,
        copies_below=16,  # the GPU's copy engine needs token strides of a multiple of this
        # ops/attention/triton_backward.py, without its two counters for every 128 rows
        workspaces=(
            Workspace(what="log-sum-exp in powers of two, within the kernels", tokens=128),
            Workspace(what="row sums, within the kernels", tokens=128),
            Workspace(
                what="gradient of the rotated query, summed within the kernels",
                tokens=128,
                widths=(64, 96, 128),
            ),
            Workspace(
                what="gradients of keys and values, on their way through the heads that share them",
                tokens=128,
                widths=(64, 80, 96, 128),
                times=2,
                of_shared_keys=True,
            ),
        ),
        memory_estimate="its workspace is from its source, for a Hopper GPU; elsewhere it has no sums",
        benchmarked_on=("cuda",),
        operators=_own("flash_triton"),
    ),
    Implementation(
        name="flash_attn_4",
        summary="that package's FlashAttention-4",
        devices=("cuda",),
        package="flash-attn-4",
        dtypes=_HALVES,
        row_bytes=16,
        empty=False,
        causal_offset=False,
        workspaces=_FLASH_BACKWARD,
        memory_estimate="its workspace is not known; torch's flash kernel's is assumed",
    ),
    Implementation(
        name="auto",
        summary="the fastest as measured",
        workspaces=_FLASH_BACKWARD,
        expands_groups=True,
        memory_estimate="assumed to save as every fused kernel does, with the workspace of torch's flash kernel",
    ),
)

NAMES = tuple(row.name for row in TABLE)
"""The choices of --attention."""
_BY_NAME = {row.name: row for row in TABLE}


def implementation(name: str) -> Implementation:
    return _BY_NAME[name]


def why_not(
    name: str,
    *,
    device: str,
    dtype: str,
    head_dim: int | None = None,
    num_queries: int = 1,
    num_keys: int = 1,
    causal: bool = False,
    grouped: bool = False,
) -> str | None:
    """Why an implementation does not take such inputs, as a clause; None if it does, as far as is known.

    `device` is a kind (cuda, rocm, cpu, mps), `dtype` a name of this table. A head_dim of None is not checked.
    """
    row = _BY_NAME[name]
    if device not in row.devices:
        return f"it has no kernel for {device}; it is for {' and '.join(row.devices)}"
    if device not in ("cuda", "rocm"):
        return None
    if dtype not in row.dtypes:
        return f"that kernel takes {_listed(row.dtypes)} alone, not {dtype}"
    if head_dim is not None:
        if row.widest is not None and head_dim > row.widest:
            return f"that kernel takes heads of at most {row.widest}, and these are {head_dim} wide"
        multiple = max(row.row_bytes // ITEM_BYTES[dtype], 1)
        if head_dim % multiple:
            return f"that kernel takes heads of a multiple of {multiple}, and these are {head_dim} wide"
    if not row.empty and 0 in (num_queries, num_keys):
        return "that kernel takes no empty sequence"
    if not row.single_token and num_queries == num_keys == 1:
        return "that kernel takes no context of a single token"
    if causal and num_queries != num_keys and not row.causal_offset:
        return "its causal mask counts positions from the last query and key, torch's from the first"
    if grouped and not row.grouped:
        return "that kernel takes no grouped-query heads"
    return None


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(", ".join(names).rsplit(", ", 1))
