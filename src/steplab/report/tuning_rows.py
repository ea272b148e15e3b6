"""Tiles that were tried for flash_triton, as rows: how long each took, and which was chosen."""

import json
from collections.abc import Sequence
from statistics import geometric_mean, median

import msgspec

from steplab import units
from steplab.records.attention_tuning import AttentionTuning, ChosenTiles, TileTrial
from steplab.records.rows import Row, Scalar
from steplab.report.columns import Column, figure_column, show_time
from steplab.report.formats import render_rows
from steplab.specs.attention_tuning import KERNELS, TileCandidate


def render_tuning(tuning: AttentionTuning, format: str, *, width: int | None = None, color: bool = False) -> str:
    """The tuning in one of formats.FORMATS, without a newline at the end. JSON is all that was measured."""
    if format == "json":
        return json.dumps(msgspec.to_builtins(tuning), indent=2, ensure_ascii=False)
    rows, empty = tuning_rows(tuning), "no candidates"
    return render_rows(rows, format, columns=_COLUMNS, empty=empty, width=width, color=color)


def tuning_rows(tuning: AttentionTuning) -> list[Row]:
    """A row a candidate and length, the fastest of its kernel and box first; then the candidates that were dropped.

    Times and rates are geometric means over head dimensions, causal and not.
    """
    rows: list[Row] = []
    for box in tuning.boxes:
        for kernel in KERNELS:
            for tokens in tuning.study.lengths:
                trials = tuning.of(kernel, box, tokens)
                slowdowns = tuning.slowdowns(kernel, box, tokens)
                for candidate in sorted(slowdowns, key=lambda candidate: slowdowns[candidate]):
                    chosen = "chosen" if _is_chosen(candidate, tokens, tuning.chosen) else None
                    rows.append(_row(candidate, tokens, trials[candidate], slowdowns[candidate], chosen))
    return rows + [_row(dropped.candidate, None, (), None, dropped.why) for dropped in tuning.dropped]


def _is_chosen(candidate: TileCandidate, tokens: int, chosen: Sequence[ChosenTiles]) -> bool:
    """Whether the candidate's row is the one that serves so many tokens."""
    serving = [
        row
        for row in chosen
        if (row.candidate.kernel, row.candidate.box) == (candidate.kernel, candidate.box)
        and (row.tokens is None or tokens <= row.tokens)
    ]
    return bool(serving) and min(serving, key=lambda row: row.tokens or float("inf")).candidate == candidate


def _row(
    candidate: TileCandidate,
    tokens: int | None,
    trials: Sequence[TileTrial],
    slowdown: float | None,
    result: str | None,
) -> Row:
    return {
        "kernel": candidate.kernel,
        "bits": candidate.bits,
        "box": candidate.box,
        "tokens": tokens,
        "candidate": candidate.label,
        "time_s": geometric_mean(median(trial.device_s) for trial in trials) if trials else None,
        "flops_per_s": geometric_mean(trial.flops / median(trial.device_s) for trial in trials) if trials else None,
        "slowdown": slowdown,
        "result": result,
    }


def _rate(value: Scalar) -> str:
    return units.format_rate(value, "FLOP/s") if isinstance(value, (int, float)) else str(value)


def _times(value: Scalar) -> str:
    return f"{value:.3f}×" if isinstance(value, (int, float)) else str(value)


_COLUMNS: tuple[Column, ...] = (
    Column(key="kernel", header="kernel", shared=False),
    Column(key="bits", header="bits", numeric=True, caption="{} bits"),
    Column(key="box", header="box", numeric=True, shared=False),
    Column(key="tokens", header="tokens", numeric=True, shared=False),
    Column(key="candidate", header="queries×keys", shared=False),
    figure_column("time_s", "time", show_time, 0),
    figure_column("flops_per_s", "rate", _rate, 1),
    figure_column("slowdown", "÷ fastest", _times, 1),
    Column(key="result", header="result", shared=False, wraps_from=12),
)
