"""Fitted rates of GPUs: the shares of the stated peak and bandwidth that kernels reach.

benchmarks/fit_rates.py writes `rates.toml` from stored records. A GPU without an entry borrows the first one's shares,
with wider intervals unless measured steps on it narrow them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

import msgspec

from steplab.errors import UserError
from steplab.specs.hardware import HardwareSpec, hardware_named
from steplab.units import format_bytes


class ProductRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of kernel_time.product_s."""

    fixed_s: float
    peak_share: float
    """Share of the stated dense peak that a long product reaches on full tiles."""
    ramp_k: float
    """Length of the inner dimension that takes as long as a tile's first load and last store."""
    bandwidth_share: float
    partial_wave: float
    """0: a partly filled last wave of tiles takes as long as a full one; 1: only its part."""


class AttentionRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of kernel_time.attention_s."""

    fixed_s: float
    peak_share: float
    """Share of the stated dense peak that attention's matmuls reach."""
    softmax_width: float
    """Columns of a head that would take as long as the exponential of one score."""
    diagonal: float
    """Keys that a query computes beyond those that the causal mask leaves, because tiles are whole."""


class StreamingRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of kernel_time.streaming_s."""

    fixed_s: float
    cached_gain: float
    """Relative gain in speed of a small tensor, held by the cache, over a large one."""
    cached_bytes: float
    """Moved bytes at which `cached_gain` has fallen to 1/e."""
    shares: dict[str, float]
    """Share of the stated bandwidth that each operator reaches, such as 'copy' and 'copy strided'. Compiled kernels are
    'fused' and 'fused reduction'; 'default' is for all others.
    """


class HostRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Python's launch times per kernel, and compile times, on measured CPUs."""

    eager_s: float
    """Python's seconds to launch a kernel of an eager step, on the quickest CPU; `eager_slow_s`: on the slowest."""
    eager_slow_s: float
    compiled_s: float
    """Python's seconds to launch a kernel of a compiled step, on the quickest CPU."""
    compiled_slow_s: float
    triton_s: float
    """Python's seconds to launch a kernel of a step with Triton's block operators, on the quickest CPU."""
    triton_slow_s: float
    compile_blocks_s: float
    """Seconds to compile all identical blocks at once, with an empty Inductor cache."""
    compile_layer_s: float
    """Seconds for each block of a model compiled as a whole, with an empty Inductor cache."""
    forward_call_s: float = 0.0
    """Python's seconds per operator call in the forward pass of an eager third-party model, views included; 0 if
    unknown.
    """
    backward_call_s: float = 0.0
    """Python's seconds per operator call in the backward pass of an eager third-party model; 0 if unknown."""

    def paces(self, launcher: str) -> tuple[float, float]:
        """Python's seconds to launch a kernel, on the quickest CPU and on the slowest; `launcher` as in StepSpec."""
        return getattr(self, f"{launcher}_s"), getattr(self, f"{launcher}_slow_s")


class StepRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How kernels within a step differ from kernels measured alone."""

    gap_s: float
    """Idle seconds between two kernels while Python launches ahead of the GPU."""
    replayed_gap_s: float
    """Idle seconds between two kernels of a replayed CUDA graph."""
    product_factor: float
    """Factor on the time of a matmul or of attention measured alone; `streaming_factor`: of all others."""
    streaming_factor: float
    throttle_from: float
    """Share of the tensor cores' peak, over the whole step, above which the power limit lowers the clock."""
    throttle: float
    """Relative growth of matmul time for each unit of the step's share of the peak above `throttle_from`."""
    hidden_update: float = 0.0
    """Share of an overlapped update's time that the backward pass hides."""
    spread: dict[str, float]
    """Half of the 90 % interval as a share of the central value, by kind of fit.

    'traced': third-party models, held out by family. 'elsewhere': formats without a fit, GPUs without a fit or a
    measured step.
    """

    def gap(self, replayed: bool) -> float:
        return self.replayed_gap_s if replayed else self.gap_s


class Borrower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Accuracy of borrowed rates on one GPU, from steps measured on it."""

    steps: int
    spread: float
    """Largest error of 19 of 20 measured steps, as a share of the measured time."""
    until_utc: str


class GpuRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    source: str
    until_utc: str
    """Time of the last record in the fit."""
    held_out: dict[str, list[str]] = {}
    """Values by field of StepSpec; steps with one of them are left out of the fit, for checking."""
    products: dict[str, ProductRates]
    streaming: StreamingRates
    attention: dict[str, dict[str, AttentionRates]]
    """Rates by implementation, then by pass: forward, backward."""
    host: HostRates
    step: StepRates
    borrowers: dict[str, Borrower] = {}
    """GPUs with measured steps that borrow these rates, by name."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    gpu: list[GpuRates]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    name: str
    peaks: dict[str, float]
    """Dense FLOP/s by number format."""
    bandwidth_bytes_per_s: float
    multiprocessors: int | None
    """Number of SMs. If None (unknown), tiles are assumed to fill all waves."""
    rates: GpuRates
    is_fitted: bool
    """True if `rates` were fitted to this GPU's own records, False if they are another GPU's."""
    sources: tuple[str, ...]
    is_stated: bool = True
    """True if peaks and bandwidth are a data sheet's, False if inferred from measured peaks."""
    peak_sources: dict[str, str] = field(default_factory=dict)
    device_names: tuple[str, ...] = ()
    platform: str = "cuda"
    """Platform of its kernels: cuda or rocm."""
    hardware: HardwareSpec | None = None
    """Data sheet of a known GPU, with a given memory size; None if its figures were measured."""


