"""Build a Profile from a Trace: select steps, attribute work, sum up."""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from steplab.errors import SteplabError
from steplab.reading.traces.activity import Activity, Pieces, activity_of, unseen_launches
from steplab.reading.traces.communication import sent_in
from steplab.reading.traces.devices import launching_calls, one_device
from steplab.reading.traces.host import Host
from steplab.reading.traces.intervals import clip, length, overlap, stretches
from steplab.reading.traces.op_costs import OpCosts, computed_in, describe
from steplab.reading.traces.steps import last_steps, offered_steps, with_steps
from steplab.reading.traces.times import possible
from steplab.reading.traces.trace import NONE, Column, Trace
from steplab.reading.traces.windows import PhaseSpan, cut, phase_times
from steplab.records.profile import CATEGORIES, Communication, HostCallStats, KernelStats, OpStats, Profile, Timeline
from steplab.units import format_time

Seconds = NDArray[np.float64]

_WAITS = re.compile(r"Synchronize|^cu(da|Mem)?(Malloc|Free|Mem(Alloc|Free))|^(cuda|cu)Memcpy")
_LAUNCHES = re.compile(r"(cuda|cu|hip)(Graph|Module|Ext)?Launch")
_GENERATED = re.compile(r"CompiledFunction|Torch-Compiled Region")
_HOST_WORK = {"data loading": re.compile(r"^enumerate\(DataLoader\)#"), "compilation": re.compile(r"dynamo_timed")}
_ACROSS = re.compile(r"HtoD|DtoH|Host -> |-> (Host|Pageable|Pinned)|Pageable|Pinned")


def digest(trace: Trace, *, source: str | None = None, step_range: str | None = None) -> Profile:
    """Sum up a trace. `source` is given for steplab's own runs and replaces the trace's. `step_range` is a shell
    pattern for names of ranges that are steps. Raises SteplabError if nothing ran, UserError if no range matches.
    """
    trace = last_steps(possible(one_device(with_steps(trace, step_range))))
    host = Host(trace)
    on_host = not len(trace.work)
    activity = activity_of(trace, host)
    doubts = [*trace.damage, *_unknown(trace)]
    if on_host:
        doubts += _without_kernels(trace, is_own=source is not None)
    else:
        doubts += _unseen(trace, host)
    notes = [*doubts, *(note for note in trace.notes if note not in doubts)]
    num_steps = len(host.steps[0])
    if not num_steps:
        notes.append(f"the trace marks no steps: it counts as one step{offered_steps(trace)}")
    outside = activity.where(activity.step == NONE)
    if len(outside) and source is None:  # steplab's runs begin with an unprofiled step
        time = format_time(float((outside.end_ns - outside.start_ns).sum()) / 1e9)
        work = "operators" if on_host else "kernels"
        notes.append(f"{len(outside)} {work} ({time}) outside steps are left out")
    activity = activity.where(activity.step != NONE)
    if not len(activity):
        raise SteplabError(
            "no kernel or operator lies in a step; record at least one whole step"
            if num_steps
            else "the trace has no kernel or operator of torch or CUDA; record with torch.profiler or nsys"
        )
    notes += _notes(activity, trace, on_host=on_host)
    windows = cut(activity)
    phases = tuple(phase_times(activity, windows, host.phase_names, host.phase_seconds(), on_host=on_host))
    return Profile(
        source=source or trace.source,
        device="cpu" if on_host else "cuda",
        num_steps=max(1, len(np.unique(activity.step))),
        window_s=(int(activity.end_ns.max()) - int(activity.start_ns.min())) / 1e9,
        phases=phases,
        kernels=tuple(sorted(_kernels(activity, trace, host, on_host=on_host), key=lambda k: -k.total_s)),
        ops=tuple(sorted(_ops(activity, trace, host), key=lambda op: -op.device_s)),
        host_calls=tuple(sorted(_host_calls(trace, host), key=lambda call: -call.total_s)),
        host_work_s=dict(_host_work(trace, host)),
        communication=_communication(*sent_in(activity, trace, host)),
        timeline=_timeline(activity, windows, trace, host),
        num_launches=len(np.unique(activity.call[activity.call != NONE])),
        device_name=trace.device_name,
        notes=tuple(notes),
        doubts=tuple(doubts),
    )


