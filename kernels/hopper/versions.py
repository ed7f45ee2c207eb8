"""What Triton 3.6 to 3.9 name differently."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import builtin

all_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the latter in 3.6
place = gl.shared_memory_descriptor
reinterpret = place.reinterpret if hasattr(place, "reinterpret") else place._reinterpret  # the latter in 3.6 to 3.8
if hasattr(tma, "async_store"):
    async_load, async_store, async_atomic_add = tma.async_load, tma.async_store, tma.async_atomic_add
else:  # 3.6 and 3.7, which have no public function that adds a tile to memory
    from triton._C.libtriton import ir

    async_load, async_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

    @builtin
    def async_atomic_add(x, at, tile, _semantic=None):
        at = _semantic._convert_to_ir_values(at, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, x.handle, at, tile.handle)
