"""sample.py and the samplers: what is written is what the model says, character by character, and can be had again."""

import codecs
import re
import sys
from dataclasses import asdict
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
import torch

import sample
import train
from data.tokenizer import byte_encoding, to_json
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from sampling.generate import Sampler, generate
from tests.test_train import OVERFLOW, OVERFLOW_NAME
from training import checkpoint
from training.metrics import printable
from training.state import rng_state

NAIVE = AttentionConfig("naive")
END = 256  # end of text, in the byte tokenizer
CHARACTERS = "a\u00e9\u20ac\U0001f600 \u4f60\u597d, gr\u00fc\u00dfe\n\u0434\u0430 \u3042"  # of one to four bytes


@pytest.fixture(scope="module")
def runs(call, small, tmp_path_factory):
    """A folder with one run, `taught`: 60 steps, and checkpoints at 40 and 60."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = ["steps=60", "checkpoint_every=20", "optimizer.lr=1e-2", f"runs={folder}", "name=taught"]
    assert call(train, *small, *arguments).code == 0
    return folder


@pytest.fixture(scope="module")
def write(call, runs):
    """write(arguments): the text on stdout, without the newline that ends it."""

    def write(*arguments: str) -> str:
        ended = call(sample, f"runs={runs}", "run=taught", "device=cpu", *arguments)
        assert ended.code == 0, ended.err
        return ended.out.removesuffix("\n")

    return write


def load(runs: Path) -> GPT:
    """The taught model with naive attention, put together here."""
    found = checkpoint.load(checkpoint.last(runs / "taught" / checkpoint.FOLDER))
    model = GPT(GPTConfig(**found.state["config"]["model"]), AttentionConfig("naive")).eval()
    model.load_state_dict(found.model)
    return model


@torch.no_grad()
def greedy(model: GPT, prompt: bytes, count: int) -> bytes:
    """The likeliest byte, `count` times, from the logits of all positions and the last context_length tokens."""
    tokens = [END, *prompt]
    for _ in range(count):
        logits = model(torch.tensor([tokens[-model.config.context_length :]]))
        tokens.append(int(logits[0, -1].argmax()))
    return bytes(tokens[1:])


def save_parrot(folder: Path, tokens: list[int], *, attention=NAIVE, **about):
    """A checkpoint whose model says tokens[i] at position i, whatever it is told. about: as for save().

    Nothing is embedded but the position, as one hot entry of C = 64; the block adds nothing; the norm leaves the entry
    the largest; and the head has a 10 where token i meets entry i.
    """
    size = GPTConfig(n_layer=1, n_head=1, n_embd=64, context_length=64, vocab_size=257, tie_head=False, bias=False)
    model = GPT(size, attention)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.positions.weight.copy_(torch.eye(64))
        model.head.weight[tokens, range(len(tokens))] = 10.0
    return save(folder, model, **about)


def save(folder: Path, model: GPT, *, step: int = 1, val_loss: float | None = None, broken: str = ""):
    """A checkpoint of a model for the byte tokenizer."""
    trained = train.Config(
        model=model.config, attention=model.attention_config, break_it=BreakIt("no_max" if broken else "none")
    )
    loader = {"position": 0, "seed": 0, "context_length": model.config.context_length, "dataset": ""}
    return checkpoint.save(
        folder,
        step,
        model=model.state_dict(),
        optimizer=rng_state(),
        state={"config": asdict(trained), "broken": broken, "loader": loader, "val_loss": val_loss},
        tokenizer=to_json(byte_encoding()),
        keep_last=10,
    )


# --- what is written ------------------------------------------------------------------------------------------------


def test_the_likeliest_text_is_the_argmax_of_the_models_logits(write, runs):
    expected = greedy(load(runs), b"words and ", 60)
    assert write("prompt=words and ", "temperature=0", "max_new_tokens=60").encode() == expected


def test_a_prompt_longer_than_the_context_is_seen_by_its_end(write, runs):
    prompt = "some words\n" * 9  # 99 tokens, the context is 32
    expected = greedy(load(runs), prompt.encode(), 40)
    assert write(f"prompt={prompt}", "temperature=0", "max_new_tokens=40").encode() == expected


def test_each_token_is_chosen_from_the_last_context_length_tokens():
    """With weights so large that every token tells; the taught model writes the same whatever it is told."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, context_length=16, vocab_size=257), AttentionConfig("naive"))
    model.eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10)
    tokens = torch.randint(257, (1, 40))
    found = [int(token) for token in generate(model, tokens, 20, Sampler(temperature=0))]
    for token in found:
        assert token == int(model(tokens[:, -16:])[0, -1].argmax())
        tokens = torch.cat((tokens, torch.tensor([[token]])), dim=1)
    assert len(set(found)) > 10


