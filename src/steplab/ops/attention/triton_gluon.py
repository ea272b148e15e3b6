"""Gluon by the names that this Triton has for it: the one file that knows where its versions differ.

Triton 3.8 renamed the copies of tiles and got one that adds; 3.9 removed the older names.
"""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin, shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
add_tile = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _add


@builtin
def reinterpret(x, dtype, shape, layout, _semantic=None):
    """The same bytes of shared memory, as numbers of another type, shape or layout."""
    name = "reinterpret" if hasattr(shared_memory_descriptor, "reinterpret") else "_reinterpret"
    return getattr(x, name)(dtype, shape, layout, _semantic=_semantic)
