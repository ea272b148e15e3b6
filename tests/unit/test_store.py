import dataclasses
import hashlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.first import first
from tests.stored_lines import fill, import_lines

from steplab.errors import SteplabError, UserError
from steplab.records.ceilings import Ceiling, Ceilings
from steplab.records.codec import encode
from steplab.records.environment import DeviceInfo, Environment
from steplab.records.failure import Failure, FailureKind
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.specs.model import model_spec
from steplab.specs.step import StepSpec
from steplab.specs.study import StudySpec
from steplab.store.database import Store
from steplab.store.location import default_path
from steplab.store.selection import cell_key, study_fingerprint, study_keys

TINY = StepSpec(model=model_spec("tiny"))
TINY_BF16 = dataclasses.replace(TINY, precision="bf16")
STUDY = StudySpec(name="sizes", description="how far?", cells=(TINY, TINY_BF16))


def make_run(
    run_id: str,
    *,
    second: int = 0,
    name: str = "",
    study: str | None = None,
    spec: StepSpec | None = TINY,
    failure: FailureKind | None = None,
) -> Run:
    step = PhaseSamples(phase="step", host_s=(0.2, 0.1, 0.3))
    return Run(
        id=run_id,
        created_utc=f"2026-11-21T07:{second // 60:02}:{second % 60:02}Z",
        steplab_version="0.1.0",
        name=name,
        study=study,
        spec=spec,
        tokens_per_step=512,
        timing=None if failure else Timing(warmup=(), back_to_back=(step,)),
        failure=Failure(kind=failure, message=f"it {failure}") if failure else None,
    )


