import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.first import first
from tests.runs import make_run
from tests.unit.test_growth import event, kernel, write_tables

from steplab.errors import SteplabError, UserError
from steplab.lab.memory import read_memory
from steplab.lab.profiling import read_profile
from steplab.measurement.progress import Progress
from steplab.reading.bounded import read_bounded
from steplab.records.codec import encode
from steplab.units import GIB, MIB
from steplab.unpacking import small_file


def unwatched(progress: Progress) -> None:
    pass


COLLIDING = 2**61 - 1
"""Python's hash of an int is the int modulo this number."""


def colliding(path: Path, num_keys: int = 400_000) -> Path:
    keys = ((number * COLLIDING).to_bytes(11, "little") for number in range(1, num_keys + 1))
    path.write_bytes(b"\x80\x04}(" + b"".join(b"\x8a\x0b" + key + b"N" for key in keys) + b"u.")
    return path


def readers(folder: Path) -> set[str]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if b"steplab.reading.child" in command and os.fsencode(folder) in command:
                found.add(f"{process.name} {command!r}")
        except OSError:
            continue
    return found


@pytest.mark.parametrize("overlap", first(1, [True, False]))
def test_ranges_within_each_other_take_little_memory(
    tmp_path: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steplab.limits.READER_BYTES", GIB)
    n = 40_000
    spans = [
        event(i, "user_annotation", name=f"range {i}", ts=i, dur=2 * n if overlap else 10 * n - i) for i in range(n)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*spans, *kernel(n // 10)]}))
    (found,) = read_profile(path, None).kernels
    assert found.range.startswith("range 0.range 1.")


def test_keys_that_collide_end_at_the_limit_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steplab.limits.READER_S", 2)
    path = colliding(tmp_path / "snapshot.pickle")
    with pytest.raises(UserError) as error:
        read_memory(path, unwatched)
    assert str(error.value) == f"{path}: reading it takes more than 2 s of processor time"


def test_objects_without_end_end_at_the_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steplab.limits.READER_BYTES", 200 * MIB)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(b"\x80\x04" + b"}" * 10_000_000)
    with pytest.raises(UserError, match="reading it takes more than 200 MiB of memory"):
        read_memory(path, unwatched)


def test_a_key_whose_hash_recurses_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(b"\x80\x04})" + b"\x85" * 10_000_000 + b"Ns.")
    with pytest.raises(UserError, match=f"{path}: its reader ended by SIG"):
        read_memory(path, unwatched)


def test_what_is_no_file_of_its_kind_is_told_as_by_the_reader(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"na\xffme")
    path.write_text("[]")
    with pytest.raises(SteplabError, match=r"has no kernel or operator") as error:
        read_profile(path, None)
    assert not isinstance(error.value, UserError)
    with pytest.raises(UserError, match=r"na\\udcffme: it is not a pickle of protocol 2 or later"):
        read_memory(path, unwatched)


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="no descriptors have names here")
def test_what_is_no_regular_file_is_told_with_the_fix() -> None:
    ends = os.pipe()
    try:
        with pytest.raises(UserError, match=r"/dev/fd/\d+ is not a regular file; save it to a file first"):
            read_profile(Path(f"/dev/fd/{ends[0]}"), None)
    finally:
        for end in ends:
            os.close(end)


def test_an_error_of_steplabs_own_has_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"in the process that read [^:]*:\nTraceback"):
        read_bounded("no such work", object, [tmp_path])


def test_what_lies_in_the_working_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "numpy", "steplab", "sqlite3", "profile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([event(1)]))
    assert read_profile(path, None).kernels


def long_trace(path: Path) -> Path:
    one = json.dumps(event(1)).encode() + b","
    path.write_bytes(b'{"traceEvents": [' + one * (200 * MIB // len(one)))
    return path


def long_export(path: Path) -> Path:
    n = 1_000_000
    kernels: list[tuple[object, ...]] = [(i, i + 1, 7, i, 0, 1) for i in range(n)]
    write_tables(path, {"StringIds": [(0, "k")], "CUPTI_ACTIVITY_KIND_KERNEL": kernels})
    return path


def started(*words: str, folder: Path | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "steplab", *words],
        stderr=subprocess.PIPE,
        cwd=folder,
        # a shell's background job, and so perhaps this test, ignores SIGINT, and would hand that down
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


READERS = {
    "snapshot.pickle": ("import-snapshot", colliding),
    "trace.json": ("import-trace", long_trace),
    "trace.sqlite": ("import-trace", long_export),
}


@pytest.fixture
def reading(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    command_name, make = READERS[name := getattr(request, "param", "snapshot.pickle")]
    words = [command_name, str(make(tmp_path / name)), "--store", str(tmp_path / "store.db")]
    with started(*words) as process:
        while not readers(tmp_path):
            time.sleep(0.1)
        time.sleep(2)
        yield process
        process.kill()
    for _ in range(50):
        if not readers(tmp_path):
            return
        time.sleep(0.1)
    raise AssertionError(f"still there: {readers(tmp_path)}")


@pytest.mark.skipif(not Path("/proc").exists(), reason="without /proc processes are not found")
@pytest.mark.parametrize("reading", first(1, ["trace.sqlite", "trace.json", "snapshot.pickle"]), indirect=True)
def test_ctrl_c_ends_each_reader_in_one_line(reading: subprocess.Popen[bytes]) -> None:
    reading.send_signal(signal.SIGINT)
    assert reading.wait(5) == 130
    assert reading.stderr
    assert reading.stderr.read().splitlines()[-1] == b"steplab: interrupted"


@pytest.mark.skipif(not Path("/proc").exists(), reason="without /proc processes are not found")
def test_ctrl_c_ends_an_import_and_nothing_of_it_is_stored(tmp_path: Path) -> None:
    line = encode(make_run()) + b"\n"
    (tmp_path / "records.jsonl").write_bytes(line * (150 * MIB // len(line)))
    words = ["import", "records.jsonl", "--store", "store.db"]
    with started(*words, folder=tmp_path) as process:
        opened = Path(f"/proc/{process.pid}/fd")
        while not any(os.path.realpath(link).endswith("records.jsonl") for link in opened.iterdir()):
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert process.stderr
        assert b"Traceback" not in process.stderr.read()
    assert not (tmp_path / "store.db").exists()


@pytest.mark.skipif(not Path("/proc").exists(), reason="without /proc processes are not found")
@pytest.mark.parametrize("number", first(1, [signal.SIGKILL, signal.SIGTERM]))
def test_a_signal_ends_it_at_once(reading: subprocess.Popen[bytes], number: signal.Signals) -> None:
    reading.send_signal(number)
    assert reading.wait(5) == (143 if number == signal.SIGTERM else -9)
    assert reading.stderr
    assert b"Traceback" not in reading.stderr.read()


def test_a_file_without_an_end_is_no_study_and_no_configuration(tmp_path: Path) -> None:
    huge = tmp_path / "study.toml"
    with huge.open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)  # a hole, which takes no disk
    for path in (huge, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"it has more than 64\.0 MiB"):
            small_file(path)
    with pytest.raises(OSError, match="null"):
        small_file(Path("a\0b"))
