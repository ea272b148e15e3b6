"""Install completion of commands and options for your shell; a new shell has it.

For example: steplab completion --shell bash
"""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def completion(
    *,
    shell: Annotated[
        Literal["bash", "zsh", "fish"] | None, Parameter(help="Shell [default: the one that runs steplab]")
    ] = None,
    output: Annotated[
        Path | None, Parameter(help="Write the script to this file, and leave the shell's own files as they are")
    ] = None,
) -> None:
    from cyclopts.completion.detect import ShellDetectionError

    from steplab.cli.app import app
    from steplab.cli.output import say
    from steplab.errors import SteplabError, UserError

    try:
        path = app.install_completion(shell=shell, output=output, add_to_startup=output is None)
    except ShellDetectionError as error:
        raise UserError("the shell is not known; name it: --shell bash, zsh or fish") from error
    except OSError as error:
        raise SteplabError(f"cannot write the script: {error}") from error
    say(f"wrote {path}; begin a new shell to use it")
