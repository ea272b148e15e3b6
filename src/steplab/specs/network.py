"""Networks between nodes, as vendors describe their clusters. The figures are in networks.toml."""

import functools
from importlib import resources

import msgspec


class NetworkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network that joins nodes of some GPUs."""

    name: str
    """Such as InfiniBand NDR."""
    bytes_per_s: float
    """Stated bandwidth of one GPU's adapter in one direction, GB = 1e9."""
    reached: float
    """Share of it that NCCL's large messages reach."""
    reached_source: str
    """Citation of that share."""
    gpus: tuple[str, ...]
    """GPUs by their names in the hardware catalogue."""
    gpus_per_node: int
    """GPUs of a node, each with an adapter of its own."""
    source: str
    """Citation of the stated figures, and how they were converted."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    network: list[NetworkSpec]


@functools.cache
def networks() -> tuple[NetworkSpec, ...]:
    """Every network of the catalogue."""
    text = resources.files("steplab.specs").joinpath("networks.toml").read_text(encoding="utf-8")
    return tuple(msgspec.toml.decode(text, type=_File).network)


def network_of(gpu: str) -> NetworkSpec | None:
    """The network of a vendor's cluster of these GPUs; None: none is known."""
    return next((network for network in networks() if gpu in network.gpus), None)


def network_alike(gpu: str) -> NetworkSpec:
    """The network whose share is reached of any adapter that is stated for these GPUs: their own; where none is known,
    the one with the least share."""
    return network_of(gpu) or min(networks(), key=lambda each: each.reached)
