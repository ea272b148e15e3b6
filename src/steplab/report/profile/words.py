"""Describes a profile in sentences; figures are per step."""

from collections.abc import Iterable

from steplab import units
from steplab.records.profile import ATTENTION_PARTS, Profile
from steplab.records.run import Run
from steplab.report.profile.attention import part_of, work_of
from steplab.report.profile.figures import TOLERANCE, Span, TopKernel, passes, shown_categories, top_kernels, whole
from steplab.report.profile.roofline import find_roofs

_PROFILED = "The profiler slows Python: rely on kernel times and shares here, not on step times or waits."
_MOST_CATEGORIES = 3


def device_word(profile: Profile) -> str:
    return "CPU" if profile.device == "cpu" else "GPU"


def has_host(profile: Profile) -> bool:
    return profile.device != "cpu"


def kernels_word(profile: Profile) -> str:
    return "operators" if profile.device == "cpu" else "kernels"


def heading(run: Run, profile: Profile) -> str:
    steps = units.counted(profile.num_steps, "step")
    where = run.device_name or f"a {device_word(profile)} of unknown name"
    file = f", from {profile.file}" if profile.file else ""
    return f"{steps} on {where}, profiled with {profile.source}{file}"


def caution(runs: Iterable[Run]) -> str:
    timed = {run.timing is not None for run in runs}
    if timed == {True}:
        return f"{_PROFILED} Step time is measured without it."
    return f"{_PROFILED} {'Some runs were' if True in timed else 'Steps were'} timed only under it."


def agreement(span: Span, profile: Profile) -> str | None:
    if span.timed_s is None:
        return None
    off = span.busy_s / span.timed_s - 1
    if abs(off) <= TOLERANCE:
        return f"agrees, {_signed(off)}"
    return f"{_signed(off)}: {_why(span, span.timed_s, off, profile)}"


def _why(span: Span, timed_s: float, off: float, profile: Profile) -> str:
    device, show = device_word(profile), units.format_time
    if off > 0:
        return "profiled steps do more, or run slower"
    waits_for_host = span.host_bound_s > max(span.idle_s, TOLERANCE * span.window_s)
    with_gaps = (span.busy_s + span.idle_s) / timed_s - 1
    if abs(with_gaps) <= TOLERANCE:
        alone = "; the profiler slows the host" if waits_for_host else ""
        gaps = f"with the {show(span.idle_s)} of gaps between {kernels_word(profile)} it agrees"
        return f"{gaps}, {_signed(with_gaps)}{alone}"
    without = f"unprofiled about {show(timed_s - span.busy_s)} of {show(timed_s)}"  # as `steplab explain` has it
    if waits_for_host:
        return f"waits for host, at most {show(timed_s - span.busy_s)} of {show(timed_s)} unprofiled"
    if span.busy_s < (1 - TOLERANCE) * span.window_s:
        # The gaps under the profiler do not explain the difference from the timed steps.
        bare = f"{show(span.window_s - span.busy_s)} of {show(span.window_s)} under the profiler"
        return f"no {kernels_word(profile).removesuffix('s')} runs for {bare}, {without}"
    return f"the {device} was busy throughout, and faster in the profiled steps than in the timed ones"


def _signed(share: float) -> str:
    return f"{100 * share:+.{0 if abs(share) >= 1 else 1}f} %"


def time_sentence(run: Run, profile: Profile) -> str:
    step = whole(run, profile)

    def part(seconds: float) -> str:
        return f"{units.format_time(seconds)} ({_share(seconds, step.window_s)})"

    waits = f", waits for the CPU {part(step.host_bound_s)} and is otherwise idle" if has_host(profile) else " and idle"
    return (
        f"Under the profiler a step takes {units.format_time(step.window_s)}: the {device_word(profile)} is busy "
        f"{part(step.busy_s)}{waits} {part(step.idle_s)}."
    )


def largest_categories(run: Run, profile: Profile) -> str:
    step = whole(run, profile)
    shares = sorted(((step.share(category) or 0.0, category) for category in shown_categories(profile)), reverse=True)
    most = ", ".join(f"{category} {units.format_percent(share)}" for share, category in shares[:_MOST_CATEGORIES])
    return f"Busy time: {most}."


def _share(part: float, total: float) -> str:
    return units.format_percent(part / total if total else 0.0)


