import errno
import json
import os
from pathlib import Path

import pytest
from tests.cli.program import Program, complaint, tiny
from tests.runs import make_run
from tests.stored_lines import fill

from steplab.cli.app import main
from steplab.lab import listing

MODEL = '''
from pathlib import Path

def build(context):
    """At context 2 the disk is full while there is no file `free`."""
    filler = Path(PLACE) / "filler"
    if context == 2 and not Path(PLACE, "free").exists():
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1024))
            except OSError:
                pass
    return lambda: None
'''
SWEEP = ("sweep", *tiny(context="1,2,3"), "--model", "filling:build", "--format", "json")


def model(place: Path) -> str:
    return MODEL.replace("PLACE", repr(str(place)))


def test_a_full_disk_under_the_store_keeps_the_record_elsewhere(tmp_path: Path, disk: Path) -> None:
    steplab = Program(tmp_path)
    steplab.environment["STEPLAB_STORE"] = str(disk / "store.db")
    steplab.write("filling.py", model(disk))
    result = steplab(*SWEEP)
    assert result.code == 1
    assert result.stderr.count("steplab: ") == 1
    assert "the disk is full" in result.stderr.splitlines()[-1]
    (kept,) = steplab.cwd.glob("steplab-unsaved-*.jsonl")
    assert f"the record is in {kept}" in result.stderr
    assert [row["context"] for row in steplab.rows()] == [1]

    (disk / "filler").unlink()
    (disk / "free").touch()
    assert steplab("import", kept).code == 0
    resumed = steplab(*SWEEP, "--resume")
    assert [(row["context"], row["status"]) for row in json.loads(resumed.stdout)] == [(1, "ok"), (2, "ok"), (3, "ok")]
    assert resumed.stderr.count("[1/1]") == 1


def test_a_full_disk_under_everything_is_said_to_lose_the_last_record(disk: Path) -> None:
    steplab = Program(disk)
    steplab.environment["TMPDIR"] = str(disk)
    steplab.write("filling.py", model(disk))
    result = steplab(*SWEEP)
    assert result.code == 1
    assert "the disk is full" in result.stderr
    assert "and it is lost" in result.stderr
    assert not list(steplab.cwd.glob("steplab-unsaved-*"))
    (disk / "filler").unlink()
    assert [row["context"] for row in steplab.rows()] == [1]


def test_a_store_on_a_full_disk_is_read_and_exported(tmp_path: Path, disk: Path) -> None:
    steplab = Program(tmp_path)
    path = disk / "store.db"
    fill(path, make_run({}, name="kept"))
    free = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize))
    assert [row["name"] for row in steplab("list", "--store", path, "--format", "json").rows()] == ["kept"]
    assert steplab("export", "--store", path, "--output", "rescued.jsonl.gz").code == 0
    assert str(path) in complaint(steplab("tag", "last", "x", "--store", path), 1)
    (disk / "filler").unlink()
    assert steplab("tag", "last", "x", "--store", path).code == 0
    assert steplab("import", "rescued.jsonl.gz").code == 0


NO_FOLDER = "No usable temporary directory found in ['/tmp']"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),
            "No space left on device: /tmp/x; free some space",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files; raise the limit of open files"),
        (FileNotFoundError(errno.ENOENT, NO_FOLDER), "no writable folder for temporary files"),
    ],
)
def test_what_the_system_refuses_is_no_internal_error(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**options: object) -> None:
        raise error

    monkeypatch.setattr(listing, "list_records", refuse)
    assert main(["list"]) == 1
    assert capsys.readouterr().err.startswith(f"steplab: {said}")
