"""Record the user's own training loop in the store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from steplab.lab.keeping import checked_name, keep, open_store
from steplab.specs.device import check_device

if TYPE_CHECKING:
    from steplab.measurement.recorder import Recorder


@contextmanager
def recorder(
    name: str,
    *,
    tokens_per_step: int | None = None,
    warmup: int = 5,
    device: str = "auto",
    store: Path | str | None = None,
) -> "Iterator[Recorder]":
    """Time the steps of a loop, and store them as one record at its end.

        with steplab.recorder("my loop", tokens_per_step=4096) as rec:
            for batch in loader:
                with rec.step():
                    with rec.phase("forward"):  # phases are optional
                        loss = model(batch)
                    ...

    The first `warmup` steps count as warm-up. Nothing is synchronised before the end, so steplab does not change how
    the loop runs. A loop that raises is stored with the steps until then, and the exception is raised again. Raises
    SteplabError before the loop begins if the store cannot be written, and UserError for a device that does not exist.
    """
    from steplab.measurement.recorder import Recorder

    check_device(device)
    with open_store(store, write=True) as opened:
        recording = Recorder(checked_name(name), tokens_per_step=tokens_per_step, warmup=warmup, device=device)
        try:
            yield recording
        except BaseException as error:
            keep(opened, recording.finish(error))
            raise
        recording.run = recording.finish()
        keep(opened, recording.run)
