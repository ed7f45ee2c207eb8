"""sample.py and the samplers: what is written is what the model says, character by character, and can be had again;
and which tokens can be drawn, how often, and as transformers does."""

import codecs
import json
import shutil
import sys
from dataclasses import asdict
from io import BytesIO, StringIO, TextIOWrapper
from itertools import product
from pathlib import Path

import pytest
import torch

import sample
import train
from data.tokenizer import byte_encoding, to_json
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.gpt import GPT, GPTConfig
from sampling.generate import NotFinite, Sampler
from tests.runs import last
from training import checkpoint
from training.metrics import printable
from training.state import rng_state

NAIVE = AttentionConfig("naive")
END = 256  # end of text, in the byte tokenizer
CHARACTERS = "a\u00e9\u20ac\U0001f600 \u4f60\u597d, gr\u00fc\u00dfe\n\u0434\u0430 \u3042"  # of one to four bytes


@pytest.fixture(scope="module")
def runs(call, small, tmp_path_factory):
    """A folder with one run, `taught`: 60 steps."""
    folder = tmp_path_factory.mktemp("runs")
    call(train, *small, "steps=60", "optimizer.lr=1e-2", f"runs={folder}", "name=taught").succeeded()
    return folder


@pytest.fixture(scope="module")
def write(call, runs):
    """write(arguments): the text on stdout, without the newline that ends it."""

    def write(*arguments: str) -> str:
        ended = call(sample, f"runs={runs}", "run=taught", "device=cpu", *arguments).succeeded()
        return ended.out.removesuffix("\n")

    return write


