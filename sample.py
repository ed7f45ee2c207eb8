"""Write text with a trained model, token by token.

    python sample.py                                      from the newest run
    python sample.py run=NAME prompt='def ' num_samples=3
    python sample.py run=NAME prompt_file=start.txt       a long prompt; prompt_file=- reads standard input
    python sample.py run=NAME temperature=1 min_p=0.05 repetition_penalty=1.1 max_new_tokens=1000
    python sample.py run=NAME stop='["\\n\\n", "def "]'       ends before one of these
    python sample.py run=NAME interactive=true            talk to it: each line that you type is continued
    python sample.py run=NAME checkpoint=last impl=naive
    python sample.py list_runs=true                       your runs: their size, steps, tokens and validation loss
    python sample.py init_from=gpt2                       from a model of Hugging Face, or a folder of safetensors
    python sample.py init_from=gpt2 hellaswag=10042 dtype=float32    its accuracy on HellaSwag, a known measure
    python sample.py run=NAME export=FOLDER               writes the model for transformers, instead of text
    python sample.py run=NAME max_new_tokens=5000 past_context=half    past the model's context, still fast

The checkpoint holds the model, the tokenizer and the attention settings. The training data is not needed.
"""

if __name__ == "__main__":  # before the imports, which load torch
    from training import start

    start.begin()

import json
import os
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tiktoken import Encoding

from conf.keys import check, key, one_line
from data.download import HELLASWAG_QUESTIONS, hellaswag
from data.prepare import DataConfig
from data.text import counted
from data.tokenizer import TextStream, encode, from_json
from model.attention import AttentionConfig
from model.gpt import GPT
from sampling.cache import PAGE, KVCache, refusal
from sampling.generate import NotFinite, Sampler, Session, generate, tokens_seen
from training import checkpoint, config, exchange, listing
from training.machine import (
    DTYPES,
    is_out_of_memory,
    out_of_memory_as,
    pick_device,
    pick_dtype,
    stop_signals,
    without_stderr,
)
from training.metrics import printable, stamp

WHICH = "run checkpoint runs init_from"  # the keys that choose the weights
LONGEST_PROMPT = 1 << 30  # bytes; a model sees the last few thousand of them
MOST_SAMPLES = 100_000  # each needs a random generator of 5 kB and a text
IN_WORDS = {  # what past_context= has done, said at the end of a text longer than the context
    "slide": "past the context of {0} tokens, the last {0} run again for each new one; past_context=half is faster",
    "half": "each time the context of {} tokens was full, the model went on from its last half",
    "stop": "stopped where the context of {} tokens was full; past_context=slide or past_context=half writes on",
}


