from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.rows import Row
from steplab.records.run import Utilization
from steplab.records.step_time import PhaseTimes, StepTimePrediction
from steplab.report.kit.document import Column, Document, Section, Table, Verdict, even, row_of
from steplab.report.kit.quantities import NUMBER, SHARE, TIME
from steplab.report.plan.document import ANSWERS, parameter_words
from steplab.report.run.one_run import utilization_blocks
from steplab.specs.step import StepSpec, describe

_BOUND = {
    "compute": "matrix products bound it",
    "memory": "memory bandwidth bounds it",
    "host": "the device waits for the host, which launches too slowly",
}


def time_document(spec: StepSpec, prediction: StepTimePrediction) -> Document:
    step, time = prediction.step, units.format_time
    return Document(
        title=f"Predicted step time on {prediction.gpu}",
        subtitle=f"{describe(spec)}{parameter_words(prediction.model)}",
        verdict=Verdict(
            sentences=(
                f"A step takes about {time(step.seconds)}, {time(step.low_s)} to {time(step.high_s)} with a "
                f"probability of 90 %; {_BOUND[step.bound]}.",
                *_rate(prediction),
            ),
            cautions=tuple(_lack_of_memory(prediction)),
        ),
        sections=tuple(_sections(prediction)),
        data=time_rows(prediction),
    )


def _rate(prediction: StepTimePrediction) -> Iterator[str]:
    if prediction.tokens_per_s is not None:
        tokens = " ".join(units.format_rate(prediction.tokens_per_s, " tokens/s").split())
        yield f"That is {tokens} on one GPU{mfu_words(prediction.utilizations)}."


def mfu_words(utilizations: Sequence[Utilization]) -> str:
    """MFU with its FLOP convention and peak, after a comma; empty if unknown."""
    mfu = next((used for used in utilizations if used.convention == "causal"), None)
    if mfu is None or mfu.value is None or mfu.peak_flops_per_s is None:
        return ""
    peak = units.format_rate(mfu.peak_flops_per_s, "FLOP/s")
    return f", an MFU of {100 * mfu.value:.1f} % (causal FLOPs, of the dense {mfu.dtype} peak of {peak})"


def _lack_of_memory(prediction: StepTimePrediction) -> Iterator[str]:
    fit, least = prediction.fit, prediction.least_device_bytes
    if fit is None or least is None or fit.verdict in ("fits", "not known"):
        return
    needed, usable = units.format_bytes(least), units.format_bytes(fit.usable_bytes)
    told = f"Warning: the step {ANSWERS[fit.verdict].format(fit.gpu)}: it needs at least {needed} of the {usable} that "
    told += "a program can use"
    if fit.verdict == "does not fit":
        told += "; the time assumes enough memory"
    yield f"{told}. `steplab plan memory` lists what takes the memory."


def _sections(prediction: StepTimePrediction) -> Iterator[Section]:
    step, time = prediction.step, units.format_time
    host = f"If the host keeps up, a step takes the GPU's time, {time(step.device_s)}."
    if step.slow_host_s > step.device_s:
        slow = f"a slow one up to {time(step.slow_host_s)}, and then the device waits"
    else:
        slow = f"a slow one {time(step.slow_host_s)}"
    if step.host_s:
        host += f" To launch it, a quick host takes {time(step.host_s)}, {slow}."
    else:
        host = "A few calls launch CUDA graphs: a step takes the GPU's time."
    yield Section.of("Phases", _phases(prediction), host)
    yield Section.of("Utilization", *utilization_blocks(prediction.utilizations))
    yield Section.of("Where the device's time goes", _parts(prediction))
    yield Section.notes(prediction.notes)
    yield Section.notes(prediction.sources, "Sources")


def _phases(prediction: StepTimePrediction) -> Table:
    return Table(
        name="phases",
        columns=(
            Column(key="phase"),
            Column(key="seconds", header="time", quantity=TIME),
            Column(key="low_s", header="low"),
            Column(key="high_s", header="high"),
            Column(key="device_s", header="device", rank=1),
            Column(key="host_s", header="quick host", rank=2),
            Column(key="slow_host_s", header="slow host", rank=2),
            Column(key="bound", header="bound by"),
        ),
        rows=tuple(map(_phase, prediction.phases)),
    )


def _phase(phase: PhaseTimes) -> Row:
    return {
        **row_of(phase, "phase", "seconds", "low_s", "high_s", "device_s"),
        "host_s": phase.host_s or None,  # not predicted for replays of CUDA graphs
        "slow_host_s": phase.slow_host_s or None,
        "bound": phase.bound,
    }


_MOST_PARTS = 12


def _parts(prediction: StepTimePrediction) -> Table:
    rows = sorted(_part_rows(prediction), key=lambda row: -float(row["seconds"] or 0))
    return Table(
        name="parts",
        columns=(
            Column(key="phase"),
            Column(key="kind", rank=2),
            Column(key="what", header="operator"),
            Column(key="dtype", header="format", rank=1),
            Column(key="kernels", quantity=NUMBER, rank=1),
            Column(key="seconds", header="time", quantity=TIME),
            Column(key="share", quantity=SHARE),
            Column(key="flops_per_s", header="rate", rank=1),
            Column(key="bytes_per_s", header="bandwidth", rank=1),
        ),
        rows=tuple(rows),
        first=_MOST_PARTS,
        caption="Central values, gaps between kernels included; 'fused' are kernels that a compiler joins.",
    )


def _part_rows(prediction: StepTimePrediction) -> list[Row]:
    whole = prediction.step.device_s
    return [
        {
            **row_of(part, "phase", "kind", "what", "dtype", "kernels", "seconds"),
            "share": part.seconds / whole,
            "flops_per_s": part.flops / part.seconds if part.kind != "streaming" else None,
            "bytes_per_s": part.moved_bytes / part.seconds,
            "flops": part.flops,
            "moved_bytes": part.moved_bytes,
        }
        for part in prediction.parts
    ]


def time_rows(prediction: StepTimePrediction) -> list[Row]:
    """One row per phase (and the step), kind of kernel, MFU or HFU convention, GPU, note and source; `row` names the
    kind.

    Seconds of a phase's parts sum to its `device_s`, and phases to the step.
    """
    rows: list[Row] = [{"row": "phase", **_phase(phase)} for phase in prediction.phases]
    rows += [{"row": "part", **row} for row in _part_rows(prediction)]
    rows += [
        {"row": used.kind, "what": used.convention, "share": used.value, "flops": used.flops, "dtype": used.dtype}
        for used in prediction.utilizations
    ]
    if prediction.fit:
        fit = prediction.fit
        rows.append({"row": "card", "what": fit.gpu, "verdict": fit.verdict, "total_bytes": fit.usable_bytes})
    rows += [{"row": "note", "what": note} for note in prediction.notes]
    rows += [{"row": "source", "what": source} for source in prediction.sources]
    return even(rows)