def parrot(tokens: list[int], attention=NAIVE) -> GPT:
    """A model that says tokens[i] at position i, whatever it is told.

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
    return model


def save(folder: Path, model: GPT, *, step: int = 1, val_loss: float | None = None, broken: str = ""):
    """A checkpoint of a model for the byte tokenizer."""
    broken_by = BreakIt("no_max" if broken else "none")
    trained = train.Config(model=model.config, attention=model.attention_config, break_it=broken_by)
    loader = {"position": 0, "seed": 0, "context_length": model.config.context_length, "dataset": ""}
    folder.parent.mkdir(parents=True, exist_ok=True)
    return checkpoint.save(
        folder,
        step,
        model=model.state_dict(),
        optimizer=rng_state(),
        state={"config": asdict(trained), "broken": broken, "loader": loader, "val_loss": val_loss},
        tokenizer=to_json(byte_encoding()),
        keep_last=10,
    )


@pytest.fixture
def says(call, tmp_path):
    """says(tokens, arguments): sample.py with a parrot of these tokens."""

    def says(tokens: list[int], *arguments: str, attention=NAIVE, broken: str = ""):
        save(tmp_path / "parrot/checkpoints", parrot(tokens, attention), broken=broken)
        return call(sample, f"runs={tmp_path}", "device=cpu", *arguments)

    return says


# --- what is written ------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("prompt", ["words and ", "some words\n" * 9])
def test_the_likeliest_text_is_the_argmax_of_the_models_logits(prompt, write, runs):
    """From the logits of all positions and the last context_length tokens, which are 32."""
    model = checkpoint.load(last(runs / "taught")).network(NAIVE, torch.device("cpu")).eval()
    tokens = [END, *prompt.encode()]
    for _ in range(40):
        tokens.append(int(model(torch.tensor([tokens[-32:]]))[0, -1].argmax()))
    assert write(f"prompt={prompt}", "temperature=0", "max_new_tokens=40").encode() == bytes(tokens[1:])


def test_a_seed_gives_its_text_again_and_each_sample_has_the_next_one(write):
    first, second = (write("max_new_tokens=40", f"seed={seed}") for seed in (5, 6))
    assert first != second
    both = write("max_new_tokens=40", "num_samples=2", "seed=5")
    assert both == f"--- sample 1 of 2\n{first}\n--- sample 2 of 2\n{second}"


PROMPTS = ["", CHARACTERS, "def f(x=1, *a): '${y}' \\ \"q\"\n\t", "<|endoftext|>", "null", "~a=[1", "two lines\r\n"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_arrives_as_it_was_typed_piped_or_put_in_a_file(call, runs, tmp_path, prompt, monkeypatch):
    seen, file = [], tmp_path / "start.txt"
    monkeypatch.setattr(sample, "generate", lambda model, idx, *_, **__: seen.append(idx[0].tolist()) or iter(()))
    file.write_bytes(codecs.BOM_UTF8 + prompt.encode())
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(prompt.encode())))
    for source in (f"prompt={prompt}", f"prompt_file={file}", "prompt_file=-"):
        ended = call(sample, f"runs={runs}", "device=cpu", source)
        assert (ended.code, ended.out) == (0, printable(prompt) + "\n")
        key, _, where = source.partition("=")
        assert (f" from {where}\n" in ended.err) == (key == "prompt_file")
    assert seen == [[END, *prompt.encode()]] * 3


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([*b"one", END, *b"two"], "one"),  # where the model ends the document
        (CHARACTERS.encode(), CHARACTERS),
        (b"ab\xe2\x82", "ab\ufffd"),  # a character that was never finished
        (b"a\x1b[2Jb\x07\x00c", "a\ufffd[2Jb\ufffd\ufffdc"),  # what a terminal would obey
        # Ideographic space, no-break space, the joiners of emoji and Persian: str.isprintable() is false
        *((text.encode(), text) for text in ("\u3000\u00a0a\u00adb", "\U0001f469\u200d\U0001f4bb", "\u0645\u200c")),
    ],
)
def test_characters_are_written_whole_and_none_commands_the_terminal(says, tokens, text):
    assert says([*tokens, END], "max_new_tokens=60").out == text + "\n"


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


@pytest.mark.parametrize(("given", "dtype"), [("auto", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_the_weights_have_the_dtype_that_was_asked_for(call, runs, monkeypatch, given, dtype):
    """On a CPU auto is float32."""
    found = []
    monkeypatch.setattr(sample, "generate", lambda model, *_, **__: found.extend(model.parameters()) or iter(()))
    call(sample, f"runs={runs}", "device=cpu", f"dtype={given}").succeeded()
    assert {weight.dtype for weight in found} == {getattr(torch, dtype)}


def test_a_cache_in_pages_writes_the_same(write, monkeypatch):
    """And it has pages: several samples of one prompt, past the context of 32."""
    made, cache = [], sample.KVCache
    monkeypatch.setattr(sample, "KVCache", lambda *given, **more: made.append(more) or cache(*given, **more))
    arguments = ["prompt=abc", "num_samples=2", "max_new_tokens=50", "past_context=half"]
    assert write(*arguments, "cache=paged") == write(*arguments) == write(*arguments, "cache=false")
    assert made == [{"page": 64}, {"page": None}]


def test_an_impl_that_was_chosen_is_not_refused_for_the_options_of_the_trainings(says):
    """autotune=true stayed, which only triton takes, and sample.py has no key to leave it out."""
    tuned = AttentionConfig("triton", autotune=True, kernel="portable")
    ended = says([*b"text", END], "impl=tiled", attention=tuned)
    assert (ended.code, ended.out) == (0, "text\n"), ended.err


def test_hellaswags_questions_are_answered_instead_of_text(says, tmp_path, monkeypatch):
    """The parrot continues `It is` with ` so` only."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "data/cache/hellaswag/hellaswag_val.jsonl"
    file.parent.mkdir(parents=True)
    asked = {"ctx": "It is", "endings": ["not", "so", "as", "it"]}
    file.write_text("".join(json.dumps(asked | {"label": i}) + "\n" for i in (1, 2, 1)), encoding="utf-8")
    learnt = [*b"t is so", END]
    (answered,) = says(learnt, "hellaswag=2").out.splitlines()
    assert " 0.5000 of 2 " in answered
    (answered,) = says(learnt, "hellaswag=3", broken="no_max").out.splitlines()
    assert answered.startswith("BROKEN[no_max]")
    assert " 0.6667 of 3 " in answered


def test_a_broken_models_text_is_stamped_and_what_has_no_cache_says_so_once(says):
    """With num_samples=1 the stamp was on stderr alone: sample.py > file.txt had none."""
    ended = says([*b"text", END], "num_samples=2", broken="no_max")
    assert ended.err.count("BROKEN[no_max] ") == len(ended.err.splitlines()) == 4
    assert ended.out == "BROKEN[no_max] --- sample 1 of 2\ntext\nBROKEN[no_max] --- sample 2 of 2\ntext\n"
    assert "BROKEN[no_max]" in says([*b"text", END], broken="no_max").out
    masked = AttentionConfig("naive", block_mask=["x"])
    for cache, times in (("contiguous", 1), ("false", 0)):
        ended = says([*b"text", END], f"cache={cache}", attention=masked)
        assert ended.out == "text\n"
        assert ended.err.count("attention.block_mask=['x']") == times


# --- from which checkpoint ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parrots(tmp_path_factory):
    """Three checkpoints of one run that say their own name; the one in the middle has the lowest validation loss."""
    folder = tmp_path_factory.mktemp("parrots")
    for step, (word, val_loss) in enumerate({"first": 2.0, "best": 1.0, "last": None}.items(), start=1):
        save(folder / "parrot/checkpoints", parrot([*word.encode(), END]), step=step, val_loss=val_loss)
    return folder


