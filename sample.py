"""Write text with a trained model, token by token.

    python sample.py                                      from the newest run
    python sample.py run=NAME prompt='def ' num_samples=3
    python sample.py run=NAME prompt_file=start.txt       a long prompt
    python sample.py run=NAME temperature=0 top_p=0.9 top_k=50 max_new_tokens=1000
    python sample.py run=NAME checkpoint=last impl=naive
    python sample.py init_from=gpt2                       from a model of Hugging Face, or a folder of safetensors
    python sample.py run=NAME export=FOLDER               writes the model for transformers, instead of text
    python sample.py run=NAME max_new_tokens=5000 past_context=half    past the model's context, still fast

The checkpoint holds the model, the tokenizer and the attention settings. The training data is not needed.
"""

if __name__ == "__main__":  # The imports take seconds. Ctrl-C during them exits at once, without a traceback.
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os
import re
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from data.prepare import DataConfig
from data.tokenizer import END_OF_TEXT, TextStream, encode, from_json
from model.attention import AttentionConfig
from model.generate import PAST_CONTEXT, Sampler, generate
from training import checkpoint, config, exchange
from training.machine import pick_device, pick_dtype
from training.metrics import printable, stamp

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IN_WORDS = {  # past_context=, once it has come to that
    "slide": "past the context of {0} tokens, the last {0} run again for each new one; past_context=half is faster",
    "half": "each time the context of {} tokens was full, the model went on from its last half",
    "stop": "stopped where the context of {} tokens was full; past_context=slide or past_context=half writes on",
}


