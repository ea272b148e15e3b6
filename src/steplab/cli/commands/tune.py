"""Measure which settings of a kernel are fastest on this GPU.

For example: steplab tune attention --tiles tiles.toml
"""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from steplab.cli.options import OutputOptions

tune = App(name="tune", help_format="plaintext")


@tune.command
def attention(
    *,
    dim: Annotated[
        str, Parameter(help="Head dimensions; those padded to one power of two get the same tiles")
    ] = "64,80,128",
    dtype: Annotated[str, Parameter(help="Number format: bf16, whose tiles serve fp16 too, or fp32")] = "bf16",
    portable: Annotated[
        bool,
        Parameter(help="Also tune the portable kernels, on a GPU that has kernels of its own", negative=""),
    ] = False,
    device: Annotated[str, Parameter(help="Device: auto, cuda or cuda:N")] = "auto",
    tiles: Annotated[
        Path | None,
        Parameter(
            help="Table of tiles that gets the rows for this GPU; a new file starts as a copy of the package's own"
        ),
    ] = None,
    out: OutputOptions = OutputOptions(),
) -> int:
    """Tune the tiles of the attention implementation flash_triton on a CUDA GPU.

    About 10 candidates for each of its three kernels are compiled on all cores
    of the CPU, compared with float64 and timed in turns, on short and long
    sequences, causal and not. A candidate that fails, hangs or gives a wrong
    result is named and left out. This takes a few minutes; --tiles stores the
    fastest tiles.

    For example: steplab tune attention --dim 128 --tiles tiles.toml

    For 32-bit tensors: steplab tune attention --dim 32,64,128 --dtype fp32
    """
    from steplab.cli.output import at, chosen_format, emit, emit_document, say
    from steplab.cli.progress import ProgressLine
    from steplab.errors import UserError
    from steplab.lab.tuning import packaged_table, rows_of, rows_text, table_before, table_with, tune_attention
    from steplab.report.attention.tuning import tuning_document, tuning_json
    from steplab.specs.attention_tuning import TuningStudy

    chosen = chosen_format(out.format, out, beside=[tiles])
    before = ""
    if tiles is not None:
        chosen_format("tiles", at(tiles, out), allowed=("tiles",))
        before = table_before(tiles)
    parts = [part.strip() for part in dim.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise UserError(f"--dim takes whole numbers, as in 64,128, not '{dim}'")
    head_dims = tuple(dict.fromkeys(int(part) for part in parts))
    study = TuningStudy(
        head_dims=head_dims,
        dtype=dtype,  # type: ignore[arg-type]  # which it checks
        portable=portable,
        device=device,
    )
    with ProgressLine() as line:
        tuning = tune_attention(study, on_progress=line.within)
    if chosen == "json":
        emit(tuning_json(tuning), out, chosen)
    else:
        emit_document(tuning_document(tuning), chosen, out)
    if tiles is not None:
        emit(table_with(tuning, before), at(tiles, out), "tiles")
    elif tuning.chosen:
        say(f"{rows_text(rows_of(tuning))}\n--tiles FILE writes these rows to a copy of {packaged_table()}")
    return 0 if tuning.chosen else 1
