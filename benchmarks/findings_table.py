"""The table of findings tried: predicted against measured gain.

    python -m benchmarks.findings_table FINDINGS.jsonl RECORDS.jsonl.gz > table.md     (from the root of the checkout)

FINDINGS holds what `steplab explain --try --output X.json` wrote, one a line; RECORDS the runs they explain.
Predictions are those of the present code, from the recorded profile; trials are as they were measured.
"""

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from steplab.explain.api import explain
from steplab.records.codec import decode
from steplab.records.finding import Finding, Findings, Trial
from steplab.records.run import Run
from steplab.units import format_time

HEADER = (
    "| step | finding | change | step, as it was | saves, predicted | saves, measured | predicted / measured |",
    "|---|---|---|---|---|---|---|",
)


def rows(found: Findings, runs: dict[str, Run]) -> Iterator[str]:
    run = runs[found.run_id]
    trials = {finding.kind: finding.trial for finding in found.findings}
    for finding in explain(run):
        trial = trials.get(finding.kind)
        if trial is not None:
            yield "| " + " | ".join((step_of(run), *cells(finding, trial))) + " |"


def cells(finding: Finding, trial: Trial) -> tuple[str, ...]:
    change = ", ".join(f"{name} {value}" for name, value in finding.fields.items())
    saved_s, predicted_s = trial.saved_s, finding.saves_s
    ratio = f"{predicted_s / saved_s:.2f}" if predicted_s is not None and saved_s and saved_s > 0 else "–"
    return (
        finding.kind,
        change,
        format_time(trial.before_s),
        "–" if predicted_s is None else format_time(predicted_s),
        trial.failure or format_time(saved_s or 0.0),
        ratio,
    )


def step_of(run: Run) -> str:
    spec = run.spec
    assert spec is not None
    compiled = "eager" if spec.compile == "off" else "compiled"
    name = spec.model.label.rpartition(".")[2] if spec.model.kind == "factory" else spec.model.label
    return f"{name}, {spec.batch} x {spec.context}, {spec.precision}, {compiled}, {spec.attention}, {spec.optimizer}"


def main(findings: str, records: str) -> None:
    found = [msgspec.json.decode(line, type=Findings) for line in Path(findings).read_bytes().splitlines()]
    decoded = map(decode, gzip.decompress(Path(records).read_bytes()).splitlines())
    runs = {run.id: run for run in decoded if isinstance(run, Run)}
    print("\n".join(HEADER))
    for one in found:
        print("\n".join(rows(one, runs)))


if __name__ == "__main__":
    main(*sys.argv[1:])
