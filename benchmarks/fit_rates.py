"""Fits the shares of a GPU's figures that kernels reach, and writes src/steplab/costs/rates.toml.

    python -m benchmarks.fit_rates > rates.toml                        (from the root of the checkout)
    python -m benchmarks.fit_rates --until 2026-12-01 > rates.toml

The first prints the committed table again, from records in tests/golden and benchmarks/results up to the table's date;
the second includes newer ones. Inputs are profiles of eager and compiled steps in fp32 and bf16, attention benchmarks,
and steps.

`--store` replaces the committed files, `--gpu` chooses the GPU. `--hold-out` leaves out steps, so that `steplab plan
check` tests predictions against them: fields and values, as in "model=xl,medium context=128"; default: the table's. The
whole table is printed, with that GPU refitted.

Kernel rates come first (rates_of_kernels), fp8's from single layers. Overheads of steps are fitted to whole forward and
backward passes with the host ahead, and the interval to errors at sizes outside the fit. Third-party models come last:
torch and transformers trace them, the rates of kernels that only they have are fitted, then Python's time per call.
"""

import argparse
import dataclasses
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from benchmarks.rates_of_kernels import (
    STAY,
    KernelSum,
    Params,
    ProductTime,
    fit_attention,
    fit_fp8,
    fit_products,
    fit_streaming,
    fit_traced,
    product_times,
    relative_error,
    search,
    streaming_sums,
)
from benchmarks.tables import GOLDEN, RESULTS, read

from steplab.costs.kernel_time import USUAL_ATTENTION
from steplab.costs.rates import (
    AttentionRates,
    Borrower,
    Gpu,
    GpuRates,
    HostRates,
    StepRates,
    StreamingRates,
    fitted_rates,
    gpu_with,
    with_rates,
)
from steplab.errors import UserError
from steplab.lab.predicting import operators_of as traced_operators
from steplab.plan.dry_run.events import Operator
from steplab.plan.host_pace import Machine, PhaseCell, host_paces, phase_cells, runs_that_waited, waited
from steplab.plan.kernel_time import launches_of, on_tensor_cores, waiting
from steplab.plan.seen import is_fitted_kind, is_held_out
from steplab.plan.time import predict_step_time, throttling
from steplab.records.attention import AttentionRun
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.records.step_time import TimePart
from steplab.records.timing import waits_for_host
from steplab.specs.hardware import HardwareSpec, find_hardware, hardware_named
from steplab.specs.step import FIELDS, StepSpec
from steplab.specs.step_choices import AFTER, OVERLAPPED
from steplab.stats import percentile
from steplab.store.database import Store

_ALWAYS = "9999"
_LEAST_PRODUCTS = 20
"""Least products in the records for fitting a number format."""
_LEAST_STEPS = 8
"""Least steps on an unfitted GPU for an interval from them."""
_ALONE = StepRates(
    gap_s=0.0,
    replayed_gap_s=0.0,
    product_factor=1.0,
    streaming_factor=1.0,
    throttle_from=1.0,
    throttle=0.0,
    spread={"elsewhere": 1.0},
)
"""A step without overhead."""
_CALL_S = 1.5e-5
_INTERVAL = 95
"""Per cent of phases at unseen sizes within the interval: above the nominal 90 %, because recorded sizes are
similar.
"""


def fit_gpu(
    records: Sequence[Record], timed: Sequence[Run], hardware: HardwareSpec, source: str, elsewhere: float
) -> GpuRates:
    """Rates of a GPU from its records. `timed`: its steps, held-out ones too, which tell the hosts' pace; `source`
    describes the records; `elsewhere` is the spread for unfitted cases, from other records.

    Raises UserError for too few records.
    """
    times, runs = kernel_times(records, hardware), _runs(records)
    gpu = fit_kernels(times, hardware, source)
    paces = host_paces(phase_cells(_runs(timed), gpu))
    ahead = fit_step(loaded(never_waited(phase_cells(runs, gpu), paces), gpu))
    step = msgspec.structs.replace(ahead, hidden_update=fit_hidden_update(records))
    rates = with_rates(gpu, host=fit_host(paces, runs), step=step).rates
    spread = _spread(records, times, hardware) | {"elsewhere": elsewhere}
    return msgspec.structs.replace(rates, step=msgspec.structs.replace(rates.step, spread=spread))