@dataclass
class Config:
    """Every key of the command line, with its default. Raises ValueError for a value that is not allowed."""

    run: str = "latest"  # name or folder of the run; latest: the run with the newest checkpoint
    checkpoint: str = "best"  # best (lowest validation loss) | last | a name like step_000100 | a path
    runs: str = "runs"  # folder of all runs
    # weights instead of a run's: a name on Hugging Face (gpt2) or a folder of safetensors
    init_from: str | None = None
    export: str | None = None  # folder to write the model into, as transformers loads it; None: write text
    prompt: str = ""  # text to continue; empty: start a new document
    prompt_file: str | None = None  # UTF-8 file with the prompt; None: use prompt=
    num_samples: int = 1  # number of samples, each with its own seed
    max_new_tokens: int = 300  # maximum length of a sample in tokens; it ends earlier if the model ends the document
    temperature: float = 0.8  # divides the logits; lower is less random, 0 always takes the most likely token
    top_k: int | None = None  # sample from the k most likely tokens only; None: from all
    top_p: float = 1.0  # sample from the most likely tokens that add up to this probability; 1: from all
    seed: int = 1337  # random seed of the first sample; each further sample adds 1 to it
    device: str = "auto"  # auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps
    dtype: str = "auto"  # of the weights: auto (bf16 if the GPU supports it, else float32) | float32 | bf16 | fp16
    impl: str | None = None  # attention: naive | tiled | triton | sdpa; None: attention.impl of the training
    cache: bool = True  # keep the keys and values of past tokens; false: run the whole context again for each token
    past_context: str = "slide"  # slide (last tokens, run again for each new one) | half (fast: forgets half) | stop

    def __post_init__(self):
        for name in ("num_samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.prompt and self.prompt_file is not None:
            raise ValueError(f"prompt= and prompt_file={self.prompt_file} are both given; leave one out")
        if self.init_from is not None and (self.run, self.checkpoint) != (Config.run, Config.checkpoint):
            raise ValueError(f"init_from={self.init_from} and run= or checkpoint= are both given; leave one out")
        for name in ("init_from", "export"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}= is empty; give it a value or leave it out")
        weights = ("run", "checkpoint", "runs", "init_from", "export")
        unused = [f.name for f in fields(self) if f.name not in weights and getattr(self, f.name) != f.default]
        if self.export is not None and unused:
            raise ValueError(f"export={self.export} writes no text: leave out {unused[0]}=")
        if self.past_context not in PAST_CONTEXT:
            raise ValueError(f"past_context={self.past_context} is not known; choose slide, half or stop")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype={self.dtype} is not known; choose auto or {', '.join(DTYPES)}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is outside [0, 2**63)")
        Sampler(self.temperature, self.top_k, self.top_p)  # checks these three before the first job of a sweep starts


def main(cfg: Config) -> None:
    """Prints the samples on stdout and the checkpoint's name on stderr. ValueError for a user's mistake."""
    sampler = Sampler(cfg.temperature, cfg.top_k, cfg.top_p)
    text = cfg.prompt if cfg.prompt_file is None else read_prompt(cfg.prompt_file)
    device = pick_device(cfg.device)
    trained = exchange.read(find(cfg), cfg.init_from or "")
    if cfg.export is not None:
        architecture = exchange.export(trained, Path(cfg.export))
        print(f"{trained.path} is in {cfg.export} as {architecture}", file=sys.stderr)
        return
    encoding = from_json(trained.tokenizer)

    attention = config.from_dict(AttentionConfig, trained.state["config"]["attention"])
    if cfg.impl is not None:
        attention = replace(attention, impl=cfg.impl, order=AttentionConfig.order)  # others than tiled refuse `order`
    model = trained.network(attention, device).to(DTYPES[pick_dtype(cfg.dtype, device)]).eval()

    broken = trained.state["broken"]
    loss = trained.state["val_loss"]
    print(f"{stamp(broken)}{trained.path}" + (f", validation loss {loss:.4f}" if loss else ""), file=sys.stderr)
    if broken:
        print(f"{stamp(broken)}this model's attention is broken on purpose: so is its text", file=sys.stderr)

    # As in training, a document begins after an end-of-text token.
    end = encoding.encode_single_token(END_OF_TEXT)
    prompt = [trained.state.get("begin", end), *encode(encoding, text).tolist()]
    if cfg.prompt_file is not None:
        print(f"prompt: {len(prompt) - 1} tokens from {cfg.prompt_file}", file=sys.stderr)
    if len(prompt) > (context := model.config.context_length):
        if cfg.past_context == "stop":
            raise ValueError(
                f"past_context=stop: the prompt's {len(prompt) - 1} tokens leave no room in a context of {context}; "
                "use past_context=slide or past_context=half"
            )
        print(f"of the prompt's {len(prompt) - 1} tokens, the model sees only the last {context}", file=sys.stderr)
    if cfg.cache and (refused := model.cache_refusal()) is not None:
        print(f"{stamp(broken)}sampling without a cache, {refused}", file=sys.stderr)
    started, made, first, past = time.perf_counter(), 0, 0.0, False
    for number in range(cfg.num_samples):
        if cfg.num_samples > 1 or broken:
            print(f"{stamp(broken)}--- sample {number + 1} of {cfg.num_samples}", flush=True)
        generator = torch.Generator(device).manual_seed(cfg.seed + number)  # each sample can be repeated alone
        stream = TextStream(encoding)
        print(printable(text), end="", flush=True)
        idx = torch.tensor([prompt], device=device)  # (1, T)
        new = generate(
            model, idx, cfg.max_new_tokens, sampler, generator, cache=cfg.cache, past_context=cfg.past_context
        )
        length, ended = len(prompt), False
        for token in map(int, new):
            past |= length > context
            made, length, first = made + 1, length + 1, first or time.perf_counter() - started
            if ended := token == end:
                break
            print(printable(stream.feed(token)), end="", flush=True)
        past |= cfg.past_context == "stop" and not ended and length < len(prompt) + cfg.max_new_tokens
        print(printable(stream.flush()), flush=True)
    if past:
        print(stamp(broken) + IN_WORDS[cfg.past_context].format(context), file=sys.stderr)
    speed = made / (time.perf_counter() - started)
    print(f"{stamp(broken)}{made} tokens, {speed:,.0f} tokens/s, the first after {first:.3f} s", file=sys.stderr)


def read_prompt(path: str) -> str:
    """The text of a file with its line ends, without a byte order mark. ValueError if it cannot be read as UTF-8."""
    try:
        return Path(os.path.expanduser(path)).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"prompt_file={path} cannot be read ({error.strerror}); give a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt_file={path} is not UTF-8 at byte offset {error.start}; convert it") from error


def find(cfg: Config) -> Path:
    """The folder of the weights that init_from=, or run= and checkpoint=, name. ValueError if there is none."""
    if cfg.init_from is not None:
        return exchange.find(cfg.init_from, Path(cfg.runs), Path(DataConfig.cache))
    if cfg.checkpoint == "best":
        return checkpoint.find_best(cfg.run, Path(cfg.runs))
    named = Path(cfg.checkpoint)
    if cfg.checkpoint != "last" and (named.exists() or not re.fullmatch(r"step_\d+", cfg.checkpoint)):
        return named
    last = checkpoint.find_resume(cfg.run, Path(cfg.runs), None, option="run")
    return last if cfg.checkpoint == "last" else last.with_name(cfg.checkpoint)


if __name__ == "__main__":
    config.run(main, Config, "sample")
