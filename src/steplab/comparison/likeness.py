"""Decides if two records may be compared: measured cell and conditions, field by field."""

from collections.abc import Collection, Mapping

from steplab.records.comparison import Unlike
from steplab.records.environment import Environment
from steplab.records.figure import MeasuredCell
from steplab.records.record import Record
from steplab.records.registry import kind_of
from steplab.records.rows import Row, Scalar
from steplab.records.run import Run

_SELECTS = ("CUDA_VISIBLE_DEVICES",)


def conditions(record: Record) -> Row:
    """Conditions that must match: kind, device, versions. The commit is excluded, since comparisons are between
    commits.
    """
    found: Row = {"kind": kind_of(record).name, "device": record.device_name, "steplab": record.steplab_version}
    if isinstance(record, Run) and record.profile and record.timing is None:
        found["source"] = record.profile.source
    env = record.environment
    if env is None:
        return found
    device = env.device
    found |= {"threads": device.threads, "power_limit_w": device.power_limit_w, "cpu": env.cpu, "host": env.host}
    found |= {name: getattr(env, name) for name in ("python", "torch", "cuda", "cudnn", "triton", "driver")}
    return found | {name: value for name, value in env.variables.items() if name not in _SELECTS}


def whole_key(record: Record, cell: MeasuredCell) -> Row:
    attention = cell.key.get("attention", cell.key.get("implementation"))
    kernels = _flash_triton(record.environment) if attention in ("flash_triton", "auto") else {}
    return conditions(record) | kernels | cell.key


def _flash_triton(env: Environment | None) -> Row:
    """Kernels behind flash_triton; records without that field had Hopper's only with Triton 3.6."""
    if env is None or env.device.kind != "cuda" or env.triton is None:
        return {}
    had_hopper = env.device.compute_capability == "9.0" and env.triton.startswith("3.6.")
    return {"flash_triton kernels": env.flash_triton or ("hopper" if had_hopper else "portable")}


def unlike(a: Mapping[str, Scalar], b: Mapping[str, Scalar], allowed: Collection[str] = ()) -> tuple[Unlike, ...]:
    names = dict.fromkeys((*a, *b))
    return tuple(
        Unlike(field=name, a=a.get(name), b=b.get(name))
        for name in names
        if name not in allowed and a.get(name) != b.get(name)
    )