@dataclass
class Config(Sampler):
    """Every key of the command line: how the next token is chosen, and these. Raises ValueError for a value that is not
    allowed."""

    run: str = key("latest", "name or folder of the run; latest: the run with the newest checkpoint")
    checkpoint: str = key("best", "best (lowest validation loss) | last | a name like step_000100 | a path")
    runs: str = key("runs", "folder of all runs")
    list_runs: bool = key(False, "list all runs, the newest first, instead of writing text", alone="runs")
    init_from: str | None = key(
        None, "weights instead of a run's: a name on Hugging Face (gpt2) or a folder of safetensors", least=1
    )
    export: str | None = key(
        None, "write the model into this folder, for transformers to load; null: write text", alone=WHICH, least=1
    )
    hellaswag: int = key(
        0,
        "questions of HellaSwag to answer, instead of writing text",
        alone=f"{WHICH} device dtype impl",
        least=0,
        most=HELLASWAG_QUESTIONS,
        usual="0: write text; 10042: all",
    )
    prompt: str = key("", "text to continue; empty: start a new document")
    prompt_file: str | None = key(None, "UTF-8 file with the prompt, - for standard input; null: use prompt=")
    interactive: bool = key(
        False, "continue each line that you type, and keep the cache; Enter alone: write more, Ctrl-D: end"
    )
    num_samples: int = key(1, "number of samples, computed as one batch, each with its own seed", least=1)
    max_new_tokens: int = key(
        300, "maximum length of a sample in tokens; it ends earlier if the model ends the document", least=1
    )
    stop: str | None = key(None, r'a sample ends before this text, or before the first of a list: ["\n\n", "User:"]')
    seed: int = key(
        1337, "random seed of the first sample; each further sample adds 1", needs="temperature", least=0, below=2**63
    )
    device: str = key("auto", "auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps")
    dtype: str = key(
        "auto", "of the weights", among="auto (bf16 if the GPU supports it, else float32) | float32 | bf16 | fp16"
    )
    impl: str | None = key(None, "attention: naive | tiled | triton | sdpa; null: attention.impl of the training")
    cache: str = key(
        "contiguous",
        "past keys and values",
        among="contiguous (a context) | paged (the text alone) | false (none: slow)",
    )
    past_context: str = key(
        "slide",
        "at a full context",
        among="slide (run it again for each token) | half (fast: forget half) | stop",
    )

    def __post_init__(self):
        check(self)
        if self.num_samples > MOST_SAMPLES:
            more = f"num_samples={MOST_SAMPLES} with another seed= for more"
            raise ValueError(f"num_samples={self.num_samples} is more than one batch of {MOST_SAMPLES:,}; use {more}")
        if self.prompt and self.prompt_file is not None:
            raise ValueError(f"prompt= and prompt_file={self.prompt_file} are both given; leave one out")
        if self.init_from is not None and (self.run, self.checkpoint) != (Config.run, Config.checkpoint):
            raise ValueError(f"init_from={self.init_from} and run= or checkpoint= are both given; leave one out")
        if self.run != Config.run and (os.sep in self.checkpoint or Path(self.checkpoint).exists()):
            raise ValueError(f"checkpoint={self.checkpoint} is a path, so run={self.run} is not read; leave it out")
        if self.interactive and self.num_samples > 1:
            raise ValueError(f"interactive=true continues one text: leave out num_samples={self.num_samples}")
        if self.interactive and self.prompt_file == "-":
            raise ValueError("interactive=true and prompt_file=- both read standard input; leave one out")
        self.stops()  # checked before the first job of a sweep starts

    def new_cache(self, model: GPT) -> KVCache | bool:
        """The cache for the samples; False: without one."""
        if self.cache == "false" or refusal(model) is not None:
            return False
        return KVCache(model, self.num_samples, page=PAGE if self.cache == "paged" else None)

    def stops(self) -> list[str]:
        """The texts of stop=. It is a list in JSON if it begins as one of texts does."""
        if self.stop is None:
            return []
        try:
            listed = json.loads(self.stop) if re.match(r'\[\s*"', self.stop) else [self.stop]
        except ValueError as error:
            raise ValueError(f'stop={self.stop} is no list ({error}); write it as ["one", "two"]') from error
        for text in listed:
            if not isinstance(text, str):
                raise ValueError(f"stop={self.stop}: {json.dumps(text)} is no text; write it in quotes")
            if not text:
                raise ValueError(f"stop={self.stop} has an empty text; give texts of at least one character")
        return listed


def main(cfg: Config) -> None:
    """Prints the samples on stdout and the checkpoint's name on stderr. ValueError for a user's mistake."""
    if cfg.list_runs:
        print(listing.table(Path(cfg.runs)))
        return
    text = cfg.prompt if cfg.prompt_file is None else read_prompt(cfg.prompt_file)
    device = pick_device(cfg.device)
    trained = exchange.read(find(cfg), cfg.init_from or "")
    if cfg.export is not None:
        architecture = exchange.export(trained, Path(os.path.expanduser(cfg.export)))
        print(printable(one_line(f"{trained.path} is in {cfg.export} as {architecture}")), file=sys.stderr)
        return
    encoding = from_json(trained.tokenizer)

    attention = config.from_dict(AttentionConfig, trained.state["config"]["attention"])
    if cfg.impl is not None:
        # Most others refuse the options of one.
        attention = replace(attention, impl=cfg.impl, order=AttentionConfig.order, kernel="auto", autotune=False)
    model = trained.network(attention, device).to(DTYPES[pick_dtype(cfg.dtype, device)]).eval()

    broken = trained.state["broken"]
    loss = trained.state["val_loss"]
    of_loss = f", validation loss {loss:.4f}" if loss else ""
    print(printable(f"{stamp(broken)}{one_line(str(trained.path))}{of_loss}"), file=sys.stderr)
    if other := trained.other_attention(attention, model):
        print(printable(other), file=sys.stderr)
    if broken:
        print(f"{stamp(broken)}this model's attention is broken on purpose: so is its text", file=sys.stderr)

    if cfg.hellaswag:
        answer_questions(cfg, model, encoding, stamp(broken))
        return

    # As in training, a document begins after an end-of-text token.
    with without_stderr():  # Rust's text, if the tokenizer of a stranger's checkpoint cannot cut this one
        prompt = [trained.state.get("begin", encoding.eot_token), *encode(encoding, text).tolist()]
    if cfg.prompt_file is not None:
        print(printable(f"prompt: {counted(len(prompt) - 1, 'token')} from {cfg.prompt_file}"), file=sys.stderr)
    if len(prompt) > (context := model.config.context_length) and cfg.past_context == "stop":
        raise ValueError(
            f"past_context=stop: the prompt's {len(prompt) - 1} tokens leave no room in a context of {context}; "
            "use past_context=slide or past_context=half"
        )
    seen = tokens_seen(len(prompt), context, cfg.past_context)
    if seen < len(prompt) - 1:  # without the token that begins a text
        print(f"of the prompt's {len(prompt) - 1} tokens, the model sees only the last {seen}", file=sys.stderr)
    if cfg.cache != "false" and (refused := refusal(model)) is not None:
        print(printable(f"{stamp(broken)}sampling without a cache, {refused}"), file=sys.stderr)
    try:
        (talk if cfg.interactive else write)(cfg, model, encoding, prompt, text, stamp(broken))
    except (RuntimeError, MemoryError, NotFinite) as error:
        print()  # the error has a line of its own
        if not is_out_of_memory(error):
            raise
        fewer = [f"num_samples={cfg.num_samples // 2}"] if cfg.num_samples > 1 else ["a smaller model"]
        if cfg.cache == "contiguous" and refusal(model) is None:
            fewer.append("cache=paged")  # which grows with the text
        fewer += [] if model.embedding.weight.device.type == "cpu" else ["device=cpu"]
        tried = f"num_samples={cfg.num_samples} in one batch and cache={cfg.cache}"
        raise ValueError(f"out of memory with {tried}; use {' or '.join(fewer)}") from error


