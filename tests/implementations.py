"""The implementations of attention, a row each, as the tests run them.

On a CPU Triton's kernels run in its interpreter, and those for Hopper GPUs by tests/gluon_on_cpu.py. Where there is a
GPU they run on it, and so do the others once more; then a row has the mark gpu.

    @over("naive", "tiled", "triton")
    def test_no_seed_means_no_dropout(row): ...

A module of tests takes over the fixture `sized`, which also lets attention.kernel=hopper run on a CPU.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.problem import HAS_TRITON
from model.abilities import wanted, why_not
from model.attention import KINDS, AttentionConfig
from tests.reference import DTYPES, Case, case_name, configured, run

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"  # where Triton's kernels run
ON_GPU = [pytest.mark.gpu] if CUDA else []
ON_HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
INTERPRETED = pytest.mark.skipif(CUDA or not HAS_TRITON, reason="wants Triton's interpreter, which a GPU has not")
HALVES = [torch.bfloat16, torch.float16]


class Row(NamedTuple):
    name: str
    config: AttentionConfig
    dtypes: list[torch.dtype]  # the first is the one of tests that need only one
    device: str = "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    def lacks(self, case: Case) -> bool:
        """Whether model/abilities.py says so, or the head size is another one."""
        thing = "hopper forward" if self.name == "hopper" else self.config.impl
        if self.name == "hopper" and case.D not in (64, 128):
            return True
        options = wanted(configured(self.config, case))
        return why_not(thing, options, self.device) != why_not(thing, {}, self.device)

    def inputs(self, case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return case.inputs(dtype or self.dtype, self.device)

    def run(self, inputs: dict[str, Tensor], case: Case, **options) -> dict[str, Tensor]:
        return run(inputs, case, self.config, **options)


NAIVE, SDPA, TRITON = AttentionConfig("naive"), AttentionConfig("sdpa"), AttentionConfig("triton", kernel="portable")
TILED, HOPPER = AttentionConfig("tiled", 32, 64), AttentionConfig("triton", kernel="hopper")
IN_TORCH = [
    Row("naive", NAIVE, [*DTYPES, torch.float64]),
    Row("tiled", TILED, [*DTYPES, torch.float64]),
    Row("keys_outside", replace(TILED, order="keys_outside"), [*DTYPES, torch.float64]),
]
ROWS = [*IN_TORCH, *(row._replace(device="cuda") for row in IN_TORCH if CUDA)]
ROWS += [Row("triton", TRITON, DTYPES, DEVICE)] * HAS_TRITON
ROWS += [Row("hopper", HOPPER, HALVES, DEVICE)] * (HAS_TRITON and (ON_HOPPER or not CUDA))


def param(row: Row, *more, marks=()):
    """A row and the other arguments of a test."""
    names = [f"{row.name}-cuda" if row.device == "cuda" else row.name]
    names += [case_name(x) if isinstance(x, Case) else str(x) for x in more]
    on = [pytest.mark.gpu] if row.device == "cuda" else []
    return pytest.param(row, *more, marks=[*on, *marks], id="-".join(names))


def over(*names: str):
    """Parametrizes a test over these rows, and their namesakes on a GPU."""
    return pytest.mark.parametrize("row", [param(row) for row in ROWS if row.name in names])


def exact(inputs: dict[str, Tensor], case: Case, config: AttentionConfig = NAIVE, **options) -> dict[str, Tensor]:
    """naive's results in float64, which tests/test_attention.py compares with the oracle's."""
    wide = {name: x.double() for name, x in inputs.items()}
    return {name: x.cpu() for name, x in run(wide, case, config, **options).items()}


@pytest.fixture(autouse=True)
def sized(monkeypatch):
    """sized(config, M, N, M of dkdv) is the configuration with tiles of M x N; Triton's portable kernels have them from
    then on. Before it is called: 64 x 64 in the interpreter, for the price of one tile of 32 x 32."""
    if not HAS_TRITON:
        yield lambda config, M=32, N=64: replace(config, block_m=M, block_n=N)
        return
    from kernels import sizes
    from tests.gluon_on_cpu import hopper_on_cpu

    def sized(config: AttentionConfig, M: int | None = None, N: int = 64, of_dkdv: int | None = None):
        if config.impl != "triton":
            return config if M is None else replace(config, block_m=M, block_n=N)
        if M is not None:
            KINDS.clear()  # which know the tiles of a kind of call
            chosen = {"dkdv": sizes.Tiles(of_dkdv or M, N, 4, 1)}
            monkeypatch.setattr(sizes, "tiles_for", lambda kernel, *_: chosen.get(kernel, sizes.Tiles(M, N, 4, 1)))
        return config

    if CUDA:
        yield sized
        KINDS.clear()
        return
    sized(TRITON, 64, 64)
    with hopper_on_cpu():
        yield sized
