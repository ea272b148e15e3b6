"""A record as a tracker of experiments takes it: flat parameters, figures and files.

`steplab export` gives this to MLflow, W&B and TensorBoard, and docs/trackers.md to any other.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from steplab.records.codec import encode_with_summary
from steplab.records.record import Record
from steplab.records.registry import summary_row
from steplab.records.rows import Scalar
from steplab.records.run import Run
from steplab.specs.step import FIELDS

PROJECT = "steplab"
"""The experiment or project that records go to where the tracker's own variables name none."""

_SETTINGS = {*(field.column for field in FIELDS.values()), "processes", "num_ranks"}
"""The columns of a row that are chosen before a measurement, numbers among them."""
_UNUSUAL = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracked:
    """What is tracked of one record."""

    id: str
    """Id of the record, which names folders and runs: of a store from elsewhere, without what would lead out of one."""
    name: str
    """Name that the user gave, or else the kind of the record and its id."""
    created: datetime
    """Time at which the measurement ended."""
    is_ok: bool
    """Whether the measurement succeeded."""
    params: Mapping[str, str | int | float | bool]
    """The configuration, the device and the software."""
    metrics: Mapping[str, float]
    """The figures in base units; their names end in the unit, as in JSON and CSV."""
    files: Mapping[str, bytes]
    """The contents of files by name: record.json with every raw sample, and report.html if a page was given."""


def tracked(record: Record, page: str = "") -> Tracked:
    """What is tracked of a record; `page` is its report as HTML. What is not known is left out."""
    row = summary_row(record)
    known = {_plain(key): value for key, value in row.items() if value is not None and value != ""}
    metrics = {key: float(value) for key, value in known.items() if _is_figure(key, value)}
    if isinstance(record, Run) and record.timing:  # a loop's phases have names of its own
        for samples in record.timing.back_to_back:
            if samples.phase != "step" and samples.best_s:
                metrics.setdefault(_plain(f"{samples.phase}_s"), median(samples.best_s))
    files = {"record.json": encode_with_summary(record)}
    if page:
        files["report.html"] = page.encode()
    return Tracked(
        id=_plain(record.id),
        name=record.name or f"{row['kind']} {record.id}",
        created=datetime.fromisoformat(record.created_utc),
        is_ok=record.failure is None,
        params={key: value for key, value in known.items() if key not in metrics},
        metrics=metrics,
        files=files,
    )


def _is_figure(key: str, value: Scalar) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and key not in _SETTINGS


def _plain(key: str) -> str:
    """The name with the characters alone that every tracker, and a file's name, takes."""
    return _UNUSUAL.sub("_", key)
