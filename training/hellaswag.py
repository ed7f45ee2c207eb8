"""HellaSwag: which of four endings continues a text? `python sample.py init_from=gpt2 hellaswag=10042`

Of Zellers et al., arXiv 1905.07830: 10,042 questions for validation. The model's answer is the ending with the lowest
mean loss of its tokens, given the text before it, and no end-of-text token before that. llm.c counts in the same way,
and reports an accuracy of 0.2955 for GPT-2 124M (lm-eval's acc_norm divides by bytes instead of tokens, and cleans the
texts). Guessing has 0.25.

T tokens of the longest text and ending in a batch.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from tiktoken import Encoding
from torch.nn.utils.rnn import pad_sequence

from data.loader import Batch
from data.text import counted
from data.tokenizer import encode
from model.gpt import GPT
from model.loss import IGNORE
from training.context import each_token

ENDINGS = 4
TOGETHER = 16  # questions in a pass


class Question(NamedTuple):
    """A text, its four endings, and which of them is right."""

    text: str
    endings: list[str]
    right: int


def questions(file: Path, count: int) -> list[Question]:
    """The first `count` of a .jsonl file. ValueError, one line, if it has fewer, or a line that is no question."""
    found: list[Question] = []
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if len(found) == count:
                break
            try:
                said = json.loads(line)
                text, endings, right = str(said["ctx"]), list(map(str, said["endings"])), int(said["label"])
                if len(endings) != ENDINGS or not 0 <= right < ENDINGS:
                    raise ValueError(f"{ENDINGS} endings are wanted, and label= the number of one")
                found.append(Question(text, endings, right))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                why = f"{type(error).__name__}: {error}"
                raise ValueError(f"{file}, line {number} is no question of HellaSwag ({why}); delete it") from error
    if len(found) < count:
        raise ValueError(f"hellaswag={count}: {file} has {counted(len(found), 'question')}; ask fewer, or delete it")
    return found


def batch_of(asked: list[Question], encoding: Encoding, context: int) -> Batch:
    """A row for each ending of each question, padded at its end; only an ending's tokens have targets. A row that is
    longer than the context begins later."""
    rows, targets = [], []
    for question in asked:
        text = encode(encoding, question.text).tolist()
        for ending in question.endings:
            end = encode(encoding, " " + ending).tolist()
            tokens = torch.tensor((text + end)[-context - 1 :])
            rows.append(tokens[:-1])
            targets.append(tokens[1:].clone())
            targets[-1][: -len(end)] = IGNORE
    x, y = pad_sequence(rows, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=IGNORE)
    return Batch(x, y, torch.zeros_like(x, dtype=torch.int32))  # each row is one document


def answers(model: GPT, encoding: Encoding, asked: list[Question]) -> Iterator[int]:
    """The number of the ending that the model takes, for each question. model: in evaluation mode. ValueError for
    losses that are not finite."""
    for i in range(0, len(asked), TOGETHER):
        batch = batch_of(asked[i : i + TOGETHER], encoding, model.config.context_length)
        losses, _ = each_token(model, batch, nullcontext())  # (4 questions, T), 0 where no target is
        means = losses.sum(1) / (batch.y != IGNORE).sum(1)
        if not means.isfinite().all():
            raise ValueError("hellaswag=: the model's losses are not finite; use dtype=float32, or another checkpoint")
        yield from means.view(-1, ENDINGS).argmin(1).tolist()


def accuracy(model: GPT, encoding: Encoding, asked: list[Question]) -> float:
    """The share of the questions that the model answers correctly. Prints its progress on stderr."""
    right = 0
    for number, (question, answer) in enumerate(zip(asked, answers(model, encoding, asked), strict=True), 1):
        right += answer == question.right
        if number % 500 == 0 and number < len(asked):
            print(f"{number:,} of {len(asked):,} questions, accuracy {right / number:.4f}", file=sys.stderr)
    return right / len(asked)
