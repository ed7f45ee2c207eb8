"""Check, then race and weigh: each attention's speed and memory, side by side in one run; or the words that it moves.

    python bench.py                                    on this machine, small enough for two CPU cores: under a minute
    python bench.py impls=[naive,tiled] lengths=[512,1024,2048,4096,8192] patience=10
    python bench.py lengths=[1024,4096,16384,65536] head_sizes=[64,128] heads=[12,16] tokens=32768 dtype=bf16 block=512
    python bench.py mode=traffic                       words between slow memory and chip, in both loop orders

mode=race. Ours (naive, tiled, triton) and the peers that are there (torch's kernels one by one, FlexAttention,
FlashAttention-4), with and without a causal mask and dropout. Each is compared with naive in float64 first: one of ours
that is wrong ends the bench, a peer that is wrong does not start. Forward and backward are timed apart (medians). Their
FLOPs are counted as everybody does, 4 B H T T D and 2.5 times that, half of it if causal, whatever was really computed.
MiB are the peak of one forward and backward above its inputs. In the table "-" is what an implementation cannot do
(why, is said once), "memory" what did not fit, and "slow" what would have taken longer than patience.

Rows go to results.csv; speed.png has TFLOP/s over length, memory.png the peaks of the first series, drawn where the
batch is the same at every length (tokens=1). All of it in runs/bench (docs/ has those of out=docs).

mode=traffic. One forward of one head, not causal, its loads and stores counted tile by tile as they happen, beside what
the papers predict; to traffic.csv and traffic.png. M, the words that the chip holds, sets the tiles as the first paper
does: block_n = M / 4D and block_m = min(block_n, D).
"""

if __name__ == "__main__":  # Ctrl-C during the imports, which take seconds, leaves at once and without a traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

from lab.race import DTYPES, IMPLS, race
from lab.traffic import traffic
from model.dropout import drop_threshold
from training import config
from training.machine import pick_device

TRAFFIC_READS = ("mode", "lengths", "head_sizes", "on_chip", "out")


@dataclass
class Config:
    """Every key of the command line. Raises ValueError for values that cannot be, and for keys that the mode
    does not read."""

    mode: str = "race"  # race (speed and memory) | traffic (words between slow memory and chip)
    impls: list[str] | None = None  # of naive, tiled, triton and the peers; None: all that run here
    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096])  # T, tokens of a sequence
    head_sizes: list[int] = field(default_factory=lambda: [32])  # D, the size of a head
    heads: list[int] = field(default_factory=lambda: [2])  # how many, for each head size, or one number for all
    tokens: int = 1  # of a batch, B = max(1, tokens // T); 32768 fill a GPU, one short sequence does not
    causal: list[bool] = field(default_factory=lambda: [True, False])  # with a causal mask, without one, or both
    dropout_p: list[float] = field(default_factory=lambda: [0.0, 0.1])  # shares of the weights that are dropped
    dtype: str = "float32"  # of q, k and v: float32 | bf16 | fp16
    block: int = 128  # tile size of tiled, its block_m and block_n
    patience: float = 1.0  # seconds that a forward and backward may take, as the length before it predicts
    on_chip: list[int] = field(default_factory=lambda: [4096, 8192, 16384, 32768])  # traffic: words that the chip holds
    device: str = "auto"  # auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps
    out: str = "runs/bench"  # folder of tables and pictures

    def __post_init__(self):
        if self.mode not in ("race", "traffic"):
            raise ValueError(f"mode={self.mode} is not known; choose race or traffic")
        if not self.out:
            raise ValueError("out= is empty; give a folder or leave it out")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype} is not known; choose {', '.join(DTYPES)}")
        for key in fields(self):
            usual = key.default if key.default_factory is MISSING else key.default_factory()
            read = key.name in TRAFFIC_READS if self.mode == "traffic" else key.name != "on_chip"
            if not read and getattr(self, key.name) != usual:
                raise ValueError(
                    f"{key.name}={getattr(self, key.name)}: mode={self.mode} does not read it; leave it out"
                )
        for name in ("impls", "lengths", "head_sizes", "heads", "causal", "dropout_p", "on_chip"):
            if getattr(self, name) == []:
                raise ValueError(f"{name}=[]: nothing to measure; give at least one")
        for name in self.impls or []:
            if name not in IMPLS:
                raise ValueError(f"impls={self.impls}: {name} is not known; choose {', '.join(IMPLS)}")
        numbers = {"tokens": self.tokens, "block": self.block}
        for name in ("lengths", "head_sizes", "heads"):
            numbers |= {f"{name}[{i}]": value for i, value in enumerate(getattr(self, name))}
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if len(self.heads) not in (1, len(self.head_sizes)):
            raise ValueError(
                f"heads={self.heads} for head_sizes={self.head_sizes}: give one for each head size, or one for all"
            )
        if not self.patience > 0:
            raise ValueError(f"patience={self.patience} must be above 0 seconds")
        for p in self.dropout_p:
            drop_threshold(p)
        if self.mode == "traffic":
            if len(self.head_sizes) > 1:
                raise ValueError(f"head_sizes={self.head_sizes}: mode=traffic counts for one; give one")
            for words in self.on_chip:
                if words < 4 * self.head_sizes[0]:
                    raise ValueError(
                        f"on_chip={words} holds no row of q, k, v and o: use {4 * self.head_sizes[0]} or more"
                    )


def main(cfg: Config) -> None:
    """Races or counts. ValueError for what the user can put right; RuntimeError where one of ours is wrong."""
    match cfg.mode:
        case "race":
            heads = cfg.heads * len(cfg.head_sizes) if len(cfg.heads) == 1 else cfg.heads
            race(
                impls=cfg.impls,
                lengths=cfg.lengths,
                sizes=list(zip(cfg.head_sizes, heads, strict=True)),
                tokens=cfg.tokens,
                causal=cfg.causal,
                dropout_p=cfg.dropout_p,
                dtype=cfg.dtype,
                block=cfg.block,
                patience=cfg.patience,
                device=pick_device(cfg.device),
                out=Path(cfg.out),
            )
        case "traffic":
            traffic(cfg.lengths, cfg.head_sizes[0], cfg.on_chip, Path(cfg.out))


if __name__ == "__main__":
    config.run(main, Config, "bench")
