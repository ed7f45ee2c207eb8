"""Checks attention, then times it and measures its memory. Or counts words moved, or times steps or new tokens.

    python bench.py                                    on this machine, small enough for two CPU cores
    python bench.py impls=[naive,tiled] lengths=[512,1024,2048,4096,8192] patience=10
    python bench.py lengths=[1024,4096,16384,65536] head_sizes=[64,128] heads=[12,16] tokens=32768 dtype=bf16 block=512
    python bench.py window=256 kv_heads=1              masks: window=, documents=, block_mask=; grouped heads: kv_heads=
    python bench.py mode=pictures                      draws an earlier race with the same keys again; needs no GPU
    python bench.py mode=traffic                       words moved between slow memory and chip, in both loop orders
    python bench.py mode=traffic causal=[true] window=256 backward=true lengths=[512,1024,2048]
    python bench.py mode=train                         whole training steps, beside a plain GPT-2 in torch
    python bench.py mode=train cases=[nano,shakespeare,gpt2-1k] peer=MODEL_PY_OF_NANOGPT
    python bench.py mode=length tokens=4096            our training step by length and implementation of attention
    python bench.py mode=decode                        one new token in sampling, beside torch's SDPA and a copy
    python bench.py mode=roofline lengths=[2048]       naive attention operation by operation, beside the others

mode=race. Runs ours (naive, tiled, triton) and the peers that are installed (torch's kernels one by one, FlexAttention,
FlashAttention-4), with and without a causal mask and dropout. First it compares each with naive in float64. If one of
ours is wrong, the bench ends; a peer that is wrong is left out. Forward and backward are timed apart (medians). On a
GPU each implementation has three turns at each length. Of each pass the median of the three counts. FLOPs count the
visible pairs of query and key, however many were computed: 4 B H D per pair in the forward, 2.5 times that in the
backward. A causal mask alone counts as half of T x T, as is usual.

A line of the table is one implementation at one length. It has ms and FLOP/s of each pass; their share of the peak, on
a GPU with a known peak and in 16 bits; the time relative to the fastest; and MiB, the peak memory of one forward and
backward beyond the inputs. Instead of numbers the line may have a word:
    -         it cannot do this; the reason is printed once
    memory    it ran out of memory
    slow      it would have taken longer than patience

Rows go to results.csv. speed.png shows FLOP/s over length. memory.png shows the peaks of the first series; it is drawn
if the batch is the same at every length (tokens=1). All go to runs/bench, or to out= (docs/ was made by out=docs).

mode=pictures. Takes the keys of a race and draws its pictures from results.csv in the folder out. If traffic.csv is
there too, it draws traffic.png.

mode=traffic. Counts the loads and stores of one forward of one head (with backward=true also of one backward) and
prints them beside what the papers predict. Without a causal mask unless causal= asks for one. Writes traffic.csv and
traffic.png. M, the number of words that the chip holds, sets the tiles as in the first paper: block_n = M / 4D and
block_m = min(block_n, D).

mode=train. Times whole training steps of ours and of a plain GPT-2 in turn: torch's SDPA, torch.compile on a GPU, all
logits at once. Both have the same model, batches and optimizer settings. The plain loop reads its loss every 10 steps.
A line is one side: ms per step (the median of five turns), tokens/s and the peak memory of its tensors. Our line also
has our speed relative to the other side (the median, the slowest and the fastest turn). Below are the parts of our
step, from a profile of three more steps: the time of its kernels (on a CPU of torch's ops) by their purpose, and the
time in which none ran. Rows go to steps.csv.
    laptop       4 layers, C=128, T=256, B=16: for two CPU cores, and the default there
    nano         the same with B=64
    shakespeare  6 layers, C=384, T=256, B=64, dropout 0.2: the model of experiment=shakespeare_gpu
    gpt2-1k      GPT-2 124M with T=1,024 and 65,536 tokens per step; also gpt2-8k, gpt2-32k and gpt2-64k, longer

mode=length. Times our training step with each implementation of attention at each of lengths=. A step has tokens=
tokens, so the batch has fewer sequences where they are longer. On a GPU the model is that of experiment=long_16k,
elsewhere that of experiment=long_laptop. Rows go to lengths.csv.

mode=decode. Times attention of one new token against T_k cached keys. A line has GB/s of keys and values, and its share
of the speed of a copy of as many bytes. plain is decode() of sampling/cache.py, kernel that of sampling/decode.py. On a
GPU it then times whole tokens of GPT-2 124M with random weights: recorded as one CUDA graph, as in sample.py, and
eager, launched from Python with plain. Rows go to decode.csv.

mode=roofline. Times each operation of naive's forward by itself, with the bytes of its inputs and results, then naive,
tiled, triton and sdpa whole. A copy and a matrix product measure the device's two limits. Without a mask unless
causal=[true]. Rows go to roofline.csv; roofline.png is of the longest length.
"""

