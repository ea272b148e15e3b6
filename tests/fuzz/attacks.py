"""The attacks: changed inputs and the commands that read them.

Each is an endless generator of ends of commands. Random numbers decide everything, so a seed repeats it.
"""

import gzip
import json
import lzma
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from cyclopts import App
from tests.fuzz import seeds
from tests.fuzz.ending import End, run, run_apart
from tests.fuzz.mutations import NUMBERS, TEXTS, flipped_bits, mutate_database, mutated_bytes, mutated_value
from tests.fuzz.players import Message, Player, conversations

from steplab.cli.app import app
from steplab.measurement.processes import conversation
from steplab.records.codec import encode


@dataclass(frozen=True, kw_only=True)
class Try:
    arguments: tuple[str, ...]
    end: End
    file: Path | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Attack:
    name: str
    tries: int
    make: Callable[[random.Random, Path], Iterator[Try]]


# --- command lines ----------------------------------------------------------------------------------------------


_EDGES = (
    *TEXTS, *(str(number) for number in NUMBERS), "1,2", ",", "1,", "8,x", "-", "--", "/", ".", "/dev/null",
    "/dev/full", "a/" * 60 + "b", "y" * 300, "y" * 300 + ".json", "~", "dp=2", "dp=99999999999", "fsdp=2,tp=0", "tiny",
    "small", "bf16", "1e3", "5min", "inf", "9" * 400, "hf:", "hf:x.json", "a:b", ":", "1_000", "١", "²", "+1", " 1 ",
    "true", "cuda", "cpu", "last", "quick", "all_reduce", "H100 SXM", "table", "csv", "html", "=", "a=b", "model=tiny",
    "steps > 3", "name ~ x", "1MB", "1e400GB", "-1MB", "2**63", "causal", "1,8,64", "0:1", "1-2",
)  # fmt: skip


def _commands(app: App, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[tuple[str, bool]]]]:
    for name in app:
        if name.startswith("-") or name == "completion":  # which would change files of the user's shell
            continue
        one, path = app[name], (*words, name)
        if one.default_command is None:
            yield from _commands(one, path)
            continue
        arguments = [argument for argument in one.assemble_argument_collection() if argument.name != "*"]
        yield path, [(argument.name, argument.name.startswith("--")) for argument in arguments]


_SIZES = ("--model.num-layers", "--model.d-model", "--model.d-ff", "--model.num-heads", "--model.vocab-size",
          "--batch", "--context", "--steps", "--warmup")  # fmt: skip


def command_lines(random_: random.Random, folder: Path) -> Iterator[Try]:
    commands = sorted(_commands(app))
    store = folder / "store.db"
    seeds.write_store(store)
    while True:
        path, options = random_.choice(commands)
        words = list(path)
        for name, is_option in random_.sample(options, min(len(options), random_.randint(0, 4))):
            if name == "--debug" or (name == "--store" and random_.random() < 0.8):
                continue
            value = random_.choice(_EDGES)
            if name in _SIZES and random_.random() < 0.5:
                value = str(random_.choice([n for n in NUMBERS if isinstance(n, int)]))
            words += [f"{name}={value}" if random_.random() < 0.8 else name] if is_option else [value]
        if "rm" in words:
            words = [word for word in words if not word.startswith("--yes")]
        yield _tried(folder, words, store if not any(word.startswith("--store") for word in words) else None)


# --- stores -----------------------------------------------------------------------------------------------------


_READING = (
    ("list",), ("list", "--kind", "study"), ("list", "--format", "json"), ("show", "last"), ("report",), ("export",),
    ("show", "last", "--format", "json"), ("explain",), ("list", "--where", "status = ok", "--format", "csv"),
    ("report", "--format", "md"),
)  # fmt: skip


def stores(random_: random.Random, folder: Path) -> Iterator[Try]:
    good = seeds.write_store(folder / "good.db")
    ids = [record.id for name, record in seeds.records().items()]
    while True:
        file = folder / "store.db"
        file.write_bytes(flipped_bits(random_, good, random_.choice((1, 1, 2, 4, 16, 64))))
        spoiled = file.read_bytes()
        for words in (*random_.sample(_READING, 3), ("show", random_.choice(ids))):
            tried = _tried(folder, list(words), file, file=file)
            lost = () if file.read_bytes() == spoiled else ("reading changed the store",)
            yield Try(arguments=tried.arguments, end=tried.end, file=file, faults=(*tried.faults, *lost))
            for beside in folder.glob("store.db-*"):
                beside.unlink()


