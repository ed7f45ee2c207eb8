"""training/context.py and data/made.py: what the context is worth, and the texts made to show it."""

import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import train
from data.dataset import open_data
from data.loader import Batch, Loader, validation_batches
from data.made import DIGITS, KEY, LETTERS, QUESTION, Made, answer, passkey, passkeys, second_half
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig
from lab.runs import model_of_run
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from tests.runs import below, composed, last, records
from training import checkpoint, context
from training.metrics import append, read_metrics
from training.run import validation

V = 11
BYTES = np.arange(V, dtype=np.int32)  # bytes in the text of each token


def small_gpt(T: int, **attention) -> GPT:
    size = GPTConfig(n_layer=2, n_head=2, n_embd=16, context_length=T, vocab_size=V, position="rope")
    return GPT(size, AttentionConfig("tiled", 16, 16, **attention)).double().eval()


def windows(T: int, sizes: tuple[int, ...] = (3, 2)) -> list[Batch]:
    drawn = [torch.randint(V, (B, T + 1)) for B in sizes]
    return [Batch(w[:, :-1], w[:, 1:], torch.zeros(len(w), T, dtype=torch.int32)) for w in drawn]


class Looks(nn.Module):
    """A model that writes, with certainty, what `tell` says for each position, and all symbols alike where that is -1.

    tell(x): int64 (B, n) for x (B, n)."""

    def __init__(self, T: int, V: int, tell):
        super().__init__()
        self.config, self.tell = SimpleNamespace(context_length=T, vocab_size=None), tell
        self.head = nn.Linear(V, V, bias=False)
        self.head.weight = nn.Parameter(100 * torch.eye(V))

    def hidden(self, x, documents):
        told = self.tell(x)
        return F.one_hot(told.clamp(min=0), len(self.head.weight)).float() * (told >= 0)[..., None]


# --- what is measured -----------------------------------------------------------------------------------------------


def plain_losses(net: GPT, batches: list[Batch], part: slice = slice(None), documents=None) -> torch.Tensor:
    """(B, n) of the tokens of that part of each window, which is all that the model sees."""
    given = [] if documents is None else [documents[:, part]]
    with torch.no_grad():
        logits = [net.logits(net.hidden(b.x[:, part], *given)).transpose(1, 2) for b in batches]
        return torch.cat(
            [F.cross_entropy(x, b.y[:, part], reduction="none") for x, b in zip(logits, batches, strict=True)]
        )


def test_the_loss_by_position_is_that_of_a_plain_computation():
    T = 48
    net, batches = small_gpt(T), windows(T)
    record = context.worth(net, batches, BYTES, nullcontext())
    plain, size = plain_losses(net, batches), torch.cat([b.y for b in batches])  # symbol i has i bytes
    spans = [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 48)]
    expected = {f"at_{low:04}_{high:04}": (plain, slice(low - 1, high)) for low, high in spans}
    # of 48 tokens the last 16 are those that every context predicts; all 48 of the window are given, or 32
    tail = slice(32, None)
    expected["given_0048"] = plain, tail
    expected["given_0032"] = torch.cat((plain[:, :16], plain_losses(net, batches, slice(16, None))), 1), tail
    assert {key[5:] for key in record if key.startswith("loss_")} == set(expected)
    for name, (losses, part) in expected.items():
        assert record[f"loss_{name}"] == pytest.approx(float(losses[:, part].mean()), rel=1e-9)
        bits = float(losses[:, part].sum() / size[:, part].sum()) / math.log(2)
        assert record[f"bpb_{name}"] == pytest.approx(bits, rel=1e-9)
    gains = (expected["given_0032"][0] - plain)[:, tail].mean(1)
    assert record["context_gain"] == pytest.approx(float(gains.mean()))
    assert record["context_gain_error"] == pytest.approx(float(gains.std()) / len(gains) ** 0.5, rel=1e-3)
    assert (record["context_tokens"], record["context_same_tokens"]) == (5 * 48, 5 * 16)


