"""Vendors' figures for GPUs and TPUs: peaks, memory and links. The figures are in hardware.toml.

They are denominators (how much of the peak did a step reach?) and planning limits, never measurements.
The conventions, the same for every entry:

- A peak is dense, in FLOP/s, a multiply-add counted as two. Data sheets of Hopper, Ada and Blackwell mostly
  print twice that, "with sparsity"; the citation says where a figure was halved.
- A tensor-core peak is the one with FP32 accumulation, because that is what PyTorch trains with. GeForce
  cards accumulate in FP32 at half the rate of FP16, so the larger number on the box does not apply.
- `fp32` is the rate outside the tensor cores; `tf32` is what float32 matrix products reach where TF32 is
  allowed.
- Bandwidths are in bytes per second with GB = 1e9, as vendors mean them. That of the interconnect is per GPU
  and counts both directions together, again as vendors state it: one direction has half.
- `memory_bytes` is the stated capacity with its "GB" read as 2**30 bytes, because that is what the parts
  hold: a "141 GB" H200 shows 143,771 MiB, more than 141e9 bytes. No card shows more than that, and each a
  little less: `usable_bytes` is what a program is told that it has, where someone has read it.

A GPU is recognised by its exact name alone. A laptop part, a cut-down export model or a MIG slice has a name
of its own and other rates; it gets no figures rather than those of the GPU it resembles.
"""

import difflib
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import msgspec

from steplab.errors import UserError

_PeakDtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """A GPU's peak rate of arithmetic in one number format."""

    flops_per_s: float
    """Dense peak in FLOP/s, with FP32 accumulation."""
    source: str
    """Citation of the figure, and how it was converted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSpec:
    """One GPU or TPU as its vendor describes it."""

    name: str
    """Short name in steplab, such as H200 SXM; unique without regard to case."""
    device_names: tuple[str, ...]
    """What torch.cuda.get_device_name() returns for this GPU, exactly."""
    memory_bytes: int
    """Stated capacity in bytes, with GB read as 2**30 bytes."""
    usable_bytes: int | None = None
    """Total memory as torch reports it (total_memory), in bytes; None: not known for this card."""
    memory_bandwidth_bytes_per_s: float
    """Stated bandwidth of the GPU's own memory, GB = 1e9."""
    multiprocessors: int | None = None
    """Number of streaming multiprocessors, or compute units; None: no source for it."""
    interconnect: str
    """The fastest link between GPUs, such as NVLink 4; a bridge is an option that a machine may lack."""
    interconnect_bytes_per_s: float
    """Stated bandwidth of that link per GPU, both directions together, GB = 1e9."""
    peaks: Mapping[str, Peak]
    """Peak by number format: fp32, tf32, bf16, fp16, fp8. A format that the GPU lacks is absent."""
    sources: Mapping[str, str]
    """A citation for every figure, by field name or number format."""
    axis_bytes_per_s: float | None = None
    """For a chip in a torus: what it sends along one axis, over both links of it, GB = 1e9; None: GPUs, whose links
    lead to a switch or to each other."""

    def peak_flops(self, dtype: str) -> Peak | None:
        """The peak for `dtype` (fp32, tf32, bf16, fp16 or fp8); None if the vendor states none."""
        return self.peaks.get(dtype)


def catalogue() -> tuple[HardwareSpec, ...]:
    """Every GPU in the catalogue, in the order of the file."""
    return tuple(spec for spec in accelerators() if spec.device_names)


@functools.cache
def accelerators() -> tuple[HardwareSpec, ...]:
    """Every GPU in the catalogue, and every TPU, which torch does not know by a name."""
    text = resources.files("steplab.specs").joinpath("hardware.toml").read_text(encoding="utf-8")
    return parse_catalogue(text)


def find_hardware(device_name: str) -> HardwareSpec | None:
    """The GPU that torch calls `device_name`; None if it is not in the catalogue."""
    return next((spec for spec in catalogue() if device_name in spec.device_names), None)


def hardware_named(name: str) -> HardwareSpec:
    """The GPU with this short name, without regard to case. Raises UserError that lists the known names."""
    return _named(name, catalogue())


def accelerator_named(name: str) -> HardwareSpec:
    """The same of GPUs and TPUs."""
    return _named(name, accelerators())


def _named(name: str, known: Sequence[HardwareSpec]) -> HardwareSpec:
    wanted = name.strip().casefold()
    for spec in known:
        if spec.name.casefold() == wanted:
            return spec
    names = [spec.name for spec in known]
    near = _near(wanted, names)
    hint = f"did you mean {' or '.join(near)}? Else " if near else ""
    raise UserError(f"unknown hardware '{name}'; {hint}choose one of {', '.join(names)}")


