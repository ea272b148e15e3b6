"""The title and subtitle of a run: the choices of its step on one line, and its record."""

from steplab import units
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.report.kit.text import dotted, made, quoted_name
from steplab.specs.step import describe
from steplab.stats import Summary


def run_title(run: Run) -> str:
    """What was measured, in one line."""
    if run.spec:
        return describe(run.spec)
    if run.profile and run.profile.file:
        return f"{run.name or run.profile.file} (imported trace)"
    if run.memory_profile:
        return f"{run.name or run.memory_profile.file or 'a snapshot'} (imported snapshot)"
    return f"{run.name or 'a loop of your own'} (recorded loop)"


def interval_words(summary: Summary) -> str:
    """How far the median may be off: '95 % interval 12.1 ms to 12.9 ms, n = 10'; of too few samples, their range."""
    show = units.format_time
    if summary.count == 1:
        return "a single sample"
    low, middle, high = show(summary.low), show(summary.median), show(summary.high)
    if low == middle == high:
        between = f"± {show(max(summary.high - summary.median, summary.median - summary.low))}"
    else:
        between = f"{low} to {high}"
    return f"{'95 % interval' if summary.is_interval else 'range'} {between}, n = {summary.count}"


def annotations(record: Record) -> list[str]:
    """What the user added to a record, in sentences."""
    tags = [f"Tags: {', '.join(record.tags)}."] if record.tags else []
    return tags + ([f"Note: {record.comment}"] if record.comment else [])


def run_subtitle(run: Run) -> str:
    """The id, date, steplab version and name of the record."""
    return dotted(made(run, "run"), quoted_name(run))


_PRECISIONS = {
    "bf16": "bf16 autocast",
    "fp16": "fp16 autocast",
    "bf16_master": "bf16 autocast over bf16 weights with fp32 masters",
    "bf16_pure": "bf16 throughout",
    "fp8": "fp8 products in blocks, bf16 elsewhere",
    "fp8_torchao": "fp8 products in blocks by torchao, bf16 elsewhere",
    "tf32": "tf32 matmuls",
}


def precision_words(precision: str) -> str:
    """A step's precision in words."""
    return _PRECISIONS.get(precision, precision)
