"""Sends a record to an experiment tracker as parameters, metrics and files (docs/report.md)."""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from steplab.errors import SteplabError, UserError
from steplab.records.codec import encode_with_summary
from steplab.records.record import Record
from steplab.records.registry import summary_row
from steplab.records.rows import Scalar
from steplab.records.run import Run
from steplab.specs.step import FIELDS

_PROJECT = "steplab"
_SETTINGS = {*(field.column for field in FIELDS.values()), "processes", "num_ranks"}
_UNUSUAL = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracked:
    id: str
    """Record id in which '_' replaces slashes and other characters that are unsafe in a file's name."""
    name: str
    created: datetime
    is_ok: bool
    params: Mapping[str, str | int | float | bool]
    metrics: Mapping[str, float]
    """Figures in base units; names end in their unit, as in JSON and CSV."""
    files: Mapping[str, bytes]
    """Contents by file name: record.json with raw samples, and report.html if given."""


def tracked(record: Record, page: str = "") -> Tracked:
    """Convert a record for trackers, without unknown values; `page` is its HTML report."""
    row = summary_row(record)
    known = {_plain(key): value for key, value in row.items() if value is not None and value != ""}
    metrics = {key: float(value) for key, value in known.items() if _is_figure(key, value)}
    if isinstance(record, Run) and record.timing:  # a loop names its own phases
        for samples in record.timing.back_to_back:
            if samples.phase != "step" and samples.best_s:
                metrics.setdefault(_plain(f"{samples.phase}_s"), median(samples.best_s))
    return Tracked(
        id=_plain(record.id),
        name=record.name or f"{row['kind']} {record.id}",
        created=datetime.fromisoformat(record.created_utc),
        is_ok=record.failure is None,
        params={key: value for key, value in known.items() if key not in metrics},
        metrics=metrics,
        files={"record.json": encode_with_summary(record)} | ({"report.html": page.encode()} if page else {}),
    )


def track(one: Tracked, tracker: str) -> str:
    """Add a record to `mlflow` or `wandb` as a run; return where it is stored.

    MLflow skips a record that it has. Raises UserError without the tracker's library, SteplabError if the tracker
    refuses.
    """
    try:
        return _to_mlflow(one) if tracker == "mlflow" else _to_wandb(one)
    except ImportError as error:
        fix = f"run `pip install 'steplab[{tracker}]'`"
        raise UserError(f"--tracker {tracker} needs a library: {error}; {fix}") from error


def _to_mlflow(one: Tracked) -> str:
    import mlflow
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

    name = MLFLOW_EXPERIMENT_NAME.get() or _PROJECT
    where = f"experiment {name} of {mlflow.get_tracking_uri()}"
    try:
        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        if client.search_runs([experiment_id], f"tags.`steplab.id` = '{one.id}'", max_results=1):
            return where
        ended_ms = round(one.created.timestamp() * 1e3)
        run_id = client.create_run(experiment_id, start_time=ended_ms, run_name=one.name).info.run_id
        metrics = [Metric(key, value, ended_ms, 0) for key, value in one.metrics.items()]
        client.log_batch(run_id, metrics, [Param(key, str(value)) for key, value in one.params.items()])
        for file, content in one.files.items():
            client.log_text(run_id, content.decode(), file)
        client.log_batch(run_id, tags=[RunTag("steplab.id", one.id)])  # last: it marks a complete run
        client.set_terminated(run_id, "FINISHED" if one.is_ok else "FAILED", ended_ms)
    except mlflow.MlflowException as error:
        raise SteplabError(f"MLflow refused record {one.id} ({where}): {error}") from error
    return where


def _to_wandb(one: Tracked) -> str:
    """Writes to a folder for `wandb sync`, in the project WANDB_PROJECT; only WANDB_MODE=online sends anything."""
    import wandb

    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=one.name,
            id=one.id,
            config=dict(one.params),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        with tempfile.TemporaryDirectory() as folder:
            for file, content in one.files.items():
                (Path(folder) / file).write_bytes(content)
            run.summary.update(dict(one.metrics))
            artifact = wandb.Artifact(f"steplab-{one.id}", type="report")
            artifact.add_dir(folder)
            run.log_artifact(artifact)
            run.finish(exit_code=0 if one.is_ok else 1)
    except wandb.Error as error:
        raise SteplabError(f"W&B refused record {one.id}: {error}") from error
    return str(run.url or Path(run.dir).parent)


def _is_figure(key: str, value: Scalar) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and key not in _SETTINGS


def _plain(key: str) -> str:
    return _UNUSUAL.sub("_", key)
