"""What was not measured in a run, and which of its figures are doubtful, each with the reason."""

from steplab.records.run import NOT_FINITE, Run


def gaps(run: Run) -> list[str]:
    """What was not measured and why: the run's notes, its environment's gaps, and what its utilizations lack."""
    told = [note for note in run.notes if not (_is_doubt(note) or _is_of_numbers(note) or _is_choice(note))]
    told += run.environment.gaps if run.environment else ()
    return told + _utilization_gaps(run, told)


def doubts(run: Run) -> list[str]:
    """Notes on figures that cannot be right, such as a utilization above 100 % of a peak."""
    return [note for note in run.notes if _is_doubt(note)]


def headline_doubts(run: Run) -> list[str]:
    """That what was computed is no number any more; and the doubts where they concern the share that the answer tells,
    MFU by the convention causal."""
    told = run.utilization("mfu", "causal")
    of_numbers = [note for note in run.notes if _is_of_numbers(note)]
    return of_numbers + doubts(run) if told and told.exceeds_peak else of_numbers


def choices(run: Run) -> list[str]:
    """Notes on choices that the spec left open, such as the implementation that attention `auto` chose."""
    return [note for note in run.notes if _is_choice(note)]


def _is_choice(note: str) -> bool:
    return note.startswith("attention auto: ")


def _is_of_numbers(note: str) -> bool:
    return note.startswith(NOT_FINITE)


def _is_doubt(note: str) -> bool:
    return note.startswith(("MFU over ", "HFU over ", "MFU and HFU over "))


def _utilization_gaps(run: Run, told: list[str]) -> list[str]:
    """Why a timed built-in step has no MFU or no HFU, unless a note says so already."""
    if run.spec is None or run.failure or run.timing is None:
        return []
    reasons = []
    kinds = {used.kind for used in run.utilizations}
    if "mfu" not in kinds and not _tells(told, "MFU"):
        reasons.append(f"MFU: {_why_no_mfu(run)}")
    if "hfu" not in kinds and not _tells(told, "HFU") and not _tells(told, "MFU and HFU"):
        reasons.append("HFU: the FLOPs that the step executes were not counted")
    absent = [used for used in run.utilizations if used.value is None]
    for source in dict.fromkeys(used.peak_source for used in absent):
        names = dict.fromkeys(used.kind.upper() for used in absent if used.peak_source == source)
        reasons.append(f"{' and '.join(names)}: {source}")
    return reasons


def _why_no_mfu(run: Run) -> str:
    if run.spec is None or run.spec.model.kind != "factory":
        return "the sizes of the model are not known"
    if run.model is None:
        return "its factory returns a whole step, in which the forward pass is not told apart"
    return "the FLOPs that the model needs were not counted"


def _tells(told: list[str], kind: str) -> bool:
    return any(text.startswith(kind) for text in told)
