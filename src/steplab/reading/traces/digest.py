"""Makes a Profile from a Trace: chooses the steps, attributes the work and sums it."""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from steplab.errors import SteplabError
from steplab.reading.traces.activity import Activity, cpu_activity, device_activity, unseen_launches
from steplab.reading.traces.communication import TRANSFERS, messages_of_host
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

MOST_STEPS = 20
"""The most steps of a trace that are used, counted from the end; more would only take more memory."""

_WAITS = re.compile(r"Synchronize|^cu(da|Mem)?(Malloc|Free|Mem(Alloc|Free))|^(cuda|cu)Memcpy")
_LAUNCHES = re.compile(r"(cuda|cu|hip)(Graph|Module|Ext)?Launch")
_GENERATED = re.compile(r"CompiledFunction|Torch-Compiled Region")
_HOST_WORK = {"data loading": re.compile(r"^enumerate\(DataLoader\)#"), "compilation": re.compile(r"dynamo_timed")}
_ACROSS = re.compile(r"HtoD|DtoH|Host -> |-> (Host|Pageable|Pinned)|Pageable|Pinned")


def digest(
    trace: Trace, *, source: str | None = None, file: str | None = None, step_range: str | None = None
) -> Profile:
    """Sum a trace up. `source` and `file` go into the record unchanged (`source` is by default the trace's own).

    `step_range` is a shell pattern of the names of ranges that are steps. Raises SteplabError for a trace in which
    nothing ran, and UserError for a pattern that no range has.
    """
    trace = possible(one_device(with_steps(trace, step_range) if step_range else trace))
    trace = last_steps(trace, MOST_STEPS)
    host = Host(trace)
    on_host = not len(trace.work)
    activity = cpu_activity(trace, host) if on_host else device_activity(trace, host)
    doubts = [*trace.damage, *_unknown(trace)]
    if on_host:
        doubts += _without_kernels(trace, is_own=source is not None)
    else:
        doubts += _unseen(trace, host)
    notes = [*doubts, *(note for note in trace.notes if note not in doubts)]
    num_steps = len(host.steps[0])
    if not num_steps:
        notes.append(f"the trace marks no steps: all of it counts as one{offered_steps(trace)}")
    outside = activity.where(activity.step == NONE)
    if len(outside) and source is None:  # its own runs begin with a step that is not profiled
        time = format_time(float((outside.end_ns - outside.start_ns).sum()) / 1e9)
        work = "operators" if on_host else "kernels"
        notes.append(f"{len(outside)} {work} ({time}) of no step are left out: launched before, between or after them")
    activity = activity.where(activity.step != NONE)
    if not len(activity):
        raise SteplabError(
            "the trace has no kernel and no operator within a step; record at least one whole step"
            if num_steps
            else "the trace has no kernel and no operator of torch or CUDA; record it with torch.profiler or nsys"
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
        communication=_communication(activity, trace, host if on_host else None),
        timeline=_timeline(activity, windows, trace, host),
        num_launches=len(np.unique(activity.call[activity.call != NONE])),
        file=file,
        device_name=trace.device_name,
        notes=tuple(notes),
        doubts=tuple(doubts),
    )


def _without_kernels(trace: Trace, *, is_own: bool) -> list[str]:
    """Notes on a trace without kernels, which is read as a CPU's; for its own run steplab knows the device.

    Raises SteplabError for the trace of a GPU's work: the step's times on the host would be taken for the device's.
    """
    if trace.named(trace.calls.name, _LAUNCHES.match).any() or (trace.lists_gpu and trace.damage):
        why = "; ".join(trace.damage) or "record with the activities CPU and CUDA, and let the profiler see the GPU"
        raise SteplabError(f"the trace is of a GPU's work and holds no kernel: nothing to profile ({why})")
    if trace.unknown:
        told = ", ".join(f"{count} of {name}" for name, count in trace.unknown.items())
        raise SteplabError(
            f"it holds no kernel of a known device and events of categories that are not known ({told}): the CPU is "
            "not taken for the device that these ran on"
        )
    if trace.lists_gpu and not is_own:
        return [
            "the machine has a GPU, and the trace holds nothing that ran on it: if the model ran there, these are only "
            "the host's times; record with the activities CPU and CUDA"
        ]
    return []


def _unknown(trace: Trace) -> Iterator[str]:
    """Doubts for events of categories that are not known."""
    for name, count in trace.unknown.items():
        yield f"{count} events of category {name}, which is not known, are left out"


