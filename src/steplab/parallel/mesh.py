"""The ranks of a world laid out along named axes, as torch's DeviceMesh.

Four axes, the outermost first, so that ranks that talk most are neighbours:

    pp      pipeline: a rank has some of the blocks
    dp      data, replicated: a rank has a part of the batch, and all that the axes below give it
    fsdp    data, sharded: a rank has a part of the batch, and keeps a part of each parameter
    tp      tensor: a rank computes a part of each matrix product

Torch's process groups come with the mesh, one for each axis; nothing is kept in this process besides it.
"""

from collections.abc import Mapping
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from steplab.errors import UserError

AXES = ("pp", "dp", "fsdp", "tp")
"""The names of the axes, from the outermost to the innermost."""


def open_mesh(sizes: Mapping[str, int], device_type: str) -> DeviceMesh:
    """The mesh of all ranks; a collective call. An axis that is left out has the size 1.

    Raises UserError where an axis is not known, a size is below 1, or the sizes ask for other than the ranks there are.
    """
    for axis, size in sizes.items():
        if axis not in AXES:
            raise UserError(f"axis '{axis}' is not known; choose among {', '.join(AXES)}")
        if size < 1:
            raise UserError(f"{axis} must be at least 1, not {size}")
    if not dist.is_initialized():
        raise UserError("there are no other processes to lay a model out on: start them by torchrun")
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    asked, present = prod(shape), dist.get_world_size()
    if asked != present:
        shown = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        raise UserError(
            f"layout {shown} is for {asked} processes, and there are {present}: start {asked}, "
            f"or choose sizes whose product is {present}"
        )
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


def data_share(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's part of the batch, from 0, and the number of parts: along dp and fsdp together."""
    place, parts = mesh.get_local_rank("dp"), mesh["dp"].size()
    return place * mesh["fsdp"].size() + mesh.get_local_rank("fsdp"), parts * mesh["fsdp"].size()