# --- records ----------------------------------------------------------------------------------------------------


_DRAWING = (
    *(("show", "last", "--format", chosen) for chosen in ("table", "csv", "md", "latex", "json")),
    ("list",), ("list", "--format", "csv"), ("explain", "last"), ("explain", "last", "--format", "md"),
    ("report", "--format", "md"), ("export",), ("list", "--columns", "id,name,status"), ("plan", "check"),
)  # fmt: skip
_PAGES = (("show", "last", "--format", "html"), ("report", "--format", "html"))


def mutated_records(random_: random.Random, folder: Path) -> Iterator[Try]:
    texts = seeds.record_texts()
    plain = {name: json.loads(text) for name, text in texts.items()}
    while True:
        name = random_.choice(sorted(texts))
        file, store = folder / "record.jsonl", folder / "store.db"
        if random_.random() < 0.25:
            file.write_bytes(mutated_bytes(random_, texts[name]))
        else:
            file.write_bytes(_json(mutated_value(random_, plain[name], most=2)))
        store.unlink(missing_ok=True)
        imported = _tried(folder, ["import", str(file)], store, file=file)
        yield imported
        if imported.end.code:
            continue
        pages = _PAGES if random_.random() < 0.15 else ()
        for words in (*random_.sample(_DRAWING, 3), *pages):
            yield _tried(folder, list(words), store, file=file)


# --- traces -----------------------------------------------------------------------------------------------------


def kineto(random_: random.Random, folder: Path) -> Iterator[Try]:
    whole = seeds.trace()
    compact, indented = (json.dumps(whole, indent=indent).encode() for indent in (None, 2))
    while True:
        how = random_.random()
        content = random_.choice((compact, indented))
        if how < 0.5:
            content = mutated_bytes(random_, content)
        else:
            small = {**whole, "traceEvents": random_.sample(whole["traceEvents"], 20)}
            content = _json(mutated_value(random_, small, most=6))
        if how > 0.8:
            content = gzip.compress(content, 1)
            content = mutated_bytes(random_, content) if how > 0.9 else content
        yield from _imported(folder, "import-trace", folder / "trace.json", content, random_)


def nsys(random_: random.Random, folder: Path) -> Iterator[Try]:
    good = seeds.write_nsys(folder / "good.sqlite").read_bytes()
    file = folder / "trace.sqlite"
    while True:
        if random_.random() < 0.2:
            file.write_bytes(flipped_bits(random_, good, random_.choice((1, 2, 8, 32))))
        else:
            file.write_bytes(good)
            mutate_database(random_, file)
        yield from _imported(folder, "import-trace", file, file.read_bytes(), random_)


# --- snapshots --------------------------------------------------------------------------------------------------


