from dataclasses import replace

from steplab.errors import Unsupported
from steplab.explain.case import Case, in_seconds
from steplab.explain.compile_in_the_loop import compile_in_the_loop
from steplab.explain.data_loading import data_loading
from steplab.explain.fusing import fusing_of
from steplab.explain.host_copies_and_syncs import host_copies_and_syncs
from steplab.explain.waiting import CONSIDERABLE, is_launch_bound, model_phases, wait_s, waits_for_host
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import Profile
from steplab.specs.resolve import command
from steplab.specs.step import StepSpec, refuse_unrecorded_step
from steplab.units import format_percent, format_time


def launch_bound(case: Case) -> Finding | None:
    """Finding if the device waits for Python in a considerable share of forward and backward. The profiler slows
    Python, so unprofiled times must confirm it if present."""
    if not waits_for_host(case):
        return None
    waiting_s = wait_s(case)
    if case.step_s is None:  # another diagnosis reports a known cause
        causes = (host_copies_and_syncs(case), data_loading(case), compile_in_the_loop(case))
        waiting_s -= sum(cause.saves_s or 0.0 for cause in causes if cause)
        if waiting_s <= CONSIDERABLE * case.length_s:
            return None
    change, note, fields = _change(case) if is_launch_bound(case) else _SLOW_HOST
    replays = change != _SLOW_HOST[0]
    records_graphs = bool(fields) or (replays and case.spec is None)
    waits = records_graphs and host_copies_and_syncs(case) is not None
    if waits:
        note += _SYNCS_FIRST
    fuses = case.is_eager and bool(fields)
    fused_s = fusing_of(case).fused_s if fuses else 0.0
    share = format_percent(waiting_s / case.length_s)
    return Finding(
        kind="launch_bound",
        title=f"The GPU waits for the CPU{_where(case.profile)}, {share} of the step",
        saw=_saw(case, waiting_s),
        why=(
            "The CPU launches the GPU's kernels, in a few microseconds each. Where kernels end before the next ones "
            "are launched, the GPU is idle, and neither a faster GPU nor a smaller dtype shortens the step."
        ),
        change=change,
        note=note,
        evidence=_evidence(case, waiting_s, fused_s),
        saves_s=waiting_s + fused_s,
        at_most=case.step_s is None or not replays,
        prediction=_prediction(case, waiting_s, fused_s, replays=replays, whole_step="cuda_graph" in fields),
        fields=fields,
        after="host_copies_and_syncs" if waits else "",
    )


_SYNCS_FIRST = (
    "; a CUDA graph cannot contain a call in which the CPU waits for the GPU (a sync, .item() or a blocking copy): "
    "remove those first"
)


_SLOW_HOST: tuple[str, str, dict[str, str]] = (
    "record Python stacks: torch.profiler.profile(with_stack=True)",
    "each launch comes later than launching alone explains: look for data loading, .item(), and Python in the step",
    {},
)


def _change(case: Case) -> tuple[str, str, dict[str, str]]:
    """The change, its note and its fields. CUDA graphs launch all kernels of a phase at once; compiling alone leaves
    one launch per unfused kernel."""
    own = 'model = torch.compile(model, mode="reduce-overhead")'
    shapes = "one launch replays all kernels of a pass; inputs must keep their shapes, and the graphs hold their memory"
    if case.spec is None:
        return own, shapes, {}
    if case.spec.replays_model:
        more = {"batch": str(2 * case.spec.batch)}
        return command(case.spec, more), "the model runs from CUDA graphs already: give each kernel more to do", {}
    fields = _graph_fields(case.spec)
    return command(case.spec, fields), f"in your own code: {own}; {shapes}", fields


def _graph_fields(spec: StepSpec) -> dict[str, str]:
    try:
        refuse_unrecorded_step(replace(spec, cuda_graph="step"))
    except Unsupported:
        return {"compile": "reduce-overhead"}
    eager = {"compile": "default" if spec.model.kind == "factory" else "block"} if spec.compile == "off" else {}
    return eager | {"cuda_graph": "step"}


def _saw(case: Case, waiting_s: float) -> str:
    profile = case.profile
    told = (
        f"Under the profiler, the GPU waits{_where(profile)} for kernels not yet launched, "
        f"{format_time(case.profiled_wait_s(model_phases(profile)))} of a step of "
        f"{format_time(profile.window_s / profile.num_steps)}; a step has "
        f"{profile.num_launches / profile.num_steps:.0f} launches."
    )
    if case.step_s is None:
        return told + " The step was not timed without a profiler, which slows Python: the real share is smaller."
    return told + (
        f" Without the profiler, a step takes {format_time(case.step_s)}: the GPU is busy for "
        f"{format_time(case.busy_s)} and waits{_where(profile)} for {format_time(waiting_s)}."
    )


def _where(profile: Profile) -> str:
    return " in forward and backward" if len(model_phases(profile)) < len(profile.phases) else ""


def _evidence(case: Case, waiting_s: float, fused_s: float) -> tuple[Evidence, ...]:
    profile = case.profile
    before = {
        f"idle while Python launches, {phase.phase}, under the profiler": case.profiled_wait_s([phase])
        for phase in model_phases(profile)
    }
    before |= {} if case.step_s is None else {"step, unprofiled": case.step_s}
    fused = {"device time that fusing also saves": fused_s} if fused_s else {}
    return (
        *in_seconds(before | {"device busy": case.busy_s}),
        Evidence(what="launches", value=profile.num_launches / profile.num_steps, unit=""),
        *in_seconds({"waiting in forward and backward": waiting_s} | fused),
    )


def _prediction(case: Case, waiting_s: float, fused_s: float, *, replays: bool, whole_step: bool) -> str:
    if case.step_s is None:
        return (
            "At most the idle time while Python launches, as profiled, less what other findings explain; the profiler "
            "itself caused part of it."
        )
    if not replays:
        return "At most: no wait remains."
    told = (
        f"The unprofiled forward and backward minus the GPU's busy time in them, {format_time(waiting_s)}: a "
        "replayed graph does not wait for Python. "
    )
    if fused_s:
        told += f"Compiling also fuses, which saves {format_time(fused_s)} of GPU time. "
    optimizer = ", and the optimizer's wait, which the graph saves too" if whole_step else ""
    return told + (
        f"Left out: gaps of about a microsecond between the kernels of a graph, copying inputs into it{optimizer}."
    )
