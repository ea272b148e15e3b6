"""How a process of steplab's own is started: it imports nothing that lies in the working folder."""

import sys
from pathlib import Path

_CODE = "import sys; sys.path.append(sys.argv.pop(1)); from {} import main; main()"


def python_running(module: str, *arguments: str) -> list[str]:
    """The words that start Python with `main` of a module of steplab's, and these arguments.

    `-P` keeps the working folder, where a user's `types.py` may lie, out of `sys.path`. Steplab is found where it lies
    now, unless a PYTHONPATH names another one.
    """
    return [sys.executable, "-P", "-c", _CODE.format(module), str(Path(__file__).parents[1]), *arguments]
