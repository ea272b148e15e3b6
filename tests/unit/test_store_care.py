import dataclasses
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.runs import make_run
from tests.stored_lines import import_lines

from steplab.cli.app import main
from steplab.errors import Remark, SteplabError
from steplab.lab.keeping import back_up_store, check_store
from steplab.records.codec import encode
from steplab.store import connection
from steplab.store.connection import network_file_system
from steplab.store.database import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "store.db"
    with Store.open(made, write=True) as store:
        for number in range(20):
            run = make_run(id=f"{number:012x}")
            store.add(dataclasses.replace(run, study="0123456789ab") if number < 10 else run)
    return made


@contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as sqlite:
        yield sqlite
        sqlite.commit()


def ids(path: Path) -> list[str]:
    with Store.open(path, write=False) as store:
        return [record.id for record in store.iterate(all_attempts=True)]


def damaged_page(path: Path, record_id: str) -> None:
    with raw(path) as sqlite:
        page_bytes = sqlite.execute("PRAGMA page_size").fetchone()[0]
        sqlite.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    begin = content.find(f'"id":"{record_id}"'.encode()) // page_bytes * page_bytes
    content[begin : begin + 8] = b"\xff" * 8
    path.write_bytes(content)


def test_a_sound_store_is_left_unchanged(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    condition = check_store(path)
    assert condition.damage == condition.records == ()
    assert (condition.num_records, condition.journal, condition.format) == (20, "wal", 3)
    assert condition.size_bytes == path.stat().st_size
    assert main(["store", "check", "--store", str(path)]) == 0
    assert "The store is sound." in capsys.readouterr().out
    assert path.read_bytes() == before


def test_a_damaged_record_is_named_with_its_fix_and_the_fix_works(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPLAB_STORE", str(path))
    with raw(path) as sqlite:
        sqlite.execute("UPDATE record SET body = x'7b22ff' WHERE seq = 3")
        sqlite.execute("UPDATE record SET body = x'', kind = CAST(x'ff31' AS TEXT) WHERE seq = 4")
        sqlite.execute("UPDATE record SET summary = x'00' WHERE seq = 5")
        sqlite.execute("UPDATE record SET id = CAST(x'ff31' AS TEXT) WHERE seq = 6")
    assert main(["store", "check"]) == 1
    out = capsys.readouterr().out
    for seq in (3, 4):
        assert f"remove it: `steplab rm {seq - 1:012x}`" in out
        assert main(["rm", f"{seq - 1:012x}", "--yes"]) == 0
    assert f"the listed figures of record {4:012x} are damaged" in out
    assert main(["export", f"{4:012x}", "--output", str(path.parent / "one.jsonl")]) == 0
    assert main(["rm", f"{4:012x}", "--yes"]) == 0
    assert main(["import", str(path.parent / "one.jsonl")]) == 0
    assert f"record {5:012x} is listed as '\ufffd1'" in out
    with raw(path) as sqlite:
        sqlite.execute(out.split(f'sqlite3 {path} "')[1].partition('"')[0])
    assert main(["store", "check"]) == 0
    assert set(ids(path)) == {f"{number:012x}" for number in range(20)} - {f"{2:012x}", f"{3:012x}"}


def test_a_damaged_page_is_reported_and_sqlite_can_save_the_rest(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged_page(path, f"{9:012x}")
    assert main(["store", "check", "--store", str(path)]) == 1
    assert f"`sqlite3 {path} .recover | sqlite3 new.db` recovers what it can" in capsys.readouterr().out
    assert check_store(path).num_records < 20


def test_a_store_that_lost_its_end_is_reported(path: Path) -> None:
    with raw(path) as sqlite:
        sqlite.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(SteplabError, match=r"damaged; `sqlite3 .* \.recover"):
        check_store(path)


def test_what_a_newer_steplab_stored_is_no_damage(path: Path) -> None:
    newer = b'{"schema": "steplab.flight/2", "id": "000000000003"}'
    with raw(path) as sqlite:
        sqlite.execute("UPDATE record SET body = ?, kind = 'flight' WHERE seq = 4", (newer,))
        sqlite.commit()
        assert check_store(path).records == ()
        sqlite.execute("UPDATE record SET body = ? WHERE seq = 4", (newer.replace(b"steplab.", b"st\xc3\xa9plab."),))
        sqlite.commit()
    (line,) = check_store(path).records
    assert f"remove it: `steplab rm {3:012x}`" in line


def test_vacuum_gives_back_what_removed_records_left(path: Path) -> None:
    with Store.open(path, write=True) as store:
        body = json.loads(encode(make_run()))
        import_lines(store, (json.dumps(body | {"id": f"aa{number:010x}"}).encode() for number in range(200)))
        store.remove([f"aa{number:010x}" for number in range(200)])
    before = check_store(path)
    assert before.free_bytes > before.size_bytes / 2
    with raw(path) as sqlite:
        sqlite.execute("VACUUM")
    assert check_store(path).free_bytes == 0
    assert len(ids(path)) == 20


def test_a_backup_is_a_store_as_it_was_at_one_moment(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = path.parent / "copy.db"
    with Store.open(path, write=True) as store:
        store.add(make_run(id="ffffffffffff"))  # still in the write-ahead log
        back_up_store(target, store=path)
    assert ids(target) == ids(path)
    assert target.read_bytes()[68:72] == b"STPL"
    assert main(["store", "backup", str(target), "--store", str(path), "--force"]) == 2
    assert "it is a steplab store; name another file" in capsys.readouterr().err
    assert {file.name for file in path.parent.iterdir()} == {"store.db", "copy.db"}


# Network folders


def test_a_store_on_a_network_folder_has_no_write_ahead_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, remote = tmp_path / "local.db", tmp_path / "remote.db"
    monkeypatch.setattr(connection, "network_file_system", lambda path: "nfs4" if path == remote else None)
    Store.open(local, write=True).close()
    with pytest.warns(Remark, match=r"remote\.db is on a network file system \(nfs4\)"):
        Store.open(remote, write=True).close()
    assert (check_store(local).journal, check_store(remote).journal) == ("wal", "delete")
    local.replace(remote)  # a store that was moved there changes its journal
    Store.open(remote, write=True).close()
    assert check_store(remote).journal == "delete"


def test_where_sqlite_has_no_write_ahead_log_it_keeps_the_rollback_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = connection._connect
    monkeypatch.setattr(
        connection, "_connect", lambda path, mode, wait: connect(path, f"{mode}&vfs=unix-dotfile", wait)
    )
    with Store.open(tmp_path / "store.db", write=True) as store:
        store.add(make_run(id="a"))
        assert store._connection.query("PRAGMA journal_mode") == [("delete",)]


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil  # type: ignore[import-untyped]

    def mounts(all: bool) -> list[object]:
        table = {"/": "ext4", str(tmp_path): "fuse.sshfs", str(tmp_path / "scratch"): "xfs", "/proc": "proc"}
        return [SimpleNamespace(mountpoint=mountpoint, fstype=kind) for mountpoint, kind in table.items()]

    monkeypatch.setattr(psutil, "disk_partitions", mounts)
    assert network_file_system(tmp_path / "a" / "store.db") == "fuse.sshfs"
    assert network_file_system(tmp_path / "scratch" / "store.db") is None
    assert network_file_system(Path("/elsewhere/store.db")) is None


class LockFails:
    def execute(self, sql: str) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_LOCK
        raise error

    def close(self) -> None: ...


def test_a_file_system_without_locks_is_named_as_the_cause(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_connect", lambda *arguments: LockFails())
    with pytest.raises(SteplabError, match=r"file system of the store .* lacks working locks"):
        Store.open(path, write=True)