def make_ceilings(record_id: str, *, device: str, second: int) -> Ceilings:
    return Ceilings(
        id=record_id,
        created_utc=f"2026-11-21T07:00:{second:02}Z",
        steplab_version="0.1.0",
        environment=Environment(
            device=DeviceInfo(kind="cpu", name=device),
            host="Linux x86_64",
            cpu=device,
            num_cpus=2,
            python="3.11",
            torch="2.13",
        ),
        ceilings=(Ceiling(name="matmul", dtype="fp32", unit="FLOP/s", work=1e9, seconds=(0.5, 0.25)),),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "store?#1.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path, write=True) as opened:
        yield opened


def ids(store: Store, **filters: object) -> list[object]:
    return [row["id"] for row in store.rows(**filters)]  # type: ignore[arg-type]


def one_line(error: pytest.ExceptionInfo[SteplabError], path: Path) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


# Where it lies


def test_default_path_is_the_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STEPLAB_STORE", "/somewhere/own.db")
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg")
    assert default_path() == Path("/somewhere/own.db")
    monkeypatch.setenv("STEPLAB_STORE", "")
    assert default_path() == Path("/xdg/steplab/store.db")
    monkeypatch.setenv("XDG_DATA_HOME", "not/absolute")
    assert default_path() == tmp_path / ".local/share/steplab/store.db"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_path() == tmp_path / ".local/share/steplab/store.db"


# Records


def test_a_record_comes_back_equal_and_from_another_connection(store: Store, path: Path) -> None:
    run, ceilings = make_run("aa11", failure="out_of_memory"), make_ceilings("cc11", device="cpu0", second=1)
    store.add(run)
    store.add(ceilings)
    with Store.open(path, write=False) as reader:
        assert reader.get("aa11") == run
        assert reader.get("cc") == ceilings
        assert reader.records(["cc11", "aa"]) == [ceilings, run]
        assert list(reader.iterate()) == [run, ceilings]


def test_the_same_record_twice_is_stored_once_and_a_different_one_refused(store: Store) -> None:
    store.add(make_run("aa11"))
    store.add(make_run("aa11"))
    with pytest.raises(SteplabError) as error:
        store.add(make_run("aa11", name="other"))
    assert "aa11" in one_line(error, store.path)
    assert list(store.iterate()) == [make_run("aa11")]


def test_prefixes_resolve_as_in_git(store: Store) -> None:
    for run_id in ("aa11", "aa12", "ab", "abcd"):
        store.add(make_run(run_id))
    assert store.get("aa12").id == "aa12"
    assert store.get("abc").id == "abcd"
    assert store.get("ab").id == "ab", "a whole id is itself, even where longer ones begin with it"
    with pytest.raises(UserError, match="aa11, aa12"):
        store.get("aa")
    for absent in ("", "f", "aa111", "%", "a_11", "\udcff"):
        with pytest.raises(UserError) as error:
            store.get(absent)
        one_line(error, store.path)
    with pytest.raises(UserError, match="steplab list"):
        store.get("f")


def test_a_name_that_one_record_alone_has_stands_for_it(store: Store) -> None:
    store.add(make_run("aa11", name="bb"))
    store.add(make_run("bb11", name="mine"))
    for run_id in ("cc11", "cc12"):
        store.add(make_run(run_id, name="twice"))
    assert store.get("mine").id == "bb11"
    assert store.get("bb").id == "aa11", "a name comes before the first digits of an id, as a branch does in git"
    store.add(make_run("dd11", name="aa11"))
    assert store.get("aa11").id == "aa11", "a whole id comes first"
    with pytest.raises(UserError, match=r"'twice' is the name of several records: cc1.*steplab export"):
        store.get("twice")
    with pytest.raises(UserError, match="no record 'min'"):
        store.get("min")


def test_rows_are_newest_first_and_filtered(store: Store) -> None:
    store.add(make_run("a", second=5, name="x"))
    store.add(make_run("b", second=9, name="y"))
    store.add(make_run("c", second=1, name="x", failure="timeout"))
    store.add(make_run("d", second=9, name="y"))  # of the same second: the later one is the newer one
    store.add(make_ceilings("e", device="cpu0", second=3))
    assert ids(store) == ["d", "b", "a", "c"]
    assert ids(store, limit=2) == ["d", "b"]
    assert ids(store, limit=0) == []
    assert ids(store, name="x") == ["a", "c"]
    assert ids(store, status="timeout") == ["c"]
    assert ids(store, kind="ceilings") == ["e"]
    assert len(ids(store, kind=None)) == 5
    assert [record.id for record in store.iterate(kind="run", name="y")] == ["b", "d"]
    row = store.rows(name="x")[0]
    assert (row["model"], row["step_time_s"], row["tokens_per_s"]) == ("tiny", 0.2, 2560.0)
    assert store.rows(kind="ceilings")[0]["matmul_fp32_flops_per_s"] == 4e9


def test_ceilings_of_a_device_the_newest_first(store: Store) -> None:
    store.add(make_ceilings("a", device="cpu0", second=2))
    store.add(make_ceilings("b", device="cpu0", second=1))
    store.add(make_ceilings("c", device="cpu1", second=3))
    assert [record.id for record in store.ceilings("cpu0")] == ["a", "b"]
    assert store.ceilings("cpu2") == []


def test_listing_many_records_reads_no_body_and_takes_one_statement(path: Path) -> None:
    many = 500
    lines = [encode(make_run(f"{number:012x}", second=number % 3600)) for number in range(many)]
    with Store.open(path, write=True) as store:
        assert import_lines(store, lines) == (many, 0)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE record SET body = x'00'")
    raw.close()
    with Store.open(path, write=False) as store:
        statements: list[str] = []
        store._connection.sqlite.set_trace_callback(statements.append)
        assert len(store.rows()) == many
        assert len(statements) == 1
        with pytest.raises(SteplabError) as error:
            store.get("0" * 12)
        assert "record 000000000000" in one_line(error, path)


# Import


def test_import_counts_new_and_known_records_and_keeps_unknown_fields(store: Store) -> None:
    known, new = make_run("aa11"), make_run("bb22")
    store.add(known)
    from_the_future = encode(new).replace(b'{"id"', b'{"unheard_of":1,"id"', 1)
    lines = [encode(known) + b"\n", b"\n", from_the_future + b"\r\n"]
    assert import_lines(store, lines) == (1, 1)
    assert import_lines(store, iter(lines)) == (0, 2)
    assert list(store.iterate()) == [known, new]


@pytest.mark.parametrize(
    "bad",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"schema":"steplab.run/1"}',
        encode(make_run("ff00")).replace(b"steplab.run/1", b"steplab.run/2"),
        encode(make_run("ff00")).replace(b'"batch":4', b'"batch":0'),
        encode(make_run("aa11", name="different")),
    ],
)
def test_import_is_all_or_nothing_and_names_the_line(store: Store, bad: bytes) -> None:
    store.add(make_run("aa11"))
    with pytest.raises(SteplabError) as error:
        import_lines(store, [encode(make_run("bb22")), b"", bad, encode(make_run("cc33"))])
    assert str(error.value).startswith("line 3: ")
    assert "\n" not in str(error.value)
    assert ids(store) == ["aa11"]
    store.add(make_run("dd44"))  # the failed transaction left no lock behind


