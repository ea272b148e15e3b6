"""Runs `steplab` by forking a process that has imported everything, since importing torch dominates a command.

As a program it listens on an inherited socket. For each request it forks a command with the given folder, variables and
streams, and answers on a given socket with process number and exit code. Parallel test processes share it; it ends with
their last connection. Measuring and reading processes, torchrun's commands and ranks of tests.distributed.ranks are
forked too.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil  # type: ignore[import-untyped]

_LONGEST_REQUEST_BYTES = 1 << 20
_MAINS = {
    "steplab": "steplab.__main__:console",
    "torch.distributed.run": "torch.distributed.run:main",
    "steplab.measurement.processes.child": "steplab.measurement.processes.child:main",
    "steplab.reading.child": "steplab.reading.child:main",
}
_OWN = re.compile(r"from (\S+) import main; main\(\)$")
_LAUNCHERS_OWN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


class Started(psutil.Process):  # type: ignore[misc]
    def __init__(self, answers: socket.socket, out: IO[bytes], errors: IO[bytes]) -> None:
        super().__init__(int(answers.recv(100)))
        answers.send(b"seen")  # until then the number is not given to another process
        self.returncode: int | None = None
        self._answers, self._files, self._outputs = answers, (out, errors), (b"", b"")

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                self.returncode = int(self._answers.recv(100))
            except TimeoutError:
                assert timeout is not None
                raise subprocess.TimeoutExpired("steplab", timeout) from None
            self._answers.close()
            out, errors = self._files
            with out, errors:
                out.seek(0)
                errors.seek(0)
                self._outputs = out.read(), errors.read()
        return self._outputs


class Preloaded:
    def __init__(self, place: Path, environment: dict[str, str]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server: subprocess.Popen[bytes] | None = None
        self._place = place
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                self._server = self._start_server(environment)
            self._socket.connect(str(place))

    def _start_server(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self._place))
            listener.listen()
            words = [sys.executable, "-m", "tests.cli.preloaded", str(listener.fileno())]
            folder = Path(__file__).parents[2]
            return subprocess.Popen(
                words, cwd=folder, env=environment, pass_fds=[listener.fileno()], start_new_session=True
            )

    def close(self) -> None:
        self._socket.close()
        if self._server is not None:
            self._server.wait()
            self._place.unlink()
            self._place.with_suffix(".lock").unlink()

    def start(
        self, module: str, arguments: list[str], *, cwd: str, environment: dict[str, str], stdin: bytes | socket.socket
    ) -> Started:
        """Start `python -m module` as a shell's foreground job: its own process group, open to Ctrl-C.

        The module `python` is the interpreter, with a file or `-c` and code. `stdin` is readable content, or a
        connection.
        """
        request = {"module": module, "arguments": arguments, "cwd": cwd, "environment": environment}
        data = json.dumps(request).encode()
        assert len(data) < _LONGEST_REQUEST_BYTES
        out, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryFile() as file, theirs:
            given = stdin if isinstance(stdin, socket.socket) else file
            if isinstance(stdin, bytes):
                file.write(stdin)
                file.seek(0)
            socket.send_fds(self._socket, [data], [each.fileno() for each in (given, out, errors, theirs)])
        return Started(answers, out, errors)


class ForkingPopen(subprocess.Popen[bytes]):
    def _execute_child(self, args: list[str], *others: Any) -> None:
        words = [word for word in args[1:] if word != "-u"]  # which torchrun adds
        own = _OWN.search(words[2]) if words[:2] == ["-P", "-c"] else None
        module, *arguments = [own[1], *words[4:]] if own else words[1:] if words[:1] == ["-m"] else [""]
        if module not in _MAINS:
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        _, _, _, pass_fds, folder, environment, *_ = others
        ends = others[9:15]  # of stdin, stdout and stderr, two each
        streams = (ends[0], ends[3], ends[5])

        def main() -> None:
            atexit._clear()  # the command's temporary folders are the command's
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            if environment is not None:
                os.environ.clear()
                os.environ.update(environment)
            if folder is not None:
                os.chdir(folder)
            if own:
                del sys.path[0]  # the working folder of the command
            # -1: as this process has it
            _take(tuple(own if given < 0 else given for own, given in enumerate(streams)), keep=pass_fds)
            pkgutil.resolve_name(_MAINS[module])()

        self.pid = os.fork()
        if self.pid == 0:
            _run(main, [module, *arguments])
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def _take(streams: tuple[int, ...], keep: tuple[int, ...] = ()) -> None:
    for number, descriptor in enumerate([os.dup(stream) for stream in streams]):
        os.dup2(descriptor, number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2 and descriptor not in (*keep, nothing):  # a closed one would be closed twice
            os.dup2(nothing, descriptor, inheritable=False)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdin = open(0, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _run(main: Callable[[], object], argv: list[str]) -> NoReturn:
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
    importlib.import_module("torch._inductor.compile_fx")  # as whatever compiles does
    importlib.import_module("torch.distributed.run")
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.models.llama.modeling_llama")  # the configurations in examples
    for module in pkgutil.walk_packages(steplab.__path__, "steplab."):
        if module.name.startswith("steplab.integrations."):
            continue  # trackers and trainers take seconds to import, and commands that are forked use none
        with contextlib.suppress(ImportError):  # what needs a package that is not here
            importlib.import_module(module.name)
    importlib.import_module("numpy.ma")  # as a first median does
    steplab.specs.hardware.catalogue()
    ranks_tests = Path(__file__).parents[1] / "distributed"
    sys.path.insert(0, str(ranks_tests))  # as pytest does, by whose names of modules ranks find their functions
    for file in ranks_tests.glob("test_*.py"):
        importlib.import_module(file.stem)
    del sys.path[0]
    sys.dont_write_bytecode = True  # commands leave no bytecode next to the models
    tempfile.tempdir = None  # to be found by the variables of each
    gc.collect()
    gc.freeze()


def _command(
    streams: tuple[int, ...], *, module: str, arguments: list[str], cwd: str, environment: dict[str, str]
) -> None:
    _take(streams)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may be a background job, which ignores it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # or under nohup, which ignores this
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0], sys.argv = cwd, [module, *arguments]
    subprocess.Popen = ForkingPopen  # type: ignore[assignment,misc]
    launchers: Any = importlib.import_module(_LAUNCHERS_OWN)
    launchers.Popen = ForkingPopen
    (_python if module == "python" else pkgutil.resolve_name(_MAINS[module]))()


def _python() -> None:
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-c":
        exec(compile(sys.argv[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, partial(self._connect, listener))
        self._num_connections = -1

    def serve(self) -> None:
        while self._num_connections or len(self._selector.get_map()) > 1:
            for key, _ in self._selector.select():
                key.data()

    def _connect(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self._selector.register(connection, selectors.EVENT_READ, partial(self._start, connection))
        self._num_connections = max(self._num_connections, 0) + 1

    def _start(self, connection: socket.socket) -> None:
        data, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_REQUEST_BYTES, 4)
        if not data:
            self._selector.unregister(connection)
            connection.close()
            self._num_connections -= 1
            return
        *streams, theirs = descriptors
        answers = socket.socket(fileno=theirs)
        number = os.fork()
        if number == 0:
            _run(partial(_command, tuple(streams), **json.loads(data)), [])
        os.setpgid(number, number)
        for stream in streams:
            os.close(stream)
        ended = os.pidfd_open(number)
        self._selector.register(ended, selectors.EVENT_READ, partial(self._collect, ended, number, answers))
        _tell(answers, number)

    def _collect(self, ended: int, number: int, answers: socket.socket) -> None:
        self._selector.unregister(ended)
        os.close(ended)
        with answers:
            with contextlib.suppress(OSError):
                answers.recv(100)  # its number was seen
            _, status = os.waitpid(number, 0)
            _tell(answers, os.waitstatus_to_exitcode(status))


def _tell(answers: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # whoever asked has ended
        answers.send(str(number).encode())


if __name__ == "__main__":
    _import_everything()
    _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
