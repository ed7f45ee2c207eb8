"""Checks attention, then times it and measures its memory. Or counts words moved, or times whole training steps.

    python bench.py                               the race: large cases on a GPU, small ones on a CPU
    python bench.py window=256 kv_heads=1         a window; grouped heads
    python bench.py mode=traffic                  words moved between slow memory and chip, counted and predicted
    python bench.py mode=step peer=MODEL_PY       the step of train.py beside one of nanoGPT's model.py

The race compares o and all gradients with naive in float64. If one of ours is wrong, it ends; a peer that is wrong is
left out. Times are medians, on a GPU with a cleared L2 cache. MiB is the peak memory, beyond the inputs.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from conf.keys import check, key
from lab.peers import IMPLS, Case
from lab.race import race
from lab.step import compare_steps
from lab.traffic import traffic
from training.config import command
from training.machine import pick_device

GPU = torch.cuda.is_available()
LENGTHS = {
    "race": [1024, 4096, 16384, 65536] if GPU else [512, 1024, 2048, 4096],
    "traffic": [512, 1024, 2048, 4096],
    "step": [1024, 8192, 32768, 65536] if GPU else [256],
}


@dataclass
class Bench:
    mode: str = key("race", among="race | traffic | step")
    impls: list[str] = key(list(IMPLS), "race: who races", among=" | ".join(IMPLS))
    lengths: list[int] = key([], "T, tokens per sequence; []: LENGTHS of bench.py", least=1)
    head_sizes: list[int] = key([64, 128] if GPU else [32], "race, traffic: D, the size of a head", least=1)
    heads: list[int] = key([12, 16] if GPU else [2], "race: H, a number for each head size", least=1)
    kv_heads: int | None = key(None, "race: heads of k and v, a divisor of heads; null: as many as heads", least=1)
    tokens: int = key(32768 if GPU else 1, "race: tokens per batch; B = max(1, tokens // T)", least=1)
    causal: list[bool] = key([True], "race, traffic: [true] | [false] | [true,false]")
    window: int | None = key(None, "race: keys that a query sees, itself included", least=2)
    dropout_p: list[float] = key([0.0, 0.1], "race: probability of dropping an attention weight", least=0, below=1)
    dtype: str = key("bf16" if GPU else "float32", "race: of q, k and v", among="float32 | bf16 | fp16")
    on_chip: list[int] = key([4096, 8192, 16384, 32768], "traffic: M, words that the chip holds", least=1)
    peer: str = key("", "step: path of nanoGPT's model.py")
    device: str = key("auto", "auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps")
    out: str = key("runs/bench", "race: the folder for results.csv and pictures", least=1)

    def __post_init__(self):
        check(self)
        self.lengths = sorted(self.lengths or LENGTHS[self.mode])
        if len(self.heads) != len(self.head_sizes):
            raise ValueError(f"heads={self.heads}: give one for each of head_sizes={self.head_sizes}")


def bench(cfg: Bench) -> None:
    device = pick_device(cfg.device)
    if cfg.mode == "race":
        sizes = zip(cfg.head_sizes, cfg.heads, strict=True)
        cases = [
            Case(max(1, cfg.tokens // T), H, T, D, causal, p, cfg.kv_heads, cfg.window)
            for (D, H), p, causal, T in product(sizes, cfg.dropout_p, cfg.causal, cfg.lengths)
        ]
        race(cases, cfg.impls, device, cfg.dtype, Path(cfg.out))
    elif cfg.mode == "step":
        if Path(cfg.peer).suffix != ".py":
            raise ValueError("mode=step needs peer=PATH of nanoGPT's model.py")
        compare_steps(cfg.lengths, cfg.peer, device)
    else:
        for D, causal in product(cfg.head_sizes, cfg.causal):
            traffic(cfg.lengths, D, cfg.on_chip, causal)


if __name__ == "__main__":
    command("bench", Bench, bench)