def answer_questions(cfg: Config, model: GPT, encoding: Encoding, label: str) -> None:
    """Prints the model's accuracy on the first questions of HellaSwag."""
    from training.hellaswag import accuracy, questions  # here, because few need it

    asked = questions(hellaswag(Path(DataConfig.cache)), cfg.hellaswag)
    with out_of_memory_as(lambda: ValueError("out of memory with hellaswag=; use device=cpu or a smaller model")):
        share = accuracy(model, encoding, asked)
    print(f"{label}HellaSwag accuracy {share:.4f} of {counted(len(asked), 'question')}; guessing has 0.25")


def write(cfg: Config, model: GPT, encoding: Encoding, prompt: list[int], text: str, label: str) -> None:
    """Writes num_samples texts after the same prompt, as rows of one batch. A text that has ended runs on unseen.

    prompt: the tokens of `text`, after the one that begins a text. label: says that the model is broken on purpose; ""
    if it is whole.
    """
    device, count, stops = model.embedding.weight.device, cfg.num_samples, cfg.stops()
    heads = [f"{label}--- sample {number + 1} of {count}\n" if count > 1 or label else "" for number in range(count)]
    screen = Screen([head + printable(text) for head in heads])
    streams = [TextStream(encoding, stops) for _ in heads]
    # One generator per sample, so that each can be reproduced alone.
    generators = [torch.Generator(device).manual_seed(cfg.seed + number) for number in range(count)]
    idx = torch.tensor([prompt], device=device).expand(count, -1)  # (B, T)
    started, made, first, length = time.perf_counter(), 0, 0.0, len(prompt)
    cache = cfg.new_cache(model)
    new = generate(model, idx, cfg.max_new_tokens, cfg, generators, cache=cache, past_context=cfg.past_context)
    for tokens in new:
        made, length, first = made + len(screen.going), length + 1, first or time.perf_counter() - started
        for row, (stream, token) in enumerate(zip(streams, tokens.tolist(), strict=True)):
            ends = token == encoding.eot_token
            screen.add(row, stream.flush() if ends else stream.feed(token), ends or stream.stopped)
        if not screen.going:
            break
    stopped = cfg.past_context == "stop" and bool(screen.going) and length < len(prompt) + cfg.max_new_tokens
    for row, stream in enumerate(streams):
        screen.add(row, stream.flush(), ends=True)
    past = stopped or length - 1 > model.config.context_length
    say_the_end(cfg, model, label, made, first, time.perf_counter() - started, past)


