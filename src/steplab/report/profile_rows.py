"""The kernels of a profile as rows, for programs and for tables."""

from steplab.records.profile import KernelStats, Profile
from steplab.records.rows import Row, Scalar
from steplab.report.columns import Column, figure_column, show_percent, show_time
from steplab.report.formats import render_rows
from steplab.report.kernel_names import short_kernel

_NAME_LENGTH = 72


def _short(name: Scalar) -> str:
    return short_kernel(str(name), _NAME_LENGTH)


KERNEL_COLUMNS: tuple[Column, ...] = (
    Column(key="name", header="kernel", show=_short, shared=False, wraps_from=24),
    Column(key="category", header="category", shared=False, rank=2),
    Column(key="phase", header="phase", shared=False),
    Column(key="range", header="range", shared=False, rank=3),
    Column(key="stream", header="stream", numeric=True, caption="stream {}", rank=6),
    Column(key="num_steps", header="steps", numeric=True, caption="{} profiled step{s}", rank=9),
    figure_column("calls", "calls", str, 1),
    figure_column("total_s", "total", show_time, 0),
    figure_column("per_step_s", "a step", show_time, 4),
    figure_column("share", "share", show_percent, 0),
    figure_column("median_s", "median", show_time, 4),
    figure_column("max_s", "longest", show_time, 5),
)


def kernel_rows(profile: Profile) -> list[Row]:
    """A row a kernel, phase, range and stream, largest total first, as the record has them.

    calls, total_s, median_s and max_s are over all num_steps profiled steps, per_step_s is total_s over them, and
    share that of the durations of all kernels.
    """
    total_s = sum(kernel.total_s for kernel in profile.kernels)
    return [_row(kernel, profile, total_s) for kernel in sorted(profile.kernels, key=lambda k: -k.total_s)]


def _row(kernel: KernelStats, profile: Profile, total_s: float) -> Row:
    return {
        "name": kernel.name,
        "category": kernel.category,
        "phase": kernel.phase,
        "range": kernel.range or None,
        "stream": kernel.stream,
        "num_steps": profile.num_steps,
        "calls": kernel.calls,
        "total_s": kernel.total_s,
        "per_step_s": kernel.total_s / profile.num_steps,
        "share": kernel.total_s / total_s if total_s else None,
        "median_s": kernel.median_s,
        "max_s": kernel.max_s,
    }


def render_kernels(profile: Profile, format: str, *, width: int | None = None, color: bool = False) -> str:
    """The kernels in one of formats.FORMATS, without a newline at the end. Raises UserError for another format."""
    return render_rows(
        kernel_rows(profile), format, columns=KERNEL_COLUMNS, empty="no kernels", width=width, color=color
    )
