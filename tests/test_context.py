"""training/context.py: what a longer context is worth to a run's model."""

import os
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import sample
import train
from data.dataset import open_data
from data.loader import Batch, validation_batches
from data.made import second_half
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig, build
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from tests.runs import last
from training import context
from training.checkpoint import load_checkpoint, network

V = 11


def gpt(T: int, **attention) -> GPT:
    size = GPTConfig(n_layer=2, n_head=2, n_embd=16, context_length=T, vocab_size=V, position="rope")
    return GPT(size, AttentionConfig("tiled", 16, 16, **attention)).double().eval()


def windows(T: int, sizes: tuple[int, ...] = (3, 2), begins: int | None = None) -> list[Batch]:
    """begins: where in each window the second document begins."""
    drawn = [torch.randint(V, (B, T + 1)) for B in sizes]
    numbers = (torch.arange(T) >= (T if begins is None else begins)).int()
    return [Batch(w[:, :-1], w[:, 1:], numbers.expand(len(w), T)) for w in drawn]


def plain_losses(model: GPT, batches: list[Batch], part: slice = slice(None)) -> torch.Tensor:
    """(windows, n) of the tokens of that part of each window, which is all that the model sees."""
    with torch.no_grad():
        logits = [model(b.x[:, part], documents=b.documents[:, part]).transpose(1, 2) for b in batches]
    found = [F.cross_entropy(x, b.y[:, part], reduction="none") for x, b in zip(logits, batches, strict=True)]
    return torch.cat(found)


@pytest.mark.parametrize("begins", [None, 40])
def test_the_loss_given_a_context_is_that_of_a_plain_computation(begins):
    """Of 48 tokens the last 16 are those that every context predicts; all 48 are given, or the 32 of two halves."""
    model, batches = gpt(48, documents=begins is not None), windows(48, begins=begins)
    found = context.given(model, batches, nullcontext())
    whole, cut = plain_losses(model, batches), plain_losses(model, batches, slice(16, None))
    torch.testing.assert_close(found, {32: cut[:, 16:].mean(1), 48: whole[:, 32:].mean(1)})
    whole, cut = (losses[:, -16:] for losses in (whole, cut))
    assert (begins is None) == bool((whole != cut).all()), "a document that begins later is seen whole by both"


def test_the_pieces_of_a_window_are_its_own():
    model, batches = gpt(100), windows(100)
    pieces = [plain_losses(model, batches, slice(begin, begin + 32))[:, 16:] for begin in (52, 68)]
    torch.testing.assert_close(context.given(model, batches, nullcontext())[32], torch.cat(pieces, 1).mean(1))


