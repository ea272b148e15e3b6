"""Vendors' figures for GPUs, TPUs and networks between nodes, from hardware.toml and networks.toml.

They are denominators and planning limits, never measurements. Conventions:

- A peak is dense, in FLOP/s, a multiply-add counted as two, with FP32 accumulation; the citation says where a figure
  "with sparsity" was halved.
- `fp32` is the rate outside the tensor cores; `tf32` is the rate of float32 matrix products with TF32 allowed.
- Bandwidths are in bytes per second with GB = 1e9. An interconnect's is per GPU, both directions together.
- `memory_bytes` is the stated capacity, with GB read as 2**30 bytes; `usable_bytes` is the slightly smaller memory
  that torch reports, if known.

A GPU is recognised only by its exact name: a laptop part, an export model or a MIG slice has other rates, and gets no
figures.
"""

import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any, Literal

import msgspec

from steplab.errors import UserError

_Figure = Annotated[float, msgspec.Meta(gt=0)]
_Count = Annotated[int, msgspec.Meta(gt=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """A GPU's peak rate of arithmetic in one number format."""

    flops_per_s: _Figure
    """Dense peak in FLOP/s, with FP32 accumulation."""
    source: str
    """Citation of the figure, and its conversion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSpec:
    """One GPU or TPU as its vendor describes it."""

    name: str
    """Short name in steplab, such as H200 SXM; unique without regard to case."""
    device_names: tuple[str, ...] = ()
    """Exact results of torch.cuda.get_device_name() for this GPU; none for a TPU."""
    platform: Literal["cuda", "rocm"] = "cuda"
    """Platform that kernels are compiled for; meaningless for a TPU."""
    memory_bytes: _Count
    """Stated capacity in bytes, with GB read as 2**30 bytes."""
    usable_bytes: _Count | None = None
    """Total memory as torch reports it (total_memory), in bytes; None: unknown."""
    memory_bandwidth_bytes_per_s: _Figure
    """Stated bandwidth of the GPU's own memory, GB = 1e9."""
    multiprocessors: _Count | None = None
    """Streaming multiprocessors or compute units; None: unknown."""
    interconnect: str
    """Fastest link between GPUs, such as NVLink 4; a machine may lack a bridge."""
    interconnect_bytes_per_s: _Figure
    """Stated bandwidth of the interconnect per GPU, both directions together, GB = 1e9."""
    peaks: Mapping[str, Peak]
    """Peak by number format: fp32, tf32, bf16, fp16, fp8. A format that the GPU lacks is absent."""
    sources: Mapping[str, str]
    """A citation for every figure, by field name or number format."""
    axis_bytes_per_s: _Figure | None = None
    """Bandwidth along one axis of a torus of chips, over both links of the axis, GB = 1e9. None for GPUs, which form
    none."""

    def peak_flops(self, dtype: str) -> Peak | None:
        return self.peaks.get(dtype)


class NetworkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network between nodes with certain GPUs."""

    name: str
    """Name of the network, such as InfiniBand NDR."""
    bytes_per_s: float
    """Stated bandwidth of one GPU's adapter in one direction, GB = 1e9."""
    reached: float
    """Fraction of `bytes_per_s` that NCCL reaches with large messages."""
    reached_source: str
    """Citation of `reached`."""
    gpus: tuple[str, ...]
    """Short names of the GPUs."""
    gpus_per_node: int
    """GPUs per node, each with its own adapter."""
    source: str
    """Citation of the stated figures, and their conversion."""


def catalogue() -> tuple[HardwareSpec, ...]:
    """Every known GPU, in the file's order."""
    return tuple(spec for spec in accelerators() if spec.device_names)


@functools.cache
def accelerators() -> tuple[HardwareSpec, ...]:
    """Every known GPU and TPU."""
    text = resources.files("steplab.specs").joinpath("hardware.toml").read_text(encoding="utf-8")
    return parse_catalogue(text)


def find_hardware(device_name: str) -> HardwareSpec | None:
    return next((spec for spec in catalogue() if device_name in spec.device_names), None)


def hardware_named(name: str) -> HardwareSpec:
    """GPU with this short name or torch's, in any case and spacing. H100 means its SXM module, else the one with most
    memory. Raises UserError with the short names."""
    return _named(name, catalogue())


def accelerator_named(name: str) -> HardwareSpec:
    return _named(name, accelerators())


def _named(name: str, known: Sequence[HardwareSpec]) -> HardwareSpec:
    wanted = name.strip().casefold()
    for spec in known:
        if wanted in map(str.casefold, (spec.name, *spec.device_names)):
            return spec
    asked = _plain(name)
    alike = [spec for spec in known if asked in (_plain(spec.name), _plain(spec.name.partition(" ")[0]))]
    if alike:
        return max(alike, key=lambda spec: ("SXM" in spec.name, spec.memory_bytes))
    names = [spec.name for spec in known]
    near = _near(wanted, names)
    hint = f"did you mean {' or '.join(near)}? Else " if near else ""
    raise UserError(f"unknown hardware '{name}'; {hint}choose one of {', '.join(names)}")


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


def _near(wanted: str, names: Sequence[str]) -> list[str]:
    plain = {_plain(name): name for name in names}
    asked = _plain(wanted)
    containing = [name for text, name in plain.items() if asked and asked in text]
    return containing or [plain[text] for text in difflib.get_close_matches(asked, plain, n=2, cutoff=0.7)]


def parse_catalogue(text: str) -> tuple[HardwareSpec, ...]:
    file = msgspec.toml.decode(text)
    return tuple(_spec(table, file["documents"]) for table in (*file["gpu"], *file.get("tpu", ())))


def _spec(table: Mapping[str, Any], documents: Mapping[str, str]) -> HardwareSpec:
    sources = {
        figure: f"{documents[source['document']]}; {source['note']}"
        for source in table["sources"]
        for figure in source["covers"]
    }
    peaks = {dtype: {"flops_per_s": peak, "source": sources[dtype]} for dtype, peak in table["peaks"].items()}
    return msgspec.convert({**table, "peaks": peaks, "sources": sources}, HardwareSpec)


@functools.cache
def networks() -> tuple[NetworkSpec, ...]:
    text = resources.files("steplab.specs").joinpath("networks.toml").read_text(encoding="utf-8")
    return msgspec.convert(msgspec.toml.decode(text)["network"], tuple[NetworkSpec, ...])


def network_of(gpu: str) -> NetworkSpec | None:
    """Network of the vendor's clusters of these GPUs; None: unknown."""
    return next((network for network in networks() if gpu in network.gpus), None)


def network_alike(gpu: str) -> NetworkSpec:
    """Network whose `reached` predictions for these GPUs use: their own, else the one with the least."""
    return network_of(gpu) or min(networks(), key=lambda each: each.reached)
