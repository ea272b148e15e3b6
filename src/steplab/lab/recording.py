"""Record the user's own training loop in the store."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from steplab.errors import Remark, UserError, warn_caller
from steplab.lab.files import folder_for
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.lab.profiling import read_profile, with_profile
from steplab.lab.utilization import with_given_flops
from steplab.printing import text_of
from steplab.records.validation import LARGEST, LARGEST_FLOPS
from steplab.specs.layout import check_device
from steplab.specs.step import FIELDS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from steplab.measurement.recorder import Recorder
    from steplab.records.run import Run
    from steplab.store.database import Store


_NO_FLOPS = (
    "MFU: the FLOPs of the loop are not known; give the recorder flops_per_step, such as 6 * parameters * tokens, and "
    "precision"
)


@contextmanager
def recorder(
    name: str,
    *,
    tokens_per_step: int | None = None,
    flops_per_step: float | None = None,
    precision: str | None = None,
    warmup: int = 5,
    steps: int | None = None,
    profile: range | None = None,
    model: "nn.Module | None" = None,
    device: "torch.device | str" = "auto",
    store: Path | str | None = None,
) -> "Iterator[Recorder]":
    """Time the steps of a loop, and store them as one record at its end.

        with steplab.recorder("my loop", tokens_per_step=4096) as rec:
            for batch in loader:
                with rec.step():
                    with rec.phase("forward"):  # phases are optional
                        loss = model(batch)
                    ...

    With `flops_per_step`, the model FLOPs of a step on all ranks (rule of thumb: 6 x parameters x tokens), and
    `precision`, the number format of its products (fp32, tf32, bf16, fp16), the record has an MFU.

    The first `warmup` steps are warm-up, and the next `steps` are measured (None: all). `device` is by default the
    current GPU. steplab synchronises only at the end, so the loop runs unchanged.

    `profile=range(20, 23)` runs steps 20 to 22, counted from 0, and the one before under torch.profiler, untimed.
    `model` names the modules in that profile.

    In several processes every rank opens a recorder after torch.distributed has a process group, and runs the same
    steps; `tokens_per_step` is over all ranks. Rank 0 stores one record of all, with its own profile.

    A loop that raises is stored (by rank 0) with its completed steps; the exception passes on. Raises SteplabError
    before the loop if the store cannot be written, and UserError for an absent device, steps that cannot be profiled,
    FLOPs without a precision, and ranks without a process group.
    """
    from steplab.measurement.recorder import Recorder

    tokens = None if tokens_per_step is None else int(_number("tokens_per_step", tokens_per_step, 1))
    flops = _flops(flops_per_step, precision)
    warmup = int(_number("warmup", warmup, 0))
    most = None if steps is None else int(_number("steps", steps, 1))
    device, name = _device_name(device), checked_name(name)
    with folder_for(None) as folder:
        recording = Recorder(
            name,
            tokens_per_step=tokens,
            warmup=warmup,
            steps=most,
            device=device,
            profile=profile,
            model=model,
            folder=folder,
        )
        with open_store(store, write=True) if recording.is_first else nullcontext() as opened:

            def ended(error: BaseException | None = None) -> "Run | None":
                run = recording.finish(error)
                return _keep(opened, run, recording, flops, precision) if opened else None

            try:
                yield recording
            except GeneratorExit:  # the program drops the recorder without closing it
                raise
            except BaseException as error:
                try:
                    ended(error)
                except Exception as lost:
                    with suppress(Exception):
                        error.add_note(f"steplab: {lost}")
                raise
            recording.run = ended()
            for note in recording.run.notes if recording.run else ():
                if note.startswith("step time: "):
                    warn_caller(Remark(f"{name or 'the recorder'}: {note}"))


def _number(what: str, given: object, least: float, most: float = LARGEST, *, whole: bool = True) -> float:
    try:
        number = float(given)  # type: ignore[arg-type]
    except Exception:
        number = math.nan
    if not least <= number < most or (whole and number % 1):
        rule = f"{'a whole number' if whole else 'a number'} from {least:g} to below {most:g}"
        raise UserError(f"{what} must be {rule}, not {ascii(text_of(given)[:80])[1:-1]}; leave it out if unknown")
    return number


def _flops(given: object, precision: object) -> float | None:
    if precision is not None:
        FIELDS["precision"].refuse_invalid(precision)
    if given is None:
        return None
    flops = _number("flops_per_step", given, 1, LARGEST_FLOPS, whole=False)
    if precision is None:
        raise UserError("flops_per_step needs precision, the number format of its products, as in precision='bf16'")
    return flops


def _device_name(device: "torch.device | str") -> str:
    kind, _, index = str(device).partition(":")
    name = f"cuda:{index}" if kind == "cuda" and index else kind if index == "0" else str(device)
    check_device(name)
    return name


def _keep(store: "Store", run: "Run", recording: "Recorder", flops: float | None, precision: str | None) -> "Run":
    if flops is not None and precision is not None:
        run = with_given_flops(run, flops, precision, recording.num_ranks, store)
    else:
        run = dataclasses.replace(run, notes=(_NO_FLOPS, *run.notes))
    if recording.trace is not None:
        try:
            run = with_profile(run, read_profile(recording.trace, "torch.profiler"))
        except Exception as error:  # the timing is kept
            run = dataclasses.replace(run, notes=(*run.notes, f"profile: {error}"))
    return keep(store, run)
