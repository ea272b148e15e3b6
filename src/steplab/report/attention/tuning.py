"""The candidate tiles of flash_triton as rows: the time of each, and which were chosen."""

import json
from collections.abc import Iterator, Sequence
from statistics import geometric_mean, median

import msgspec

from steplab.records.attention_tuning import AttentionTuning, ChosenTiles, TileTrial
from steplab.records.rows import Row
from steplab.report.kit.document import Column, Document, Table, Verdict, named_section
from steplab.report.kit.quantities import FLOPS_PER_S, LABEL, TIME, Quantity
from steplab.specs.attention_tuning import KERNELS, TileCandidate


def tuning_document(tuning: AttentionTuning) -> Document:
    """The candidates, and which of them were chosen."""
    table = Table(
        name="candidates",
        columns=_COLUMNS,
        rows=tuple(tuning_rows(tuning)),
        caption="Times and rates are geometric means over head dimensions, with and without the causal mask.",
    )
    return Document(
        title="Tiles of flash_triton",
        verdict=Verdict(sentences=tuple(_answer(tuning))),
        sections=(named_section("Candidates", table),),
        data=table,
    )


def _answer(tuning: AttentionTuning) -> Iterator[str]:
    """The tiles chosen for each kernel, and how much slower the slowest candidate is."""
    for kernel in KERNELS:
        chosen = dict.fromkeys(row.candidate.label for row in tuning.chosen if row.candidate.kernel == kernel)
        found = [
            slowdown
            for box in tuning.boxes
            for tokens in tuning.study.lengths
            for slowdown in tuning.slowdowns(kernel, box, tokens).values()
        ]
        if chosen and found:
            yield (
                f"{kernel} on {tuning.gpu}: {'; '.join(chosen)}. The slowest candidate takes {max(found):.2f} times as "
                "long as the fastest."
            )


def tuning_json(tuning: AttentionTuning) -> str:
    """The whole measurement as JSON."""
    return json.dumps(msgspec.to_builtins(tuning), indent=2, ensure_ascii=False)


def tuning_rows(tuning: AttentionTuning) -> list[Row]:
    """One row per candidate and length, the fastest of each kernel and box first; then the dropped candidates.

    Times and rates are geometric means over head dimensions, with and without the causal mask.
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
    """Whether the candidate was chosen for so many tokens."""
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


_COLUMNS = (
    Column(key="kernel", header="kernel"),
    Column(key="bits", header="bits", quantity=LABEL, shared="{} bits"),
    Column(key="box", header="box", quantity=LABEL),
    Column(key="tokens", header="tokens", quantity=LABEL),
    Column(key="candidate", header="queries×keys"),
    Column(key="time_s", header="time", quantity=TIME),
    Column(key="flops_per_s", header="rate", quantity=FLOPS_PER_S, rank=1),
    Column(key="slowdown", header="time over the fastest", quantity=Quantity(lambda value: f"{value:.3f}×"), rank=1),
    Column(key="result", header="result", wraps_from=12),
)
