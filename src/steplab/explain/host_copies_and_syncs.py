import re

from steplab.explain.case import WORTH_TELLING, Case
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import OUTSIDE, HostCallStats, Profile
from steplab.specs.resolve import command
from steplab.units import format_percent, format_time, listed

_WAITS = re.compile(r"^(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize|^(cuda|cu|hip)Memcpy")
_COPY = re.compile(r"Memcpy")
_AT_ONCE_S = 10e-6
"""Mean time of a synchronisation below which Python did not wait; the call itself takes a few microseconds."""
_ASYNCHRONOUS = re.compile(r"Pinned")
"""Names of copies with page-locked memory, for which Python does not wait."""
_OF_A_PROFILER = re.compile(r"^(cuda|hip)DeviceSynchronize")
_READS_BACK = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero")
_NUM_NAMED = 3


def host_copies_and_syncs(case: Case) -> Finding | None:
    """Finding if Python synchronises with the GPU or copies at least once per step, and the GPU then idles."""
    profile = case.profile
    if profile.device != "cuda":
        return None
    calls = [call for call in profile.host_calls if _counts(call)]
    # Reading a number back makes two calls, a copy and a synchronisation, but waits only once.
    copies = sum(call.calls for call in calls if _COPY.search(call.name))
    syncs = sum(call.calls for call in calls) - copies
    count = max(copies, syncs) / profile.num_steps
    if count < 1:
        return None
    idle_s = _idle_after_s(case, {call.phase for call in calls})
    host_s = case.per_step(sum(call.total_s for call in calls))
    saves_s = min(idle_s, host_s)
    if saves_s <= WORTH_TELLING * case.length_s:
        return None
    reads = sum(op.calls for op in profile.ops if op.name in _READS_BACK) / profile.num_steps
    change, note, fields = _change(case, calls)
    return Finding(
        kind="host_copies_and_syncs",
        title=f"The CPU waits for the GPU {'once' if count == 1 else f'{count:.3g} times'} per step",
        saw=(
            f"{_most(profile, calls)}.{' A copy and its sync count as one wait.' * bool(copies and syncs)}"
            f"{_places(profile)} The GPU is idle for {format_time(idle_s)} per step "
            f"({format_percent(idle_s / case.length_s)}) in the phases of these calls and in those that "
            "follow them, because nothing has been launched."
        ),
        why=(
            "The CPU normally runs ahead and keeps a queue of kernels before the GPU. Where it needs a number from the "
            "GPU, such as a loss to print, it waits until the queue has drained. Then the GPU waits until the CPU has "
            "launched again."
        ),
        change=change,
        note=note,
        evidence=(
            Evidence(what="waits of Python for the GPU", value=count, unit=""),
            Evidence(what="values that Python reads (.item() and the like)", value=reads, unit=""),
            Evidence(what="Python's time in them", value=host_s, unit="s"),
            Evidence(what="GPU idle in the phases of these calls and the next", value=idle_s, unit="s"),
        ),
        saves_s=saves_s,
        at_most=True,
        prediction=(
            "At most that idle time, and at most Python's time in the calls: without them every later launch comes "
            "that much earlier. The GPU would still wait where launches take longer than kernels."
        ),
        fields=fields,
    )


def _most(profile: Profile, calls: list[HostCallStats]) -> str:
    places: dict[str, dict[str, int]] = {}
    for call in calls:
        by_place = places.setdefault(call.name, {})
        place = call.range.rpartition(".")[2] or call.phase
        by_place[place] = by_place.get(place, 0) + call.calls
    host_s = {name: sum(call.total_s for call in calls if call.name == name) / profile.num_steps for name in places}
    commonest = sorted(places.items(), key=lambda item: -sum(item[1].values()))[:_NUM_NAMED]
    told = []
    for name, by_place in commonest:
        a_step, place = sum(by_place.values()) / profile.num_steps, max(by_place, key=lambda where: by_place[where])
        told.append(f"{name}, {a_step:.3g} per step, {format_time(host_s[name])} of Python's time, most in {place}")
    return "; ".join(told)


def _places(profile: Profile) -> str:
    if profile.compiled is None:
        return ""
    reads, made = profile.compiled.reads_at, profile.compiled.made_at
    said = f" The model reads values off tensors at {listed(reads)}." if reads else ""
    return said + (f" It makes tensors without naming a device at {listed(made)}." if made else "")


def _counts(call: HostCallStats) -> bool:
    """True if Python waits in the call; the profiler's own synchronisation after the steps does not count."""
    own = call.phase == OUTSIDE and call.calls <= 1 and _OF_A_PROFILER.match(call.name)
    at_once = not _COPY.search(call.name) and call.total_s < _AT_ONCE_S * call.calls
    return bool(_WAITS.match(call.name)) and not own and not at_once and not _ASYNCHRONOUS.search(call.name)


def _idle_after_s(case: Case, of: set[str]) -> float:
    """The GPU's waits for launches in the phases `of`, and in the phase after each: seconds per step, at most the
    unprofiled step's idle time."""
    phases = [phase.phase for phase in case.profile.phases]
    after = {phases[(number + 1) % len(phases)] for number, name in enumerate(phases) if name in of}
    if of - set(phases):  # nothing ran on the device in that phase, so the next step idles
        after.add(phases[0])
    idle_s = case.profiled_wait_s(p for p in case.profile.phases if p.phase in of | after)
    return idle_s if case.step_s is None else min(idle_s, max(0.0, case.step_s - case.busy_s))


def _change(case: Case, calls: list[HostCallStats]) -> tuple[str, str, dict[str, str]]:
    spec = case.spec
    if spec is not None and spec.precision == "fp16" and any(call.phase == "optimizer" for call in calls):
        fields = {"precision": "bf16"}
        why = "fp16's gradient scaler asks the GPU in each step whether a gradient overflowed; bf16 needs none"
        return command(spec, fields), why, fields
    return (
        "keep numbers on the GPU: total_loss += loss.detach(), and .item() only every hundredth step",
        "copy batches with pin_memory=True and .to(device, non_blocking=True); no .cpu(), print or `if` on a tensor; "
        "make masks and positions once, as buffers, or with device=",
        {},
    )
