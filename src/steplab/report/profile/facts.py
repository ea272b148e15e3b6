"""The main fact about the profiles of a page: the change that is predicted to save most."""

from collections.abc import Mapping, Sequence

from steplab import units
from steplab.records.finding import Findings
from steplab.report.kit.document import Fact
from steplab.report.profile.verdict import saving_sentence
from steplab.report.run.cells import RunCell, label


def saving_facts(cells: Sequence[RunCell], findings: Mapping[str, Findings], fields: Sequence[str]) -> list[Fact]:
    """The largest saving, as a share of its step, that is predicted of a run; empty where none is."""
    predicted = [
        (finding.saves_s / found.step_s, cell, found)
        for cell in cells
        if (found := findings.get(cell.run.id)) and found.step_s and found.findings
        if (finding := found.findings[0]).saves_s is not None
    ]
    if not predicted:
        return []
    share, cell, found = max(predicted, key=lambda one: one[0])
    told = saving_sentence(found.findings[0], found.step_s)
    text = f"of a step is the most that one change is predicted to save: {label(cell, fields)}. {told}"
    return [Fact(figure=units.format_percent(share), text=text, wide=True)]