def matmul_sentences(run: Run, profile: Profile) -> list[str]:
    told = [(name, span, share) for name, span in passes(run, profile) if (share := span.share("matmul")) is not None]
    if not told:
        return []
    shares = ", ".join(f"{units.format_percent(share)} of {_passes_words(name)}" for name, _, share in told)
    sentences = [f"Matrix multiplication takes {shares} (of the busy time)."]
    fused = [share for _, span, _ in told if (share := span.share("attention"))]
    if fused:
        sentences.append(
            f"The products inside fused attention ({units.format_percent(fused[-1])} of {_passes_words(told[-1][0])}) "
            "are not counted in it."
        )
    return sentences


def _passes_words(name: str) -> str:
    return "the whole step" if name == "train" else name


def top_kernel_sentences(profile: Profile) -> list[str]:
    word = kernels_word(profile).removesuffix("s")
    if not profile.kernels:
        return []
    phases = [phase.phase for phase in profile.phases if phase.phase in ("forward", "backward")]
    tops = [(f"the {phase} pass", top_kernels(profile, (phase,))[:1]) for phase in phases]
    tops.append(("the step", top_kernels(profile, by_phase=False)[:1]))
    return [f"Top {word} of {where}: {kernel_words(kernel[0], profile)}." for where, kernel in tops if kernel]


def kernel_words(kernel: TopKernel, profile: Profile) -> str:
    return (
        f"{kernel.short}, {_calls(kernel.calls)}, {units.format_time(kernel.time_s)}, "
        f"{units.format_percent(kernel.share)} of the {kernels_word(profile).removesuffix('s')} time"
    )


def _calls(calls: float) -> str:
    text = calls_text(calls)
    return f"{text} call{'' if text == '1' else 's'}"


def calls_text(calls: float) -> str:
    return f"{calls:.0f}" if abs(calls - round(calls)) < 1e-9 else f"{calls:.1f}"


def softmax_sentence(run: Run, profile: Profile) -> str | None:
    """Compare softmax with attention's matmuls in the forward pass."""
    phase = "forward" if profile.phase("forward") else "outside"
    ops = [op for op in profile.ops if op.phase == phase and part_of(op) in ATTENTION_PARTS]
    roofs = find_roofs(run)
    soft = work_of([op for op in ops if part_of(op) == "softmax"], run, profile, roofs)
    product = work_of([op for op in ops if part_of(op) == "scores" and op.category == "matmul"], run, profile, roofs)
    if not (soft.flops and product.flops and soft.intensity and product.intensity):
        return None
    times = f"{soft.time_s / product.time_s:.2f} times the {units.format_time(product.time_s)} of the scores' matmul"
    return (
        f"Softmax takes {units.format_time(soft.time_s)} of {phase}, {times}, with 1/{product.flops / soft.flops:.0f} "
        f"of its FLOPs: it does {units.three_digits(soft.intensity)} FLOP for each byte it moves, the matmul "
        f"{units.three_digits(product.intensity)}."
    )


def communication_sentence(run: Run, profile: Profile) -> str | None:
    talk = profile.communication
    if talk is None:
        return None
    window_s, show = whole(run, profile).window_s, units.format_time
    total_s, hidden_s, bare_s = (s / profile.num_steps for s in (talk.total_s, talk.overlapped_s, talk.exposed_s))
    return (
        f"Communication runs {show(total_s)} ({_share(total_s, window_s)} of the window): {show(hidden_s)} overlapped "
        f"by computation, {show(bare_s)} ({_share(bare_s, window_s)}) exposed."
    )


def uncategorised_sentence(run: Run, profile: Profile) -> str:
    step = whole(run, profile)
    unknown_s = step.categories["uncategorised"]
    told = f"{_share(unknown_s, step.busy_s)} of the busy time ({units.format_time(unknown_s)})"
    return f"{kernels_word(profile).capitalize()} of unknown name (uncategorised): {told}."


def overlap_note(run: Run, profile: Profile) -> str | None:
    busy_s, total_s = whole(run, profile).busy_s, sum(kernel.total_s for kernel in profile.kernels) / profile.num_steps
    if total_s <= busy_s * 1.001:
        return None
    return (
        f"{kernels_word(profile).capitalize()} ran side by side: their durations add up to "
        f"{units.format_time(total_s)}, and categories share overlapped time equally: {units.format_time(busy_s)}."
    )