def talk(cfg: Config, model: GPT, encoding: Encoding, prompt: list[int], text: str, label: str) -> None:
    """Reads a line, continues the text with it, and so on until the input ends. What the model sees is what the screen
    shows. Ctrl-C ends the present answer; where a line is read, and when it comes twice, it ends the program."""
    generator = torch.Generator(model.embedding.weight.device).manual_seed(cfg.seed)
    session = Session(model, cfg, generator, cache=cfg.new_cache(model), past_context=cfg.past_context)
    if sys.stdin is None:
        raise ValueError("interactive=true reads standard input, which is closed; use prompt=")
    mark = "> " if sys.stdin.isatty() else ""
    if mark:
        print("type a line, or Enter alone to go on; Ctrl-C ends an answer, Ctrl-D the program", file=sys.stderr)
    print(label + printable(text), end="" if text else mark, flush=True)
    ids, between = prompt, ""  # the whole text; what parts its last answer from the next line
    made, first, seconds, past, full = 0, 0.0, 0.0, False, False
    while not full and (line := read_line()) is not None:
        ids = ids + encode(encoding, between + line if line else "").tolist()
        stream, shown, answer, started = TextStream(encoding, cfg.stops()), "", list[int](), time.perf_counter()
        with stop_signals(silent=True) as interrupted:  # a token is never interrupted, so the cache stays right
            for token in session.answer(ids, cfg.max_new_tokens):
                first = first or time.perf_counter() - started
                answer.append(token)
                if token != encoding.eot_token:
                    shown += (piece := stream.feed(token))
                    print(printable(piece), end="", flush=True)
                if token == encoding.eot_token or stream.stopped or interrupted:
                    break
            else:
                full = len(answer) < cfg.max_new_tokens
        shown += (piece := stream.flush())
        between = "" if shown.endswith("\n") else "\n"
        print(printable(piece), end=between, flush=True)
        made, seconds = made + len(answer), seconds + time.perf_counter() - started
        past |= full or len(ids) + len(answer) - 1 > model.config.context_length
        if stream.stopped:  # the tokens go past the end of the text
            answer = encode(encoding, shown).tolist()
        ids = ids + answer
        if answer[-1:] == [encoding.eot_token]:  # the next line begins a document
            ids, between = prompt[:1] if model.attention_config.documents else ids, ""
        print(mark * (not full), end="", flush=True)
    print(end="\n" if mark or (text and not made) else "", flush=True)
    say_the_end(cfg, model, label, made, first, seconds, past)


def say_the_end(cfg: Config, model: GPT, label: str, made: int, first: float, seconds: float, past: bool) -> None:
    """Prints how many tokens were made and how fast. past: the text was longer than the context."""
    if past:
        print(label + IN_WORDS[cfg.past_context].format(model.config.context_length), file=sys.stderr)
    speed = made / max(seconds, 1e-9)
    said = f"{counted(made, 'token')}, {speed:,.0f} tokens/s, the first after {first:.3f} s" if made else "no token"
    print(f"{label}{said}", file=sys.stderr)


def read_line() -> str | None:
    """A line of standard input without its end; None at the end of the input."""
    line = sys.stdin.buffer.readline()
    return line.decode(errors="replace").rstrip("\r\n") if line else None


class Screen:
    """Prints several texts one after the other: each as it is made, once those before it have ended."""

    def __init__(self, heads: list[str]):
        """heads: what each text begins with."""
        self.waiting = heads  # what of each text is not printed yet
        self.going = set(range(len(heads)))  # the texts that have not ended
        self.turn = 0  # the text that is printed now
        self.add(0, "")

    def add(self, row: int, text: str, ends: bool = False) -> None:
        """Appends to a text that has not ended. ends: that was its last. Prints what may be printed now."""
        if row not in self.going:
            return
        self.waiting[row] += printable(text) + "\n" * ends
        if ends:
            self.going.remove(row)
        while self.turn < len(self.waiting):
            print(self.waiting[self.turn], end="", flush=True)
            self.waiting[self.turn] = ""
            if self.turn in self.going:
                return
            self.turn += 1


def read_prompt(path: str) -> str:
    """The text of a file with its line ends, without a byte order mark; of standard input for "-". ValueError if it
    cannot be read as UTF-8."""
    if path == "-" and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError(
            "prompt_file=- reads standard input, and nothing is piped into it; use prompt= for a short one"
        )
    file = Path(os.path.expanduser(path))
    try:
        if path != "-" and file.is_char_device():  # /dev/zero never ends
            raise ValueError(f"prompt_file={path} is a device; give a text file, or - for standard input")
        if path != "-" and (size := file.stat().st_size) > LONGEST_PROMPT:
            raise ValueError(f"prompt_file={path} has {size:,} bytes; give the end of it, {LONGEST_PROMPT:,} at most")
        read = sys.stdin.buffer.read if path == "-" else file.read_bytes
        return read().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"prompt_file={path} cannot be read ({error.strerror}); give a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt_file={path} is not UTF-8 at byte offset {error.start}; convert it") from error


def find(cfg: Config) -> Path:
    """The folder of the weights that init_from=, or run= and checkpoint=, name. ValueError if there is none."""
    if cfg.init_from is not None:
        return exchange.find(cfg.init_from, Path(cfg.runs), Path(DataConfig.cache))
    if not re.fullmatch(r"best|last|step_\d+", cfg.checkpoint):
        return Path(cfg.checkpoint)
    return checkpoint.find(cfg.run, Path(cfg.runs), option="run", which=cfg.checkpoint)


if __name__ == "__main__":
    config.run(main, Config, "sample")
