import json
import shlex
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.program import Program, complaint, digests, tiny, without_privileges
from tests.first import first

TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}

FACTORIES = """
from torch import nn


def returns_a_number():
    return 42


def raises():
    raise RuntimeError("no such weights\\nsecond line")


def module(batch):
    return nn.Linear(4, 4), lambda: __import__("torch").randn(batch, 4)


def whole_step():
    return lambda: None


def leaves_a_mark():
    return lambda: open("mark", "w").close()


not_callable = 3
"""


# Refused before anything is started

USAGE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unknown model": (("run", "--model", "smal"), ("'smal'", "small", "hf:")),
    "a word for a number": (("run", "--context", "many"), ("context", "whole number", "'many'")),
    "zero steps": (("run", "--steps", "0"), ("steps", "at least 1")),
    "near miss of an option": (("run", "--contxt", "8"), ("--contxt", "--context")),
    "another command's option": (
        ("advise", "--recipe", "fast"),
        ("Unknown option: --recipe. --recipe is an option of ab, memory, plan memory, plan time, profile and run.",),
    ),
    "a near miss that another has": (("run", "--gpu=2"), ("mean --gpus?", "--gpu is an option of", "plan memory")),
    "option without its value": (("run", "--context"), ("--context",)),
    "an option left out": (("plan", "layout", "--gpus", "8"), ("plan layout needs --global-batch", "--help")),
    "far too many GPUs": (("plan", "layout", "--gpus", "99999999", "--global-batch", "8"), ("gpus", "65536")),
    "too large a layout": (("plan", "memory", "--layout", "fsdp=99999999"), ("fsdp must be from 1 to 1048576",)),
    "a memory of no such GPU": (("plan", "memory", "--gpu", "H100 SMX"), ("did you mean H100 SXM",)),
    "a bandwidth in TB/s": (("plan", "time", "--bandwidth", "4.8"), ("bytes per second, as 4.8e12",)),
    "a peak in TFLOP/s": (("plan", "time", "--peak", "bf16=989"), ("FLOP/s, as 989e12",)),
    "none for a shell": (("completion", "--shell", "none"), ("--shell", "bash")),
    "not a number": (("plan", "accounting", "--flops", "nan"), ("--flops must be a finite number, not 'nan'",)),
    "none for a number": (("plan", "accounting", "--flops", "null"), ("--flops", "null")),
    "more than 64 bits": (("list", "--limit", "9" * 20), ("--limit must be below 2^63",)),
    "no ranks of a study": (("ddp", "--processes", "0"), ("--processes must be at least 1",)),
    "standard input where a file is read": (("import-trace", "-"), ("only `steplab import -` reads stdin",)),
    "standard output by a hyphen": (("export", "--output", "-"), ("omit --output to write to stdout",)),
    "nothing to compare with": (("compare", "", "last"), ("'' stands for no record",)),
    "records and a study": (("report", "last", "--study", "x"), ("records and a study were given",)),
    "ids and a study": (("export", "last", "--study", "x"), ("ids and a study were given",)),
    "a fraction of a process": (("run", "--processes", "2.5"), ("--processes must be a whole number, not '2.5'",)),
    "option given twice": (("run", "--context", "8", "--context", "16"), ("--context",)),
    "word without an option": (("run", "small"), ("small",)),
    "unknown command": (("measure",), ("measure", "run")),
    "unknown precision": (("run", "--precision", "int4"), ("int4", "bf16")),
    "unknown format": (("run", "--format", "xml"), ("xml", "json")),
    "heads that do not split": (("run", "--model.num-heads", "3"), ("num_heads", "128")),
    "a size of someone else's model": (("run", "--model", "a:b", "--model.d-ff", "8"), ("d_ff", "a:b")),
    "a list for one run": (("run", "--context", "128,256"), ("--context", "sweep")),
    "a negative duration": (("run", "--timeout=-3s"), ("'-3s'", "90s")),
    "no time at all": (("run", "--timeout", "0"), ("'0'",)),
    "a sweep of nothing": (("sweep",), ("study quick", "--context")),
    "a study in a sweep": (("sweep", "quick"), ("unexpected argument 'quick'",)),
    "a sweep's processes": (("sweep", *tiny(), "--processes", "2"), ("--processes is an option of", "run")),
    "a sweep's GPUs": (("sweep", *tiny(), "--gpus", "4"), ("--gpus is an option of", "run")),
    "a sweep with a bad cell": (("sweep", "--context", "8,x"), ("context", "'x'")),
    "a sweep with a hole": (("sweep", "--context", "8,"), ("context",)),
    "unknown study": (("study", "everything"), ("everything", "quick", "TOML")),
    "no such run": (("show", "zzzz"), ("zzzz", "steplab list")),
    "no such study to report": (("report", "--study", "zzzz"), ("zzzz",)),
    "export as a page": (("export", "--output", "page.html"), ("html", "jsonl")),
    "a limit of nothing": (("list", "--limit", "0"), ("--limit",)),
    "a file that is missing": (("import", "missing.jsonl"), ("missing.jsonl", "No such file")),
    "a configuration that is missing": (("run", "--model", "hf:missing.json"), ("missing.json", "No such file")),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), USAGE.values(), ids=USAGE.keys())