@pytest.mark.parametrize("T", [32, 33, 64, 100, 128, 1000])
def test_every_context_given_predicts_the_same_tokens(T):
    tokens = torch.arange(2 * T).view(2, T)
    measured = tokens[:, T - context.most(T) // 2 :].flatten()
    for n in [n for n in (32, 64, 128, 256, 512) if n <= T]:
        cut = context.pieces(tokens, n)
        assert cut.shape[1] == n
        assert torch.equal(cut[:, n // 2 :].flatten(), measured)
        assert (cut.diff(dim=1) == 1).all()  # a piece is consecutive tokens of one window


def test_a_gain_has_the_standard_error_of_its_differences():
    """Windows differ by 5 nats. Over the line before each gains 0.2 or 0.3, then loses 0.1."""
    each = {32: [1.0, 6.0], 64: [0.8, 5.7], 80: [0.9, 5.8]}
    losses = {n: torch.tensor(loss, dtype=torch.float64) for n, loss in each.items()}
    lines = context.table(losses, 80, 128)  # two bytes a token
    assert "64 tokens" in lines[0]
    numbers = [[float(x) for x in re.findall(r"-?[\d.]+", line)] for line in lines[2:]]
    assert numbers == [[32, 3.5, 2.5247, 0, 0], [64, 3.25, 2.3444, 0.25, 0.05], [80, 3.35, 2.4165, -0.1, 0]]
    assert "nan" in context.table({n: loss[:1] for n, loss in losses.items()}, 80, 64)[-1]  # one window has no error


def test_a_run_is_measured_on_its_own_validation_text(small_run, text, call, tmp_path):
    """Each token once: more were said to be measured than there are. After an edit the model was given the ids of
    another tokenizer, and text that it had learned."""
    own = shutil.copytree(text, tmp_path / "text")
    sizes = "model.context_length=64 eval_tokens=4096 tokens_per_step=256 tokenizer=bpe tokenizer.vocab_size=300"
    sizes += f" attention.documents=true data.cache={tmp_path}/cache"
    small_run(f"steps=2 {sizes} data.path={own}")
    ended = call(sample, f"runs={tmp_path}", "context=true")
    os.utime(own / "0.txt", (1, 1))
    assert call(sample, f"runs={tmp_path}", "context=true").out == ended.out, "the same text is prepared again"
    kept = load_checkpoint(last(tmp_path / "x"))
    model = network(kept, "auto", torch.device("cpu"))
    dataset = open_data(DataConfig(**kept.state["config"]["data"]), TokenizerConfig("bpe", 300))
    batches = validation_batches(dataset.val, dataset.val_documents, 4, 64, 4096, stride=32)
    size = sum(int(dataset.token_bytes[batch.y[:, 32:].numpy()].sum()) for batch in batches)
    assert ended.out.splitlines() == context.table(context.given(model, batches, nullcontext()), 64, size)
    assert len(dataset.val) - 96 <= int(ended.out.split()[4].replace(",", "")) <= len(dataset.val)
    (own / "0.txt").write_text("a\n" + (own / "0.txt").read_text())
    ended = call(sample, f"runs={tmp_path}", "context=true")
    assert (ended.code, ended.out, "before an edit" in ended.err) == (1, "", True)
    small_run(f"resume=auto steps=3 {sizes} data.source=bin data.path={dataset.folder}")  # its tokens are still there


class Reads(torch.nn.Module):
    """A model that finds a pass key among the last `reach` tokens of a text and writes it where it is asked for."""

    def __init__(self, reach: int):
        super().__init__()
        self.embedding, self.reach = torch.nn.Embedding(1, 1), reach

    def hidden(self, idx, documents):
        return torch.stack([self.of(bytes(text[1:].tolist()).decode()) for text in idx])

    def of(self, text: str):
        key = re.search(r"The pass key is (\d{5})\. ", text[-self.reach :])
        told, asked = torch.zeros(len(text) + 1, dtype=torch.int64), text.rindex("key is ") + len("key is ")
        told[asked : asked + 5] = torch.tensor([*(key[1] if key else text[asked : asked + 4] + "?").encode()])
        return F.one_hot(told, 257).float()

    def head(self, x):
        return x


def test_pass_keys_are_counted_by_the_depth_and_the_length_of_the_text(monkeypatch):
    monkeypatch.setattr(context, "TEXTS", 5)
    cells = [(256, 0), (512, 0), (512, 50), (512, 100)]
    found = [context.retrieved(Reads(300), build(TokenizerConfig("byte"), []), *cell, nullcontext()) for cell in cells]
    assert found == [1, 0, 0, 1]


@pytest.mark.parametrize("source", ["recall", "passkey"])
def test_a_run_on_a_made_text_says_how_much_of_it_is_found(source, call, small, tmp_path, monkeypatch):
    monkeypatch.setattr("data.made.DOCUMENTS", 60)
    monkeypatch.setattr(context, "TEXTS", 5)
    own = [f"data={source}", "data.path=null", "model.context_length=512", "steps=1", "tokens_per_step=2048"]
    ended = call(train, *small, *own, f"runs={tmp_path}", "name=x")
    assert ended.code == 0, ended.err
    ended = call(sample, f"runs={tmp_path}", "context=true")
    assert ended.code == 0, ended.err
    if source == "passkey":
        rows = [line.split("%")[1:] for line in ended.out.splitlines()[-len(context.DEPTHS) :]]
        assert all(0 <= float(share) <= 100 for (share, _) in rows)
        assert (tmp_path / "x" / "passkey.png").exists()
        return
    kept, half, hits = load_checkpoint(last(tmp_path / "x")), second_half(512), []
    model = network(kept, "auto", torch.device("cpu"))
    dataset = open_data(DataConfig(**kept.state["config"]["data"]), TokenizerConfig("byte"), None, 512)
    for batch in validation_batches(dataset.val, dataset.val_documents, 4, 512, context.WINDOWS * 512):
        found = model(batch.x, documents=torch.zeros_like(batch.x)).argmax(-1) == batch.y
        hits.append(found[:, half].double().mean(1))
    assert f"{float(torch.cat(hits).mean()):.1%} of the second string" in ended.out
