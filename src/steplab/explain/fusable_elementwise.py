"""Elementwise work that a compiler would fuse."""

from steplab.explain.case import Case
from steplab.explain.fusing import (
    fewer_kernels,
    fusable_s,
    fusing_saves_s,
    gaps_s,
    most_fusable,
    moved_by,
    products_save_s,
    shares_of,
)
from steplab.explain.waiting import is_launch_bound
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import Profile
from steplab.specs.command import command
from steplab.units import format_bytes, format_percent, format_time

CONSIDERABLE = 0.05
"""Least share of the device's time that fusing must save: compiling takes seconds to minutes at every start, and error
messages of compiled code are harder to read."""

_NUM_NAMED = 3


def fusable_elementwise(case: Case) -> Finding | None:
    """Fires where fusing an eager model's elementwise work would save a considerable share of the device's time."""
    profile = case.profile
    if profile is None or not case.is_eager:
        return None
    low_s, fused_s, busy_s = fusable_s(case, profile), fusing_saves_s(case, profile), case.busy_s(profile)
    if fused_s <= CONSIDERABLE * busy_s:
        return None
    fields = {"compile": "default"} if case.spec else {}
    products_s = products_save_s(case, profile)
    saves_s, prediction = _gain(case, profile, fused_s, products_s)
    return Finding(
        kind="fusable_elementwise",
        title=f"{format_percent(low_s / busy_s)} of the device's work is elementwise, in kernels that could be fused",
        saw=(
            f"Outside of the optimizer, elementwise work, norms, softmax, sums and copies take {format_time(low_s)} of "
            f"{format_time(busy_s)} per step.{_moved(profile)}{_most(case, profile)}"
        ),
        why=(
            "Such a kernel computes little and lasts as long as memory takes to read its inputs and write its output. "
            "In a chain of kernels every intermediate is written and read again; fused into one kernel, none "
            "does."
        ),
        change=command(case.spec, fields) if case.spec else "model = torch.compile(model)",
        note="compiling takes seconds to minutes at the start; in your own code model = torch.compile(model)",
        evidence=(
            Evidence(what="elementwise, normalisation, softmax, reduction and copy", value=low_s, unit="s"),
            Evidence(what="device busy", value=busy_s, unit="s"),
            Evidence(what="device time that fusing saves", value=fused_s, unit="s"),
            Evidence(what="device time that matrix products save", value=products_s, unit="s"),
            Evidence(what="kernels per step that fusing saves", value=fewer_kernels(profile), unit=""),
        ),
        saves_s=saves_s,
        prediction=prediction,
        fields=fields,
    )


def _gain(case: Case, profile: Profile, fused_s: float, products_s: float) -> tuple[float, str]:
    """Seconds saved per step, and how they were found. A launch-bound step lasts as long as its launches, so there the
    number of launches decides."""
    shares, gap_s = shares_of(profile), gaps_s(case, profile)
    told = _source(profile)
    if products_s > 0:
        told += f" The compiler pads products with the vocabulary, which saves {format_time(products_s)}."
    if case.step_s is None or not is_launch_bound(case, profile):
        saves_s = max(0.0, fused_s + products_s + gap_s * (1 - shares.kernels))
        return saves_s, told + case.host_limit(profile, saves_s)
    device_s = case.busy_s(profile) - fused_s - products_s + gap_s * shares.kernels
    told += (
        " The step is launch-bound: it is taken to last as long as its launches, of which compiling leaves "
        f"{format_percent(shares.host)} of the host's time, or as the device's work if that is longer."
    )
    return max(0.0, case.step_s - max(device_s, shares.host * case.step_s)), told


def _source(profile: Profile) -> str:
    shares = shares_of(profile)
    leaves = (
        f"{format_percent(shares.memory_bound)} of the time of such kernels and {format_percent(shares.kernels)} of "
        "the kernels"
    )
    if profile.compiled is not None:
        return f"By a dry run of the step, eager and as Inductor fuses it, compiling leaves {leaves}."
    return f"In recorded steps of an H200 compiling left at most {leaves}; no dry run of this step is in its record."


def _most(case: Case, profile: Profile) -> str:
    found = most_fusable(case, profile, _NUM_NAMED)
    places = ", ".join(f"{place} {format_time(seconds)}" for place, seconds in found)
    return f" Most of that is in {places}." if places else ""


def _moved(profile: Profile) -> str:
    found = moved_by(profile)
    if found is None:
        return ""
    return f" They move {format_bytes(found[0])} per step, at {found[1]:.2g} FLOP per byte."
