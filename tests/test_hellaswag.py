"""training/hellaswag.py: the answer is the ending whose tokens have the lowest mean loss after the text."""

import json
import random
from copy import deepcopy

import pytest
import torch
from torch.nn.functional import cross_entropy

from data.tokenizer import byte_encoding
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig
from training.hellaswag import Question, accuracy, answers, questions

CONTEXT = 48
WORDS = random.Random(0)


def text(least: int, most: int) -> str:
    return "".join(WORDS.choices("abc de", k=WORDS.randint(least, most)))


ASKED = [Question(text(1, 40), [text(1, 12) for _ in range(4)], WORDS.randrange(4)) for _ in range(40)]
ASKED += [Question(text(1, 80), [text(1, 90) for _ in range(4)], 0) for _ in range(5)]  # longer than the context


@pytest.fixture(scope="module", params=["rope", "learned", "documents"])
def model(request) -> GPT:
    torch.manual_seed(0)
    position = "learned" if request.param == "learned" else "rope"
    config = GPTConfig(
        n_layer=2, n_head=2, n_kv_head=2, n_embd=32, context_length=CONTEXT, vocab_size=257, position=position
    )
    made = GPT(config, AttentionConfig(impl="naive", documents=request.param == "documents"))
    for weight in made.parameters():
        weight.data += 0.3 * torch.randn_like(weight)  # so that endings differ by more than their length
    return made.double().eval()


def mean_loss(model: GPT, before: str, ending: str) -> float:
    """Of one ending alone, by the whole table of logits, after no padding."""
    tokens = torch.tensor([*before.encode(), *f" {ending}".encode()])[-CONTEXT - 1 :]
    count = min(len(ending) + 1, len(tokens) - 1)
    x = tokens[None, :-1]
    with torch.no_grad():
        hidden = model.hidden(x, torch.zeros_like(x, dtype=torch.int32))
        logits = hidden[0, -count:] @ model.head.weight.T
    return cross_entropy(logits[:, :257], tokens[-count:]).item()


def test_the_answer_is_the_ending_with_the_lowest_mean_loss(model):
    losses = [[mean_loss(model, asked.text, ending) for ending in asked.endings] for asked in ASKED]
    right = [row.index(min(row)) for row in losses]
    assert list(answers(model, byte_encoding(), ASKED)) == right
    assert len(set(right)) == 4
    known = sum(answer == asked.right for answer, asked in zip(right, ASKED, strict=True))
    assert accuracy(model, byte_encoding(), ASKED) == known / len(ASKED)


def test_losses_that_are_not_finite_are_no_answers(model):
    broken = deepcopy(model)
    broken.head.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"\Ahellaswag=[^\n]*\Z"):
        accuracy(broken, byte_encoding(), ASKED)


LINE = {"ctx": "A man is on a roof. he", "endings": ["a", "b", "c", "d"], "label": 3}
CHANGES = [{"endings": ["a", "b", "c"], "label": 0}, {"label": 4}, {"label": -1}, {"label": None}, {"endings": 4}]
BAD = [b'{"ctx": "A man', b'{"label": 0}', b"[]", b'{"ctx": "\xff"}', b"[" * 100_000]
BAD += [json.dumps(LINE | change).encode() for change in CHANGES]


def test_questions_are_read_in_order_and_others_are_refused(tmp_path):
    file = tmp_path / "q.jsonl"
    lines = [LINE | {"label": i} for i in range(4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert questions(file, 3) == [Question(LINE["ctx"], LINE["endings"], i) for i in range(3)]
    with pytest.raises(ValueError, match=rf"\Ahellaswag=5: {file}[^\n]* 4 [^\n]*\Z"):
        questions(file, 5)


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_line_that_is_no_question_is_named(bad, tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_bytes(json.dumps(LINE).encode() + b"\n" + bad + b"\n")
    with pytest.raises(ValueError, match=rf"\A{file}, line 2 [^\n]*\Z"):
        questions(file, 2)
