"""What a run did not measure, and which of its figures are in doubt, each with the reason."""

from steplab.records.run import Run


def gaps(run: Run) -> list[str]:
    """What was not measured and why: the run's notes, its environment's gaps, and what its utilizations lack."""
    told = [note for note in run.notes if not _is_doubt(note) and not _is_choice(note)]
    told += run.environment.gaps if run.environment else ()
    return told + _utilization_gaps(run, told)


def doubts(run: Run) -> list[str]:
    """Notes on figures that are there and cannot be right: a share above one of a peak."""
    return [note for note in run.notes if _is_doubt(note)]


def choices(run: Run) -> list[str]:
    """Notes on what was chosen where the spec left it open: whom attention `auto` was."""
    return [note for note in run.notes if _is_choice(note)]


def _is_choice(note: str) -> bool:
    return note.startswith("attention auto: ")


def _is_doubt(note: str) -> bool:
    return note.startswith(("MFU over ", "HFU over ", "MFU and HFU over "))


def _utilization_gaps(run: Run, told: list[str]) -> list[str]:
    """Why a step of steplab's own that was timed has no MFU or no HFU, unless it is told already."""
    if run.spec is None or run.failure or run.timing is None:
        return []
    reasons = []
    kinds = {used.kind for used in run.utilizations}
    if "mfu" not in kinds and not _tells(told, "MFU"):
        why = "what a factory's model needs is not known, only what it executes"
        reasons.append(f"MFU: {why if run.spec.model.kind == 'factory' else 'the sizes of the model are not known'}")
    if "hfu" not in kinds and not _tells(told, "HFU"):
        reasons.append("HFU: the FLOPs that the step executes were not counted")
    absent = [used for used in run.utilizations if used.value is None]
    for source in dict.fromkeys(used.peak_source for used in absent):
        names = dict.fromkeys(used.kind.upper() for used in absent if used.peak_source == source)
        reasons.append(f"{' and '.join(names)}: {source}")
    return reasons


def _tells(told: list[str], kind: str) -> bool:
    return any(text.startswith(kind) for text in told)
