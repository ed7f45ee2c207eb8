"""The implementations of attention, as rows that a test runs over. Where there is a GPU, each also runs on it.

@over("naive", "tiled", "triton")
def test_no_seed_means_no_dropout(row): ...
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode  # PyTorch's guide "Extending PyTorch" points to it
from torch.utils._pytree import tree_leaves

from model.attention import AttentionConfig
from tests.reference import DTYPES

CUDA, HAS_TRITON = torch.cuda.is_available(), bool(find_spec("triton"))
DEVICE = "cuda" if CUDA else "cpu"  # where Triton's kernels run; on a CPU in Triton's interpreter
ON_GPU = [pytest.mark.gpu] if CUDA else []
if HAS_TRITON and not CUDA:
    import tests.interpreter  # noqa: F401 (before kernels/ is imported, which reads whether to interpret)
HALVES = [torch.bfloat16, torch.float16]
NAIVE, TILED = AttentionConfig("naive"), AttentionConfig("tiled", 32, 64)
SDPA, TRITON = AttentionConfig("sdpa"), AttentionConfig("triton")


class Row(NamedTuple):
    name: str
    config: AttentionConfig
    dtypes: list[torch.dtype]
    device: str = "cpu"


IN_TORCH = [Row("naive", NAIVE, [*DTYPES, torch.float64]), Row("tiled", TILED, [*DTYPES, torch.float64])]
IN_TORCH += [Row("sdpa", SDPA, [*DTYPES, torch.float64])]
ROWS = [*IN_TORCH, *(row._replace(device="cuda") for row in IN_TORCH if CUDA)]
ROWS += [Row("triton", TRITON, DTYPES, DEVICE)] * HAS_TRITON


def param(row: Row, *more):
    """A row and the other arguments of a test."""
    on_gpu = row.device == "cuda"
    return pytest.param(row, *more, marks=ON_GPU if on_gpu else [], id=f"{row.name}{'-cuda' * on_gpu}{more or ''}")


def over(*names: str):
    """Parametrizes a test over these implementations."""
    return pytest.mark.parametrize("row", [param(row) for row in ROWS if row.name in names])


Sized = Callable[..., AttentionConfig]


@pytest.fixture(autouse=True)
def sized(monkeypatch) -> Sized:
    """sized(config, M, N) is config with tiles of M rows and N columns. Triton's kernels have them from then on.

    Before that they have 64 x 64 in the interpreter, where a tile takes a few milliseconds whatever its size.
    """

    def sized(config: AttentionConfig, M: int, N: int) -> AttentionConfig:
        if config.impl == "triton":
            from kernels import launch

            monkeypatch.setattr(launch, "tiles_for", lambda *_: launch.Tiles(M, N, 4, 1))
        return replace(config, block_m=M, block_n=N)

    if HAS_TRITON and not CUDA:
        sized(TRITON, 64, 64)
    return sized


class PeakBytes(TorchDispatchMode):
    """The peak number of bytes in tensors that were made inside this context."""

    def __init__(self):
        super().__init__()
        self.held = self.peak = 0
        self.made: set[int] = set()  # addresses of the storages that were made inside and are still held

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
            key, size = storage.data_ptr(), storage.nbytes()
            if size and key not in given and key not in self.made:
                weakref.finalize(storage, self.freed, key, size)
                self.made.add(key)
                self.held += size
                self.peak = max(self.peak, self.held)
        return result

    def freed(self, key: int, size: int) -> None:
        self.made.remove(key)
        self.held -= size
