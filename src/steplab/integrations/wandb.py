"""Records as runs of Weights & Biases."""

import os
import tempfile
from pathlib import Path

import wandb

from steplab.errors import SteplabError
from steplab.integrations.tracking import PROJECT, Tracked


def export(one: Tracked) -> str:
    """Add a record as a run whose id is the record's, and say where.

    Nothing leaves the machine unless WANDB_MODE=online: the run is written to a folder, which `wandb sync` uploads. The
    project is that of WANDB_PROJECT, or else `steplab`. Raises SteplabError if W&B refuses.
    """
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
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
        raise SteplabError(f"W&B did not take record {one.id}: {error}") from error
    return str(run.url or Path(run.dir).parent)