def _near(wanted: str, names: Sequence[str]) -> list[str]:
    """The names that contain what was asked for, such as H200, else those spelt most like it."""
    plain = {"".join(filter(str.isalnum, name.casefold())): name for name in names}
    asked = "".join(filter(str.isalnum, wanted))
    containing = [name for text, name in plain.items() if asked and asked in text]
    return containing or [plain[text] for text in difflib.get_close_matches(asked, plain, n=2, cutoff=0.7)]


class _Source(msgspec.Struct, forbid_unknown_fields=True):
    covers: list[str]
    document: str
    note: str


class _Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    interconnect: str
    interconnect_bytes_per_s: float
    peaks: dict[_PeakDtype, float]
    sources: list[_Source]
    usable_bytes: int | None = None
    multiprocessors: int | None = None


class _Gpu(_Entry, forbid_unknown_fields=True, kw_only=True):
    device_names: list[str]


class _Tpu(_Entry, forbid_unknown_fields=True, kw_only=True):
    axis_bytes_per_s: float


class _File(msgspec.Struct, forbid_unknown_fields=True):
    documents: dict[str, str]
    gpu: list[_Gpu]
    tpu: list[_Tpu] = []


def parse_catalogue(text: str) -> tuple[HardwareSpec, ...]:
    """Read a catalogue and check all of it. Raises ValueError that says what is wrong with it."""
    try:
        file = msgspec.toml.decode(text, type=_File)
    except msgspec.DecodeError as error:
        raise ValueError(f"hardware catalogue: {error}") from error
    entries: list[_Gpu | _Tpu] = [*file.gpu, *file.tpu]
    specs = tuple(_spec(entry, file.documents) for entry in entries)
    _refuse_repeats("name", [spec.name.casefold() for spec in specs])
    _refuse_repeats("device name", [name for spec in specs for name in spec.device_names])
    return specs


def _spec(entry: _Gpu | _Tpu, documents: Mapping[str, str]) -> HardwareSpec:
    axis_bytes_per_s = entry.axis_bytes_per_s if isinstance(entry, _Tpu) else None
    figures: dict[str, float] = {
        "memory_bytes": entry.memory_bytes,
        "memory_bandwidth_bytes_per_s": entry.memory_bandwidth_bytes_per_s,
        "interconnect_bytes_per_s": entry.interconnect_bytes_per_s,
    }
    if entry.usable_bytes is not None:
        figures["usable_bytes"] = entry.usable_bytes
    if entry.multiprocessors is not None:
        figures["multiprocessors"] = entry.multiprocessors
    if axis_bytes_per_s is not None:
        figures["axis_bytes_per_s"] = axis_bytes_per_s
    figures.update(entry.peaks.items())
    for figure, value in figures.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"hardware catalogue: {entry.name}: {figure} must be positive, not {value}")
    if entry.usable_bytes is not None and entry.usable_bytes > entry.memory_bytes:
        raise ValueError(f"hardware catalogue: {entry.name}: usable_bytes is more than memory_bytes")
    named = [("device name", entry.device_names)] if isinstance(entry, _Gpu) else []
    for label, texts in (("name", [entry.name]), *named):
        if not texts or not all(text == text.strip() != "" for text in texts):
            raise ValueError(f"hardware catalogue: {entry.name}: empty or padded {label}")
    sources = _sources(entry, set(figures), documents)
    return HardwareSpec(
        name=entry.name,
        device_names=tuple(entry.device_names) if isinstance(entry, _Gpu) else (),
        memory_bytes=entry.memory_bytes,
        usable_bytes=entry.usable_bytes,
        memory_bandwidth_bytes_per_s=entry.memory_bandwidth_bytes_per_s,
        multiprocessors=entry.multiprocessors,
        interconnect=entry.interconnect,
        interconnect_bytes_per_s=entry.interconnect_bytes_per_s,
        peaks={dtype: Peak(flops_per_s=peak, source=sources[dtype]) for dtype, peak in entry.peaks.items()},
        sources=sources,
        axis_bytes_per_s=axis_bytes_per_s,
    )


def _sources(entry: _Entry, figures: set[str], documents: Mapping[str, str]) -> dict[str, str]:
    """Citation by figure. Raises ValueError for a figure with two citations, and for a citation of no figure."""
    covered = [figure for source in entry.sources for figure in source.covers]
    _refuse_repeats(f"source of {entry.name} for", covered)
    if wrong := figures.symmetric_difference(covered):
        raise ValueError(f"hardware catalogue: {entry.name}: figures and sources differ in {', '.join(sorted(wrong))}")
    for source in entry.sources:
        if not documents.get(source.document, "").strip() or not source.note.strip():
            raise ValueError(f"hardware catalogue: {entry.name}: no such document or no note: {source}")
    return {
        figure: f"{documents[source.document]}; {source.note}" for source in entry.sources for figure in source.covers
    }


def _refuse_repeats(what: str, names: list[str]) -> None:
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"hardware catalogue: {what} {repeated[0]} occurs twice")