def test_a_seed_gives_its_text_again_and_another_seed_another(write):
    one, again, another = (write("max_new_tokens=60", f"seed={seed}") for seed in (1, 1, 2))
    assert one == again
    assert one != another


def test_sampling_is_reproducible_sample_by_sample(write):
    """The second of several is what the next seed writes alone."""
    both = write("max_new_tokens=40", "num_samples=2", "seed=5")
    first, second = (write("max_new_tokens=40", f"seed={seed}") for seed in (5, 6))
    assert both == f"--- sample 1 of 2\n{first}\n--- sample 2 of 2\n{second}"


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_naive_and_tiled_write_the_same_text(runs, capsys, temperature):
    texts = []
    for impl in ("naive", "tiled"):
        options = {"temperature": temperature, "max_new_tokens": 60, "device": "cpu", "impl": impl}
        sample.main(sample.Config(run="taught", runs=str(runs), **options))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 20


PROMPTS = ["", CHARACTERS, "def f(x=1, *a): '${y}' \\ \"q\"\n\t", "<|endoftext|>", "null", "~a=[1"]


@pytest.fixture
def seen(monkeypatch):
    """The tokens that the model is given, as they come; it answers nothing."""
    tokens = []

    def generate(model, idx, *options, **more):
        tokens.extend(idx[0].tolist())
        return iter(())

    monkeypatch.setattr(sample, "generate", generate)
    return tokens


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_arrives_as_it_was_typed(write, seen, prompt):
    assert write(f"prompt={prompt}") == prompt
    assert seen == [END, *prompt.encode()]


@pytest.mark.parametrize("prompt", [*PROMPTS, "two lines\r\n and their ends\r\n"])
def test_a_prompt_from_a_file_arrives_as_it_stands_there(call, runs, seen, tmp_path, prompt):
    file = tmp_path / "start.txt"
    file.write_bytes(codecs.BOM_UTF8 + prompt.encode())
    ended = call(sample, f"runs={runs}", "device=cpu", f"prompt_file={file}")
    assert (ended.code, ended.out) == (0, printable(prompt) + "\n")
    assert f"prompt: {len(prompt.encode())} tokens from {file}\n" in ended.err
    assert seen == [END, *prompt.encode()]


def test_characters_of_several_bytes_are_written_whole(call, tmp_path):
    save_parrot(tmp_path / "parrot/checkpoints", [*CHARACTERS.encode(), END])
    ended = call(sample, f"runs={tmp_path}", "max_new_tokens=60")
    assert ended.out == CHARACTERS + "\n"


def test_a_character_that_was_never_finished_is_one_replacement_mark(call, tmp_path):
    save_parrot(tmp_path / "parrot/checkpoints", [*b"ab\xe2\x82", END])
    assert call(sample, f"runs={tmp_path}").out == "ab\ufffd\n"


def test_a_terminal_is_not_sent_what_it_would_obey(call, tmp_path):
    save_parrot(tmp_path / "parrot/checkpoints", [*b"a\x1b[2Jb\x07\x00c", END])
    assert call(sample, f"runs={tmp_path}").out == "a\ufffd[2Jb\ufffd\ufffdc\n"


def test_text_is_written_while_it_is_made(runs, monkeypatch):
    """After each byte everything is on the screen that the bytes so far make whole."""
    monkeypatch.setattr(sys, "stdout", StringIO())
    seen = []

    def generate(*options, **more):
        for byte in "a\u20acb".encode():
            yield torch.tensor([byte])
            seen.append(sys.stdout.getvalue())

    monkeypatch.setattr(sample, "generate", generate)
    sample.main(sample.Config(run="taught", runs=str(runs), device="cpu"))
    assert seen == ["a", "a", "a", "a\u20ac", "a\u20acb"]


def test_a_sample_ends_where_the_model_ends_the_document(call, tmp_path):
    save_parrot(tmp_path / "parrot/checkpoints", [*b"one", END, *b"two"])
    assert call(sample, f"runs={tmp_path}").out == "one\n"


