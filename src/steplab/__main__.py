"""`python -m steplab` is `steplab`."""

import sys

from steplab.cli.ending import Ending


def console() -> None:
    ending = Ending()
    ending.listen()
    try:
        from steplab.cli.app import main  # takes a while, and a signal may arrive

        code = main(ending=ending)
        ending.ignore()
    except KeyboardInterrupt:
        ending.ignore()
        code = ending.exit_code
    sys.exit(code)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working folder, where a user's types.py may lie
    console()
