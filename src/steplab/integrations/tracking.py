"""A record as a tracker of experiments takes it: flat parameters, figures and files.

`steplab export --tracker` gives this to MLflow, W&B and TensorBoard, and docs/report.md to any other.
"""

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
    return Tracked(
        id=_plain(record.id),
        name=record.name or f"{row['kind']} {record.id}",
        created=datetime.fromisoformat(record.created_utc),
        is_ok=record.failure is None,
        params={key: value for key, value in known.items() if key not in metrics},
        metrics=metrics,
        files={"record.json": encode_with_summary(record)} | ({"report.html": page.encode()} if page else {}),
    )


def track(one: Tracked, tracker: str, folder: Path) -> str:
    """Add a record to `mlflow`, `wandb` or `tensorboard` as a run, unless it is there already, and say where.

    `folder` is TensorBoard's; the others know by variables of their own where to write. Raises UserError if the
    tracker's library is not installed, and SteplabError if the tracker refuses.
    """
    try:
        if tracker == "tensorboard":
            return _to_tensorboard(one, folder)
        return _to_mlflow(one) if tracker == "mlflow" else _to_wandb(one)
    except ImportError as error:
        fix = f"install it by `pip install 'steplab[{tracker}]'`"
        raise UserError(f"--tracker {tracker} needs a library: {error}; {fix}") from error


def _to_mlflow(one: Tracked) -> str:
    """To the server of MLFLOW_TRACKING_URI, and the experiment of MLFLOW_EXPERIMENT_NAME."""
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
        client.log_batch(run_id, tags=[RunTag("steplab.id", one.id)])  # last: a run without it is not whole
        client.set_terminated(run_id, "FINISHED" if one.is_ok else "FAILED", ended_ms)
    except mlflow.MlflowException as error:
        raise SteplabError(f"MLflow did not take record {one.id} ({where}): {error}") from error
    return where


def _to_wandb(one: Tracked) -> str:
    """To the project of WANDB_PROJECT, in a folder that `wandb sync` uploads: nothing leaves the machine unless
    WANDB_MODE=online."""
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
            _write(one, Path(folder))
            run.summary.update(dict(one.metrics))
            artifact = wandb.Artifact(f"steplab-{one.id}", type="report")
            artifact.add_dir(folder)
            run.log_artifact(artifact)
            run.finish(exit_code=0 if one.is_ok else 1)
    except wandb.Error as error:
        raise SteplabError(f"W&B did not take record {one.id}: {error}") from error
    return str(run.url or Path(run.dir).parent)


def _to_tensorboard(one: Tracked, folder: Path) -> str:
    """To a folder in this one, with the files beside the events."""
    from torch.utils.tensorboard import SummaryWriter

    run = folder / f"steplab-{one.id}"
    try:
        if not run.exists():
            with SummaryWriter(str(run)) as writer:
                writer.add_hparams({"name": one.name, **one.params}, dict(one.metrics), run_name=".")
            _write(one, run)
    except OSError as error:
        raise SteplabError(f"cannot write to {run}: {error.strerror}") from error
    return str(folder)


def _write(one: Tracked, folder: Path) -> None:
    for file, content in one.files.items():
        (folder / file).write_bytes(content)


def _is_figure(key: str, value: Scalar) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and key not in _SETTINGS


def _plain(key: str) -> str:
    """The name with the characters alone that every tracker, and a file's name, takes."""
    return _UNUSUAL.sub("_", key)
