from statistics import median

from steplab.explain.case import Case
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import Profile
from steplab.units import format_time

MANY_TIMES = 5.0
"""Multiple of the median step time above which a step may have compiled."""
LEAST_S = 0.3
"""Least seconds above the median; compiling takes longer than most disturbances of a machine."""
LEAST_AGAIN_S = 0.03
"""Least seconds above the median if several steps were long: compiling a small graph from Inductor's cache takes about
0.07 s."""
_COMPILING = "dynamo_timed"
"""Part of the names of ranges that mark compilation. `TorchDynamo Cache Lookup`, `Torch-Compiled Region` and
`CompiledFunction` mark execution instead."""


def compile_in_the_loop(case: Case) -> Finding | None:
    """Finding if a measured step of a compiled model was as long as a compilation, or the profiler recorded one."""
    spec = case.spec
    step = case.run.timing.phase("step") if case.run.timing else None
    late_s: list[float] = []
    if spec is not None and spec.compile != "off" and step is not None and step.best_s:
        middle_s = median(step.best_s)
        late_s = [s - middle_s for s in step.best_s if s > MANY_TIMES * middle_s and s - middle_s > LEAST_AGAIN_S]
        if len(late_s) == 1 and late_s[0] <= LEAST_S:
            late_s = []
    profile = case.profile
    seen = _ranges_of_compilation(profile)
    if not late_s and not seen:
        return None
    graphs = ", or recorded its CUDA graphs," if spec and spec.replays_model else ""
    saw = []
    if late_s and step:
        saw.append(
            f"{len(late_s)} of {len(step.best_s)} measured steps took up to {format_time(max(late_s))} longer than the "
            f"median: the model was compiled again{graphs} in the loop."
        )
    if seen:
        saw.append(f"The profiler saw torch compile within the profiled steps: {seen[0]}.")
    compiling_s = profile.host_work_s.get("compilation", 0.0) / profile.num_steps
    waits_s = sum(phase.host_bound_s for phase in profile.phases) / profile.num_steps
    saves_s = sum(late_s) / len(step.best_s) if late_s and step else min(compiling_s, waits_s) or None
    return Finding(
        kind="compile_in_the_loop",
        title="The model is compiled again while it trains",
        saw=" ".join(saw),
        why=(
            "torch.compile guards compiled code: a new shape, dtype or Python value makes it compile again, "
            "which takes seconds, and after eight times it falls back to eager execution. The median step does not "
            "show this time, but training takes that much longer."
        ),
        change='TORCH_LOGS="recompiles" names the guard that failed',
        note="pad batches to one shape, or torch.compile(model, dynamic=True); warm up with every shape that will come",
        evidence=tuple(Evidence(what="longer than the median step", value=s, unit="s") for s in late_s)
        or (
            Evidence(what="ranges of compilation in the profile", value=len(seen), unit=""),
            Evidence(what="Python's time in them", value=compiling_s, unit="s"),
            Evidence(what="waiting for Python", value=waits_s, unit="s"),
        ),
        saves_s=saves_s,
        at_most=not late_s and saves_s is not None,
        prediction=(
            "The time of those steps beyond the median, spread over the measured steps; over a long training it is "
            "less per step if it happens only once."
            if late_s
            else f"At most the waiting while torch compiled: it took {format_time(compiling_s)} of a profiled step."
            if saves_s
            else "How long the compilation took is not in the profile's sums."
        ),
    )


def _ranges_of_compilation(profile: Profile) -> list[str]:
    names = [op.name for op in profile.ops] + [op.range for op in profile.ops]
    names += [kernel.range for kernel in profile.kernels] + [call.range for call in profile.host_calls]
    if "compilation" in profile.host_work_s:
        names.append(f"ranges of {_COMPILING}")
    return sorted({name for name in names if _COMPILING in name})
