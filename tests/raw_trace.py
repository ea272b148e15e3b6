import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Event:
    name: str
    kind: str
    start_us: float
    end_us: float
    arguments: dict[str, Any]
    inside: list["Event"] = field(default_factory=list)

    def all(self) -> "list[Event]":
        return [self, *(event for child in self.inside for event in child.all())]

    def named(self, name: str) -> "list[Event]":
        return [event for event in self.all() if event.name == name]

    def ranges(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for child in self.inside:
            if child.kind == "user_annotation" and not child.name.startswith("Optimizer."):
                assert child.name not in found, f"{child.name} twice in {self.name}"
                found[child.name] = child.ranges()
        return found


def read_events(path: Path) -> list[Event]:
    content = path.read_bytes()
    document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    by_thread: dict[object, list[Event]] = {}
    for raw in document["traceEvents"]:
        if raw.get("cat") in ("user_annotation", "cpu_op"):
            event = Event(
                name=raw["name"],
                kind=raw["cat"],
                start_us=raw["ts"],
                end_us=raw["ts"] + raw["dur"],
                arguments=raw.get("args", {}),
            )
            by_thread.setdefault(raw["tid"], []).append(event)
    return [top for events in by_thread.values() for top in _nested(events)]


def top_ranges(path: Path, name: str) -> list[Event]:
    return [event for event in read_events(path) if event.kind == "user_annotation" and event.name == name]


def _nested(events: list[Event]) -> list[Event]:
    tops: list[Event] = []
    around: list[Event] = []
    for event in sorted(events, key=lambda event: (event.start_us, -event.end_us)):
        while around and around[-1].end_us <= event.start_us:
            around.pop()
        (around[-1].inside if around else tops).append(event)
        around.append(event)
    return tops
