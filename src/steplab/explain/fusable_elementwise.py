from collections import defaultdict

from steplab.explain.case import Case
from steplab.explain.fusing import FUSABLE, Fusing, fusing_of, is_compiled
from steplab.explain.waiting import is_launch_bound
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import Profile
from steplab.specs.resolve import command
from steplab.units import format_percent, format_time

CONSIDERABLE = 0.05
"""Least share of the device's time that fusing must save: compiling takes seconds to minutes at every start, and error
messages of compiled code are harder to read."""

_NUM_NAMED = 3


def fusable_elementwise(case: Case) -> Finding | None:
    """Fires if fusing an eager model's elementwise work would save a considerable share of the device's time. On a CPU
    the saving is not known, and the work itself must take that share."""
    profile = case.profile
    if profile is None or not case.is_eager:
        return None
    fusing, busy_s = fusing_of(case, profile), case.busy_s(profile)
    if (fusing.fused_s if case.is_gpu else fusing.fusable_s) <= CONSIDERABLE * busy_s:
        return None
    fields = {"compile": "default"} if case.spec else {}
    saves_s, prediction = _gain(case, profile, fusing)
    share = format_percent(fusing.fusable_s / busy_s)
    saved = [
        Evidence(what="device time that fusing saves", value=fusing.fused_s, unit="s"),
        Evidence(what="device time that matrix products save", value=fusing.products_s, unit="s"),
        Evidence(
            what="kernels per step that fusing saves", value=fusing.num_kernels * (1 - fusing.shares.kernels), unit=""
        ),
    ]
    if not fusing.products_s:
        del saved[1]  # zero would be no measurement: without a dry run unpadded products are unknown
    return Finding(
        kind="fusable_elementwise",
        title=f"{share} of the device's work is elementwise, in kernels that could be fused",
        saw=(
            f"Outside of the optimizer, elementwise work, norms, softmax, sums and copies take "
            f"{format_time(fusing.fusable_s)} of {format_time(busy_s)} per step.{_most(case, profile)}"
        ),
        why=(
            "Such a kernel computes little and lasts as long as memory takes to read its inputs and write its output. "
            "In a chain of kernels every intermediate is written and read again; fused into one kernel, none "
            "does."
        ),
        change=command(case.spec, fields) if case.spec else "model = torch.compile(model)",
        note="compiling takes seconds to minutes at the start; in your own code: model = torch.compile(model)",
        evidence=(
            Evidence(what="elementwise, normalisation, softmax, reduction and copy", value=fusing.fusable_s, unit="s"),
            Evidence(what="device busy", value=busy_s, unit="s"),
            *(saved if case.is_gpu else ()),
        ),
        saves_s=saves_s,
        prediction=prediction,
        fields=fields,
    )


def _gain(case: Case, profile: Profile, fusing: Fusing) -> tuple[float | None, str]:
    """None on a CPU. The number of launches determines a launch-bound step."""
    if not case.is_gpu:
        why = "The gain from compiling is known only for CUDA GPUs; on a CPU compiling may also cost time."
        return None, why
    shares = fusing.shares
    leaves = f"{format_percent(shares.memory_bound)} of these kernels' time and {format_percent(shares.kernels)}"
    if profile.compiled is not None:
        told = f"By a dry run of the step, eager and as Inductor fuses it, compiling leaves {leaves} of the kernels."
    else:
        told = (
            f"In recorded steps of an H200 compiling left at most {leaves} of the kernels; this record has no dry run."
        )
    if fusing.products_s > 0:
        told += f" The compiler pads products with the vocabulary, which saves {format_time(fusing.products_s)}."
    if case.step_s is None or not is_launch_bound(case, profile):
        saves_s = max(0.0, fusing.saves_s)
        return saves_s, told + case.host_limit(profile, saves_s)
    device_s = case.busy_s(profile) + fusing.gaps_s - fusing.saves_s
    told += (
        " The step is launch-bound: it is assumed to last as long as its launches, where compiling leaves "
        f"{format_percent(shares.host)} of Python's time, or as the device's work if that is longer."
    )
    return max(0.0, case.step_s - max(device_s, shares.host * case.step_s)), told


def _most(case: Case, profile: Profile) -> str:
    found = defaultdict[str, float](float)
    for op in profile.ops:
        if op.range and op.category in FUSABLE and is_compiled(op.phase):
            found[f"{op.range} {op.phase}"] += case.per_step(profile, op.device_s)
    longest = sorted(found.items(), key=lambda place: -place[1])[:_NUM_NAMED]
    places = ", ".join(f"{place} {format_time(seconds)}" for place, seconds in longest)
    return f" Most of that is in {places}." if places else ""
