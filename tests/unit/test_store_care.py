"""`steplab store`: what is damaged is found, and what can be read of it is kept."""

import base64
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
from steplab.lab.store_care import back_up_store, check_store, compact_store, repair_store
from steplab.records.codec import encode
from steplab.store import connection
from steplab.store.database import Store
from steplab.store.file_system import network_file_system


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of twenty records, ten of them of one study."""
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


def test_a_sound_store_is_left_unchanged(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    condition = check_store(path)
    assert condition.is_sound
    assert (condition.num_records, condition.num_studies, condition.journal, condition.format) == (20, 1, "wal", 3)
    assert condition.size_bytes == path.stat().st_size
    assert repair_store(path) is None
    assert path.read_bytes() == before
    assert main(["store", "check", "--store", str(path)]) == 0
    assert "The store is sound." in capsys.readouterr().out


def test_what_cannot_be_read_is_moved_aside_with_its_content(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with raw(path) as sqlite:
        sqlite.execute("UPDATE record SET body = x'7b22ff' WHERE seq = 3")
        sqlite.execute("UPDATE record SET body = x'', kind = CAST(x'ff31' AS TEXT) WHERE seq = 4")
        sqlite.execute("UPDATE record SET summary = x'00', status = 'timeout' WHERE seq = 5")
        sqlite.execute("UPDATE record SET id = CAST(x'ff31' AS TEXT) WHERE seq = 6")
    assert main(["store", "check", "--store", str(path), "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(row["id"], row["kind"]) for row in found["unreadable"]] == [(f"{2:012x}", "run"), (f"{3:012x}", "\ufffd1")]
    assert found["store"][0]["num_outdated"] == 2
    assert main(["store", "repair", "--store", str(path)]) == 0
    assert "2 unreadable records were moved" in capsys.readouterr().err
    (aside,) = path.parent.glob("store.db.unreadable-*")
    lines = [json.loads(line) for line in aside.read_text().splitlines()]
    assert base64.b64decode(lines[0]["body_base64"]) == b'{"\xff'
    assert (lines[1]["study"], lines[1]["body_base64"]) == ("0123456789ab", "")
    (before,) = path.parent.glob("store.db.before-repair-*")
    assert not check_store(before).is_sound
    assert check_store(path).is_sound
    assert check_store(path).num_records == 18
    with Store.open(path, write=False) as store:
        assert store.get(f"{5:012x}").id == f"{5:012x}"
        row = next(row for row in store.rows(all_attempts=True) if row["id"] == f"{4:012x}")
        assert row["status"] == "ok"
        assert len(store.studies()) == 1


def test_a_damaged_page_costs_the_records_on_it_alone(path: Path) -> None:
    with raw(path) as sqlite:
        page_bytes = sqlite.execute("PRAGMA page_size").fetchone()[0]
        sqlite.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    page = content.find(f'"id":"{9:012x}"'.encode()) // page_bytes
    begin = page * page_bytes
    on_page = sum(f'"id":"{number:012x}"'.encode() in content[begin : begin + page_bytes] for number in range(20))
    content[page * page_bytes : page * page_bytes + 8] = b"\xff" * 8
    path.write_bytes(content)
    condition = check_store(path)
    assert condition.damage
    assert condition.num_records < 20
    repaired = repair_store(path)
    assert repaired is not None
    after = check_store(path)
    assert after.is_sound
    assert after.num_records == condition.num_records == 20 - on_page
    assert set(ids(path)) <= {f"{number:012x}" for number in range(20)}
    with Store.open(path, write=True) as store:
        store.add(make_run(id="ffffffffffff"))


def test_what_a_newer_steplab_stored_is_no_damage(path: Path) -> None:
    newer = b'{"schema": "steplab.flight/2", "id": "000000000003"}'
    with raw(path) as sqlite:
        sqlite.execute("UPDATE record SET body = ?, kind = 'flight' WHERE seq = 4", (newer,))
        sqlite.execute("UPDATE record SET body = x'00' WHERE seq = 5")
    assert [record.id for record in check_store(path).unreadable] == [f"{4:012x}"]
    repair_store(path)
    with raw(path) as sqlite:
        assert sqlite.execute("SELECT kind, body FROM record WHERE id = '000000000003'").fetchone() == ("flight", newer)
        assert sqlite.execute("SELECT COUNT(*) FROM record").fetchone() == (19,)


def test_a_repair_beside_a_writer_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raw(path) as sqlite:
        sqlite.execute("UPDATE record SET body = x'00' WHERE seq = 5")
    from steplab.store import care

    fill = care._fill

    def beside_a_writer(made: sqlite3.Connection, sqlite: sqlite3.Connection) -> object:
        with Store.open(path, write=True) as store:
            store.add(make_run(id="ffffffffffff"))
        return fill(made, sqlite)

    monkeypatch.setattr(care, "_fill", beside_a_writer)
    with pytest.raises(SteplabError, match="another process wrote"):
        repair_store(path)
    assert len(check_store(path).unreadable) == 1
    assert check_store(path).num_records == 20


def test_compact_gives_back_what_removed_records_left(path: Path) -> None:
    with Store.open(path, write=True) as store:
        body = json.loads(encode(make_run()))
        import_lines(store, (json.dumps(body | {"id": f"aa{number:010x}"}).encode() for number in range(200)))
        store.remove([f"aa{number:010x}" for number in range(200)])
    before_bytes, after_bytes = compact_store(path)
    assert after_bytes < before_bytes / 2
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
    """A connection to a file system that has no locks."""

    def execute(self, sql: str) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_LOCK
        raise error

    def close(self) -> None: ...


def test_a_file_system_without_locks_is_named_as_the_cause(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_connect", lambda *arguments: LockFails())
    with pytest.raises(SteplabError, match=r"file system of the store .* has no working locks"):
        Store.open(path, write=True)


def test_what_is_left_of_a_truncated_store_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    body = json.loads(encode(make_run()))
    with Store.open(path, write=True) as store:
        import_lines(store, (json.dumps(body | {"id": f"{number:012x}"}).encode() for number in range(200)))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    assert check_store(path).has_unreachable
    repaired = repair_store(path)
    assert repaired is not None
    assert repaired.has_unreachable
    condition = check_store(path)
    assert condition.is_sound
    assert 20 < condition.num_records < 200