# --- from which checkpoint ------------------------------------------------------------------------------------------


@pytest.fixture
def parrots(tmp_path):
    """Three checkpoints of one run that say their own name; the one in the middle has the lowest validation loss."""
    for step, (word, val_loss) in enumerate({"first": 2.0, "best": 1.0, "last": None}.items(), start=1):
        save_parrot(tmp_path / "parrot/checkpoints", [*word.encode(), END], step=step, val_loss=val_loss)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["checkpoint=step_000001"], "first"),
        ([], "best"),
        (["run=parrot"], "best"),
        (["run={runs}/parrot"], "best"),
        (["checkpoint=best"], "best"),
        (["checkpoint=last"], "last"),
        (["checkpoint={runs}/parrot/checkpoints/step_000001"], "first"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else None,
)
def test_the_checkpoint_that_was_asked_for_speaks(call, parrots, arguments, word):
    ended = call(sample, f"runs={parrots}", *[argument.format(runs=parrots) for argument in arguments])
    assert ended.out == word + "\n"
    assert f"{parrots}/parrot/checkpoints/step_" in ended.err


@pytest.mark.parametrize(("cut", "word", "said"), [(2, "first", 1), (3, "best", 0), (1, "best", 0)])
def test_a_best_checkpoint_that_is_cut_short_is_passed_over(call, parrots, cut, word, said):
    """It said "resuming from step_000001 instead", and then stopped with "use resume=", which sample.py has not."""
    path = parrots / f"parrot/checkpoints/step_{cut:06d}"
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:-9])
    ended = call(sample, f"runs={parrots}")
    assert (ended.code, ended.out) == (0, f"{word}\n")
    named = ended.err.splitlines()[:-2]
    assert len(named) == said
    assert all(line.startswith(f"checkpoint {path} is damaged (") for line in named)


@pytest.mark.parametrize("more", [[], ["export={runs}/\x1b[32mout"]])
def test_a_name_cannot_command_the_terminal(call, parrots, more):
    (parrots / "parrot").rename(parrots / "\x1b[31mred")
    (parrots / "\x1b[31mred/checkpoints/step_000003/model.safetensors").write_bytes(b"")
    for which in ("best", "last"):
        ended = call(sample, f"runs={parrots}", f"checkpoint={which}", *[word.format(runs=parrots) for word in more])
        assert "red" in ended.err
        assert "\x1b" not in ended.out + ended.err


def test_a_prompt_that_is_longer_than_the_context_is_said(call, parrots):
    """It was said, too, of a prompt of 64 tokens, all of which the model sees."""
    said = "of the prompt's 65 tokens, the model sees only the last 64\n"
    assert said in call(sample, f"runs={parrots}", f"prompt={65 * 'a'}", "max_new_tokens=1").err
    assert "of the prompt" not in call(sample, f"runs={parrots}", f"prompt={64 * 'a'}", "max_new_tokens=1").err
    half = call(sample, f"runs={parrots}", f"prompt={64 * 'a'}", "max_new_tokens=1", "past_context=half").err
    assert "of the prompt's 64 tokens, the model sees only the last 33\n" in half


@pytest.mark.parametrize("past_context", ["slide", "half"])
def test_a_long_prompt_is_seen_as_it_is_said_and_as_a_session_sees_it(call, parrots, monkeypatch, past_context):
    """With half, sample.py said 35, the model saw 64, and interactive=true 35, so they wrote different texts."""
    seen, run = [], sample.GPT.next_logits
    monkeypatch.setattr(sample.GPT, "next_logits", lambda *given: seen.append(given[1].shape[1]) or run(*given))
    arguments = [f"runs={parrots}", f"prompt={66 * 'a'}", "max_new_tokens=1", f"past_context={past_context}"]
    ended = call(sample, *arguments, "cache=false")
    assert f"sees only the last {seen[0]}\n" in ended.err
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"\n")))
    call(sample, *arguments, "cache=false", "interactive=true")
    assert seen[1:] == seen[:1]


def test_the_end_says_how_many_tokens_there_were_and_how_fast(call, parrots):
    *_, last = call(sample, f"runs={parrots}", "num_samples=2").err.splitlines()
    assert re.fullmatch(r"10 tokens, [\d,]+ tokens/s, the first after \d+\.\d{3} s", last)  # "best" and the end, twice


