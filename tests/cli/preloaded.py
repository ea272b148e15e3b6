"""`steplab` by forking a process that has imported everything already: importing torch is most of what a command takes.

Run as a program, with the descriptor of a socket: for each request on it, this process forks into a command with the
folder, variables and streams that come along, and answers with its number and then its exit code. Measuring processes
are forked in turn, by the command and with a session of their own, as `steplab.measurement.launch` starts them.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

_LONGEST_REQUEST_BYTES = 1 << 20
_MEASURING = tuple(f"steplab.measurement.{name}" for name in ("child", "elastic", "rank"))
_LAUNCHERS_OWN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
"""Where torch's launcher, by which ranks are started, has a Popen by its own name."""


class Preloaded:
    """The one that asks."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:  # when this end goes, with its process at the latest, the other process ends
            number = str(theirs.fileno())
            self._server = subprocess.Popen(
                [sys.executable, __file__, number], env=environment, pass_fds=[theirs.fileno()], start_new_session=True
            )

    def __call__(
        self, arguments: list[str], *, cwd: str, environment: dict[str, str], stdin: bytes, timeout_s: float
    ) -> subprocess.CompletedProcess[bytes]:
        """As `subprocess.run` of the command, its output captured."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            given.write(stdin)
            given.seek(0)
            request = json.dumps({"arguments": arguments, "cwd": cwd, "environment": environment}).encode()
            assert len(request) < _LONGEST_REQUEST_BYTES
            self._socket.settimeout(timeout_s)
            socket.send_fds(self._socket, [request], [file.fileno() for file in (given, out, errors)])
            number = int(self._socket.recv(100))
            try:
                code = int(self._socket.recv(100))
            except TimeoutError:
                os.kill(number, signal.SIGKILL)
                self._socket.recv(100)
                raise subprocess.TimeoutExpired(["steplab", *arguments], timeout_s) from None
            out.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), errors.read())


class ForkingPopen(subprocess.Popen[bytes]):
    """Starts a measuring process by forking; whatever else, as ever."""

    def _execute_child(self, args: list[str], *others: Any) -> None:
        if args[1] != "-m" or args[2] not in _MEASURING:
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        _, _, _, pass_fds, _, environment, *_ = others
        ends = others[9:15]  # of stdin, stdout and stderr, two each
        streams = (ends[0], ends[3], ends[5])

        def measure() -> None:
            atexit._clear()  # the command's temporary folders are the command's
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            if environment is not None:
                os.environ.clear()
                os.environ.update(environment)
            # -1: as this process has it
            _take(tuple(own if given < 0 else given for own, given in enumerate(streams)), keep=pass_fds)
            importlib.import_module(args[2]).main()

        self.pid = os.fork()
        if self.pid == 0:
            _run(measure, ["child", *args[3:]])
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def _take(streams: tuple[int, ...], keep: tuple[int, ...] = ()) -> None:
    """Make these descriptors the standard streams, and keep no others."""
    for number, descriptor in enumerate([os.dup(stream) for stream in streams]):
        os.dup2(descriptor, number)
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2 and descriptor not in keep:
            with contextlib.suppress(OSError):  # the list's own
                os.close(descriptor)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdin = open(0, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _run(main: Callable[[], object], argv: list[str]) -> NoReturn:
    """Become a program, to its end."""
    sys.argv, code = argv, 1
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _import_everything() -> None:
    import steplab

    importlib.import_module("torch._dynamo")  # as the first optimizer does, in a measuring process
    importlib.import_module("torch.distributed.launcher.api")
    for module in pkgutil.walk_packages(steplab.__path__, "steplab."):
        with contextlib.suppress(ImportError):  # what needs a package that is not here
            importlib.import_module(module.name)
    tempfile.tempdir = None  # to be found by the variables of each
    gc.collect()
    gc.freeze()


def _command(streams: tuple[int, ...], *, arguments: list[str], cwd: str, environment: dict[str, str]) -> None:
    from steplab.cli import app

    _take(streams)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0], sys.argv = cwd, ["steplab", *arguments]
    subprocess.Popen = ForkingPopen  # type: ignore[assignment,misc]
    launchers: Any = importlib.import_module(_LAUNCHERS_OWN)
    launchers.Popen = ForkingPopen
    app.console()


def _serve(requests: socket.socket) -> None:
    while True:
        data, streams, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST_BYTES, 3)
        if not data:
            return
        number = os.fork()
        if number == 0:
            _run(partial(_command, tuple(streams), **json.loads(data)), [])
        for stream in streams:
            os.close(stream)
        requests.send(str(number).encode())
        _, status = os.waitpid(number, 0)
        requests.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    _import_everything()
    _serve(socket.socket(fileno=int(sys.argv[1])))