# Studies


def test_cell_keys_tell_specs_apart_and_are_stable() -> None:
    assert cell_key(TINY) == cell_key(StepSpec(model=model_spec("tiny")))
    assert cell_key(TINY) != cell_key(TINY_BF16)
    turned = dataclasses.replace(STUDY, name="other", cells=STUDY.cells[::-1])
    assert study_fingerprint(turned) == study_fingerprint(STUDY)
    assert study_fingerprint(dataclasses.replace(STUDY, cells=(TINY,))) != study_fingerprint(STUDY)


def test_a_study_is_found_by_its_cells_and_by_prefix(store: Store) -> None:
    assert store.studies() == []
    assert store.find_study(STUDY) is None
    first, second = store.begin_study(STUDY), store.begin_study(STUDY)
    other = store.begin_study(dataclasses.replace(STUDY, name="one", cells=(TINY,)))
    assert store.find_study(STUDY) == second != first
    assert store.study_id("last") == other
    assert store.study_id(first[:11]) == first
    with pytest.raises(UserError):
        store.study_id("not hexadecimal")
    assert [row["id"] for row in store.studies()] == [other, second, first]


@pytest.mark.parametrize(
    ("failure", "is_finished"),
    [(None, True), ("out_of_memory", True), ("error", True), ("crashed", False), ("timeout", False)],
)
def test_only_a_killed_cell_is_measured_again(store: Store, failure: FailureKind | None, is_finished: bool) -> None:
    study = store.begin_study(STUDY)
    store.add(make_run("a", study=study, failure=failure), cell=cell_key(TINY))
    store.add(make_run("b", study=None, spec=TINY_BF16))
    assert store.finished_cells(study) == ({cell_key(TINY)} if is_finished else set())
    assert store.finished_cells("another") == set()


def test_readers_see_the_last_attempt_at_a_cell(store: Store) -> None:
    study, later = store.begin_study(STUDY), store.begin_study(STUDY)
    store.add(make_run("a", second=1, study=study, failure="crashed"))  # the cell follows from the spec
    store.add(make_run("b", second=2, study=study, spec=TINY_BF16, failure="timeout"))
    store.add(make_run("c", second=3, study=study), cell=cell_key(TINY))
    store.add(make_run("d", second=4, study=later))
    store.add(make_run("e", second=5))
    assert ids(store, study=study) == ["c", "b"]
    assert ids(store, study=study, status="crashed") == []
    assert ids(store, study=study, all_attempts=True) == ["c", "b", "a"]
    assert ids(store) == ["e", "d", "c", "b"]
    assert [record.id for record in store.iterate(study=study)] == ["b", "c"]
    assert [record.id for record in store.iterate(study=study, all_attempts=True)] == ["a", "b", "c"]
    assert store.get("a").id == "a"
    row = store.studies()[1]
    assert (row["id"], row["name"], row["description"]) == (study, "sizes", "how far?")
    assert (row["num_cells"], row["num_ok"], row["num_failed"]) == (2, 1, 1)


def test_a_study_known_by_imported_records_alone_is_listed(store: Store) -> None:
    import_lines(store, [encode(make_run("a", second=7, study="beef", name="sizes"))])
    assert store.study_id("be") == store.study_id("last") == "beef"
    row = store.studies()[0]
    assert (row["name"], row["num_cells"], row["num_ok"], row["num_failed"]) == ("sizes", None, 1, 0)
    assert store.finished_cells("beef") == {cell_key(TINY)}


# Files that are not a store of ours


def test_reading_where_there_is_no_store_makes_none(path: Path) -> None:
    with pytest.raises(SteplabError, match="steplab run") as error:
        Store.open(path, write=False)
    one_line(error, path)
    assert error.value.exit_code == 1
    assert not path.parent.exists()