_INSTRUCTIONS = (
    b"c__builtin__\neval\n", b"cos\nsystem\n(X\x02\x00\x00\x00idtR", b"\x8c\x02os\x8c\x06system\x93", b"\x81", b"b",
    b"\x8b\xff\x00\x00\x00" + b"\x7f" * 255, b"\x8a\xff" + b"\x7f" * 255, b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8,
    b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\xff", b"(" * 80, b"N0" * 40, b"(1" * 40, b"\x97", b"\x8f", b"]\x94" * 30,
    b"0" * 30, b"2", b"Pname\n", b"G\x7f\xf0\x00\x00\x00\x00\x00\x00", b"G\x7f\xf8\x00\x00\x00\x00\x00\x00", b".",
)  # fmt: skip


def snapshots(random_: random.Random, folder: Path) -> Iterator[Try]:
    (folder / "mark").unlink(missing_ok=True)
    while True:
        how = random_.random()
        content = random_.choice(seeds.pickles()[:4]) if random_.random() < 0.98 else seeds.pickles()[4]
        if how < 0.4:
            content = mutated_bytes(random_, content)
        elif how < 0.85:
            value = mutated_value(random_, seeds.snapshot(), most=4)
            content = pickle.dumps(value, random_.choice((2, 3, 4, 5)))
        else:
            at = random_.randrange(2, len(content))
            content = content[:at] + random_.choice(_INSTRUCTIONS) + content[at:]
        if random_.random() < 0.1:
            content = random_.choice((gzip.compress, lzma.compress))(content)
        yield from _imported(folder, "import-snapshot", folder / "snapshot.pickle", content, random_)


# --- configurations and studies ---------------------------------------------------------------------------------


def configurations(random_: random.Random, folder: Path) -> Iterator[Try]:
    file, store = folder / "config.json", folder / "store.db"
    text = json.dumps(seeds.CONFIGURATION).encode()
    reading = (("plan", "memory"), ("plan", "time"), ("run",), ("plan", "accounting"))
    while True:
        if random_.random() < 0.3:
            file.write_bytes(mutated_bytes(random_, text))
        else:
            file.write_bytes(_json(mutated_value(random_, seeds.CONFIGURATION)))
        words = [*random_.choice(reading), "--model", f"hf:{file}"]
        yield _tried(folder, words, store, file=file)


def studies(random_: random.Random, folder: Path) -> Iterator[Try]:
    file, store = folder / "study.toml", folder / "store.db"
    while True:
        content = mutated_bytes(random_, seeds.STUDY.encode())
        if random_.random() < 0.5:
            lines = seeds.STUDY.splitlines()
            at = random_.randrange(len(lines))
            key = lines[at].partition(" = ")[0]
            lines[at] = f"{key} = {random_.choice(_TOML)}" if " = " in lines[at] else random_.choice(_TOML)
            content = "\n".join(lines).encode("utf-8", "surrogatepass")
        file.write_bytes(content)
        yield _tried(folder, ["study", str(file)], store, file=file)
        store.unlink(missing_ok=True)


_TOML = (
    "1", "-1", "9223372036854775807", "9223372036854775808", "1e300", "nan", "inf", "true", '""', '"\\u001b[31m"', "[]",
    "[[]]", "{}", '{a = 1}', "[1, 'a']", "1979-05-27T07:32:00Z", "[0, 1, 2]", "['quick', 'quick']", "'''\na\n'''",
    "[[grid]]", "[grid.x]", "[[unknown]]", "[" * 3000, '"tiny"', "['tiny', 'small', 'xxl']", "0.5", '"8,16"',
)  # fmt: skip


# --- messages between processes ---------------------------------------------------------------------------------


def messages(random_: random.Random, folder: Path) -> Iterator[Try]:
    file, store = folder / "told-0", folder / "store.db"
    played = conversations()
    players: type[Player] = type("Players", (Player,), {"folder": folder})
    while True:
        words, said = random_.choice(list(played.items()))
        told = _mutated_lines(random_, said)
        of_every_rank = [message for message in said if message["kind"] in ("stage", "step")] + [{"kind": "ended"}]
        second = _lines(of_every_rank)
        if random_.random() < 0.3:  # of the second rank, where there is one
            told, second = _lines(said), _mutated_lines(random_, of_every_rank)
        file.write_bytes(told)
        (folder / "told-1").write_bytes(second)
        store.unlink(missing_ok=True)
        arguments = (*words, "--store", str(store))
        with mock.patch.multiple(conversation, _CAUSE_S=0.01, _ANSWER_S=0.01):
            end = run(*arguments, parse_once=True, process=players)
        yield Try(arguments=arguments, end=end, file=file, faults=end.faults)
        if store.exists() and random_.random() < 0.3:
            yield from _used(folder, store, file, random_)


def _lines(said: list[Message]) -> bytes:
    return b"".join(_framed(encode(message)) for message in said)


def _framed(text: bytes) -> bytes:
    """A message on its way, as multiprocessing.connection sends it."""
    return struct.pack("!i", len(text)) + text


def _mutated_lines(random_: random.Random, said: list[Message]) -> bytes:
    how, at = random_.random(), random_.randrange(len(said))
    if how < 0.6:
        changed = mutated_value(random_, json.loads(encode(said[at])), most=2)
        return _lines(said[:at]) + _framed(_json(changed)) + _lines(said[at + 1 :])
    if how < 0.8:
        return mutated_bytes(random_, _lines(said))
    order = [random_.choice(said) for _ in said] if how < 0.9 else said[:at] + said[at:] * 2
    return _lines(order)


# --- bombs ------------------------------------------------------------------------------------------------------


_BOMB_S, _BOMB_BYTES = 330.0, 9 << 30
"""Limits for a bomb, just above those on reading: processor seconds and bytes."""
_BLOCKS = (
    b"\0", b" ", b"\n", b"1,", b"{},", b"[", b'"', b"\\", b'{"a":', b'{"cat":"cpu_op","name":"x","ts":1,"dur":1},',
    b'{"cat":"kernel"},', b"N0", b"(1", b"]a", b"]", b"}", b"(", b"N", b"\x95" + b"\0" * 8, b"]\x94", b"K\x01",
)  # fmt: skip
_HEADS = {
    "import": (b"", b'{"schema":"steplab.run/1","name":"', b'{"schema":"steplab.run/1","notes":['),
    "import-trace": (b'{"traceEvents":[', b"[", b'{"a":', b'{"'),
    "import-snapshot": (b"\x80\x04", b"\x80\x04]", b"\x80\x04}(", b"\x80\x04("),
}


def bombs(random_: random.Random, folder: Path) -> Iterator[Try]:
    while True:
        command = random_.choice(sorted(_HEADS))
        head, block = random_.choice(_HEADS[command]), random_.choice(_BLOCKS)
        mebibyte = block * ((1 << 20) // len(block))
        file = folder / "bomb"
        if random_.random() < 0.7:
            file.write_bytes(gzip.compress(head) + gzip.compress(mebibyte, 9) * 1024)
        else:
            file.write_bytes(head + mebibyte * 64)
        words = [command, str(file), "--store", str(folder / "store.db")]
        end = run_apart(*words, limit_s=_BOMB_S, most_bytes=_BOMB_BYTES)
        named = f"{command} {head!r}, then {block!r}"
        yield Try(arguments=(*words, named), end=end, faults=end.faults)


# --- what they share --------------------------------------------------------------------------------------------


def _imported(folder: Path, command: str, file: Path, content: bytes, random_: random.Random) -> Iterator[Try]:
    file.write_bytes(content)
    store = folder / "store.db"
    store.unlink(missing_ok=True)
    imported = _tried(folder, [command, str(file)], store, file=file)
    yield imported
    if imported.end.code == 0 and random_.random() < 0.3:
        yield from _used(folder, store, file, random_)


def _used(folder: Path, store: Path, file: Path, random_: random.Random) -> Iterator[Try]:
    yield _tried(folder, list(random_.choice((*_DRAWING, *_PAGES[:1]))), store, file=file)
    exported = run("export", "--store", str(store), parse_once=True)
    if not exported.stdout:  # nothing was stored
        return
    (folder / "again.jsonl").write_bytes(exported.stdout.encode("utf-8", "surrogateescape"))
    (folder / "again.db").unlink(missing_ok=True)
    again = _tried(folder, ["import", str(folder / "again.jsonl")], folder / "again.db", file=file)
    refused = (f"what was made of it cannot be imported: {again.end.stderr}"[:300],) if again.end.code else ()
    yield Try(arguments=again.arguments, end=again.end, file=file, faults=(*again.faults, *refused))


def _json(value: object) -> bytes:
    return json.dumps(value, default=repr).encode()


def _tried(folder: Path, words: list[str], store: Path | None, file: Path | None = None) -> Try:
    arguments = tuple([*words, "--store", str(store)] if store else words)
    end = run(*arguments, parse_once=file is not None)
    return Try(arguments=arguments, end=end, file=file, faults=end.faults)


ATTACKS = {
    attack.name: attack
    for attack in (
        Attack(name="command lines", tries=1400, make=command_lines),
        Attack(name="stores with flipped bits", tries=3720, make=stores),
        Attack(name="mutated records", tries=2764, make=mutated_records),
        Attack(name="nsys files", tries=855, make=nsys),
        Attack(name="snapshots", tries=704, make=snapshots),
        Attack(name="Kineto traces", tries=1356, make=kineto),
        Attack(name="bombs", tries=27, make=bombs),
        Attack(name="configurations", tries=300, make=configurations),
        Attack(name="study files", tries=300, make=studies),
        Attack(name="messages of processes", tries=300, make=messages),
    )
}