if __name__ == "__main__":  # before the imports, which load torch
    from training import start

    start.begin()

from dataclasses import MISSING, dataclass, field, fields
from itertools import product
from pathlib import Path

from data.text import counted
from lab.decode import race_decode
from lab.entrants import IMPLS, Case
from lab.race import DTYPES, pictures, race
from lab.roofline import roofline
from lab.steps import CASES, by_length, train
from lab.traffic import traffic
from model.attention import AttentionConfig
from model.dropout import drop_threshold
from training import config
from training.machine import is_out_of_memory, pick_device

MODES = ("race", "pictures", "traffic", "train", "length", "decode", "roofline")
OF_STEPS = ("naive", "tiled", "sdpa", "triton")  # the attention of train.py, for mode=length
TRAFFIC_READS = ("mode", "lengths", "head_sizes", "causal", "window", "backward", "on_chip", "out")
TRAIN_READS = ("mode", "cases", "impl", "bias", "peer", "device", "out")
LENGTH_READS = ("mode", "lengths", "impls", "tokens", "device", "out")
DECODE_READS = ("mode", "device", "out")
ROOFLINE_READS = ("mode", "lengths", "head_sizes", "heads", "tokens", "causal", "dtype", "device", "out")
NOT_IN_RACE = ("on_chip", "backward", "cases", "impl", "bias", "peer")
NOT_IN_PICTURES = (*NOT_IN_RACE, "block", "patience", "device")