@pytest.mark.parametrize(
    ("past_context", "said"),
    [
        ("slide", "past the context of 32 tokens, the last 32 run again for each new one; past_context=half is faster"),
        ("half", "each time the context of 32 tokens was full, the model went on from its last half"),
        ("stop", "stopped where the context of 32 tokens was full; past_context=slide or past_context=half writes on"),
    ],
)
def test_a_text_that_passes_the_context_is_said_once(call, runs, past_context, said):
    """The prompt is 4 tokens with the end-of-text token before it, so a 30th new one is chosen from 33."""
    arguments = [f"runs={runs}", "device=cpu", "prompt=abc", "temperature=0", f"past_context={past_context}"]
    within, beyond = (call(sample, *arguments, f"max_new_tokens={count}").err for count in (29, 30))
    assert said not in within
    assert beyond.count(said) == 1
    assert f"\n{29 if past_context == 'stop' else 30} tokens, " in beyond


def test_stop_refuses_a_prompt_that_is_longer_than_the_context(call, parrots):
    ended = call(sample, f"runs={parrots}", f"prompt={64 * 'a'}", "past_context=stop")
    assert (ended.code, ended.out) == (2, "")
    assert "past_context=stop: the prompt's 64 tokens leave no room in a context of 64; use " in ended.err


def test_a_block_mask_is_sampled_without_a_cache(call, tmp_path):
    blocks = AttentionConfig("naive", block_mask=["x"])
    save_parrot(tmp_path / "parrot/checkpoints", [*b"text", END], attention=blocks)
    ended = call(sample, f"runs={tmp_path}")
    assert ended.out == "text\n"
    assert ended.err.count("sampling without a cache, attention.block_mask=['x']: the cache has no block masks\n") == 1
    assert "without a cache" not in call(sample, f"runs={tmp_path}", "cache=false").err


def test_a_cache_in_pages_writes_the_same(write, monkeypatch):
    """And it has pages: several samples of one prompt, past the context of 32."""
    made, cache = [], sample.KVCache
    monkeypatch.setattr(sample, "KVCache", lambda *given, **more: made.append(more) or cache(*given, **more))
    arguments = ["prompt=abc", "num_samples=2", "max_new_tokens=50", "past_context=half"]
    assert write(*arguments, "cache=paged") == write(*arguments) == write(*arguments, "cache=contiguous")
    assert made == [{"page": 64}, {"page": None}, {"page": None}]
    write("prompt=abc", "cache=false")
    assert len(made) == 3


def test_the_newest_run_speaks_when_none_is_named(call, parrots):
    save_parrot(parrots / "newer/checkpoints", [*b"newer", END])
    assert call(sample, f"runs={parrots}").out == "newer\n"


def test_a_broken_models_text_is_stamped(call, tmp_path):
    save_parrot(tmp_path / "parrot/checkpoints", [*b"text", END], broken="no_max")
    ended = call(sample, f"runs={tmp_path}", "num_samples=2")
    assert ended.err.count("BROKEN[no_max] ") == len(ended.err.splitlines()) == 4
    assert "sampling without a cache, break_it=no_max: " in ended.err
    assert ended.out == "BROKEN[no_max] --- sample 1 of 2\ntext\nBROKEN[no_max] --- sample 2 of 2\ntext\n"