@pytest.fixture
def spoilt(parrots, tmp_path):
    """A copy of them, to be spoilt."""
    return shutil.copytree(parrots, tmp_path / "spoilt")


SPEAKERS = {
    "checkpoint=step_000001": "first", "": "best", "run=parrot": "best", "run={runs}/parrot": "best",
    "checkpoint=best": "best", "checkpoint=last": "last",
    "checkpoint={runs}/parrot/checkpoints/step_000001": "first",
}  # fmt: skip


def test_the_checkpoint_that_was_asked_for_speaks(call, spoilt):
    """Of the newest run, if none is named."""
    for argument, word in SPEAKERS.items():
        ended = call(sample, f"runs={spoilt}", *argument.format(runs=spoilt).split())
        assert ended.out == word + "\n"
        assert f"{spoilt}/parrot/checkpoints/step_" in ended.err
    save(spoilt / "newer/checkpoints", parrot([*b"newer", END]))
    assert call(sample, f"runs={spoilt}").out == "newer\n"


@pytest.mark.parametrize(("cut", "word", "said"), [(2, "first", 1), (3, "best", 0), (1, "best", 0)])
def test_a_best_checkpoint_that_is_cut_short_is_passed_over(call, spoilt, cut, word, said):
    """It said "resuming from step_000001 instead", and then stopped with "use resume=", which sample.py has not."""
    path = spoilt / f"parrot/checkpoints/step_{cut:06d}"
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:-9])
    ended = call(sample, f"runs={spoilt}")
    assert (ended.code, ended.out) == (0, f"{word}\n")
    named = ended.err.splitlines()[:-2]
    assert len(named) == said
    assert all(str(path) in line for line in named)


@pytest.mark.parametrize("how", [[], ["num_samples=2"]])
def test_where_no_token_can_be_drawn_the_error_has_a_line_of_its_own(call, tmp_path, how):
    model = parrot([*b"word", END])
    torch.nn.init.constant_(model.head.weight, torch.nan)
    save(tmp_path / "nan/checkpoints", model)
    ended = call(sample, f"runs={tmp_path}", "prompt=abc", *how)
    assert ended.code == 2
    assert ended.out.endswith("abc\n")


@pytest.mark.parametrize("more", [[], ["export={runs}/\x1b[32mo\nut"]])
def test_a_name_cannot_command_the_terminal(call, spoilt, more):
    (spoilt / "parrot").rename(spoilt / "\x1b[31mred")
    (spoilt / "\x1b[31mred/checkpoints/step_000003/model.safetensors").write_bytes(b"")
    for which in ("best", "last"):
        ended = call(sample, f"runs={spoilt}", f"checkpoint={which}", *[word.format(runs=spoilt) for word in more])
        assert "red" in ended.err
        assert "\x1b" not in ended.out + ended.err
        assert "o\nut" not in ended.err


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("past_context", "length", "sees"), [("slide", 65, 64), ("slide", 64, 64), ("half", 66, 35)])
def test_a_long_prompt_is_seen_as_it_is_said_and_as_a_session_sees_it(
    call, parrots, monkeypatch, past_context, length, sees
):
    """With half, sample.py said 35, the model saw 64, and interactive=true 35, so they wrote different texts. It was
    said, too, of a prompt of 64 tokens, all of which the model sees."""
    seen, run = [], GPT.next_logits
    monkeypatch.setattr(GPT, "next_logits", lambda *given: seen.append(given[1].shape[1]) or run(*given))
    arguments = [f"runs={parrots}", f"prompt={length * 'a'}", "max_new_tokens=1", f"past_context={past_context}"]
    ended = call(sample, *arguments, "cache=false")
    assert (f"prompt's {length} tokens" in ended.err) == (sees < length)
    assert f" {sees}\n" in ended.err or sees == length
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"\n")))
    call(sample, *arguments, "cache=false", "interactive=true")
    assert seen == [sees] * 2


def test_a_prompt_that_leaves_no_room_is_refused_where_no_token_may_slide_out(call, parrots):
    ended = call(sample, f"runs={parrots}", "past_context=stop", f"prompt={64 * 'a'}")
    assert (ended.code, ended.out) == (2, "")
    assert "past_context=slide" in ended.err.splitlines()[1]  # the first names the checkpoint, which has to be read


def test_a_model_of_nan_is_one_line(call, tmp_path):
    model = parrot([*b"text"])
    model.head.weight.data.fill_(torch.nan)
    save(tmp_path / "x/checkpoints", model)
    ended = call(sample, f"runs={tmp_path}", "device=cpu")
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("sample: ")


