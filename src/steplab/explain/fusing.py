"""Predict savings from compiling the model of a profiled step.

Fusing memory-bound operators saves the traffic of intermediates between them. A dry run shows which operators can fuse;
`steplab profile` stores its ratios. Other profiles use ratios from steps recorded eager and compiled.

Two findings: elementwise work that a compiler would fuse; and one operator that launches many short kernels, as a
Python loop over elements or experts."""

from collections import defaultdict
from dataclasses import dataclass

from steplab.explain.case import ACROSS, Case, in_seconds
from steplab.explain.vocabulary import padding_saves_s
from steplab.explain.waiting import host_limit, is_launch_bound
from steplab.records.finding import Evidence, Finding
from steplab.records.profile import CompiledShares
from steplab.units import format_percent, format_time

FUSABLE = ("elementwise", "normalisation", "softmax", "reduction", "copy")
MOST_LEFT = CompiledShares(memory_bound=0.41, products=1.0, kernels=0.58, host=0.58)
"""Largest compiled-to-eager ratios among twelve steps recorded on an H200 (tests/golden; a test computes them). `host`
is assumed equal to `kernels`; products were not compared."""

_LONGEST_GAP_S = 5e-6
"""Longest gap between queued kernels; longer ones are waits for another stream, process or event."""
_PRODUCTS = ("matmul", "attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusing:
    shares: CompiledShares
    """Compiled-to-eager ratios from the profile's dry run, else MOST_LEFT."""
    fusable_s: float
    products_s: float
    """Device seconds saved in matrix products, from padding the vocabulary and a changed clock."""
    gaps_s: float
    """Idle seconds between queued kernels: at most `_LONGEST_GAP_S` per kernel, and at most the unprofiled step's time
    outside kernels."""
    num_kernels: float

    @property
    def fused_s(self) -> float:
        return self.fusable_s * (1 - self.shares.memory_bound)

    @property
    def saves_s(self) -> float:
        return self.fused_s + self.products_s + self.gaps_s * (1 - self.shares.kernels)


def fusing_of(case: Case) -> Fusing:
    profile = case.profile
    shares = profile.compiled or MOST_LEFT
    model = [phase for phase in profile.phases if is_compiled(phase.phase)]

    def seconds(categories: tuple[str, ...]) -> float:
        return case.per_step(sum(phase.categories.get(each, 0.0) for phase in model for each in categories))

    copies = [kernel for kernel in profile.kernels if kernel.category == "copy" and is_compiled(kernel.phase)]
    across_s = case.per_step(sum(kernel.total_s for kernel in copies if ACROSS.search(kernel.name)))
    padding_s = padding_saves_s(case)
    num_kernels = sum(phase.num_kernels for phase in model) / profile.num_steps
    idle_s = case.per_step(sum(phase.idle_s for phase in model))
    gaps_s = min(idle_s, num_kernels * _LONGEST_GAP_S)
    return Fusing(
        shares=shares,
        fusable_s=seconds(FUSABLE) - across_s,
        products_s=padding_s + (seconds(_PRODUCTS) - padding_s) * (1 - shares.products),
        gaps_s=gaps_s if case.step_s is None else max(0.0, min(gaps_s, case.step_s - case.busy_s)),
        num_kernels=num_kernels,
    )


def is_compiled(phase: str) -> bool:
    return phase != "optimizer"


CONSIDERABLE = 0.05
"""Least saving as a share of device time: compiling delays every start, and compiled code's errors are harder to read.
"""

_NUM_NAMED = 3


def fusable_elementwise(case: Case) -> Finding | None:
    """Finding if fusing an eager model's elementwise work would save a considerable share of device time. On a CPU the
    saving is unknown, so the work itself must take that share."""
    if not case.is_eager:
        return None
    fusing, busy_s = fusing_of(case), case.busy_s
    if (fusing.fused_s if case.is_gpu else fusing.fusable_s) <= CONSIDERABLE * busy_s:
        return None
    fields = {"compile": "default"} if case.spec else {}
    saves_s, prediction = _gain(case, fusing)
    share = format_percent(fusing.fusable_s / busy_s)
    evidence = {"elementwise, normalisation, softmax, reduction and copy": fusing.fusable_s, "device busy": busy_s}
    fewer: tuple[Evidence, ...] = ()
    if case.is_gpu:
        evidence["device time that fusing saves"] = fusing.fused_s
        if fusing.products_s:  # zero would be no measurement: without a dry run unpadded products are unknown
            evidence["device time that matrix products save"] = fusing.products_s
        saved = 1 - fusing.shares.kernels
        if not is_launch_bound(case):
            evidence["gaps between kernels that fusing saves"] = fusing.gaps_s * saved
        fewer = (Evidence(what="kernels per step that fusing saves", value=fusing.num_kernels * saved, unit=""),)
    return Finding(
        kind="fusable_elementwise",
        title=f"{'Kernels' if case.is_gpu else 'Operators'} that could be fused take {share} of the device's busy time",
        saw=(
            f"Outside of the optimizer, elementwise work, norms, softmax, sums and copies take "
            f"{format_time(fusing.fusable_s)} of {format_time(busy_s)} per step.{_most(case)}"
        ),
        why=(
            "Such a kernel computes little and lasts as long as memory takes to read its inputs and write its output. "
            "In a chain of kernels every intermediate is written and read again; fused into one kernel, none "
            "does."
        ),
        change=case.change(fields, "model = torch.compile(model)"),
        note="compiling takes seconds to minutes at the start; in your own code: model = torch.compile(model)",
        evidence=(*in_seconds(evidence), *fewer),
        saves_s=saves_s,
        prediction=prediction,
        fields=fields,
        includes="vocabulary_padding" if padding_saves_s(case) and not is_launch_bound(case) else "",
    )


def _gain(case: Case, fusing: Fusing) -> tuple[float | None, str]:
    """Seconds saved and their derivation; None on a CPU. A launch-bound step is assumed to
    last as long as its launches, or as the device's work if that is longer."""
    if not case.is_gpu:
        why = "The gain from compiling is known only for CUDA GPUs; on a CPU compiling may also cost time."
        return None, why
    shares = fusing.shares
    leaves = f"{format_percent(shares.memory_bound)} of these kernels' time and {format_percent(shares.kernels)}"
    if case.profile.compiled is not None:
        told = f"A dry run (sizes only) compares eager with Inductor: compiling leaves {leaves} of the kernels."
    else:
        told = f"This record has no dry run of compiling. On an H200 it left at most {leaves} of the kernels."
    if fusing.products_s > 0:
        told += f" The compiler pads products with the vocabulary, which saves {format_time(fusing.products_s)}."
    if case.step_s is None or not is_launch_bound(case):
        saves_s = max(0.0, fusing.saves_s)
        return saves_s, told + host_limit(case, saves_s)
    device_s = case.busy_s + fusing.gaps_s - fusing.saves_s
    told += (
        f" Launches limit the step. Assumed: compiling leaves {format_percent(shares.host)} of Python's time, and the "
        "step lasts as long as Python or the GPU's kernels, whichever is longer."
    )
    return max(0.0, case.step_s - max(device_s, shares.host * case.step_s)), told


def _most(case: Case) -> str:
    found = defaultdict[str, float](float)
    for op in case.profile.ops:
        if op.range and op.category in FUSABLE and is_compiled(op.phase):
            found[f"{op.range} {op.phase}"] += case.per_step(op.device_s)
    longest = sorted(found.items(), key=lambda place: -place[1])[:_NUM_NAMED]
    places = ", ".join(f"{place} {format_time(seconds)}" for place, seconds in longest)
    return f" The largest parts: {places}." if places else ""


MANY = 1000
"""Least kernels per step of one operator and input shape; a model of 80 layers has a hundred or more."""
TINY_S = 10e-6
"""Longest mean kernel time; a launch takes as long."""
_EXPERTS = 8
_SELECTS = ("aten::nonzero", "aten::where", "aten::masked_select", "aten::index")
_PUTS = ("aten::index_add_", "aten::index_put_", "aten::_index_put_impl_", "aten::scatter_add_", "aten::index_add")


def tiny_kernels(case: Case) -> Finding | None:
    """Finding on a GPU if one operator launches MANY tiny kernels per step, or a loop over experts selects tokens.
    Kernels and waits for launches must take a twentieth of the step."""
    profile = case.profile
    if profile.device != "cuda" or not profile.num_launches:
        return None

    def per_step(names: tuple[str, ...]) -> float:
        return sum(op.calls for op in profile.ops if op.name in names) / profile.num_steps

    loops = per_step(("aten::nonzero",)) >= _EXPERTS and per_step(_PUTS) >= _EXPERTS
    if loops:
        name, chosen = "The loop over experts", [op for op in profile.ops if op.name in _SELECTS + _PUTS]
    else:
        tiny = [op for op in profile.ops if op.phase != "optimizer" and op.device_s <= TINY_S * op.kernels]
        chosen = sorted(tiny, key=lambda op: -op.kernels)[:1]
        name = chosen[0].name if chosen else ""
    num = sum(op.kernels for op in chosen) / profile.num_steps
    if not loops and num < MANY:
        return None
    device_s = case.ops_s(chosen)
    waits_s = case.profiled_wait_s()
    share = min(1.0, num / (profile.num_launches / profile.num_steps))
    saves_s = min(device_s + waits_s * share, case.length_s)
    if saves_s <= 0.05 * case.length_s:
        return None
    return Finding(
        kind="tiny_kernels",
        title=f"{name} launches {num:.0f} kernels per step",
        saw=(
            f"They take {format_time(device_s)} on the GPU per step, {format_time(device_s / num)} each, and are "
            f"{format_percent(share)} of the launches; the GPU waits {format_time(waits_s)} per step for launches."
        ),
        why=(
            "A kernel of a few microseconds takes as long to launch as to run, so a loop in Python over elements, "
            "parameters or experts is as slow as Python."
        ),
        change="sort tokens by expert and multiply once: torch._grouped_mm, or a grouped GEMM of Triton"
        if loops
        else "one call on a stacked tensor (torch.stack, torch._foreach_add and the like), or torch.compile",
        evidence=(
            Evidence(what="kernels of it", value=num, unit=""),
            *in_seconds({"device time of these": device_s, "waiting for their launches": waits_s * share}),
        ),
        saves_s=saves_s,
        at_most=True,
        prediction="At most: their time, and the waiting in proportion to their launches.",
    )