@pytest.mark.parametrize(
    ("arguments", "value", "way_out"),
    [
        (["run=nobody"], "run=nobody: no checkpoint in ", "runs that have one: parrot"),
        (["checkpoint={runs}/parrot/checkpoints/step_000009"], "step_000009", ""),
        (["checkpoint=step_000009"], "no checkpoint {runs}/parrot/checkpoints/step_000009", ""),
        (["runs={runs}/none"], "run=latest: no checkpoint in ", "train one first"),
        (["stop="], "stop= has an empty text", "give texts of at least one character"),
        (['stop=["a", 1]'], 'stop=["a", 1]: 1 is no text', "write it in quotes"),
        (['stop=["a", ""]'], 'stop=["a", ""] has an empty text', "give texts of at least one character"),
        (['stop=["a]'], 'stop=["a] is no list (', 'write it as ["one", "two"]'),
        (["interactive=true", "num_samples=2"], "interactive=true continues one text", "leave out num_samples=2"),
        (["interactive=true", "prompt_file=-"], "both read standard input", "leave one out"),
        (["num_samples=1000000000"], "num_samples=1000000000 is more than one batch", "with another seed= for more"),
        (["prompt_file={runs}/none"], "prompt_file={runs}/none cannot be read (No such file", "give a text file"),
        (["prompt_file={runs}"], "prompt_file={runs} cannot be read (Is a directory)", "give a text file"),
        (["prompt_file={runs}/bad"], "prompt_file={runs}/bad is not UTF-8 at byte offset 3", "convert it"),
        (["cache=true"], "cache=true is not known", "choose contiguous, paged or false"),
        (["prompt=a", "prompt_file=b"], "prompt= and prompt_file=b are both given", "leave one out"),
        (["device=cuda:99"], "device=cuda:99 cannot be used here", "use device=auto or device=cpu"),
        (["temprature=1"], "there is no key temprature", "did you mean temperature?"),
        (["--prompt=a"], "--prompt=a: options are written key=value here", "did you mean prompt=a?"),
    ],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_a_mistake_is_one_line_that_names_the_value_and_the_way_out(call, parrots, arguments, value, way_out):
    (parrots / "bad").write_bytes(b"caf\xe9")
    ended = call(sample, f"runs={parrots}", *[argument.format(runs=parrots) for argument in arguments])
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("sample: ")
    assert ended.err.count("\n") == 1
    assert value.format(runs=parrots) in ended.err
    assert way_out in ended.err


# --- what went wrong once ---------------------------------------------------------------------------------------------


def test_a_model_of_nan_is_one_line_in_sample(call, small, tmp_path):
    arguments = ["stop_on_nan=false", "steps=30", "sample_every=0", f"runs={tmp_path}", "name=x"]
    assert call(train, *small, *OVERFLOW, *arguments).code == 0
    ended = call(sample, f"runs={tmp_path}", f"run={OVERFLOW_NAME}", "device=cpu", "checkpoint=last")
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("sample: ")


def test_the_attention_of_a_sample_can_be_chosen(call, tmp_path):
    """It was called attention= once, which Hydra takes for the group conf/attention."""
    save_parrot(tmp_path / "parrot/checkpoints", [*b"text", END])
    ended = call(sample, f"runs={tmp_path}", "impl=tiled")
    assert (ended.code, ended.out) == (0, "text\n"), ended.err


def test_an_impl_that_was_chosen_is_not_refused_for_the_options_of_the_trainings(call, tmp_path):
    """autotune=true stayed, which only triton takes, and sample.py has no key to leave it out."""
    tuned = AttentionConfig("triton", autotune=True, kernel="portable")
    save_parrot(tmp_path / "parrot/checkpoints", [*b"text", END], attention=tuned)
    ended = call(sample, f"runs={tmp_path}", "impl=tiled", "device=cpu")
    assert (ended.code, ended.out) == (0, "text\n"), ended.err


@pytest.mark.parametrize(("given", "dtype"), [("auto", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_the_weights_have_the_dtype_that_was_asked_for(call, runs, monkeypatch, given, dtype):
    """On a CPU auto is float32."""
    found = []
    monkeypatch.setattr(sample, "generate", lambda model, *_, **__: found.extend(model.parameters()) or iter(()))
    assert call(sample, f"runs={runs}", "device=cpu", f"dtype={given}").code == 0
    assert {weight.dtype for weight in found} == {getattr(torch, dtype)}


@pytest.mark.parametrize("text", ["\u3000", "\u00a0", "\U0001f469\u200d\U0001f4bb", "a\u00adb", "\u0645\u06cc\u200c"])
def test_characters_that_str_isprintable_does_not_like_are_written(call, tmp_path, text):
    """Ideographic space, no-break space, the joiners of emoji and Persian: ordinary text, printed as U+FFFD."""
    save_parrot(tmp_path / "parrot/checkpoints", [*text.encode(), END])
    assert call(sample, f"runs={tmp_path}").out == text + "\n"


def test_a_single_sample_of_a_broken_model_is_stamped_on_stdout(call, tmp_path):
    """With num_samples=1 the stamp was on stderr alone: sample.py > file.txt had none."""
    save_parrot(tmp_path / "parrot/checkpoints", [*b"text", END], broken="no_max")
    assert "BROKEN[no_max]" in call(sample, f"runs={tmp_path}").out