# --- the choice of a token --------------------------------------------------------------------------------------------


def random_logits(seed: int) -> torch.Tensor:
    """Logits (5, 50) as a model might have them, the rows from nearly even to nearly decided."""
    spread = torch.tensor([0.1, 1.0, 2.0, 4.0, 8.0])[:, None]
    return torch.randn(5, 50, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}, *({"temperature": t} for t in (1e-3, 1e-40, 1e-300))]
)
def test_the_likeliest_token_is_chosen_where_no_other_can_be(options):
    """Logits over 1e-40 are infinite, and their softmax was NaN."""
    logits = torch.stack([torch.randperm(30) for _ in range(20)]).float()  # nowhere closer than 1
    assert torch.equal(Sampler(**options).choose(logits), logits.argmax(-1))


@pytest.mark.parametrize(("top_k", "top_p"), [*product((None, 1, 5, 49, 50, 51), (1.0, 0.1, 0.7, 0.99))])
def test_probabilities_are_transformers(top_k, top_p, monkeypatch):
    """All of its processors in the order of its generate(), over texts that use some tokens several times."""
    from transformers.generation import logits_process as theirs

    texts, logits = torch.randint(50, (5, 12)), random_logits(3)
    for temperature, min_p, penalty in ((0.6, 0.0, 1.0), (1.5, 0.1, 1.3), (1.0, 0.6, 0.7), (0.6, 1.0, 1.3)):
        expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(texts, logits.clone())
        expected = theirs.TemperatureLogitsWarper(temperature)(texts, expected)
        if top_k is not None:
            expected = theirs.TopKLogitsWarper(top_k)(texts, expected)
        if top_p < 1:
            expected = theirs.TopPLogitsWarper(top_p)(texts, expected)
        expected = theirs.MinPLogitsWarper(min_p)(texts, expected).softmax(-1)
        drawn = []
        monkeypatch.setattr(
            "sampling.generate.waiting_times", lambda p, _, to=drawn: to.append(p) or torch.ones_like(p)
        )
        sampler = Sampler(temperature, top_k, top_p, min_p, penalty)
        sampler.choose(logits, None, sampler.tokens_used(list(texts), 50))
        torch.testing.assert_close(drawn[0], expected, rtol=1e-5, atol=1e-7)


def test_new_tokens_are_penalized_too():
    """Greedy over the same logits: 3, then 2.4 (for 3 is 2 now), then 2.1, then 3 / 1.5 again."""
    sampler = Sampler(0, repetition_penalty=1.5)
    logits = torch.tensor([[3.0, 2.4, 2.1, -1.0]])
    used = sampler.tokens_used([torch.tensor([3])], 4)
    assert [int(sampler.choose(logits, None, used)) for _ in range(4)] == [0, 1, 2, 0]


def test_draws_are_torch_multinomials():
    """So a sample of a commit before has the same text."""
    p = random_logits(0).softmax(-1)
    for seed in range(50):
        one, other = (torch.Generator().manual_seed(seed) for _ in range(2))
        found = Sampler(1.0).choose(p.log(), one)
        assert torch.equal(found, torch.multinomial(p.log().softmax(-1), 1, generator=other)[:, 0])


def test_a_row_with_its_own_generator_draws_what_it_draws_alone():
    logits = random_logits(1)
    together, alone = ([torch.Generator().manual_seed(seed) for seed in range(7, 12)] for _ in range(2))
    for _ in range(20):
        expected = [Sampler().choose(logits[i : i + 1], one) for i, one in enumerate(alone)]
        assert torch.equal(Sampler().choose(logits, together), torch.cat(expected))


@pytest.mark.parametrize("sampler", [{}, {"top_k": 1}, {"top_p": 0.5, "min_p": 0.1}, {"temperature": 0}], ids=str)
def test_what_is_not_finite_is_no_choice(sampler):
    """A row without probabilities once drew its first token. On a GPU the host is told one token later."""
    rows = [[0.0, torch.nan, 1.0], [torch.inf, 1.0, torch.inf], [-torch.inf] * 3]
    for row in rows[:1] if sampler == {"temperature": 0} else rows:
        logits = torch.tensor([[0.0, 1.0, 2.0], row])
        with pytest.raises(NotFinite):
            Sampler(**sampler).choose(logits)
        assert Sampler(**sampler).choose_unseen(logits)[-1] == 1
    assert Sampler(**sampler).choose_unseen(torch.tensor([[0.0, 1.0, -torch.inf]]))[-1] == 0
