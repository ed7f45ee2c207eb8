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
    python bench.py mode=learn                         what our recipe and nanoGPT's learn in 150 seconds
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
In a pipe or a file every mode that times or counts ends with a line of JSON, which has its rows.

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

mode=learn. Trains nanoGPT's recipe and ours (lab/learn.py) for seconds= each, with each of seeds=, one run after the
other: on a CPU on data=pystdlib, on a GPU on data=pypackages, which takes half a minute to prepare. A line is one run:
validation bits per byte at its end. learn.csv has each evaluation, and learn.png is drawn from it. `also=` adds
arguments of train.py, for example 'also=data=text data.path=FILE'.

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

from lab.decode import race_decode
from lab.learn import learn
from lab.race import pictures, race
from lab.roofline import rooflines
from lab.settings import Bench as Config
from lab.steps import by_length, train
from lab.traffic import traffic
from training import config

MODES = {"race": race, "pictures": pictures, "traffic": traffic, "train": train, "length": by_length}
MODES |= {"learn": learn, "decode": race_decode, "roofline": rooflines}


def main(cfg: Config) -> None:
    """Runs the mode. Raises ValueError for mistakes that the user can correct, RuntimeError if one of ours is wrong."""
    MODES[cfg.mode](cfg)


if __name__ == "__main__":
    config.run(main, Config, "bench")
