"""Text from a trained model, token by token. Without run= it is the newest run.

    python sample.py run=NAME prompt='def ' num_samples=3 temperature=1 top_k=50
    python sample.py run=NAME prompt_file=start.txt     a long prompt; prompt_file=- reads standard input
    python sample.py checkpoint=hf:gpt2 prompt=Once     a model of the hub; FOLDER: one that transformers wrote
    python sample.py run=NAME context=true              instead of text: what a longer context is worth to the model
    python sample.py run=NAME export=FOLDER             instead of text: the model for transformers
    python sample.py --help                             every key, with its meaning

A checkpoint holds the model, the tokenizer and the configuration; only context=true needs the data.
"""

import training  # noqa: F401 (before torch, because it sets how OpenMP's idle threads wait)

# isort: split
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor

from conf.keys import check, key
from data.tokenizer import beginning, encode, from_json, to_text
from model.generate import Sampler, generate
from model.gpt import GPT
from training import context, huggingface
from training.checkpoint import find_checkpoint, network
from training.config import command
from training.machine import DTYPES, pick_device, pick_dtype


@dataclass
class Config(Sampler):
    """sample.py's keys: the sampler's and these. ValueError for a value that is not allowed."""

    run: str | None = key(None, "name of the run; null: the one that saved last and is not broken", least=1)
    checkpoint: str = key("best", "of the run: best (lowest validation loss) | last; or a path, or hf:NAME", least=1)
    runs: str = key("runs", "folder of all runs", least=1)
    prompt: str = key("", "text to continue; empty: begin a document")
    prompt_file: str | None = key(None, "file with the prompt; -: standard input; null: use prompt=", least=1)
    num_samples: int = key(1, "number of texts; each has its own seed: seed, seed + 1, ...", least=1)
    max_new_tokens: int = key(300, "maximum tokens of a text; it ends earlier at the document's end", least=1)
    context: bool = key(False, "measure what a longer context is worth to the model, with its run's dtype and text")
    export: str | None = key(None, "write the model into this new folder, for transformers", least=1)
    seed: int = key(1337, "seed of the first text", least=0)
    device: str = key("auto", "auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps")
    dtype: str = key("auto", among="auto (bf16 if the GPU supports it, else float32) | float32 | bf16 | fp16")
    impl: str = key("auto", "attention", among="auto (triton if it runs here) | naive | tiled | triton | sdpa")
    cache: bool = key(True, "keep the keys and values of past tokens; false: compute them again for each new one")

    def __post_init__(self):
        check(self)
        if bool(self.prompt) + bool(self.prompt_file) + self.context + bool(self.export) > 1:
            raise ValueError("prompt=, prompt_file=, context= and export= are different things: give one of them")
        if self.run and self.checkpoint not in ("best", "last"):
            raise ValueError(f"run={self.run} and checkpoint={self.checkpoint} are two models: give one of them")


def sample(cfg: Config) -> None:
    """Prints text on standard output and what it is on standard error, or does what is asked for instead."""
    if cfg.checkpoint in ("best", "last"):
        trained = find_checkpoint(cfg.run or "auto", Path(cfg.runs), best=cfg.checkpoint == "best")
    else:
        trained = huggingface.find_weights(cfg.checkpoint, Path(cfg.runs))
    device = pick_device(cfg.device)
    broken, loss = trained.state["broken"], trained.state["val_loss"]
    stamp = f"BROKEN[{broken}] " if broken else ""
    lowest = ", the lowest" if cfg.checkpoint == "best" else ""
    what = (f", validation loss {loss:.4f}{lowest}" if loss else "") + (": its text is worth nothing" if broken else "")
    print(f"{stamp}{trained.path}{what}", file=sys.stderr)
    if cfg.export:
        print(f"{huggingface.export(trained, Path(cfg.export))} is in {cfg.export}", file=sys.stderr)
        return
    model, encoding = network(trained, cfg.impl, device), from_json(trained.tokenizer)
    if cfg.context:
        print(stamp + context.report(model, trained))
        return
    model.to(DTYPES[pick_dtype(cfg.dtype, device)])
    text = cfg.prompt
    if cfg.prompt_file:
        content = sys.stdin.buffer.read() if cfg.prompt_file == "-" else Path(cfg.prompt_file).read_bytes()
        text = content.decode("utf-8-sig")
    begin = trained.state.get("begin") or beginning(encoding)  # a hub model has its own
    prompt = torch.tensor([[*begin, *encode(encoding, text).tolist()]], device=device)
    for number in range(cfg.num_samples):
        head = f"--- sample {number + 1} of {cfg.num_samples}\n" if cfg.num_samples > 1 else ""
        print(stamp + head + text, end="", flush=True)
        write(cfg, model, encoding, prompt, cfg.seed + number)


def write(cfg: Config, model: GPT, encoding: tiktoken.Encoding, prompt: Tensor, seed: int) -> None:
    """Prints what the model writes after the prompt (1, T), and a line end."""
    count, began = -1, time.perf_counter()  # to_text() gives one part more than there are tokens
    generator = torch.Generator(prompt.device).manual_seed(seed)
    tokens = generate(model, prompt, cfg.max_new_tokens, cfg, generator, cfg.cache)
    ids = one_behind(tokens) if prompt.is_cuda else map(int, tokens)
    for part in to_text(encoding, ids):  # ends at the first end of text
        print(part, end="", flush=True)
        count += 1
    print()
    print(f"{count} tokens in {time.perf_counter() - began:.2f} s", file=sys.stderr)


def one_behind(tokens: Iterator[Tensor]) -> Iterator[int]:
    """Tokens (1, 1) of a CUDA GPU as integers. Each is read while the GPU computes the next one."""
    end: Any = None
    sent = ((token.to("cpu", non_blocking=True), torch.cuda.current_stream().record_event()) for token in tokens)
    for (copy, arrived), _ in pairwise(chain(sent, [end])):  # asks for the next token first
        arrived.synchronize()
        yield int(copy)


if __name__ == "__main__":
    command("sample", Config, sample)