@dataclasses.dataclass(frozen=True, slots=True)
class KernelTimes:
    products: list[ProductTime]
    sums: list[KernelSum]
    attention: dict[str, dict[str, AttentionRates]]

    def of(self, runs: Sequence[Run]) -> "KernelTimes":
        """Times of these steps, with unchanged attention rates, which no step fits."""
        return KernelTimes(product_times(runs), streaming_sums(runs), self.attention)


def kernel_times(records: Sequence[Record], hardware: HardwareSpec) -> KernelTimes:
    """Kernel times in a GPU's records. Raises UserError for too little attention."""
    runs = _runs(records)
    attention = fit_attention(records, gpu_with(hardware, _unfitted(hardware.name, "")))
    if missing := [name for name in USUAL_ATTENTION.values() if name not in attention]:
        raise UserError(f"too few benchmarks of {missing[0]} to fit; make some with `steplab attention --grid peers`")
    return KernelTimes(product_times(runs), streaming_sums(runs), attention)


def fit_kernels(times: KernelTimes, hardware: HardwareSpec, source: str) -> Gpu:
    """The GPU with kernel rates, and a step without overhead."""
    gpu = with_rates(gpu_with(hardware, _unfitted(hardware.name, source)), attention=times.attention)
    counted = Counter(time.dtype for time in times.products)
    dtypes = sorted(dtype for dtype, number in counted.items() if number >= _LEAST_PRODUCTS)
    if not {"fp32", "bf16"} <= set(dtypes):
        raise UserError("too few profiles of eager steps in fp32 and bf16 to fit; make some with `steplab profile`")
    gpu = with_rates(gpu, products={dtype: fit_products(times.products, dtype, gpu) for dtype in dtypes})
    return with_rates(gpu, streaming=fit_streaming(times.sums, gpu))


def _runs(records: Sequence[Record], *, update: str = AFTER) -> list[Run]:
    """Steps with this update: an overlapped one has no phase."""
    runs = (record for record in records if isinstance(record, Run))
    return [run for run in runs if run.spec and is_fitted_kind(run.spec) and run.spec.update == update]


