from collections.abc import Iterator

from steplab.ops.attention.hopper_kernels import remedy, too_old
from steplab.records.ceilings import Ceiling, Ceilings
from steplab.records.environment import Environment
from steplab.records.rows import Row
from steplab.report.kit.document import Column, Section, Table, Verdict
from steplab.report.kit.quantities import LABEL, Quantity
from steplab.report.kit.text import made
from steplab.report.report import RecordReport
from steplab.specs.hardware import HardwareSpec, find_hardware
from steplab.stats import summarize
from steplab.units import format_percent, format_rate


def ceilings_verdict(ceilings: Ceilings) -> Verdict:
    name = ceilings.environment.device.name
    hardware = find_hardware(name)
    told = []
    for kind, verb in (("matmul", "multiplies matrices"), ("copy", "copies memory")):
        of_kind = [ceiling for ceiling in ceilings.ceilings if ceiling.name == kind]
        if best := max(of_kind, key=lambda ceiling: ceiling.best_per_s, default=None):
            dtype = f" in {best.dtype}" if best.dtype else ""
            stated = _stated_per_s(best, hardware)
            share = f" ({format_percent(best.best_per_s / stated)} of the data sheet's)" if stated else ""
            told.append(f"{verb} at up to {format_rate(best.best_per_s, best.unit)}{dtype}{share}")
    against = "its data sheet" if hardware else "the matmul ceilings below, because it is not a known GPU"
    first = (f"{name} {' and '.join(told)}.",) if told else ()
    doubt = f"Warning: {ceilings.doubt} MFU does not use such ceilings; run `steplab doctor` on an idle machine."
    told_against = f"MFU on this device is relative to {against}."
    kernels = _attention_kernels(ceilings.environment)
    return Verdict(sentences=(*first, told_against, *kernels), cautions=(doubt,) if ceilings.doubt else ())


def _attention_kernels(env: Environment) -> Iterator[str]:
    if env.device.kind != "cuda" or env.device.compute_capability is None:
        return
    if env.triton is None:
        yield "Attention flash_triton cannot run: Triton is not installed."
    elif env.flash_triton == "hopper":
        yield f"Attention flash_triton runs its Hopper kernels, with Triton {env.triton}."
    elif env.device.compute_capability != "9.0":
        yield f"Attention flash_triton runs its portable kernels, with Triton {env.triton}."
    elif env.flash_triton == "portable":
        why = "is too old for the Hopper ones" if too_old(env.triton) else "does not compile the Hopper ones correctly"
        yield (
            f"Attention flash_triton runs its portable kernels: Triton {env.triton} {why}; {remedy(env.triton)}. "
            "Until then cuDNN's attention (--attention sdpa_cudnn) is faster."
        )


def _table(ceilings: Ceilings) -> Table:
    hardware = find_hardware(ceilings.environment.device.name)
    return Table(
        name="ceilings",
        columns=(
            Column(key="ceiling"),
            Column(key="best", quantity=_RATE),
            Column(key="median_s", header="median time"),
            Column(key="repeats", quantity=LABEL, rank=1),
            Column(key="stated", header="data sheet", quantity=_RATE),
        ),
        rows=tuple(_row(ceiling, hardware) for ceiling in ceilings.ceilings),
    )


_RATE = Quantity(str)


def _stated_per_s(ceiling: Ceiling, hardware: HardwareSpec | None) -> float | None:
    if hardware and ceiling.name == "copy":
        return hardware.memory_bandwidth_bytes_per_s
    peak = hardware.peak_flops(ceiling.dtype or "") if hardware else None
    return peak.flops_per_s if peak else None


def _row(ceiling: Ceiling, hardware: HardwareSpec | None) -> Row:
    stated = _stated_per_s(ceiling, hardware)
    return {
        "ceiling": f"{ceiling.dtype} matmul" if ceiling.name == "matmul" else "copy (read + write)",
        "best": format_rate(ceiling.best_per_s, ceiling.unit),
        "median_s": summarize(ceiling.seconds).median,
        "repeats": len(ceiling.seconds),
        "stated": format_rate(stated, ceiling.unit) if stated is not None else None,
        "name": ceiling.name,
        "dtype": ceiling.dtype,
        "unit": ceiling.unit,
        "best_per_s": ceiling.best_per_s,
        "stated_per_s": stated,
    }


def _sections(ceilings: Ceilings) -> Iterator[Section]:
    yield Section.of("Ceilings", _table(ceilings))
    yield Section.notes(ceilings.environment.gaps, "Not measured")


REPORT = RecordReport(
    chapter="Ceilings",
    anchor="ceilings",
    title=lambda record: record.environment.device.name,
    subtitle=lambda record: made(record, "record"),
    called=lambda record: record.environment.device.name,
    answer=ceilings_verdict,
    sections=_sections,
    rows=lambda record: _table(record).rows,
)
