"""sample.py: what is written, from which checkpoint, after which prompt."""

import codecs
import random
import subprocess
import sys
from dataclasses import asdict
from io import BytesIO, TextIOWrapper
from itertools import takewhile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from safetensors.torch import save_file

import sample
from data.tokenizer import TokenizerConfig, build, to_json
from model import generate
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from training import config
from training.checkpoint import FOLDER, save_checkpoint

END = 256  # tokenizer=byte's end-of-text token
CHARACTERS = "a \u00e9\u4f60\U0001f600\U0001f469\u200d\U0001f467\u3000\n\tz"  # of one to four bytes


def gpt(T: int = 32, **options) -> GPT:
    """A model whose weights are large enough that every token counts."""
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": T, "vocab_size": END + 1}
    model = GPT(GPTConfig(**size | options), AttentionConfig("tiled", 16, 16)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.ndim == 2 else 1)
    return model


def parrot(tokens: list[int]) -> GPT:
    """A model that writes these tokens, whatever it sees: its weights look at the position alone."""
    tokens = [0, *tokens]  # of the place before the last token of the beginning
    T = len(tokens)
    model = gpt(T, n_embd=2 * T, n_head=1, tie_head=False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(float(name.startswith("norm.weight")))
        model.positions.weight[:, :T] = torch.eye(T)
        for at, token in enumerate(tokens):
            model.head.weight[token, at] = 100
    return model


def keep(run: Path, model: GPT, step: int = 1, val_loss: float | None = None, broken: str = "none") -> Path:
    """Writes a checkpoint of a run."""
    break_it = BreakIt(broken)
    groups = {"model": model.config, "attention": AttentionConfig(block_m=16, block_n=16), "break_it": break_it}
    state = {"config": {name: asdict(group) for name, group in groups.items()}, "broken": break_it.label}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    tokenizer = to_json(build(TokenizerConfig("byte"), []))
    return save_checkpoint(run / FOLDER, step, weights, {}, state | {"val_loss": val_loss}, tokenizer, 9)


@pytest.fixture
def write(call, tmp_path):
    """write("seed=5"): what is printed; of the newest run in tmp_path/runs."""

    def write(*typed: str) -> str:
        ended = call(sample, f"runs={tmp_path / 'runs'}", "device=cpu", *typed)
        assert ended.code == 0, ended.err
        return ended.out

    return write


@pytest.fixture
def run(tmp_path) -> Path:
    return tmp_path / "runs" / "x"


@pytest.mark.parametrize("cache", ["true", "false"])
@pytest.mark.parametrize("prompt", ["words and ", "some words " * 9])
def test_the_likeliest_text_is_the_argmax_of_the_models_logits(prompt, cache, write, run):
    model = gpt()
    keep(run, model)
    tokens = [*b"\n", END, *prompt.encode()][-32:]
    found = map(int, generate.generate(model, torch.tensor([tokens]), 40, generate.Sampler(0), cache=False))
    expected = bytes(takewhile(END.__ne__, found)).decode(errors="replace")
    typed = f"prompt={prompt}", "temperature=0", "max_new_tokens=40", f"cache={cache}"
    assert write(*typed) == prompt + expected + "\n"


def test_a_seed_gives_its_text_again_and_each_sample_has_the_next_one(write, run):
    keep(run, gpt())
    first, second = (write("max_new_tokens=40", f"seed={seed}") for seed in (5, 6))
    assert first != second
    both = write("max_new_tokens=40", "num_samples=2", "seed=5")
    assert both == f"--- sample 1 of 2\n{first}--- sample 2 of 2\n{second}"


def test_a_typed_prompt_means_itself_to_hydra():
    """Hydra has a grammar of its own, in which prompt="cat" was cat."""
    draw = random.Random(0)
    prompts = ["", CHARACTERS, '"cat"', "null", "~a=[1", "ends\r\n", "\\", "\\\n", "\\${a}", "<|endoftext|>"]
    prompts += ["".join(draw.choices("\\\\'\"${}a, =[]:\n\t#%", k=draw.randrange(9))) for _ in range(1000)]
    paths = ["naïve file (1).txt", "run[1]", "é", "*.txt", "~/x", "1e3", "a,b=c", "-", "a/b.txt"]
    for key, text in [("prompt", prompt) for prompt in prompts] + [("data.path", path) for path in paths]:
        quoted = config.quoted(f"{key}={text}", {"prompt", "data.path"})
        (override,) = OverridesParser.create().parse_overrides([quoted])
        assert OmegaConf.create({"text": override.value()}).text == text
    for argument in ("data.path='a b'", 'data.path="a b"', "steps=1", "name=a b"):
        assert config.quoted(argument, {"data.path"}) == argument


def test_a_prompt_arrives_as_it_was_typed_piped_or_put_in_a_file(write, run, tmp_path, monkeypatch):
    keep(run, gpt(64))
    seen, file, prompt = [], tmp_path / "start.txt", CHARACTERS + "def f(x=1, *a): '${y}' \\ \"q\"\r\n\t\\"
    monkeypatch.setattr(generate, "generate", lambda model, idx, *_: seen.append(idx[0].tolist()) or iter(()))
    file.write_bytes(codecs.BOM_UTF8 + prompt.encode())
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(prompt.encode())))
    for source in (f"prompt={prompt}", f"prompt_file={file}", "prompt_file=-"):
        assert write(source) == prompt + "\n"
    assert seen == [[*b"\n", END, *prompt.encode()]] * 3


