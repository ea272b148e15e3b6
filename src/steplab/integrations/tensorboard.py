"""Records as runs of TensorBoard."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from steplab.errors import SteplabError
from steplab.integrations.tracking import Tracked


def export(one: Tracked, folder: Path) -> str:
    """Write a record as a run in a folder of its own, unless it is there already, and say where.

    The parameters and figures are in the tab for hyperparameters, and the figures are scalars too; the files lie beside
    the events. Raises SteplabError if the folder cannot be written.
    """
    run = folder / f"steplab-{one.id}"
    if run.exists():
        return str(folder)
    try:
        with SummaryWriter(str(run)) as writer:
            writer.add_hparams({"name": one.name, **one.params}, dict(one.metrics), run_name=".")
        for file, content in one.files.items():
            (run / file).write_bytes(content)
    except OSError as error:
        raise SteplabError(f"cannot write to {run}: {error.strerror}") from error
    return str(folder)
