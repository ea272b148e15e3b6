"""Starts steplab's own processes, which import nothing from the working folder."""

import sys
from pathlib import Path

_CODE = "import sys; sys.path.append(sys.argv.pop(1)); from {} import main; main()"


def python_running(module: str, *arguments: str) -> list[str]:
    """The command line that runs `main` of a steplab module with these arguments.

    `-P` keeps the working folder, maybe with a `types.py`, out of `sys.path`. PYTHONPATH may name another steplab.
    """
    return [sys.executable, "-P", "-c", _CODE.format(module), str(Path(__file__).parents[1]), *arguments]