def _without_kernels(trace: Trace, *, is_own: bool) -> list[str]:
    """Doubts about a trace without kernels, which is read as a CPU's although the machine may have a GPU. Empty if
    steplab recorded the trace (`is_own`), because the device is then known.

    Raises SteplabError if the trace must be a GPU's: host times would be taken for the device's.
    """
    if trace.named(trace.calls.name, _LAUNCHES.match).any() or (trace.lists_gpu and trace.damage):
        why = "; ".join(trace.damage) or "record the activities CPU and CUDA, with the GPU visible to the profiler"
        raise SteplabError(f"the GPU trace contains no kernels ({why})")
    if trace.unknown:
        told = ", ".join(f"{count} of {name}" for name, count in trace.unknown.items())
        raise SteplabError(
            f"it has no kernel of a known device, and events of unknown categories ({told}), so its device is unknown"
        )
    if trace.lists_gpu and not is_own:
        return [
            "the machine has a GPU without work in the trace: if the model ran there, these times "
            "are only Python's; record the activities CPU and CUDA"
        ]
    return []


def _unknown(trace: Trace) -> Iterator[str]:
    for name, count in trace.unknown.items():
        yield f"{count} events of the unknown category {name} are left out"


def _unseen(trace: Trace, host: Host) -> Iterator[str]:
    launches = trace.named(trace.calls.name, _LAUNCHES.match).any()
    if launches and ((trace.work.correlation <= 0).all() or (trace.calls.correlation <= 0).all()):
        yield "all correlation ids are 0: kernels have no known launch, operator or range"
    lost = unseen_launches(trace)
    lost = lost[host.step_at(trace.calls.start_ns[lost]) != NONE]
    if len(lost):
        yield (
            f"{len(lost)} launches of CUDA graphs have no kernel in the trace: their GPU work is unknown, "
            "so time before the next kernel counts as idle, not as waiting for Python"
        )


def _notes(activity: Activity, trace: Trace, *, on_host: bool) -> Iterator[str]:
    lost = int((activity.call == NONE).sum())
    if lost:
        yield (
            f"{lost} of {len(activity)} kernels have no launch in the trace: each counts to the step it "
            "ran in, and the previous kernel's phase"
        )
    if not on_host and not len(trace.ops):
        yield "the trace has no operators: no FLOPs, no bytes, no ranges for backward"
    elif (trace.ops.inputs == NONE).all():
        yield "the trace was made without record_shapes: no FLOPs and no bytes"
    if on_host and trace.named(activity.name, _GENERATED.match).any():
        yield (
            "code of torch.compile is uncategorised: on a CPU torch.profiler sees only its call, "
            "unless TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1 is set before compiling"
        )


def _kernels(activity: Activity, trace: Trace, host: Host, *, on_host: bool) -> Iterator[KernelStats]:
    lasted_s: Seconds = (activity.end_ns - activity.start_ns) / 1e9
    for chosen in _groups(activity.name, activity.phase, activity.path, activity.stream):
        first = chosen[0]
        calls_s = lasted_s[chosen]
        if on_host:  # several pieces may be one call's
            _, call = np.unique(activity.call[chosen], return_inverse=True)
            calls_s = np.bincount(call, weights=calls_s).astype(np.float64)
        yield KernelStats(
            name=trace.names[activity.name[first]],
            category=CATEGORIES[activity.category[first]],
            phase=host.phase_names[activity.phase[first]],
            range=host.paths[activity.path[first]],
            stream=int(activity.stream[first]),
            calls=len(calls_s),
            total_s=float(calls_s.sum()),
            median_s=float(np.median(calls_s)),
            max_s=float(calls_s.max()),
        )


def _ops(activity: Activity, trace: Trace, host: Host) -> Iterator[OpStats]:
    known = activity.where(activity.op != NONE)
    name, inputs = trace.ops.name[known.op], trace.ops.inputs[known.op]
    lasted_s: Seconds = (known.end_ns - known.start_ns) / 1e9
    costs = OpCosts(trace, host.op_nesting.parent)
    for chosen in _groups(name, inputs, known.phase, known.path):
        first = chosen[0]
        calls = np.unique(known.op[chosen])
        by_category = np.bincount(known.category[chosen], weights=lasted_s[chosen], minlength=len(CATEGORIES))
        given = trace.inputs[inputs[first]] if inputs[first] != NONE else None
        cost = costs.of(calls)
        yield OpStats(
            name=trace.names[name[first]],
            category=CATEGORIES[int(by_category.argmax())],
            phase=host.phase_names[known.phase[first]],
            range=host.paths[known.path[first]],
            inputs=describe(given) if given else "",
            dtype=computed_in(given) if given else "",
            calls=len(calls),
            kernels=len(chosen),
            device_s=float(lasted_s[chosen].sum()),
            flops=cost.flops if cost else None,
            moved_bytes=(cost.moved_bytes or None) if cost else None,
        )