def test_an_empty_file_is_no_store_to_a_reader_and_a_new_one_to_a_writer(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    with pytest.raises(SteplabError, match="steplab run"):
        Store.open(path, write=False)
    assert path.stat().st_size == 0
    fill(path, make_run("a"))


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("content", [b"not a database at all\n" * 400, b"short", bytes(5000)])
def test_garbage_is_refused_and_kept(path: Path, write: bool, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(SteplabError, match=r"move it away.*steplab import") as error:
        Store.open(path, write=write)
    one_line(error, path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("write", [True, False])
def test_a_truncated_store_is_refused(path: Path, write: bool) -> None:
    with Store.open(path, write=True) as store:
        import_lines(store, (encode(make_run(f"{number:012x}")) for number in range(200)))
    size = path.stat().st_size
    os.truncate(path, size // 2)
    with pytest.raises(SteplabError, match=r"damaged.*recover") as error, Store.open(path, write=write) as store:
        list(store.iterate())
    one_line(error, path)
    assert path.stat().st_size == size // 2


def test_a_page_damaged_in_the_middle_ends_in_an_error_of_ours(path: Path) -> None:
    with Store.open(path, write=True) as store:
        import_lines(store, (encode(make_run(f"{number:012x}")) for number in range(200)))
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 8192))
    with Store.open(path, write=False) as store:
        for read in (lambda: store.rows(), lambda: list(store.iterate()), lambda: store.get("000000000003")):
            with pytest.raises(SteplabError) as error:
                read()
            one_line(error, path)


@pytest.mark.parametrize("write", [True, False])
def test_another_programs_database_is_refused_and_kept(path: Path, write: bool) -> None:
    path.parent.mkdir()
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE photos (name)")
    raw.close()
    before = digests(path.parent)
    with pytest.raises(SteplabError, match="another program's") as error:
        Store.open(path, write=write)
    one_line(error, path)
    assert digests(path.parent) == before


@pytest.mark.parametrize("write", [True, False])
def test_a_newer_store_is_refused_and_not_a_byte_of_it_changes(path: Path, write: bool) -> None:
    Store.open(path, write=True).close()
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA user_version = 99")
    raw.close()
    before = digests(path.parent)
    with pytest.raises(SteplabError, match="upgrade steplab") as error:
        Store.open(path, write=write)
    assert "99" in one_line(error, path)
    assert digests(path.parent) == before


@pytest.mark.parametrize("write", [True, False])
def test_a_folder_is_no_store(tmp_path: Path, write: bool) -> None:
    with pytest.raises(SteplabError, match="is a folder") as error:
        Store.open(tmp_path, write=write)
    one_line(error, tmp_path)


def test_a_closed_store_raises_an_error_of_ours(path: Path) -> None:
    store = Store.open(path, write=True)
    store.close()
    with pytest.raises(SteplabError):
        store.rows()


# Where it cannot be written


def test_reading_leaves_no_trace(path: Path) -> None:
    fill(path, make_run("a"))
    before = digests(path.parent)
    assert list(before) == [path.name]
    with Store.open(path, write=False) as store:
        assert ids(store) == ["a"]
        with pytest.raises(SteplabError, match="not writable"):
            store.add(make_run("b"))
    assert digests(path.parent) == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, which nobody can write")
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured() -> None:
    for path in (Path("/proc/steplab/store.db"), Path("/proc/store.db"), Path("/dev/null/store.db")):
        with pytest.raises(SteplabError, match="--store") as error:
            Store.open(path, write=True)
        one_line(error, path)


def unprivileged() -> list[str]:
    """Prefix for commands that must obey permissions, unlike root's."""
    if os.geteuid() != 0:
        return []
    if not shutil.which("setpriv"):
        pytest.skip("runs as root, and there is no setpriv to give up root's right to ignore permissions")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@contextmanager
def without_write_permission(*paths: Path) -> Iterator[None]:
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(modes[path] & ~0o222)
    try:
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


PREAMBLE = """
import os, sys
from pathlib import Path
from steplab.errors import SteplabError
from steplab.store.database import Store
from test_store import ids, make_run
path = Path(sys.argv[1])
"""


def python(script: str, *arguments: object, prefix: list[str] | None = None) -> "subprocess.Popen[str]":
    places = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [*(prefix or []), sys.executable, "-c", PREAMBLE + textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": places},
    )


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    return process.stdout.readline().rstrip("\n")


def kill(process: "subprocess.Popen[str]") -> str:
    process.kill()
    rest = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL
    return rest


OPEN_BOTH_WAYS = """
    try:
        Store.open(path, write=True)
    except SteplabError as error:
        print("refused:", error)
    try:
        with Store.open(path, write=False) as store:
            print("read:", *ids(store), store.get("a").id)
    except SteplabError as error:
        print("unreadable:", error)
"""


@pytest.mark.parametrize("read_only", first(2, ["file", "folder", "both"]))
def test_a_read_only_store_can_be_read_and_is_refused_for_writing(path: Path, read_only: str) -> None:
    fill(path, make_run("a"))
    before = digests(path.parent)
    with without_write_permission(*{"file": [path], "folder": [path.parent]}.get(read_only, [path, path.parent])):
        output = python(OPEN_BOTH_WAYS, path, prefix=unprivileged()).communicate()[0]
    refused, read = output.splitlines()
    assert refused.startswith("refused:")
    assert str(path) in refused
    assert "writable" in refused
    assert read == "read: a a"
    assert digests(path.parent) == before


def test_a_killed_writers_log_is_read_in_a_read_only_folder_or_refused_in_words(path: Path) -> None:
    writer = python(
        """
        store = Store.open(path, write=True)
        store.add(make_run("a"))
        print("committed", flush=True)
        sys.stdin.read()
        """,
        path,
    )
    assert read_line(writer) == "committed"
    kill(writer)
    log, shared = Path(f"{path}-wal"), Path(f"{path}-shm")
    assert log.stat().st_size > 0
    before = digests(path.parent)
    with Store.open(path, write=False) as store:
        assert ids(store) == ["a"]
    assert set(digests(path.parent)) == set(before)
    assert digests(path.parent)[path.name] == before[path.name]
    with without_write_permission(path, log, shared, path.parent):
        assert "read: a a" in python(OPEN_BOTH_WAYS, path, prefix=unprivileged()).communicate()[0]
    shared.unlink()
    with without_write_permission(path, log, path.parent):
        output = python(OPEN_BOTH_WAYS, path, prefix=unprivileged()).communicate()[0]
    assert "unreadable:" in output
    assert log.name in output.splitlines()[1]
    assert "copy both files" in output


def test_a_disk_that_refuses_a_write_ends_in_an_error_of_ours(path: Path) -> None:
    pytest.importorskip("resource", reason="needs limits on file sizes, which Windows lacks")
    fill(path, make_run("a"))
    output = python(
        """
        import resource
        store = Store.open(path, write=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            for number in range(100):
                store.add(make_run(f"{number:012x}"))
        except SteplabError as error:
            print(error)
        """,
        path,
    ).communicate()[0]
    assert "disk" in output
    assert str(path) in output
    assert output.count("\n") == 1
    with Store.open(path, write=True) as store:
        assert "a" in ids(store)


def test_a_full_disk_loses_the_new_record_alone(store: Store) -> None:
    store.add(make_run("a"))
    sqlite = store._connection.sqlite
    num_pages = sqlite.execute("PRAGMA page_count").fetchone()[0]
    sqlite.execute(f"PRAGMA max_page_count = {num_pages + 2}")
    with pytest.raises(SteplabError, match="disk is full") as error:
        import_lines(store, (encode(make_run(f"{number:012x}")) for number in range(100)))
    one_line(error, store.path)
    assert ids(store) == ["a"]
    sqlite.execute("PRAGMA max_page_count = 1000000")
    store.add(make_run("b"))
    assert len(ids(store)) == 2


# Several processes


def test_two_processes_write_at_once_into_a_new_store(path: Path) -> None:
    script = """
        for number in range(60):
            with Store.open(path, write=True) as store:
                store.add(make_run(f"{sys.argv[2]}{number:03}"))
        """
    writers = [python(script, path, letter) for letter in "ab"]
    assert [writer.communicate()[0] for writer in writers] == ["", ""]
    assert [writer.returncode for writer in writers] == [0, 0]
    with Store.open(path, write=False) as store:
        assert sorted(map(str, ids(store))) == [f"{letter}{number:03}" for letter in "ab" for number in range(60)]


def test_a_reader_is_not_stopped_by_a_writer_and_a_second_writer_says_what_it_waited_for(path: Path) -> None:
    with Store.open(path, write=True) as store:
        store.add(make_run("a"))
        with store._connection.transaction():
            with Store.open(path, write=False, timeout_s=0.05) as reader:
                assert ids(reader) == ["a"]
            with pytest.raises(SteplabError, match="locked") as error:
                Store.open(path, write=True, timeout_s=0.05)
            one_line(error, path)
    Store.open(path, write=True, timeout_s=0.05).close()


def test_killing_a_busy_writer_loses_nothing_that_was_committed(path: Path) -> None:
    committed: list[str] = []
    for attempt in range(2):
        writer = python(
            """
            with Store.open(path, write=True) as store:
                for number in range(10**6):
                    store.add(make_run(f"{sys.argv[2]}{number:06}"))
                    print(f"{sys.argv[2]}{number:06}", flush=True)
            """,
            path,
            "ab"[attempt],
        )
        committed += [read_line(writer) for _ in range(25)]
        committed += kill(writer).split()
    with Store.open(path, write=True) as store:
        stored = {record.id for record in store.iterate()}
        assert stored >= {run_id for run_id in committed if len(run_id) == 7}
        store.add(make_run("d"))
    assert integrity(path) == "ok"


def test_killing_a_writer_within_a_transaction_leaves_the_state_before(path: Path) -> None:
    fill(path, make_run("a"))
    writer = python(
        """
        from steplab.records.codec import encode
        from steplab.store import record_table
        store = Store.open(path, write=True)
        store._connection.query("PRAGMA cache_size = 5")  # so that unfinished writes reach the disk
        with store._connection.transaction():
            store._connection.query("DELETE FROM record")
            for number in range(200):
                run = make_run(f"{number:012x}")
                record_table._insert(store._connection, run, encode(run), None)
            print("within", flush=True)
            sys.stdin.read()
        """,
        path,
    )
    assert read_line(writer) == "within"
    assert Path(f"{path}-wal").stat().st_size > 50_000
    kill(writer)
    with Store.open(path, write=False) as store:
        assert ids(store) == ["a"]
    with Store.open(path, write=True, timeout_s=1.0) as store:
        store.add(make_run("b"))
        assert len(ids(store)) == 2
    assert integrity(path) == "ok"


def integrity(path: Path) -> str:
    raw = sqlite3.connect(path)
    try:
        return str(raw.execute("PRAGMA integrity_check").fetchone()[0])
    finally:
        raw.close()


def test_a_clock_that_was_set_back_hides_no_attempt_that_stands(store: Store) -> None:
    study = StudySpec(name="s", description="", cells=(TINY,))
    identity = store.begin_study(study)
    store.add(make_run("crashed", second=30, study=identity, failure="crashed"))
    store.add(make_run("ok", second=10, study=identity))
    assert [row["id"] for row in store.rows(study=identity)] == ["ok"]
    assert store.finished_cells(identity) == set(study_keys(study))
    assert [row["num_ok"] for row in store.studies()] == [1]
    store.add(make_run("again", second=5, study=identity, failure="timeout"))
    assert [row["id"] for row in store.rows(study=identity)] == ["ok"]


def test_earlier_records_are_found_by_how_far_back_they_are(store: Store) -> None:
    for number, record_id in enumerate(("aa11", "bb22", "cc33")):
        store.add(make_run(record_id, second=number))
    assert [store.get(f"last~{back}").id for back in range(3)] == ["cc33", "bb22", "aa11"]
    with pytest.raises(UserError, match="'last~3' exceeds the 3 records"):
        store.get("last~3")
    with pytest.raises(UserError, match="'last~x' is not a record; last~1"):
        store.get("last~x")


@pytest.mark.parametrize(
    ("statements", "what"),
    [
        (["ALTER TABLE record RENAME TO kept", "CREATE VIEW record AS SELECT * FROM kept"], "'kept'"),
        (["CREATE TRIGGER gone AFTER INSERT ON record BEGIN DELETE FROM record; END"], "'gone'"),
        (["CREATE VIRTUAL TABLE searched USING fts5(text)"], "'searched'"),
        (["ALTER TABLE record ADD COLUMN twice AS (seq * 2)"], "'record'"),
        (["CREATE INDEX computed ON record (length(body))"], "'computed'"),
        (
            [
                "PRAGMA writable_schema = ON",
                "UPDATE sqlite_schema SET sql = replace(sql, 'UNIQUE', 'UNIQUE ON CONFLICT IGNORE')",
            ],
            "'record'",
        ),
    ],
)
def test_a_store_that_computes_is_refused(path: Path, statements: list[str], what: str) -> None:
    """Views may be endless, and triggers may fake imports."""
    fill(path, make_run("a"))
    with sqlite3.connect(path) as sqlite:
        for statement in statements:
            sqlite.execute(statement)
    sqlite.close()
    before = path.read_bytes()
    for write in (False, True):
        with pytest.raises(SteplabError, match=f"store .* contains the .*{what}, unlike a store; refused; move"):
            Store.open(path, write=write)
    assert path.read_bytes() == before
