"""The table of whole models' steps that benchmarks/attention_table.py shows, from records of `steplab run`."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.page_tables import table_of_texts

from steplab.records.run import Run
from steplab.records.timing import find_phase, waits_for_host
from steplab.report.kit.document import Table

OURS = "flash_triton"
STEPS = Path(__file__).parents[1] / "tests/golden/step_h200_202611.jsonl.gz"
"""Steps with plain attention and with torch's choice, measured on another day."""
_WANTED = {"precision": "bf16", "pass_name": "train", "batch": 4, "checkpointing": "none"}


def steps(earlier: Sequence[Run], runs: Sequence[Run]) -> Table | None:
    """The step of each model by who computes its attention, replayed as CUDA graphs or not; of one measured twice, the
    later. Earlier ones are marked: they were not measured beside the others; and so are those that are the host's more
    than the device's."""
    found: dict[tuple[str, str], dict[str, Run]] = {}
    for run in (*earlier, *runs):
        spec = run.spec
        if spec is None or run.timing is None or spec.warmup < 3 or spec.context < 512:
            continue
        if all(getattr(spec, name) == value for name, value in _WANTED.items()):
            column = f"{spec.attention}, {'eager' if spec.compile == 'off' else 'compiled'}"
            launched = "" if spec.cuda_graph == "off" else ", CUDA graphs"
            found.setdefault((spec.model.name + launched, str(spec.context)), {})[column] = run
    compared = {key: own for key, own in found.items() if any(column.startswith(OURS) for column in own)}
    if not compared:
        return None
    columns = list(dict.fromkeys(column for own in compared.values() for column in own))
    columns.sort(key=lambda column: ("compiled" in column, OURS in column, column))
    old = {run.id for run in earlier}

    def text(run: Run | None) -> str:
        return milliseconds(_step_s(run)) + "*" * (run.id in old) + "†" * waited(run) if run else "–"

    rows = [(*key, *(text(own.get(column)) for column in columns)) for key, own in compared.items()]
    ids = ", ".join(run.id for own in compared.values() for run in own.values())
    return table_of_texts(
        "table",
        headers=("model", "context", *columns),
        rows=tuple(rows),
        numeric=(False, True, *(True for _ in columns)),
        caption="Milliseconds of a training step, batch 4, bf16; –: not measured; *: in another session, from "
        f"{STEPS.relative_to(STEPS.parents[2])}; †: the device waited for Python, so that the time is the host's and "
        f"says little of attention; without †, Python was ahead or it is not recorded whether it was. Records: {ids}.",
    )


def waited(run: Run) -> bool:
    """Whether Python was hardly ahead of the device in its steps; where that is not recorded, it is not known to be."""
    return run.timing is not None and waits_for_host(run.timing.back_to_back)


def _step_s(run: Run) -> float:
    """The median of its steps."""
    assert run.timing is not None
    samples = find_phase(run.timing.back_to_back, "step")
    assert samples is not None
    return median(samples.best_s)


def milliseconds(seconds: float) -> str:
    """Three significant digits, trailing zeros among them."""
    return f"{1e3 * seconds:#.3g}".rstrip(".")