@functools.cache
def fitted_rates() -> tuple[GpuRates, ...]:
    """The committed rates of all fitted GPUs."""
    text = resources.files("steplab.costs").joinpath("rates.toml").read_text(encoding="utf-8")
    return tuple(msgspec.toml.decode(text, type=_File).gpu)


LEAST_PER_S = 1e9
"""Least plausible FLOP/s or bytes/s of a GPU. A lower given figure was meant in TFLOP/s or TB/s."""


def gpu_named(
    name: str,
    *,
    peak: Mapping[str, float] | None = None,
    bandwidth_bytes_per_s: float | None = None,
    memory_bytes: int | None = None,
) -> Gpu:
    """A known GPU with its committed rates; given figures replace the data sheet's.

    `peak` is FLOP/s by number format, `memory_bytes` the stated capacity. Raises UserError for an unknown GPU, and for
    a peak or bandwidth that is implausible.
    """
    gpu = gpu_of(hardware_named(name))
    if memory_bytes is not None and gpu.hardware is not None:
        named = f"{gpu.name} with {format_bytes(memory_bytes)}"
        card = dataclasses.replace(gpu.hardware, name=named, memory_bytes=memory_bytes, usable_bytes=None)
        gpu = dataclasses.replace(gpu, hardware=card)
    given = {f"peak {dtype}": value for dtype, value in (peak or {}).items()}
    given |= {} if bandwidth_bytes_per_s is None else {"bandwidth": bandwidth_bytes_per_s}
    for what, value in given.items():
        if not 0 < value < math.inf:
            raise UserError(f"{what} must be a positive number, not {value:g}")
        if value < LEAST_PER_S:
            unit = "bytes per second, as 4.8e12" if what == "bandwidth" else "FLOP/s, as 989e12"
            raise UserError(f"{what} is given in {unit}, not {value:g}")
    if not given:
        return gpu
    return dataclasses.replace(
        gpu,
        peaks=gpu.peaks | dict(peak or {}),
        peak_sources=gpu.peak_sources | {dtype: f"given: {value:g} FLOP/s" for dtype, value in (peak or {}).items()},
        bandwidth_bytes_per_s=bandwidth_bytes_per_s or gpu.bandwidth_bytes_per_s,
        sources=(*gpu.sources, f"given: {', '.join(f'{what} {value:g}' for what, value in given.items())}"),
    )


def gpu_of(hardware: HardwareSpec) -> Gpu:
    """The GPU of a data sheet with its own committed rates, or with borrowed ones."""
    table = fitted_rates()
    return gpu_with(hardware, next((each for each in table if each.name == hardware.name), table[0]))


def gpu_with(hardware: HardwareSpec, rates: GpuRates) -> Gpu:
    own = rates.name == hardware.name
    borrowed = f"no record of {hardware.name} was fitted: it is assumed to reach the same shares of its figures as "
    borrowed += f"{rates.name}"
    if tried := rates.borrowers.get(hardware.name):
        borrowed += f": 95 % of {tried.steps} steps measured on it are predicted within {tried.spread:.1%}"
    return Gpu(
        name=hardware.name,
        peaks={dtype: each.flops_per_s for dtype, each in hardware.peaks.items()},
        peak_sources={dtype: each.source for dtype, each in hardware.peaks.items()},
        bandwidth_bytes_per_s=hardware.memory_bandwidth_bytes_per_s,
        multiprocessors=hardware.multiprocessors,
        device_names=tuple(hardware.device_names),
        platform=hardware.platform,
        hardware=hardware,
        rates=rates,
        is_fitted=own,
        sources=(
            hardware.sources["memory_bandwidth_bytes_per_s"],
            *((rates.source,) if own else (borrowed, rates.source)),
        ),
    )


def measured_gpu(name: str, matmul_flops_per_s: Mapping[str, float], copy_bytes_per_s: float) -> Gpu:
    """A device without a data sheet, from `steplab doctor`'s measurements of large matmuls and a large copy.

    Its peaks and bandwidth are these figures divided by the shares of stated peaks and bandwidth that kernels reach on
    the first fitted GPU.
    """
    rates = fitted_rates()[0]
    others = rates.products["bf16"].peak_share
    shares = {dtype: each.peak_share for dtype, each in rates.products.items()}
    bandwidth = copy_bytes_per_s / rates.streaming.shares["copy"]
    how = "as `steplab doctor` measured"
    return Gpu(
        name=name,
        peaks={dtype: reached / shares.get(dtype, others) for dtype, reached in matmul_flops_per_s.items()},
        peak_sources=dict.fromkeys(matmul_flops_per_s, how),
        bandwidth_bytes_per_s=bandwidth,
        multiprocessors=None,
        rates=rates,
        is_fitted=False,
        is_stated=False,
        sources=(how, rates.source),
    )


def with_rates(gpu: Gpu, **changes: object) -> Gpu:
    return dataclasses.replace(gpu, rates=msgspec.structs.replace(gpu.rates, **changes))
