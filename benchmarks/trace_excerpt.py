"""Keep of a Kineto trace what an independent count needs: kernels, their launches, named ranges, and nothing else.

    python -m benchmarks.trace_excerpt TRACE.json EXCERPT.json.xz

A trace of a large model has tens of megabytes of operators and links; the excerpt is small enough to be kept beside
the tests, and is still a trace that any reader takes.
"""

import json
import lzma
import sys
from pathlib import Path
from typing import Any

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
KEPT_ARGUMENTS = ("correlation", "stream", "device", "Collective name")


def excerpt(trace: dict[str, Any]) -> dict[str, Any]:
    events = trace["traceEvents"]
    ran = {event["args"]["correlation"] for event in events if event.get("cat") in ON_DEVICE}
    kept = [
        _stripped(event)
        for event in events
        if event.get("cat") in (*ON_DEVICE, "user_annotation")
        or (event.get("cat") in LAUNCHES and event["args"].get("correlation") in ran)
    ]
    return {
        **{key: value for key, value in trace.items() if key not in ("traceEvents", "traceName")},
        "traceEvents": kept,
    }


def _stripped(event: dict[str, Any]) -> dict[str, Any]:
    arguments = {key: value for key, value in event.get("args", {}).items() if key in KEPT_ARGUMENTS}
    return {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")} | {"args": arguments}


def main(source: str, target: str) -> None:
    made = json.dumps(excerpt(json.loads(Path(source).read_bytes())), separators=(",", ":"))
    Path(target).write_bytes(lzma.compress(made.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main(*sys.argv[1:])
