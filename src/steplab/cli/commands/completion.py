"""Install completion of commands and options for new shells.

For example: steplab completion --shell bash
"""

from typing import Annotated, Literal

from cyclopts import Parameter


def completion(
    *, shell: Annotated[Literal["bash", "zsh", "fish"] | None, Parameter(help="Shell [default: this one]")] = None
) -> None:
    from cyclopts.completion.detect import ShellDetectionError

    from steplab.cli.app import app
    from steplab.cli.output import say
    from steplab.errors import SteplabError, UserError

    try:
        say(f"wrote {app.install_completion(shell=shell)}; start a new shell to use it")
    except ShellDetectionError as error:
        raise UserError("unknown shell; set --shell to bash, zsh or fish") from error
    except OSError as error:
        raise SteplabError(f"cannot write the script: {error}") from error