def _host_calls(trace: Trace, host: Host) -> Iterator[HostCallStats]:
    """Host calls in steps that wait for the device, copy to or from it, or allocate on it."""
    calls = trace.calls
    chosen = np.flatnonzero(trace.named(calls.name, _WAITS.search) & (host.step_at(calls.start_ns) != NONE))
    launched, launching = np.full(len(calls.name) + 1, NONE), launching_calls(trace)
    launched[launching] = trace.work.name
    copies = launched[chosen]
    phase = host.phase_at(calls.start_ns[chosen], calls.thread[chosen])
    path = host.path_at(calls.start_ns[chosen], calls.thread[chosen])
    for group in _groups(calls.name[chosen], copies, phase, path):
        first = group[0]
        copy = trace.names[copies[first]] if copies[first] != NONE else ""
        name = trace.names[calls.name[chosen[first]]]
        if "emcpy" in name and not _ACROSS.search(copy):
            continue  # copies within the device do not block
        yield HostCallStats(
            name=f"{name}: {copy}" if copy else name,
            phase=host.phase_names[phase[first]],
            range=host.paths[path[first]],
            calls=len(group),
            total_s=float(calls.duration_ns[chosen[group]].sum()) / 1e9,
        )


def _host_work(trace: Trace, host: Host) -> Iterator[tuple[str, float]]:
    ranges, (starts_ns, ends_ns) = trace.ranges, host.steps
    for kind, pattern in _HOST_WORK.items():
        chosen = trace.named(ranges.name, pattern.search)
        if chosen.any():
            within = ranges.start_ns[chosen], ranges.end_ns[chosen]
            if len(starts_ns):
                within = clip(*within, int(starts_ns[0]), int(ends_ns[-1]))
            yield kind, length(*within) / 1e9


def _communication(sent: Pieces, computed: Pieces) -> Communication | None:
    if not len(sent):
        return None
    overlapped_s = overlap(sent.intervals, computed.intervals) / 1e9
    return Communication(total_s=length(*sent.intervals) / 1e9, overlapped_s=overlapped_s)


def _timeline(activity: Activity, windows: list[PhaseSpan], trace: Trace, host: Host) -> Timeline:
    step = windows[-1].step
    mine = [window for window in windows if window.step == step]
    shown = activity.where(activity.step == step)
    zero = min(mine[0].start_ns, int(shown.start_ns.min()))  # a copy may overlap the previous step
    names, kernel = np.unique(shown.name, return_inverse=True)
    category_of = dict(zip(shown.name.tolist(), shown.category.tolist(), strict=True))
    return Timeline(
        names=tuple(trace.names[number] for number in names),
        categories=tuple(CATEGORIES[category_of[int(number)]] for number in names),
        kernel=tuple(kernel.tolist()),
        stream=tuple(shown.stream.tolist()),
        start_ns=tuple((shown.start_ns - zero).tolist()),
        duration_ns=tuple((shown.end_ns - shown.start_ns).tolist()),
        phases=tuple((host.phase_names[w.phase], w.start_ns - zero, w.end_ns - zero) for w in mine),
        ranges=tuple(_module_spans(shown, host, zero)),
    )


def _module_spans(shown: Activity, host: Host, zero: int) -> Iterator[tuple[str, int, int, int]]:
    for first, stop in stretches(shown.path, shown.phase):
        path = host.paths[shown.path[first]]
        if path:
            start, end = int(shown.start_ns[first]) - zero, int(shown.end_ns[first:stop].max()) - zero
            yield path, start, end, path.count(".")


def _groups(*keys: Column) -> Iterator[Column]:
    order = np.lexsort(keys[::-1])
    for first, stop in stretches(*(key[order] for key in keys)):
        yield order[first:stop]