def _unseen(trace: Trace, host: Host) -> Iterator[str]:
    """Doubts where launches and work cannot be matched."""
    launches = trace.named(trace.calls.name, _LAUNCHES.match).any()
    if launches and ((trace.work.correlation <= 0).all() or (trace.calls.correlation <= 0).all()):
        yield "all correlation ids are 0: no kernel is known to be of a launch, an operator or a range"
    lost = unseen_launches(trace)
    lost = lost[host.step_at(trace.calls.start_ns[lost]) != NONE]
    if len(lost):
        yield (
            f"{len(lost)} launches of CUDA graphs have no kernel in the trace: what the GPU did for them is not known, "
            "so time before the next known kernel counts as idle, and not as waiting for the CPU"
        )


def _notes(activity: Activity, trace: Trace, *, on_host: bool) -> Iterator[str]:
    lost = int((activity.call == NONE).sum())
    if lost:
        yield (
            f"{lost} of {len(activity)} kernels have no launch in the trace: each is counted in the step in which it "
            "ran, and in the phase of the previous kernel"
        )
    if not on_host and not len(trace.ops):
        yield "the trace holds no operators: no FLOPs, no bytes, no ranges for the backward pass"
    elif (trace.ops.inputs == NONE).all():
        yield "the trace was made without record_shapes: no FLOPs and no bytes"
    if on_host and trace.named(activity.name, _GENERATED.match).any():
        yield (
            "code that torch.compile generated is uncategorised: on a CPU torch.profiler sees only its call, "
            "unless TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1 is set before compiling"
        )


def _kernels(activity: Activity, trace: Trace, host: Host, *, on_host: bool) -> Iterator[KernelStats]:
    lasted_s: Seconds = (activity.end_ns - activity.start_ns) / 1e9
    for chosen in _groups(activity.name, activity.phase, activity.path, activity.stream):
        first = chosen[0]
        calls_s = lasted_s[chosen]
        if on_host:  # an operator's own time may be split into several pieces, which are one call
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
    """Host calls within the steps that wait for the device, copy to or from it, or allocate on it."""
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
            continue  # a copy within the device blocks no one
        yield HostCallStats(
            name=f"{name}: {copy}" if copy else name,
            phase=host.phase_names[phase[first]],
            range=host.paths[path[first]],
            calls=len(group),
            total_s=float(calls.duration_ns[chosen[group]].sum()) / 1e9,
        )


def _host_work(trace: Trace, host: Host) -> Iterator[tuple[str, float]]:
    """The time of the host from the first step to the last in ranges of each of _HOST_WORK, if there are some."""
    ranges, (starts_ns, ends_ns) = trace.ranges, host.steps
    for kind, pattern in _HOST_WORK.items():
        chosen = trace.named(ranges.name, pattern.search)
        if chosen.any() and len(starts_ns):
            start_ns, end_ns = ranges.start_ns[chosen], (ranges.start_ns + ranges.duration_ns)[chosen]
            within = clip(start_ns, end_ns, int(starts_ns[0]), int(ends_ns[-1]))
            yield kind, length(*within) / 1e9


def _communication(activity: Activity, trace: Trace, cpu: Host | None) -> Communication | None:
    """The communication in the trace; without a GPU's work it is taken from the host, whose threads send the
    messages."""
    collective = activity.category == CATEGORIES.index("communication")
    if cpu is not None:
        inside, computed = messages_of_host(trace, cpu), activity.where(~collective)
        if not len(inside[0]):
            return None
        return Communication(
            total_s=length(*inside) / 1e9,
            overlapped_s=overlap(inside, (computed.start_ns, computed.end_ns)) / 1e9,
        )
    if not collective.any():
        return None
    computing = ~collective & ~trace.named(activity.name, TRANSFERS.match)
    inside, outside = ((activity.start_ns[chosen], activity.end_ns[chosen]) for chosen in (collective, computing))
    return Communication(total_s=length(*inside) / 1e9, overlapped_s=overlap(inside, outside) / 1e9)


def _timeline(activity: Activity, windows: list[PhaseSpan], trace: Trace, host: Host) -> Timeline:
    """The last step, from the beginning of its first window."""
    step = windows[-1].step
    mine = [window for window in windows if window.step == step]
    shown = activity.where(activity.step == step)
    zero = min(mine[0].start_ns, int(shown.start_ns.min()))  # a copy may run beside the step before
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
    """Stretches of consecutive kernels that one range launched, by phase."""
    for first, stop in stretches(shown.path, shown.phase):
        path = host.paths[shown.path[first]]
        if path:
            start, end = int(shown.start_ns[first]) - zero, int(shown.end_ns[first:stop].max()) - zero
            yield path, start, end, path.count(".")


def _groups(*keys: Column) -> Iterator[Column]:
    """Indices of the rows that agree in all keys, one group at a time, each in its own order."""
    order = np.lexsort(keys[::-1])
    for first, stop in stretches(*(key[order] for key in keys)):
        yield order[first:stop]