@pytest.mark.parametrize(("tokens", "text"), [
    ([*b"one", END, *b"two"], "one"), (CHARACTERS.encode(), CHARACTERS),  # where the model ends the document
    (b"ab\xe2\x82", "ab\ufffd"),  # a character that was never finished
])  # fmt: skip
def test_characters_are_written_whole(write, run, tokens, text):
    keep(run, parrot([*tokens, END]))
    assert write("max_new_tokens=60") == text + "\n"


def test_on_a_gpu_every_token_is_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    assert [*sample.one_behind(torch.tensor([[[5]], [[7]]]))] == [5, 7]


def test_text_is_written_while_it_is_made(write, run, monkeypatch):
    """After each byte everything is on the screen that the bytes so far make whole."""
    keep(run, gpt())
    shown = []

    def slowly(*_):
        sys.stdout.flush = lambda screen=sys.stdout: shown.append(screen.getvalue())
        for number, byte in enumerate("a\u00e9b".encode(), 1):
            yield torch.tensor([[byte]])
            assert len(shown) == number

    monkeypatch.setattr(generate, "generate", slowly)
    write("prompt=x")
    assert shown[:4] == ["xa", "xa", "xa\u00e9", "xa\u00e9b"]


def test_the_weights_have_the_dtype_that_was_asked_for(write, run, monkeypatch):
    keep(run, gpt())
    seen = []
    monkeypatch.setattr(generate, "generate", lambda model, *_: seen.append(model.head.weight.dtype) or iter(()))
    write("dtype=bf16")
    assert seen == [torch.bfloat16]


def test_the_checkpoint_that_was_asked_for_speaks(call, write, run):
    """best is the default; of runs the newest one that is not broken."""
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        keep(run, parrot([*str(step).encode(), END]), step, loss)
    keep(run.with_name("later"), parrot([*b"later", END]))
    keep(run.with_name("x-BROKEN-no_scale"), parrot([*b"broken", END]), broken="no_scale")
    for typed, said in {"": "later", "run=x": "2", "run=x checkpoint=best": "2", "run=x checkpoint=last": "3",
                        f"checkpoint={run}/{FOLDER}/step_000001": "1"}.items():  # fmt: skip
        assert write(*typed.split()) == said + "\n"


def test_a_broken_models_text_is_stamped(call, run):
    keep(run, parrot([*b"text", END]), broken="no_scale")
    ended = call(sample, f"runs={run.parent}", "run=x", "num_samples=2")
    assert ended.err.count("4 tokens in ") == 2
    assert ended.out == "".join(f"BROKEN[no_scale] --- sample {n} of 2\ntext\n" for n in (1, 2))
    assert all(line.startswith("BROKEN[no_scale]") for line in ended.err.splitlines() if "tokens in" not in line)


MISTAKES = ["run=none", "checkpoint=nowhere", "prompt=a prompt_file=b", "prompt_file=nowhere", "temperature=-1",
            "num_samples=0", "num_sample=3", "device=tpu", "impl=cudnn", "context=true", "export={run}",
            "prompt=a export={run}-new", "--start=a b", "run=x checkpoint={run}"]  # fmt: skip


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_line(typed, call, run):
    keep(run, gpt())
    ended = call(sample, f"runs={run.parent}", *typed.format(run=run).split())
    assert (ended.code, ended.out) == (1, "")
    assert len([line for line in ended.err.splitlines() if not line.startswith(str(run))]) == 1


def test_weights_that_do_not_fit_the_model_are_one_line_for_every_use(call, run, tmp_path):
    """A matrix that was missing, or had another name, was random."""
    model = gpt()
    path = keep(run, model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    weights["lost"] = weights.pop("blocks.1.mlp.up.weight")
    save_file(weights, path / "model.safetensors")
    for typed in ("prompt=a", "context=true", f"export={tmp_path}/out"):
        ended = call(sample, f"runs={run.parent}", typed)
        assert (ended.code, ended.out) == (1, "")
        assert "blocks.1.mlp.up.weight" in ended.err
    state = path / "state.json"
    state.write_text(state.read_text().replace('"n_layer"', '"n_layers"'))
    ended = call(sample, f"runs={run.parent}")
    assert (ended.code, "n_layers" in ended.err, "Traceback" in ended.err) == (1, True, False)


def test_a_prompt_of_other_bytes_than_utf8_is_named(run):
    keep(run, gpt())
    command = [sys.executable, "sample.py", f"runs={run.parent}", b"prompt=caf\xe9"]
    ended = subprocess.run(command, cwd=Path(sample.__file__).parent, capture_output=True)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"utf-8" in ended.stderr.splitlines()[-1]
