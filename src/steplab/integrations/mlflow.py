"""Records as runs of MLflow."""

import mlflow
from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME
from mlflow.exceptions import MlflowException

from steplab.errors import SteplabError
from steplab.integrations.tracking import PROJECT, Tracked

_ID = "steplab.id"


def export(one: Tracked) -> str:
    """Add a record as a run, unless it is there already, and say where.

    The server is the one of MLFLOW_TRACKING_URI, the experiment that of MLFLOW_EXPERIMENT_NAME, or else `steplab`.
    Raises SteplabError if MLflow refuses.
    """
    name = MLFLOW_EXPERIMENT_NAME.get() or PROJECT
    where = f"experiment {name} of {mlflow.get_tracking_uri()}"
    try:
        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        if client.search_runs([experiment_id], f"tags.`{_ID}` = '{one.id}'", max_results=1):
            return where
        ended_ms = round(one.created.timestamp() * 1e3)
        run_id = client.create_run(experiment_id, start_time=ended_ms, run_name=one.name).info.run_id
        client.log_batch(
            run_id,
            metrics=[Metric(key, value, ended_ms, 0) for key, value in one.metrics.items()],
            params=[Param(key, str(value)) for key, value in one.params.items()],
        )
        for file, content in one.files.items():
            client.log_text(run_id, content.decode(), file)
        client.log_batch(run_id, tags=[RunTag(_ID, one.id)])  # last: a run without it is not whole
        status = RunStatus.FINISHED if one.is_ok else RunStatus.FAILED
        client.set_terminated(run_id, RunStatus.to_string(status), ended_ms)
    except MlflowException as error:
        raise SteplabError(f"MLflow did not take record {one.id} ({where}): {error}") from error
    return where