def test_a_gain_within_its_error_is_not_measurable():
    """Three untrained steps were said to be worth 0.0362, without a unit and without an error."""
    for gain, measurable in ((0.03, True), (0.01, False), (-0.03, True)):
        said = context.worth_of({"context_gain": gain, "context_gain_error": 0.01})
        assert ("not measurable" not in said) == measurable


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(
    ("device", "impl"),
    [("cpu", "tiled"), *(pytest.param("cuda", impl, marks=NEEDS_GPU) for impl in ("sdpa", "triton"))],
)
def test_the_losses_by_position_have_the_models_own_loss_as_their_mean(device, impl):
    T = 100
    net = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, context_length=T, vocab_size=V), AttentionConfig(impl))
    net.to(device).eval()
    (batch,) = windows(T, (4,))
    record = context.worth(net, [batch], BYTES, nullcontext())
    sizes = {f"loss_at_{low:04}_{high:04}": high - low + 1 for low, high in context.buckets(T)}
    mean = sum(record[key] * size for key, size in sizes.items()) / T
    with torch.no_grad():
        assert mean == pytest.approx(float(net(batch.x.to(device), batch.y.to(device))), rel=1e-5)


@pytest.mark.parametrize("T", [32, 33, 64, 100, 128, 1000])
def test_every_context_given_predicts_the_same_tokens(T):
    tokens = torch.arange(2 * T).view(2, T)
    last = tokens[:, T - context.most(T) // 2 :].flatten()
    assert context.contexts(T)[-1] == T
    for n in [n for n in context.contexts(T) if n & (n - 1) == 0]:
        cut = context.pieces(tokens, n)
        assert cut.shape[1] == n
        assert torch.equal(cut[:, n // 2 :].flatten(), last)
        assert (cut.diff(dim=1) == 1).all()  # a piece is consecutive tokens of one window
    covered = [p for low, high in context.buckets(T) for p in range(low, high + 1)]
    assert covered == [*range(1, T + 1)]


def test_the_documents_of_a_piece_are_cut_with_it():
    T = 64
    net, (batch, *_) = small_gpt(T, documents=True), windows(T)
    numbers = (torch.arange(T) >= 50).int().expand(len(batch.x), T)
    record = context.worth(net, [batch._replace(documents=numbers)], BYTES, nullcontext())
    # the last piece of 32; the one before it ends where this is half over
    pieces = [plain_losses(net, [batch], slice(first, first + 32), numbers)[:, 16:] for first in (32, 16)]
    assert record["loss_given_0032"] == pytest.approx(float(torch.cat(pieces, 1).mean()), rel=1e-9)


# --- recall and passkey ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(source, T): the opened data, of few documents."""
    cache = tmp_path_factory.mktemp("made")

    def made(source: str, T: int):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("data.made.DOCUMENTS", 60)
            return open_data(DataConfig(source, cache=str(cache)), TokenizerConfig(), None, T)

    return made


def every_window(dataset, T: int) -> torch.Tensor:
    """The windows of two epochs of training, and those of validation, with their targets: (windows, 2, T)."""
    loader = Loader(dataset.train, dataset.train_documents, batch_size=1, context_length=T, seed=1, random_offset=False)
    batches = [loader.next() for _ in range(2 * loader.windows)]
    batches += validation_batches(dataset.val, dataset.val_documents, 1, T, 10**6)
    return torch.cat([torch.stack((batch.x, batch.y), 1) for batch in batches])


def test_in_every_window_of_recall_a_random_string_is_repeated(made):
    T = 64
    x, y = every_window(made("recall", T), T).unbind(1)
    assert (x[:, 0] == 256).all()
    assert (x[:, T // 2] == ord("\n")).all()
    assert torch.equal(x[:, 1 : T // 2], x[:, T // 2 + 1 :])
    assert torch.equal(y[:, second_half(T)], x[:, 1 : T // 2])
    symbols = x[:, 1 : T // 2].unique(dim=0)
    assert len(symbols) == 57 - 1 + 3 - 1  # all strings differ; of each split the last one lacks the token after it
    assert {chr(token) for token in symbols.unique().tolist()} == set(LETTERS.tobytes().decode())


def test_in_every_window_of_passkey_what_is_asked_for_was_told_before(made):
    T = 512
    x, y = every_window(made("passkey", T), T).unbind(1)
    word = r"(\w+)"
    told_and_asked = re.compile(f".*?{KEY.format(word)}.*?{QUESTION.format(word).replace('?', '[?]')} ?")
    places, longest = set(), set()
    for tokens, targets in zip(x.tolist(), y.tolist(), strict=True):
        text = bytes(tokens[1:]).decode()
        keys = told_and_asked.findall(text)
        assert told_and_asked.sub("", text) == ""
        assert all(first == second == third for first, second, third in keys)
        assert keys[-1][0] == bytes(targets[answer(T)]).decode() or not keys[-1][0].isdigit()
        places.add(text.index("Remember") // 32)
        longest |= {len(key[0]) for key in keys}
    assert len(places) > 3  # told early, late and between
    assert DIGITS in longest
    assert max(longest) > 2 * DIGITS


def test_passkeys_texts_have_all_lengths_and_the_depth_of_a_key_is_a_share_of_the_filler():
    """Also the whole document: else a model would not have learned to look so far back."""
    counts = [passkeys(1024, np.random.default_rng(i)).count("What is") for i in range(100)]
    assert min(counts) == 1
    assert max(counts) > 4
    texts = [passkey(512, depth, np.random.default_rng(0)) for depth in (0, 0.5, 1)]
    assert [len(text) for text in texts] == [511] * 3
    first, middle, last = (text.index("The pass key is") for text in texts)
    filler = texts[0].rindex("What is") - (texts[2].rindex("What is") - last)
    assert (first, middle, last) == (0, round(filler / 2), filler)


def test_made_texts_stay_small():
    sizes = {("recall", 1024): 8192, ("recall", 1 << 20): 64, ("passkey", 1 << 30): 1}
    assert {key: Made(*key).count for key in sizes} == sizes


def test_recalls_measure_is_of_the_second_string_alone(made):
    T = 64
    dataset = made("recall", T)
    batches = [*validation_batches(dataset.val, dataset.val_documents, 2, T, 10**6)]

    def tell(x):  # right in the second string, but for its first symbol
        told = torch.full_like(x, -1)
        told[:, T // 2 + 1 :] = x[:, 2 : T // 2 + 1] if x.shape[1] == T else -1
        return told

    record = context.measure(Looks(T, 257, tell), batches, dataset, "recall", nullcontext())
    n = T // 2 - 1
    assert record["recall_accuracy"] == pytest.approx((n - 1) / n)
    assert record["recall_loss"] == pytest.approx(math.log(257) / n, rel=1e-5)
    assert record["loss_at_0017_0032"] == pytest.approx(math.log(257), rel=1e-5)


def test_pass_keys_are_counted_by_length_and_depth(made):
    """The model finds a number that lies at most 150 tokens back, and tells it but for the last digit where the text is
    the longest."""
    T = 512
    dataset = made("passkey", T)

    def tell(x):
        told = torch.full_like(x, -1)
        for row, tokens in enumerate(x.tolist()):
            text = bytes(min(token, 255) for token in tokens).decode("latin1")
            number = text[-DIGITS:]
            if number in text[-150:-DIGITS]:
                told[row, answer(len(tokens) + 1)] = torch.tensor([*number.encode()])
            if len(tokens) == T - 1:
                told[row, answer(T).stop - 1] = -1
        return told

    record = context.retrieval(Looks(T, 257, tell), dataset, nullcontext())
    lengths, shares = context.heat(record)
    assert lengths == [128, 256, 512]
    assert shares == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert record["passkey_accuracy"] == pytest.approx(8 / 15)
    told = context.table(record | context.worth(small_gpt(64), windows(64), BYTES, nullcontext()))
    assert "256 0 0 100 100 100" in " ".join(told.split())


def test_the_control_cannot_see_the_first_string():
    """No output of the second half depends on a token that it should recall."""
    cfg = composed("experiment=recall", "attention.window=32")
    reach = cfg.model.n_layer * (cfg.attention.window - 1)  # tokens before a position on which its output depends
    assert cfg.model.context_length // 2 - 1 > reach


@pytest.mark.slow
def test_the_repeated_string_is_learned_and_with_a_window_it_is_not(call, tmp_path):
    """experiment=recall at a sixteenth of its length: 31 characters, and 14 that the control's two layers see."""
    own = ["experiment=recall", "model.context_length=64", "steps=300", "optimizer.lr=5e-3", "context_every=300"]
    own += [f"runs={tmp_path}", f"data.cache={tmp_path}/cache", "wandb.mode=disabled", "device=cpu", "eval_tokens=4096"]
    assert call(train, *own, "name=whole").code == 0
    assert call(train, *own, "name=control", "attention.window=8", "steps=100").code == 0
    whole, control = (read_metrics(tmp_path / name / "metrics.jsonl")[-1] for name in ("whole", "control"))
    assert whole["recall_accuracy"] > 0.99
    assert control["recall_accuracy"] < 0.05
    assert control["recall_loss"] > math.log(len(LETTERS)) - 0.02  # no better than guessing
    assert abs(control["context_gain"]) < 0.01
    assert whole["context_gain"] > 3


# --- in a training, and after it ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(call, small, tmp_path_factory):
    """(run, what was printed): a run `measured` after each step."""
    runs = tmp_path_factory.mktemp("runs")
    own = ["model.context_length=64", "model.position=rope", "tokens_per_step=256", "steps=6", "eval_every=2"]
    own += ["checkpoint_every=3", "context_every=1"]
    ended = call(train, *small, *own, f"runs={runs}", "name=measured")
    assert ended.code == 0, ended.err
    return runs / "measured", ended.out


def measured_again(call, run: Path, *typed: str) -> str:
    """What `train.py eval_only=true` prints of the run."""
    ended = call(train, "eval_only=true", f"runs={run.parent}", "device=cpu", f"resume={run.name}", *typed)
    assert ended.code == 0, ended.err
    return ended.out


def test_a_training_measures_every_n_steps(trained):
    run, out = trained
    found = records(run, "context_gain")[:6]  # and not those of eval_only
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]  # evaluated or not
    assert found[0]["context_tokens"] == 8 * 64  # eval_tokens=512
    assert "context step 3/6 | given 0032 " in out
    assert re.search(r"^33-64 +\d\.\d{4} +\d\.\d{4}$", out, re.MULTILINE)
    assert (run / "context.png").read_bytes().startswith(b"\x89PNG")


def test_windows_overlap_where_the_text_is_short_and_not_made():
    """A window of recall must begin with its document."""
    text = SimpleNamespace(val=np.arange(1000, dtype=np.uint16), val_documents=np.zeros(1, np.int64))
    for source, windows in {"text": 200, "recall": 31}.items():
        cfg = train.Config(batch_size=4, eval_tokens=6400, data=DataConfig(source), model=GPTConfig(context_length=32))
        assert sum(len(batch.x) for batch in validation(cfg, text, overlap=True)) == windows


def test_windows_of_a_made_text_are_its_documents_in_training_too(call, small, tmp_path, monkeypatch):
    """A random offset would cut every document in two, and leave less to recall, at worst nothing."""
    monkeypatch.setattr("data.made.DOCUMENTS", 60)
    loaders = []
    monkeypatch.setattr("training.run.Loader", lambda *args, **kw: loaders.append(Loader(*args, **kw)) or loaders[-1])
    own = [*small[3:], f"runs={tmp_path}", f"data.cache={tmp_path}/cache", "steps=1", "name=x"]
    assert call(train, *own, "data=recall").code == 0
    assert loaders[0].offsets == 1
    dataset = model_of_run("x", tmp_path, torch.device("cpu")).dataset  # breakit.py opens the same text
    assert np.array_equal(dataset.train, loaders[0].tokens)


def test_eval_only_measures_the_best_checkpoint_and_only_adds(call, small_run, tmp_path):
    """Of a broken run, which is stamped."""
    rate = "optimizer.lr=3 optimizer.warmup_steps=1 optimizer.min_lr_ratio=1 attention=naive break_it=no_scale"
    small_run(f"steps=3 eval_every=1 checkpoint_every=1 keep_last=5 {rate}")
    run = tmp_path / "x-BROKEN-no_scale"
    best = checkpoint.best(run / "checkpoints")
    assert best != last(run)  # with such a rate the loss rises
    before, lines = below(run), (run / "metrics.jsonl").read_text()
    out = measured_again(call, run)
    assert out.startswith("BROKEN[no_scale] ")
    assert str(best) in out
    after = below(run)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {f"{run}/metrics.jsonl", f"{run}/context.png"}
    assert before.keys() <= after.keys()
    added = (run / "metrics.jsonl").read_text().removeprefix(lines)
    assert len(added.splitlines()) == 1
    assert (json.loads(added)["step"], json.loads(added)["broken"]) == (int(best.name[-6:]), "no_scale")


def test_eval_only_measures_a_checkpoint_by_its_path_without_optimizer_state(call, trained):
    path = trained[0] / "checkpoints/step_000003"
    (path / "optimizer.safetensors").unlink()
    measured_again(call, trained[0], f"resume={path}")
    training, after = (r for r in records(trained[0], "context_gain") if r["step"] == 3)
    assert training | {"context_ms": 0} == after | {"context_ms": 0}


def test_eval_only_measures_a_run_with_another_context(call, trained):
    """So a model trained on short sequences and one trained on long ones can be asked for the same tokens."""
    for T in (64, 128, 32):
        measured_again(call, trained[0], f"model.context_length={T}")
    usual, longer, shorter = records(trained[0], "context_gain")[-3:]
    longest = [max(context.spans(key) for key in r if "given" in key) for r in (usual, longer, shorter)]
    assert longest == [(64,), (128,), (32,)]
    assert longer["context_tokens"] == usual["context_tokens"] == 512
    assert longer["loss_given_0064"] != longer["loss_given_0128"]


def test_eval_only_measures_a_run_on_another_text(call, trained, monkeypatch):
    monkeypatch.setattr("data.made.DOCUMENTS", 60)
    assert "of the second string right" in measured_again(call, trained[0], "data=recall", "data.path=null")


def test_out_of_memory_in_eval_only_is_one_line(call, trained, monkeypatch):
    """It was a traceback."""
    monkeypatch.setattr(context, "measure", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    ended = call(train, "eval_only=true", "resume=measured", f"runs={trained[0].parent}", "device=cpu")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "batch_size=4" in ended.err


def test_eval_only_refuses_tokens_of_another_tokenizer(call, small, make, text, tmp_path):
    """A token id that the model lacks would be an IndexError, or worse on a GPU."""
    ours, theirs = make(text), make(text, TokenizerConfig("bpe", vocab_size=300))
    own = ["data=bin", f"data.path={ours}", f"runs={tmp_path}", "steps=1", "name=x"]
    assert call(train, *small[3:], *own).code == 0
    ended = call(train, "eval_only=true", "resume=x", f"runs={tmp_path}", "device=cpu", f"data.path={theirs}")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert str(theirs) in ended.err


def test_a_loss_that_is_not_a_number_is_drawn_and_printed(tmp_path, caplog):
    record = context.worth(small_gpt(64), windows(64), BYTES, nullcontext())
    lost = {key: math.nan if key.startswith("loss") else x for key, x in record.items()} | {"context_gain": math.nan}
    assert context.draw(lost, tmp_path, "x", "no_max") == [tmp_path / "context.png"]
    assert "nan" in context.table(lost)
    assert not caplog.records  # matplotlib logs a warning for text at no place


def test_a_line_that_a_kill_cut_short_does_not_swallow_the_next(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    append(file, {"step": 1, "context_gain": math.nan})
    assert [record["step"] for record in read_metrics(file)] == [1, 1]
    append(file, {"step": 3})
    assert file.read_text().endswith('"nan"}\n{"step": 3}\n')


def test_a_measurement_may_have_a_context_that_the_runs_length_warmup_does_not_reach():
    """It trains nothing. A training with it is refused in tests/test_bad_input.py."""
    warmup = {"length_warmup_steps": 4, "length_warmup_from": 16, "length_warmup_by": 4}
    train.Config(model=GPTConfig(context_length=512), eval_only=True, resume="NAME", **warmup)
