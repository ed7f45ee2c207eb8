"""Times one new token: the decode kernel beside torch's SDPA and a copy, and tokens/s of GPT-2. `bench.py mode=decode`

Shapes: B sequences, H query heads, H_kv key/value heads, D head size, T_k keys.
    q (B, H, 1, D)    k, v (B, H_kv, T_k, D)

Attention of one token reads each key and value once and computes little. So its speed is that of the memory, and the
measure is a copy of as many bytes: half of them read, half written.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.problem import Problem
from lab.files import Results
from lab.meter import median_ms
from lab.settings import Bench
from model.abilities import resolve, why_not
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from sampling.cache import PAGE, KVCache, decode
from sampling.generate import Sampler, generate, run_prompts
from training.machine import DTYPES, pick_device, pick_dtype

COLUMNS = ["commit", "device", "torch", "triton", "dtype", "case", "B", "H", "H_kv", "D", "T_k", "name", "ms"]
COLUMNS += ["gb_per_s", "of_copy", "tokens_per_s"]
# case -> B, T_k, H, H_kv, D
SHAPES = {
    "plain-32x4k": (32, 4096, 12, 12, 64),
    "plain-1x256k": (1, 262_144, 12, 12, 64),
    "grouped-32x4k": (32, 4096, 32, 8, 128),
    "grouped-1x256k": (1, 262_144, 32, 8, 128),
}
SMALL = {"laptop": (2, 1024, 4, 2, 32)}  # for a CPU
LENGTHS = {"gpt2-1k": 1024, "gpt2-64k": 65_536}  # tokens of context before the first new one
WARM_UP, TOKENS = 20, 400  # tokens that are not timed, and those that are


def race_decode(cfg: Bench) -> None:
    """Prints and appends the rows to decode.csv in the folder out: attention of one token, and on a GPU whole tokens.

    Raises ValueError for a decode.csv of other columns, RuntimeError if the kernel is wrong.
    """
    device = pick_device(cfg.device)
    dtype = DTYPES[pick_dtype("auto", device)]
    results = Results(Path(cfg.out), "decode.csv", COLUMNS)
    results.begin(device, str(dtype)[6:])
    shapes = SHAPES if device.type == "cuda" else SMALL
    found = [attention_rows(name, shape, dtype, device) for name, shape in shapes.items()]
    if device.type == "cuda":
        found += [token_rows(name, T, dtype, device) for name, T in LENGTHS.items()]
    for row in (row for part in found for row in part):
        share = f"{row['of_copy']:8.1%} of copy" if "of_copy" in row else ""
        speed = f"{row['gb_per_s']:10.1f} GB/s" if "gb_per_s" in row else f"{row['tokens_per_s']:10,} tok/s"
        print(f"  {row['case']:16}{row['name']:10}{row['ms']:10.4f} ms{speed}{share}", flush=True)
        results.append([row])
    results.end()


def attention_rows(
    case: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> Iterator[dict[str, Any]]:
    """The rows of a copy, ours (the kernel on a GPU, with keys in buffers and in pages, and plain PyTorch) and SDPA."""
    B, T_k, H, H_kv, D = shape
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(B, H, 1, D, dtype=dtype, device=device, generator=generator)
    keys, values = torch.randn(2, B * H_kv, T_k, D, dtype=dtype, device=device, generator=generator)
    k, v = (x.view(B, H_kv, T_k, D) for x in (keys, values))
    problem = Problem.of(1, T_k, D**-0.5)
    new = torch.empty_like(keys)
    actions: dict[str, Callable[[], Tensor]] = {
        "copy": lambda: new.copy_(keys),  # as many bytes as in keys and values, read and written
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=H != H_kv),
        "plain": lambda: decode(q, keys, values, problem),
    }
    if not why_not("decode", {"attention=sdpa": "attention=sdpa"}, device, dtype, D):
        from sampling.decode import decode as kernel  # imported here: triton is not installed everywhere

        last = k[:, :, -1:].clone(), v[:, :, -1:].clone()  # the new token has the last slot
        position = torch.full((B,), T_k - 1, device=device)
        tickets = torch.zeros(B * H_kv, dtype=torch.int32, device=device)
        actions["kernel"] = lambda: kernel(q, *last, keys, values, position, problem, tickets)
        # The same memory as pages in any order.
        table = torch.randperm(B * T_k // PAGE, device=device, generator=generator).view(B, -1).int()
        pages = keys.view(-1, H_kv, PAGE, D), values.view(-1, H_kv, PAGE, D)
        actions["paged"] = lambda: kernel(q, *last, *pages, position, problem, tickets, None, None, (table, T_k))
        check(actions["kernel"](), actions["plain"](), decode(q.double(), keys.double(), values.double(), problem))
    copy_speed = 0.0
    for name, action in actions.items():
        ms = median_ms(action, device)
        speed = 2 * keys.nbytes / ms / 1e6
        copy_speed = copy_speed or speed
        row = {"case": case, "B": B, "H": H, "H_kv": H_kv, "D": D, "T_k": T_k, "name": name, "ms": ms}
        yield row | {"gb_per_s": round(speed, 1), "of_copy": round(speed / copy_speed, 4)}


def check(found: Tensor, plain: Tensor, right: Tensor) -> None:
    """RuntimeError if the kernel's error is more than twice that of plain PyTorch, plus twice the rounding."""
    error, allowed = ((x.double() - right).abs().max() for x in (found, plain))
    allowed = 2 * (allowed + torch.finfo(found.dtype).eps * right.abs().max())
    if not error <= allowed:
        raise RuntimeError(f"sampling/decode.py is further from float64 than {allowed:.3g}: {error:.3g}")


def token_rows(case: str, T: int, dtype: torch.dtype, device: torch.device) -> Iterator[dict[str, Any]]:
    """The rows of GPT-2 124M with random weights, after a prompt of T random tokens: recorded as sample.py has it, with
    a cache in buffers and in pages, and from Python with the cache in plain PyTorch."""
    torch.manual_seed(0)
    config = GPTConfig(context_length=T + WARM_UP + TOKENS, vocab_size=50_257, vocab_multiple=64)
    model = GPT(config, resolve(AttentionConfig(), device.type)).to(device, dtype).eval()
    prompt = torch.randint(50_257, (1, T), device=device)
    shape = {"case": case, "B": 1, "H": config.n_head, "H_kv": config.n_kv_head, "D": config.head_size, "T_k": T}
    made = {"recorded": recorded(model, prompt), "paged": recorded(model, prompt, PAGE), "eager": eager(model, prompt)}
    for name, tokens in made.items():
        for _ in range(WARM_UP):
            next(tokens)
        started = time.perf_counter()
        for _ in range(TOKENS):
            next(tokens)
        seconds = (time.perf_counter() - started) / TOKENS
        yield shape | {"name": name, "ms": seconds * 1e3, "tokens_per_s": round(1 / seconds)}


def recorded(model: GPT, prompt: Tensor, page: int | None = None) -> Iterator[int]:
    """New tokens, as sample.py makes them."""
    yield from map(int, generate(model, prompt, WARM_UP + TOKENS, Sampler(), cache=KVCache(model, 1, page=page)))


@torch.inference_mode()
def eager(model: GPT, prompt: Tensor) -> Iterator[int]:
    """New tokens without a kernel of ours and without a graph: Python launches every operation."""
    cache = KVCache(model, 1, kernel=False)
    token = Sampler().choose(run_prompts(model, list(prompt), cache))
    while True:
        yield int(token)
        token = Sampler().choose(model.next_logits(token[:, None], cache.advance()))
