"""Install completion of commands and options for new shells.

For example: steplab completion --shell bash
"""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def completion(
    *,
    shell: Annotated[Literal["bash", "zsh", "fish"] | None, Parameter(help="Shell [default: this one]")] = None,
    output: Annotated[Path | None, Parameter(help="Only write the script to this file")] = None,
    force: Annotated[
        bool, Parameter(help="Replace a file that is not a completion script", negative="", show_default=False)
    ] = False,
) -> None:
    from cyclopts.completion.detect import ShellDetectionError

    from steplab.cli.app import app
    from steplab.cli.output import say
    from steplab.errors import SteplabError, UserError
    from steplab.lab.files import Destination
    from steplab.printing import MARK

    try:
        if output:
            first, _, rest = app.generate_completion(shell=shell).partition("\n")  # zsh reads its first line
            Destination(path=output, force=force).write(f"{first}\n# {MARK}\n{rest}".encode())
            say(f"wrote {output}; source it in your shell")
        else:
            say(f"wrote {app.install_completion(shell=shell)}; start a new shell to use it")
    except ShellDetectionError as error:
        raise UserError("unknown shell; set --shell to bash, zsh or fish") from error
    except OSError as error:
        raise SteplabError(f"cannot write the script: {error}") from error