@dataclass
class Config:
    """Every key of the command line. Raises ValueError for invalid values, and for keys that the mode does not
    read."""

    # race | pictures (of it) | traffic | train | length | decode (new tokens) | roofline
    mode: str = "race"
    impls: list[str] | None = None  # a list of naive, tiled, triton and the peers; None: all that run here
    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096])  # T, tokens per sequence
    head_sizes: list[int] = field(default_factory=lambda: [32])  # D, the size of a head
    heads: list[int] = field(default_factory=lambda: [2])  # H: one number for each head size, or one for all
    kv_heads: int | None = None  # heads of k and v, a divisor of heads; None: as many as heads
    tokens: int = 1  # tokens per batch: B = max(1, tokens // T) sequences; 32768 fill a GPU
    # causal mask: [true] | [false] | [true,false] (both); None: both, in traffic [false]
    causal: list[bool] | None = None
    window: int | None = None  # keys that a query sees, itself included
    documents: int | None = None  # mean length of a document in tokens; a token sees its own document only
    block_mask: list[str] | None = None  # as attention.block_mask, stretched over each length: [x..,xx.,.xx]
    dropout_p: list[float] = field(default_factory=lambda: [0.0, 0.1])  # probability of dropping an attention weight
    dtype: str = "float32"  # of q, k and v: float32 | bf16 | fp16
    block: int = 128  # tile size of tiled, its block_m and block_n
    patience: float = 1.0  # seconds: a forward and backward that is expected to take longer is left out
    on_chip: list[int] = field(default_factory=lambda: [4096, 8192, 16384, 32768])  # traffic: words that the chip holds
    backward: bool = False  # traffic: count the backward too
    # train: laptop, nano, shakespeare, gpt2-1k (-8k, -32k, -64k); None: all for the device
    cases: list[str] | None = None
    impl: str = "auto"  # train: our attention: auto | naive | tiled | sdpa | triton
    bias: bool | None = None  # train: whether both models have biases; None: as in the case
    peer: str | None = None  # train: path of nanoGPT's model.py, to time instead of the plain GPT-2
    device: str = "auto"  # auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps
    out: str = "runs/bench"  # the folder for tables and pictures

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode} is not known; choose {', '.join(MODES)}")
        if not self.out:
            raise ValueError("out= is empty; give a folder or leave it out")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype} is not known; choose {', '.join(DTYPES)}")
        for key in fields(self):
            usual = key.default if key.default_factory is MISSING else key.default_factory()
            read = {
                "race": key.name not in NOT_IN_RACE,
                "pictures": key.name not in NOT_IN_PICTURES,
                "traffic": key.name in TRAFFIC_READS,
                "train": key.name in TRAIN_READS,
                "length": key.name in LENGTH_READS,
                "decode": key.name in DECODE_READS,
                "roofline": key.name in ROOFLINE_READS,
            }
            if not read[self.mode] and getattr(self, key.name) != usual:
                raise ValueError(
                    f"{key.name}={getattr(self, key.name)}: mode={self.mode} does not read it; leave it out"
                )
        for name in ("impls", "lengths", "head_sizes", "heads", "causal", "dropout_p", "on_chip", "cases"):
            if getattr(self, name) == []:
                raise ValueError(f"{name}=[]: nothing to measure; give at least one")
        known = OF_STEPS if self.mode == "length" else IMPLS
        for name in self.impls or []:
            if name not in known:
                raise ValueError(f"impls={self.impls}: {name} is not known; choose {', '.join(known)}")
        for name in self.cases or []:
            if name not in CASES:
                raise ValueError(f"cases={self.cases}: {name} is not known; choose {', '.join(CASES)}")
        numbers = {"tokens": self.tokens, "block": self.block}
        for name in ("lengths", "head_sizes", "heads"):
            numbers |= {f"{name}[{i}]": value for i, value in enumerate(getattr(self, name))}
        numbers |= {name: value for name in ("kv_heads", "documents") if (value := getattr(self, name)) is not None}
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
            if value >= 2**31:
                raise ValueError(f"{name}={value} must be below 2**31")
        try:
            AttentionConfig(self.impl, window=self.window, block_mask=self.block_mask)
        except ValueError as error:  # it names the keys as train.py does
            raise ValueError(str(error).replace("attention.", "")) from error
        if len(self.heads) not in (1, len(self.head_sizes)):
            raise ValueError(
                f"heads={self.heads} for head_sizes={self.head_sizes}: give one for each head size, or one for all"
            )
        for H in self.heads:
            if self.kv_heads is not None and H % self.kv_heads:
                raise ValueError(f"kv_heads={self.kv_heads}: heads={H} is no multiple of it; use a divisor")
        if not self.patience > 0:
            raise ValueError(f"patience={self.patience} must be above 0 seconds")
        for p in self.dropout_p:
            drop_threshold(p)
        if self.mode == "roofline":
            for name in ("head_sizes", "heads", "causal"):
                if len(getattr(self, name) or []) > 1:
                    raise ValueError(f"{name}={getattr(self, name)}: mode=roofline measures one; give one")
        if self.mode == "traffic":
            if len(self.head_sizes) > 1:
                raise ValueError(f"head_sizes={self.head_sizes}: mode=traffic counts for one; give one")
            for words in self.on_chip:
                if words < 4 * self.head_sizes[0]:
                    raise ValueError(
                        f"on_chip={words} holds no row of q, k, v and o: use {4 * self.head_sizes[0]} or more"
                    )

    def series(self) -> list[list[Case]]:
        """The cases of the race: a list for each head size, dropout and mask, shortest first."""
        heads = self.heads * len(self.head_sizes) if len(self.heads) == 1 else self.heads
        picture = None if self.block_mask is None else tuple(self.block_mask)
        return [
            [
                Case(B, H, T, D, causal, p, self.kv_heads, self.window, self.documents, picture)
                for T in sorted(set(self.lengths))
                for B in [max(1, self.tokens // T)]
            ]
            for (D, H), p, causal in product(
                zip(self.head_sizes, heads, strict=True), self.dropout_p, self.causal or [True, False]
            )
        ]


def main(cfg: Config) -> None:
    """Runs the mode. Raises ValueError for mistakes that the user can correct, RuntimeError if one of ours is wrong."""
    out = Path(cfg.out)
    match cfg.mode:
        case "race":
            race(
                cfg.series(),
                impls=cfg.impls,
                dtype=cfg.dtype,
                block=cfg.block,
                patience=cfg.patience,
                device=pick_device(cfg.device),
                out=out,
            )
        case "pictures":
            pictures(cfg.series(), impls=cfg.impls, dtype=cfg.dtype, out=out)
        case "traffic":
            causal = cfg.causal or [False]
            traffic(cfg.lengths, cfg.head_sizes[0], cfg.on_chip, causal, cfg.window, cfg.backward, out)
        case "train":
            device = pick_device(cfg.device)
            train(cfg.cases, impl=cfg.impl, bias=cfg.bias, peer=cfg.peer, device=device, out=out)
        case "length":
            lengths, device = sorted(set(cfg.lengths)), pick_device(cfg.device)
            try:
                by_length(lengths, cfg.impls, tokens=cfg.tokens, device=device, out=out)
            except (RuntimeError, MemoryError) as error:  # for the batches; out of memory in a step is a line
                if not is_out_of_memory(error):
                    raise
                few = "use shorter lengths= or fewer tokens="
                raise ValueError(f"out of memory with steps of {max(lengths[-1], cfg.tokens)} tokens; {few}") from error
        case "decode":
            race_decode(pick_device(cfg.device), out)
        case "roofline":
            device, masked = pick_device(cfg.device), (cfg.causal or [False])[0]
            for T in sorted(set(cfg.lengths)):
                case = Case(max(1, cfg.tokens // T), cfg.heads[0], T, cfg.head_sizes[0], masked, 0.0)
                try:
                    roofline(case, dtype=cfg.dtype, device=device, out=out)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    size, few = counted(case.B, "sequence"), "use shorter lengths=, fewer heads= or fewer tokens="
                    raise ValueError(f"out of memory with {size} of {T} tokens; {few}") from error


if __name__ == "__main__":
    config.run(main, Config, "bench")
