"""Predicts the time of a collective between ranks: t = alpha + bytes on the wire / w (Hockney 1994).

w is NCCL's share of the stated bandwidth: within a node of the GPU's link, between nodes of the network adapters
(specs/networks.toml), where a ring enters and leaves each node once, through one adapter per rank of the group. alpha
grows with the number of ranks as in NCCL's tuning model (src/graph/tuning.cc: the latency of a hop, protocol Simple).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from steplab.costs.communication import bus_factor
from steplab.errors import UserError
from steplab.records.comm import CommFit
from steplab.specs.hardware import HardwareSpec, network_alike, network_of

REACHED = {"all_reduce": 0.691, "all_gather": 0.603, "reduce_scatter": 0.605, "send_recv": 0.669}
"""Share of the stated one-way bandwidth that NCCL reaches over NVLink 4 with 2 and 4 ranks.

It is 1 / beta of the communication profile in benchmarks/results/comm_h200_202611.jsonl.gz over 450 GB/s.
"""
CALL_S = 10.8e-6
"""Latency (alpha) of two ranks: the median of all-reduce, all-gather and reduce-scatter in the same profile."""
NODE_HOP_S, NETWORK_HOP_S = 3.4e-6, 14e-6
"""Seconds of each further hop of a ring, within a node and to the next (hwLat of NVLink and NET, Ring, Simple)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    gpus_per_node: int
    node: str
    node_bytes_per_s: Mapping[str, float]
    """Bus bandwidth that NCCL reaches within a node, by collective."""
    network: str
    """Name of the network between nodes; '' if unknown."""
    network_bytes_per_s: float | None
    """One-way bandwidth that NCCL reaches through one network adapter; None: unknown."""
    network_stated_bytes_per_s: float | None
    """Stated bandwidth of a network adapter; None: unknown, or the reached bandwidth was given."""
    sources: tuple[str, ...]
    node_is_stated: bool = True
    """True if `node_bytes_per_s` is a share of the stated bandwidth, not given or measured."""
    calls_s: Mapping[str, float] = field(default_factory=dict)
    """Measured latency (alpha) of each collective within a node; others follow NCCL's model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that communicate: `size` of them, `stride` apart."""

    size: int
    stride: int
    in_line: int = 0
    """Length of the pipeline in which these ranks are neighbours, some in different nodes if it is longer than a node.

    0: not a pipeline.
    """

    def ranks_in_node(self, gpus_per_node: int) -> int:
        if self.in_line * self.stride > gpus_per_node:
            return 1
        return min(max(gpus_per_node // self.stride, 1), self.size)


def machine_of(
    hardware: HardwareSpec,
    gpus_per_node: int | None,
    links: Mapping[str, float] | None = None,
    *,
    network_stated_bytes_per_s: float | None = None,
) -> Cluster:
    """Cluster of nodes with these GPUs.

    Args:
        links: bus bandwidths in bytes per second, by `node` or `network`, that replace NCCL's share of the stated ones.
        network_stated_bytes_per_s: replaces an adapter's stated bandwidth; NCCL reaches the same share of it.

    Raises UserError for another name of a link.
    """
    given = dict(links or {})
    if unknown := set(given) - {"node", "network"}:
        raise UserError(f"there is no link '{unknown.pop()}'; choose node or network, as in --link network=45")
    network = network_of(hardware.name)
    one_way = hardware.interconnect_bytes_per_s / 2
    sources = [hardware.sources["interconnect_bytes_per_s"]]
    node = {name: given.get("node", share * one_way) for name, share in REACHED.items()}
    stated = network_stated_bytes_per_s or (network.bytes_per_s if network else None)
    stated = None if "network" in given else stated
    between = given.get("network")
    if stated:
        alike = network_alike(hardware.name)
        between = alike.reached * stated
        known = network is not None and stated == network.bytes_per_s
        sources += [
            alike.source if known else f"given: network {8 * stated / 1e9:g} Gb/s, stated",
            alike.reached_source,
        ]
    sources += [f"given: {name} {value / 1e9:g} GB/s" for name, value in given.items()]
    return Cluster(
        gpus_per_node=gpus_per_node or (network.gpus_per_node if network else 8),
        node=hardware.interconnect,
        node_bytes_per_s=node,
        network=network.name if network else "network" if between else "",
        network_bytes_per_s=between,
        network_stated_bytes_per_s=stated,
        node_is_stated="node" not in given,
        sources=tuple(sources),
    )


def with_profile(machine: Cluster, fits: Sequence[CommFit], source: str) -> Cluster:
    """Cluster with a stored communication profile's bandwidths and latencies within a node.

    Each collective takes its fit over all world sizes if there is one, else the fit of the most ranks. Raises UserError
    for a profile without a fit of every collective.
    """
    chosen: dict[str, CommFit] = {}
    for fit in sorted(fits, key=lambda fit: fit.world_size or math.inf):
        if fit.beta_s_per_byte > 0:
            chosen[fit.collective] = fit
    if missing := set(REACHED) - set(chosen):
        names = ",".join(sorted(missing))
        raise UserError(f"{source} has no line for {names}; measure them with `steplab comm --collective {names}`")
    return dataclasses.replace(
        machine,
        node_bytes_per_s={name: 1 / chosen[name].beta_s_per_byte for name in REACHED},
        node_is_stated=False,
        calls_s={name: chosen[name].alpha_s for name in REACHED},
        sources=(*machine.sources[1:], source),
    )


def bandwidth(machine: Cluster, collective: str, group: Group) -> float | None:
    """Bytes per second that a rank can send on the wire; None: the network between nodes is unknown."""
    within = machine.node_bytes_per_s[collective]
    ranks = group.ranks_in_node(machine.gpus_per_node)
    if ranks == group.size:
        return within
    if machine.network_bytes_per_s is None:
        return None
    return min(within, ranks * machine.network_bytes_per_s) if ranks > 1 else machine.network_bytes_per_s


def call_s(machine: Cluster, collective: str, group: Group) -> float:
    """Latency (alpha) of a collective in seconds, whatever its size."""
    ranks = group.ranks_in_node(machine.gpus_per_node)
    nodes = math.ceil(group.size / ranks)
    steps, turns = (1, 1) if collective == "send_recv" else (group.size - 1, 2 if collective == "all_reduce" else 1)
    between = (1 if nodes > 1 else 0) if collective == "send_recv" else nodes - 1
    ring = turns * (between * NETWORK_HOP_S + (steps - between) * NODE_HOP_S)
    tree = 2 * ((ranks - 1) * NODE_HOP_S + math.ceil(math.log2(nodes)) * NETWORK_HOP_S)
    first = turns * NODE_HOP_S  # two ranks' hops, which CALL_S includes
    return machine.calls_s.get(collective, CALL_S) + max((min(ring, tree) if turns == 2 else ring) - first, 0.0)


def message_s(machine: Cluster, collective: str, message_bytes: float, group: Group) -> float | None:
    """Seconds of one transfer without concurrent work; None: the network between nodes is unknown."""
    rate = bandwidth(machine, collective, group)
    if rate is None:
        return None
    wire = message_bytes * bus_factor(collective, group.size)
    return call_s(machine, collective, group) + wire / rate
