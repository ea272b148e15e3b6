from collections.abc import Sequence

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
        pairs = [(name, "; ".join(found)) for name, found in values.items()]
        title = units.counted(len(group), "record") if len(groups) > 1 else ""
        more = further if len(groups) == 1 else ()
        blocks.append(Section.of(title, Pairs(pairs=(*pairs, *condition_pairs(group), *more))))
    return Section.of("Environment", *(blocks or [Pairs(pairs=further)]))


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
    pairs = [
        ("device", ", ".join([f"{device.name} ({device.kind})", *(detail for detail in details if detail)])),
        ("software", ", ".join(software)),
        ("host", f"{env.cpu}, {env.num_cpus} logical processors, {env.host}"),
    ]
    if env.git_commit:
        changed = " with uncommitted changes" if env.git_commit.endswith("+") else ""
        pairs.append(("git commit", env.git_commit.rstrip("+") + changed))
    if env.variables:
        pairs.append(("variables", " ".join(f"{name}={value}" for name, value in sorted(env.variables.items()))))
    return pairs


def condition_pairs(envs: Sequence[Environment]) -> list[tuple[str, str]]:
    devices = [env.device for env in envs]
    sm = sorted(d.sm_clock_hz for d in devices if d.sm_clock_hz is not None)
    memory = sorted(d.memory_clock_hz for d in devices if d.memory_clock_hz is not None)
    celsius = sorted(d.temperature_c for d in devices if d.temperature_c is not None)
    load = sorted(env.load_average for env in envs if env.load_average is not None)
    others = sorted(env.other_cpus for env in envs if env.other_cpus is not None)
    processes = sorted(d.other_processes for d in devices if d.other_processes)
    limits = dict.fromkeys(limit for d in devices for limit in d.clock_limits or ())
    known = [
        ("SM clock", [units.format_rate(clock, "Hz") for clock in sm]),
        ("memory clock", [units.format_rate(clock, "Hz") for clock in memory]),
        ("temperature", [f"{temperature:.0f} °C" for temperature in celsius]),
        ("load average before", [f"{mean:.1f}" for mean in load]),
        ("busy with other processes", [f"{busy:.1f} processors" for busy in others]),
        ("other processes on the GPU", [str(number) for number in processes]),
    ]
    ranges = [(name, " to ".join(dict.fromkeys((texts[0], texts[-1])))) for name, texts in known if texts]
    return ranges + ([("clock limited by", ", ".join(limits))] if limits else [])