def test_a_wrong_request_is_named_with_its_remedy(
    guarded: Program, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    said = complaint(guarded.here(*arguments), 2)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("ddp --variants magic", "variant 'magic' is not known; choose some of none, naive, flat"),
        ("ddp --bucket-sizes 0", "a bucket size must be a positive number of MB, not 0"),
        ("ddp --compile default", "delivers all gradients at the end; choose one of off, block"),
        ("ddp --processes 1", "processes must be at least 2, not 1"),
        ("ddp --gpus 2 --processes 2", "not both"),
        ("ddp --precision fp16", "use --precision bf16"),
        ("ddp --transport peer_copy", "transport peer_copy on a CPU is not supported"),
        ("ddp --transport magic", "transport 'magic' is not known; choose some of collectives, peer_copy"),
        ("ddp --variants flat,torch_ddp --transport collectives", "add bucketed or sharded to --variants"),
        ("ddp --variants flat,sharded --update after", "add overlap or bucketed to --variants"),
        ("ddp --variants flat,bucketed:5 --bucket-sizes 1", "bucket sizes have no effect on flat, bucketed:5"),
        ("comm --collective gossip", "collective 'gossip' is not known; choose one of all_reduce, all_gather"),
        ("comm --size 1MB,big", "'big' is not a size"),
        ("comm --processes 1", "--processes must be at least 2, not 1: a collective needs two processes"),
        ("comm --processes 1000000", "1000000 processes do not fit: each takes at least 128 MiB"),
        ("comm --processes 2 --world-size 4", "world-size 4 needs 4 processes, but only 2 are started"),
        ("comm --output page.html", "this command does not write html"),
        ("attention --implementation magic", "implementation 'magic' is not known; choose one of plain, sdpa"),
        ("attention --pass sideways", "pass 'sideways' is not known; choose some of forward, backward, both"),
        (
            "attention --grid nowhere",
            "no grid 'nowhere': choose one of choice, long, peers, study, tiny ... a TOML file",
        ),
        ("attention --gpu 'H200 SXM'", "--gpu needs --derive"),
        ("attention --derive --gpu abacus", "unknown hardware 'abacus'"),
        ("attention --derive --output page.html", "does not write html; choose one of table, json, csv"),
        ("attention --implementation plain --against sdpa", "--against 'sdpa' is not among ... choose one of plain"),
        ("attention --repeats 0", "repeats must be at least 1"),
        ("precision --precision int4", "precision 'int4' is not known; choose one of fp32, tf32 ... bf16_pure"),
        ("precision --only weights", 'Invalid value "weights" for --only'),
        ("precision --format csv", "--format csv holds one table; set --only"),
        ("precision --model toy,tiny", "--model takes a single value here"),
        ("ab", "name what the sides differ in"),
        ("ab '--precison bf16'", "--precison ... --precision"),
        ("ab '--precision bf16 --compile'", "--compile requires an argument"),
        ("ab '--precision bf17'", "precision 'bf17' is not known; choose one of fp32"),
        ("ab '--steps 10' '--steps 20'", "the same --steps"),
        ("ab '--attention sdpa' --threshold much", "'much' ... 3%"),
        ("ab --against main '--attention sdpa'", "another revision ... the same options"),
        ("advise --model tiny --budget soon", "'soon'"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_line(guarded: Program, words: str, told: str) -> None:
    said = complaint(guarded.here(*shlex.split(words)), 2)
    assert all(part in said for part in told.split(" ... ")), said


def test_a_line_break_in_a_value_does_not_break_the_line(guarded: Program) -> None:
    complaint(guarded.here("run", "--model", "small\nmedium"), 2)


def test_a_name_that_is_no_text_costs_no_measurement(guarded: Program) -> None:
    # A byte that is no UTF-8, as Python passes it on.
    complaint(guarded.here("run", *tiny(), "--name", "\udcff"), 2)


def test_a_context_beyond_the_configurations_positions_is_refused(guarded: Program) -> None:
    guarded.write("config.json", json.dumps(TINY_LLAMA))
    said = complaint(guarded.here("run", *tiny(context="33"), "--model", "hf:config.json"), 2)
    assert "33" in said
    assert "32" in said
    assert "max_position_embeddings" in said


@pytest.mark.parametrize("content", ["[1, 2]", "{}", '{"model_type": 7}'])
def test_a_file_that_is_no_configuration_is_named(guarded: Program, content: str) -> None:
    guarded.write("config.json", content)
    said = complaint(guarded.here("run", *tiny(), "--model", "hf:config.json"), 2)
    assert "config.json" in said


@pytest.mark.parametrize(
    "study",
    [
        "context = [",
        "contexts = [8]",
        "[[grid]]\ncontxt = 8",
        "[[grid]]\ncontext = []",
        "[[grid]]\ncontext = 1.5",
        "[[grid]]\nmodel = 7",
        "[grid]\ncontext = 8",
        "grid = 3",
        'description = "none"',
    ],
)
def test_a_file_that_is_no_study_is_refused(guarded: Program, study: str) -> None:
    guarded.write("study.toml", study)
    assert "study study.toml" in complaint(guarded.here("study", "study.toml"), 2)


def test_debug_shows_where_an_error_comes_from(guarded: Program) -> None:
    result = guarded("run", "--model", "smal", "--debug")
    assert result.code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("steplab: unknown model")


# Refused by the measuring process

REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no such module": (("--model", "nowhere:build"), ("nowhere", "folder")),
    "no such function": (("--model", "mine:build"), ("mine", "build")),
    "not a function": (("--model", "mine:not_callable"), ("not_callable",)),
    "a factory that returns nonsense": (("--model", "mine:returns_a_number"), ("int", "make_batch")),
    "a module without a loss": (("--model", "mine:module"), ("(1, 4)", "loss")),
    "an attention steplab cannot apply": (("--model", "mine:module", "--attention", "sdpa"), ("attention",)),
    "a compilation steplab cannot apply": (("--model", "mine:whole_step", "--compile", "default"), ("compile",)),
    "a size for planning only": (("--model", "xxl"), ("xxl", "planning")),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_served_is_no_measurement(
    guarded: Program, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    guarded.write("mine.py", FACTORIES)
    said = complaint(guarded("run", *tiny(), *arguments), 2)
    assert all(word in said for word in words), said


def test_a_type_of_model_that_transformers_does_not_know_is_refused(guarded: Program) -> None:
    pytest.importorskip("transformers")
    guarded.write("config.json", json.dumps({"model_type": "perceptron9000"}))
    said = complaint(guarded("run", *tiny(), "--model", "hf:config.json"), 2)
    assert "config.json" in said


def test_cuda_is_refused_where_there_is_none(guarded: Program) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    said = complaint(guarded("run", *tiny(device="cuda")), 2)
    assert "CUDA" in said
    assert "--device cpu" in said


def test_a_very_long_timeout_is_no_error_of_its_own(guarded: Program) -> None:
    said = complaint(guarded("run", *tiny(), "--model", "nowhere:build", "--timeout", "9999999999h"), 2)
    assert "nowhere" in said or "9999999999h" in said


def test_a_factory_that_raises_is_a_row_and_one_line(filled: Program) -> None:
    filled.write("mine.py", FACTORIES)
    result = filled("run", *tiny(), "--model", "mine:raises", "--format", "json")
    assert result.code == 1
    line = FACTORIES[: FACTORIES.index("no such weights")].count("\n") + 1
    assert result.stderr.splitlines() == [f"steplab: error: RuntimeError: no such weights (mine.py:{line})"]
    [row] = result.rows()
    assert (row["status"], row["model"], row["step_time_s"]) == ("error", "mine:raises", None)
    assert row["failure"] == f"RuntimeError: no such weights (mine.py:{line})"
    assert filled.rows()[0]["id"] == row["id"]


# Stores


@pytest.fixture
def read_only(guarded: Program) -> Iterator[Program]:
    guarded.store.chmod(0o444)
    guarded.store.parent.chmod(0o555)
    yield guarded
    guarded.store.parent.chmod(0o755)
    guarded.store.chmod(0o644)


@pytest.mark.parametrize(
    "arguments",
    first(1, [("run", *tiny()), ("import", "all.jsonl"), ("sweep", *tiny()), ("doctor", "--device", "cpu")]),
)
def test_a_read_only_store_is_refused_before_anything_is_measured(
    read_only: Program, arguments: tuple[str, ...]
) -> None:
    privileges = without_privileges()
    read_only.write("all.jsonl", read_only("export").stdout)
    said = complaint(read_only(*arguments, prefix=privileges), 1)
    assert "not writable" in said
    assert str(read_only.store) in said


def test_a_read_only_store_can_be_read(read_only: Program) -> None:
    privileges = without_privileges()
    assert read_only("export", prefix=privileges) == read_only("export")


def test_an_error_that_quotes_a_name_does_not_steer_the_terminal(steplab: Program) -> None:
    said = complaint(steplab.here("list", "--store", "none\x1b[2J.db"), 1)
    assert "\x1b" not in said
    assert "none.db" in said


def _garbage(store: Path) -> None:
    store.write_text("this was never a database\n" * 500)


def _damaged(store: Path) -> None:
    content = bytearray(store.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    store.write_bytes(content)


def _newer(store: Path) -> None:
    with sqlite3.connect(store) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def _foreign(store: Path) -> None:
    store.unlink()
    with sqlite3.connect(store) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "word"), [(_garbage, "not a steplab store"), (_newer, "newer"), (_foreign, "another program")]
)
def test_a_store_that_is_none_is_left_as_it_is(filled: Program, spoil: Callable[[Path], None], word: str) -> None:
    spoil(filled.store)
    before = digests(filled.store.parent)
    said = complaint(filled.here("run", *tiny()), 1)
    assert word in said
    assert str(filled.store) in said
    assert digests(filled.store.parent) == before


def test_a_damaged_store_loses_no_measurement(filled: Program) -> None:
    _damaged(filled.store)
    before = digests(filled.store.parent)
    assert "damaged" in complaint(filled.here("list"), 1)
    filled.write("mine.py", FACTORIES)
    said = complaint(filled("run", *tiny(), "--model", "mine:leaves_a_mark", "--name", "rescued"), 1)
    assert "damaged" in said
    assert digests(filled.store.parent) == before
    if not (filled.cwd / "mark").exists():
        return  # refused before anything was measured, which is as good
    rescued = list(filled.cwd.glob("*.jsonl"))
    assert len(rescued) == 1, "the measurement was made, and is neither in the store nor beside it"
    assert rescued[0].name in said
    filled.store.unlink()
    assert filled("import", rescued[0]).code == 0
    assert [row["name"] for row in filled.rows()] == ["rescued"]


def test_a_folder_is_no_store(guarded: Program) -> None:
    said = complaint(guarded.here("run", *tiny(), "--store", guarded.cwd), 1)
    assert "folder" in said


def test_a_file_where_the_stores_folder_should_be_is_named(guarded: Program) -> None:
    guarded.write("notes", "")
    said = complaint(guarded.here("run", *tiny(), "--store", "notes/store.db"), 1)
    assert "notes/store.db" in said


@pytest.mark.parametrize("command", ["list", "report"])
def test_reading_before_anything_was_measured_says_how_to_begin(steplab: Program, command: str) -> None:
    said = complaint(steplab.here(command), 1)
    assert "steplab run" in said
    assert not steplab.store.exists()


# Imports


@pytest.fixture
def lines(filled: Program) -> list[str]:
    exported = filled("export").stdout.splitlines()
    filled.store.unlink()
    assert filled("import", _file(filled, "first.jsonl", exported[:1])).code == 0
    return exported


def _file(program: Program, name: str, lines: list[str]) -> Path:
    return program.write(name, "".join(line + "\n" for line in lines))


@pytest.mark.parametrize(
    "bad",
    ["garbage", "{}", "[]", '{"schema": "steplab.run/1"}', '{"schema": "novel.chapter/1"}', "[" * 100_000],
    ids=["no JSON", "no schema", "a list", "half a record", "another program's", "deeply nested"],
)
def test_a_line_that_is_no_record_is_named_and_nothing_is_imported(filled: Program, lines: list[str], bad: str) -> None:
    before = digests(filled.store.parent)
    _file(filled, "bad.jsonl", [lines[1], "", bad, lines[2]])
    said = complaint(filled.here("import", "bad.jsonl"), 2)
    assert "line 3" in said
    assert "nothing was imported" in said
    assert digests(filled.store.parent) == before


def test_a_newer_format_of_record_is_refused_with_the_remedy(filled: Program, lines: list[str]) -> None:
    before = digests(filled.store.parent)
    newer = json.dumps(json.loads(lines[1]) | {"schema": "steplab.run/2"})
    _file(filled, "newer.jsonl", [lines[2], newer])
    said = complaint(filled.here("import", "newer.jsonl"), 2)
    assert all(word in said for word in ("line 2", "steplab.run/2", "upgrade"))
    assert digests(filled.store.parent) == before


def test_an_unknown_field_of_the_same_format_is_no_obstacle(filled: Program, lines: list[str]) -> None:
    later = json.dumps(json.loads(lines[1]) | {"mood": "cheerful"})
    _file(filled, "later.jsonl", [later])
    assert filled("import", "later.jsonl").code == 0
    assert len(filled.rows()) == 2


def test_a_bad_line_in_the_second_of_two_files_names_it_and_imports_neither(filled: Program, lines: list[str]) -> None:
    before = digests(filled.store.parent)
    _file(filled, "good.jsonl", lines[1:])
    _file(filled, "bad.jsonl", ["garbage"])
    said = complaint(filled.here("import", "good.jsonl", "bad.jsonl"), 2)
    assert "bad.jsonl" in said
    assert "line 1" in said
    assert digests(filled.store.parent) == before


def test_bytes_that_are_no_text_are_refused(guarded: Program) -> None:
    (guarded.cwd / "bytes.jsonl").write_bytes(b'{"schema": "steplab.run/1", "id": "\xff\xfe"}\n')
    assert "line 1" in complaint(guarded.here("import", "bytes.jsonl"), 2)


def test_another_record_under_a_stored_id_is_refused(guarded: Program) -> None:
    other = json.loads(guarded("export").stdout.splitlines()[0]) | {"name": "changed"}
    _file(guarded, "other.jsonl", [json.dumps(other)])
    said = complaint(guarded.here("import", "other.jsonl"), 1)
    assert other["id"] in said
    assert "line 1" in said