def _unfitted(name: str, source: str) -> GpuRates:
    return GpuRates(
        name=name,
        source=source,
        until_utc="",
        held_out={},
        products={},
        streaming=StreamingRates(fixed_s=2e-6, cached_gain=0.3, cached_bytes=3e7, shares={"default": 0.7}),
        attention={},
        host=msgspec.convert(dict.fromkeys(HostRates.__struct_fields__, 0.0), HostRates),
        step=_ALONE,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    tensor_s: float
    """Tensor-core seconds of products and attention."""
    vector_s: float
    """Seconds of the other products."""
    streaming_s: float
    """Seconds of all other kernels."""
    kernels: int
    at_peak_s: float
    """Seconds of the tensor-core FLOPs at the stated peak."""
    replayed: bool
    """True if a CUDA graph launches the kernels."""

    def in_step_s(self, rates: StepRates, slower: float) -> float:
        products = (self.tensor_s * slower + self.vector_s) * rates.product_factor
        return products + self.streaming_s * rates.streaming_factor + self.kernels * rates.gap(self.replayed)


def _load(parts: Sequence[TimePart], gpu: Gpu, *, replayed: bool) -> _Load:
    tensor = [part for part in parts if on_tensor_cores(part)]
    streaming_s = sum(part.seconds for part in parts if part.kind == "streaming")
    tensor_s = sum(part.seconds for part in tensor)
    return _Load(
        tensor_s=tensor_s,
        vector_s=sum(part.seconds for part in parts) - tensor_s - streaming_s,
        streaming_s=streaming_s,
        kernels=sum(part.kernels for part in parts),
        at_peak_s=sum(part.flops / gpu.peaks[part.dtype] for part in tensor),
        replayed=replayed,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedCell:
    """A measured phase with its load and its step's."""

    cell: PhaseCell
    own: _Load
    step: _Load

    def in_step_s(self, rates: StepRates) -> float:
        """Seconds of the phase at these rates, as in plan.time.throttled."""
        reached = self.step.at_peak_s / self.step.in_step_s(rates, 1.0)
        return self.own.in_step_s(rates, throttling(reached, rates))


def loaded(cells: Sequence[PhaseCell], gpu: Gpu) -> list[LoadedCell]:
    return [
        LoadedCell(cell, *(_load(parts, gpu, replayed=cell.replayed) for parts in (cell.parts, cell.step)))
        for cell in cells
    ]


def fit_host(paces: Mapping[Machine, float], runs: Sequence[Run]) -> HostRates:
    """The fastest and slowest measured hosts, and compile times."""
    found = dict[str, float]()
    for launcher in ("eager", "compiled", "triton"):
        own = [seconds for (_, other), seconds in paces.items() if other == launcher]
        if not own:
            raise UserError(f"no record shows the host's speed; add {launcher} steps of small models")
        found |= {f"{launcher}_s": min(own), f"{launcher}_slow_s": max(own)}
    blocks_s, layers_s = compile_times(runs)
    if not blocks_s or not layers_s:
        raise UserError("no record shows compile times; add steps with --compile block and --compile default")
    return HostRates(compile_blocks_s=median(blocks_s), compile_layer_s=median(layers_s), **found)


def compile_times(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    """Compile seconds of equal blocks, and of each block of a whole model: the longest per size and attention, as
    others hit Inductor's cache.
    """
    longest: tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]] = {}, {}
    for run in runs:
        spec, timing = run.spec, run.timing
        if spec is None or spec.model.shape is None or timing is None or timing.first_step_s is None:
            continue
        whole = spec.compile != "block"
        each_s = timing.first_step_s / (spec.model.shape.num_layers if whole else 1)
        of_kind, kind = longest[whole], (spec.model.label, spec.attention)
        of_kind[kind] = max(each_s, of_kind.get(kind, 0.0))
    return list(longest[False].values()), list(longest[True].values())


def never_waited(cells: Sequence[PhaseCell], paces: Mapping[Machine, float]) -> list[PhaseCell]:
    return [cell for cell in cells if not waited(cell, paces)]


def fit_step(cells: Sequence[LoadedCell]) -> StepRates:
    """Overheads of phases without waiting for the host; the gap in CUDA graphs separately."""
    launched, replayed = ([each for each in cells if each.cell.replayed == by_graph] for by_graph in (False, True))

    def fitted(start: Params, known: Params, own: Sequence[LoadedCell]) -> Params:
        def error(params: Params) -> float:
            rates = msgspec.convert({"replayed_gap_s": 0.0, "spread": {}} | known | params, StepRates)
            away = sum(abs(math.log(params[name] / start[name])) for name in start)
            return relative_error((each.in_step_s(rates), each.cell.measured_s) for each in own) + STAY * away

        return known | search(error, start)

    start = {"gap_s": 1e-6, "product_factor": 1.02, "streaming_factor": 1.02, "throttle_from": 0.4, "throttle": 0.3}
    found = fitted(start, {}, launched)
    found = (
        fitted({"replayed_gap_s": found["gap_s"]}, found, replayed)
        if replayed
        else found | {"replayed_gap_s": found["gap_s"]}
    )
    return msgspec.convert(found | {"spread": {}}, StepRates)


def fit_hidden_update(records: Sequence[Record]) -> float:
    """Share of an update hidden by backward: the saving of an overlapped update over that update's time alone. The
    median over steps measured both ways, alternating, with the host ahead; 0 without any.
    """
    after: dict[tuple[StepSpec | None, str], list[Run]] = defaultdict(list)
    for run in _runs(records):
        if run.turns is not None:
            after[run.spec, run.turns.session].append(run)
    shares = []
    for run in _runs(records, update=OVERLAPPED):
        if run.spec is None or run.turns is None or run.timing is None or waits_for_host(run.timing.back_to_back):
            continue
        others = after.get((dataclasses.replace(run.spec, update=AFTER), run.turns.session), [])
        step_s = _median_s([run], "step")
        step_after_s, update_s = _median_s(others, "step"), _median_s(others, "optimizer")
        if step_s and step_after_s and update_s:
            shares.append((step_after_s - step_s) / update_s)
    return max(median(shares), 0.0) if shares else 0.0


def _median_s(runs: Sequence[Run], phase: str) -> float | None:
    """Median of a phase over all samples of the runs; None without any."""
    found = [run.timing.phase(phase) for run in runs if run.timing is not None]
    samples = [seconds for each in found if each is not None for seconds in each.best_s]
    return median(samples) if samples else None


def _spread(records: Sequence[Record], times: KernelTimes, hardware: HardwareSpec) -> dict[str, float]:
    """Half of the interval: the error, as a share of measured time, in most phases of sizes left out of the fit."""
    runs = _runs(records)
    sizes = sorted({run.spec.model.label for run in runs if run.spec and run.profile})
    errors: dict[str, list[float]] = {"eager": [], "compiled": []}
    for size in sizes:
        gpu = fit_kernels(times.of([run for run in runs if _size(run) != size]), hardware, "")
        cells = phase_cells(runs, gpu)
        paces = host_paces(cells)
        ahead = loaded(never_waited(cells, paces), gpu)
        rates = fit_step([each for each in ahead if _size(each.cell.run) != size])
        for each in ahead:
            if _size(each.cell.run) == size:
                error = abs(each.in_step_s(rates) / each.cell.measured_s - 1)
                spec = each.cell.run.spec
                errors["eager" if spec and spec.compile == "off" else "compiled"].append(error)
    return {how: percentile(found, _INTERVAL) for how, found in errors.items()}


def _size(record: Record) -> str | None:
    """Size of a step's model; None for other records."""
    return record.spec.model.label if isinstance(record, Run) and record.spec else None


# --- the table ----------------------------------------------------------------------------------------------------


def fit_rates(
    records: Sequence[Record], gpu: str, held_out: Mapping[str, Sequence[str]], others: Sequence[Run]
) -> list[GpuRates]:
    """The committed table with one GPU refitted to `records`, from `records_to_fit`.

    `held_out`: field values of steps left out for checking. `others`: all steps; those on unfitted GPUs give the error
    of borrowed rates, those of third-party models the rates of their kernels and their interval, all the hosts' pace.
    Attention implementations without records keep their rates.

    Raises UserError for an unknown GPU, or too few records.
    """
    hardware, table = hardware_named(gpu), fitted_rates()
    before = next((each for each in table if each.name == hardware.name), table[0])
    timed = [run for run in others if _name_of_gpu(run) == hardware.name]
    rates = fit_gpu(records, timed, hardware, source_of(records, hardware), before.step.spread["elsewhere"])
    kept = before.attention if before.name == hardware.name else {}
    own = msgspec.structs.replace(
        rates,
        attention=kept | rates.attention,
        until_utc=records[-1].created_utc,
        held_out={name: list(values) for name, values in held_out.items()},
    )
    traced = [run for run in timed if _is_traced(run)]
    own_gpu = fit_fp8(gpu_with(hardware, own))
    host = fit_calls(traced, fit_traced(traced, _operators_of, own_gpu))
    own_gpu = with_rates(own_gpu, host=host)
    step = msgspec.structs.replace(own.step, spread=own.step.spread | {"traced": _traced_spread(traced, own_gpu)})
    new = msgspec.structs.replace(fit_traced(traced, _operators_of, own_gpu).rates, step=step)
    fitted = [new, *(each for each in table if each.name != hardware.name)]
    names = {rates.name for rates in fitted}
    tried = borrowers([run for run in others if _name_of_gpu(run) not in names], new)
    return [msgspec.structs.replace(new, borrowers=tried), *fitted[1:]]


def _is_traced(run: Run) -> bool:
    """True for a profiled step of a third-party model by one process."""
    spec = run.spec
    return run.profile is not None and spec is not None and spec.model.kind == "hf" and spec.layout.world_size == 1


@cache
def _operators_of(spec: StepSpec) -> Iterable[Operator]:
    return traced_operators(spec.as_predicted)


def fit_calls(runs: Sequence[Run], gpu: Gpu) -> HostRates:
    """Python's time per call, by eager steps of third-party models: phases in which the device waits are longer."""
    steps = []
    for run in runs:
        if run.spec and run.spec.compile == "off" and run.median_s:
            device_s = sum(
                part.device_s for part in predict_step_time(run.spec, gpu, _operators_of(run.spec)).phases[:-1]
            )
            steps.append((launches_of(_operators_of(run.spec), gpu), device_s, run.median_s))

    def error(params: Params) -> float:
        host = msgspec.structs.replace(gpu.rates.host, **params)
        idle = (sum(each.idle_s for each in waiting(launches, host).values()) for launches, _, _ in steps)
        away = sum(abs(math.log(seconds / _CALL_S)) for seconds in params.values())
        pairs = ((device_s + idle_s, step_s) for idle_s, (_, device_s, step_s) in zip(idle, steps, strict=True))
        return relative_error(pairs) + STAY * away

    found = search(error, {"forward_call_s": _CALL_S, "backward_call_s": _CALL_S})
    return msgspec.structs.replace(gpu.rates.host, **found)


def _traced_spread(runs: Sequence[Run], gpu: Gpu) -> float:
    """Largest error of 19 of 20 steps of third-party models, in fits without their family."""
    families = {run.id: run.spec.model.hf_config["model_type"] for run in runs if run.spec and run.spec.model.hf_config}
    errors = []
    for family in dict.fromkeys(families.values()):
        without = fit_traced([run for run in runs if families[run.id] != family], _operators_of, gpu)
        for run in runs:
            if families[run.id] == family and run.spec and run.median_s:
                found = predict_step_time(run.spec, without, _operators_of(run.spec))
                errors.append(abs(found.central_s / run.median_s - 1))
    return percentile(errors, _INTERVAL)


def borrowers(runs: Iterable[Run], rates: GpuRates) -> dict[str, Borrower]:
    """Errors of these rates on unfitted GPUs, by name, given enough steps."""
    by_gpu: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if (name := _name_of_gpu(run)) and run.spec and is_fitted_kind(run.spec) and run.median_s:
            by_gpu[name].append(run)
    found = {}
    for name, own in sorted(by_gpu.items()):
        gpu = gpu_with(hardware_named(name), rates)
        waiting = runs_that_waited(own, gpu)
        errors = [
            abs(predict_step_time(run.spec, gpu).central_s / run.median_s - 1)
            for run in own
            if run.spec and run.median_s and run.id not in waiting
        ]
        if len(errors) >= _LEAST_STEPS:
            newest = max(run.created_utc for run in own)
            found[name] = Borrower(steps=len(errors), spread=percentile(errors, _INTERVAL), until_utc=newest)
    return found


def _name_of_gpu(run: Run) -> str | None:
    """Name in hardware.toml; None if absent."""
    hardware = find_hardware(run.device_name or "")
    return hardware.name if hardware else None


def records_to_fit(
    records: Iterable[Record], hardware: HardwareSpec, held_out: Mapping[str, Sequence[str]], until_utc: str
) -> list[Record]:
    """Steps and attention benchmarks of a GPU until then, each once, oldest first.

    Raises UserError without any.
    """
    found = {}
    for record in records:
        device = record.environment.device.name if record.environment else None
        if device in hardware.device_names and record.created_utc <= until_utc and _is_fitted(record, held_out):
            found[record.id] = record
    if not found:
        raise UserError(f"no record of {hardware.name} until {until_utc}; import some with `steplab import`")
    return sorted(found.values(), key=lambda record: (record.created_utc, record.id))


def _is_fitted(record: Record, held_out: Mapping[str, Sequence[str]]) -> bool:
    if isinstance(record, Run) and record.spec is not None:
        return is_fitted_kind(record.spec) and not is_held_out(record.spec, held_out)
    return isinstance(record, AttentionRun)


def source_of(records: Sequence[Record], hardware: HardwareSpec) -> str:
    """Description of the fitted records."""
    runs, until = sum(isinstance(record, Run) for record in records), records[-1].created_utc
    return f"{runs} steps and {len(records) - runs} benchmarks of attention on {hardware.name}, until {until[:10]}"


def committed_records() -> Iterator[Record]:
    for folder in (GOLDEN, RESULTS):
        for path in sorted(folder.glob("*_h?00_*.jsonl.[gx]z")):
            yield from read(path, Record)


def parsed_hold_out(text: str) -> dict[str, list[str]]:
    """Fields and values, such as 'model=xl,medium context=128'. Raises UserError for an unknown field."""
    found: dict[str, list[str]] = {}
    for part in text.split():
        name, _, values = part.partition("=")
        if name not in FIELDS or not values:
            raise UserError(f"--hold-out takes fields and values, such as model=xl,medium context=128; not '{part}'")
        found[name] = values.split(",")
    return found


def as_toml(table: Sequence[GpuRates]) -> str:
    """The file for `fitted_rates`, five digits a figure."""
    lines = [
        "# What kernels reach of the stated figures of a GPU, as steplab/costs/rates.py explains. Written by",
        "# benchmarks/fit_rates.py; docs/plan_time.md says which records were fitted, which held out, and how far off.",
    ]
    for rates in table:
        lines += ["", "[[gpu]]", *_toml_lines("gpu", msgspec.to_builtins(rates))]
    return "\n".join(lines) + "\n"


def _toml_lines(path: str, content: dict[str, Any]) -> Iterator[str]:
    for key, value in content.items():
        if not isinstance(value, dict):
            yield f"{_toml_key(key)} = {json.dumps(value) if isinstance(value, str | list) else f'{value:.5g}'}"
    for key, value in content.items():
        if isinstance(value, dict):
            inner = f"{path}.{_toml_key(key)}"
            if not all(isinstance(each, dict) for each in value.values()):
                yield from ("", f"[{inner}]")
            yield from _toml_lines(inner, value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200 SXM", help="known GPU")
    parser.add_argument("--store", type=Path, help="store of the records (default: the files of the repository)")
    parser.add_argument("--hold-out", help="steps to leave out (default: the table's)")
    parser.add_argument("--until", help="UTC of the newest record (default: the table's)")
    given = parser.parse_args(words)
    hardware = hardware_named(given.gpu)
    known = next((rates for rates in fitted_rates() if rates.name == hardware.name), None)
    held_out = parsed_hold_out(given.hold_out or "") if known is None or given.hold_out is not None else known.held_out
    until_utc = given.until or (known.until_utc if known else _ALWAYS)
    if given.store:
        with Store.open(given.store) as opened:
            every = list(opened.iterate())
    else:
        every = list(committed_records())
    records = records_to_fit(every, hardware, held_out, until_utc)
    stated = {name: tried.until_utc for name, tried in known.borrowers.items()} if known else {}
    stated[hardware.name] = until_utc
    steps = [
        record
        for record in every
        if isinstance(record, Run)
        and record.created_utc <= (given.until or stated.get(_name_of_gpu(record) or "", _ALWAYS))
    ]
    sys.stdout.write(as_toml(fit_rates(records, given.gpu, held_out, steps)))


if __name__ == "__main__":
    main()
