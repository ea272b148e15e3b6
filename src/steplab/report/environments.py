from collections.abc import Callable, Iterable, Sequence
from functools import partial

from steplab import units
from steplab.records.environment import Environment
from steplab.report.kit.document import Block, Pairs, Section
from steplab.report.kit.grouping import grouped


def environment_section(environments: Sequence[Environment], *further: tuple[str, str]) -> Section:
    """List the environments, one block per combination of device and software."""
    groups = grouped(environments, lambda environment: tuple(environment_pairs(environment)[:2])).values()
    blocks: list[Block] = []
    for group in groups:
        values: dict[str, dict[str, None]] = {}
        for name, value in (pair for environment in group for pair in environment_pairs(environment)):
            values.setdefault(name, {})[value] = None
        pairs = [(name, "; ".join(filter(None, found))) for name, found in values.items()]
        title = units.counted(len(group), "record") if len(groups) > 1 else ""
        more = further if len(groups) == 1 else ()
        blocks.append(Section.of(title, Pairs.of(*pairs, *condition_pairs(group), *more)))
    return Section.of("Environment", *(blocks or [Pairs.of(*further)]))


def environment_pairs(env: Environment) -> list[tuple[str, str]]:
    device = env.device
    details = [
        units.format_bytes(device.memory_bytes) if device.memory_bytes is not None else "",
        f"compute capability {device.compute_capability}" if device.compute_capability else "",
        f"power limit {device.power_limit_w:.0f} W" if device.power_limit_w is not None else "",
        units.counted(device.threads, "thread") if device.threads is not None else "",
    ]
    versions = [("CUDA", env.cuda), ("cuDNN", env.cudnn), ("Triton", env.triton), ("driver", env.driver)]
    software = [f"torch {env.torch}", f"Python {env.python}", *(f"{name} {v}" for name, v in versions if v)]
    return [
        ("device", ", ".join([f"{device.name} ({device.kind})", *(detail for detail in details if detail)])),
        ("software", ", ".join(software)),
        ("host", f"{env.cpu}, {env.num_cpus} logical processors, {env.host}"),
        ("git commit", (env.git_commit or "").replace("+", " with uncommitted changes")),
        ("variables", " ".join(f"{name}={value}" for name, value in sorted(env.variables.items()))),
    ]


def condition_pairs(envs: Sequence[Environment]) -> list[tuple[str, str]]:
    devices = [env.device for env in envs]

    def between(found: Iterable[float | None], show: Callable[[float], str]) -> str:
        known = sorted(value for value in found if value is not None)
        return " to ".join(dict.fromkeys(map(show, known[:1] + known[-1:])))

    clock = partial(units.format_rate, unit="Hz")
    return [
        ("SM clock", between((d.sm_clock_hz for d in devices), clock)),
        ("memory clock", between((d.memory_clock_hz for d in devices), clock)),
        ("temperature", between((d.temperature_c for d in devices), "{:.0f} °C".format)),
        ("load average before", between((env.load_average for env in envs), "{:.1f}".format)),
        ("busy with other processes", between((env.other_cpus for env in envs), "{:.1f} processors".format)),
        ("other processes on the GPU", between((d.other_processes or None for d in devices), str)),
        ("clock limited by", ", ".join(dict.fromkeys(limit for d in devices for limit in d.clock_limits or ()))),
    ]
