"""The implementations of attention, as rows that a test runs over. Where there is a GPU, each also runs on it.

@over("naive", "tiled", "triton")
def test_no_seed_means_no_dropout(row): ...
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch

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
