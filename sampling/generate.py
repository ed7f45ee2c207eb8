"""Generating text: choose the next token from the logits, append it, repeat.

Shapes: B sequences at a time, T tokens so far, V vocabulary.

With a cache (sampling/cache.py) the prompt runs once, and then each token alone. Without one every new token runs the
whole context through the model again. Both compute the same logits, up to rounding.

On a CUDA GPU a token with a cache is recorded (sampling/token.py), and the caller reads each token while the GPU
already makes the next one.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conf.keys import check, key
from kernels.problem import runs_kernels
from model.gpt import GPT
from sampling.cache import KVCache, refusal
from sampling.token import Generators, NextToken

SPOILT = "the logits are NaN or infinite: the weights of this checkpoint are spoilt; use an earlier one"


class NotFinite(ValueError):
    """The logits are NaN or infinite, so no token can be drawn."""


@dataclass
class Sampler:
    """How the next token is chosen.

    As in transformers, repetition_penalty applies first, then the temperature, top_k, top_p and min_p.
    """

    temperature: float = key(
        0.8,
        "divides the logits; lower is less random",
        least=0,
        most=math.inf,
        usual="0: always the most likely token",
    )
    top_k: int | None = key(
        None, "sample from the k most likely tokens only", needs="temperature", least=1, usual="null: from all"
    )
    # arXiv 1904.09751
    top_p: float = key(
        1.0,
        "sample from the most likely tokens that add up to this probability",
        needs="temperature",
        above=0,
        most=1,
        usual="1: from all",
    )
    # arXiv 2407.01082
    min_p: float = key(
        0.0,
        "sample from tokens with at least this share of the largest probability",
        needs="temperature",
        least=0,
        most=1,
        usual="0: from all",
    )
    # Positive logits of such tokens are divided by it, negative ones multiplied (CTRL, arXiv 1909.05858).
    repetition_penalty: float = key(
        1.0, "above 1: tokens that are in the text already become less likely", above=0, usual="1: off"
    )

    def __post_init__(self):
        check(self)

    def choose(self, logits: Tensor, generator: Generators = None, used: Tensor | None = None) -> Tensor:
        """Logits float (B, V) to token ids int64 (B,). Raises NotFinite if draw() finds that it cannot draw.

        generator: on their device. With one for each row, a row draws what it would draw alone.
        used: bool (B, V), the tokens that each text has, as tokens_used() gives it. The chosen ones are added to it.
        """
        return checked(self.draw(logits, generator, used))

    def choose_unseen(
        self,
        logits: Tensor,
        generator: Generators = None,
        used: Tensor | None = None,
        draws: Tensor | None = None,
        made: Tensor | None = None,
    ) -> Tensor:
        """choose() without a wait for the device: int64 (B + 1,), the token ids, and after them 1 where choose() raises
        NotFinite, else 0. Where sampling/choose.py compares logarithms, two tokens may change places that differ by
        rounding alone. draws: what draw_ahead() gave. made: to be overwritten and returned."""
        if not self.by_kernel(logits, used):
            return self.draw(logits, generator, used, made)
        from sampling.choose import choose  # imported here: triton is not installed everywhere

        logits = logits.float().contiguous()
        draws = self.draw_ahead(logits, generator, used) if draws is None else draws
        return choose(logits, draws, self.temperature, made)

    def draw_ahead(self, logits: Tensor, generator: Generators, used: Tensor | None) -> Tensor | None:
        """What choose_unseen() draws for logits like these, whose values do not matter; None if they do."""
        return waiting_times(logits, generator) if self.temperature > 0 and self.by_kernel(logits, used) else None

    def by_kernel(self, logits: Tensor, used: Tensor | None) -> bool:
        """Whether sampling/choose.py chooses: every token can be drawn, by its logit alone."""
        narrows = self.top_k is not None or self.top_p < 1 or self.min_p > 0
        return used is None and not narrows and runs_kernels(logits.device)

    def draw(
        self, logits: Tensor, generator: Generators, used: Tensor | None = None, made: Tensor | None = None
    ) -> Tensor:
        """choose_unseen() in PyTorch. Nothing in it makes the host wait for a GPU. There is no choice in a row with
        NaN, with inf (unless temperature=0 takes it), or with -inf alone."""
        logits = logits.float()
        if used is not None:
            penalized = torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
            logits = torch.where(used, penalized, logits)
        if self.temperature == 0:
            largest, token = logits.max(-1)
        else:
            p = self.probabilities(logits)
            largest, token = (p / waiting_times(p, generator)).max(-1)
        if used is not None:
            used.scatter_(1, token[:, None], True)
        return torch.cat((token, largest.isnan().any()[None]), out=made)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits float32 (B, V) to the probabilities (B, V) of being drawn, for a temperature above 0."""
        # Shifts the largest logit to 0 first. Then a tiny temperature sends the others to -inf and none to inf.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)  # so it is never 0
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1:
            p, order = logits.softmax(-1).sort(descending=True, dim=-1)
            # A token is removed if the likelier ones reach top_p without it. So the likeliest token always stays.
            enough = p.cumsum(-1) - p >= self.top_p
            logits = logits.masked_fill(enough.scatter(-1, order, enough), -torch.inf)
        if self.min_p > 0:
            logits = logits.masked_fill(logits < math.log(self.min_p), -torch.inf)  # the largest is 0
        return logits.softmax(-1)

    def tokens_used(self, texts: Sequence[Tensor], vocab_size: int) -> Tensor | None:
        """bool (B, vocab_size): which tokens B texts of ids int64 (T,) have. None if no penalty needs it."""
        if self.repetition_penalty == 1:
            return None
        used = torch.zeros(len(texts), vocab_size, dtype=torch.bool, device=texts[0].device)
        for row, text in zip(used, texts, strict=True):
            row[text] = True
        return used


def waiting_times(p: Tensor, generator: Generators) -> Tensor:
    """Exponential draws (B, V). The token with the largest p / draw is a draw from p. It is that of torch.multinomial,
    bit for bit, but that function makes the host wait for a GPU."""
    draws = torch.empty_like(p)
    if generator is None or isinstance(generator, torch.Generator):
        return draws.exponential_(generator=generator)
    for row, own in zip(draws, generator, strict=True):
        row.exponential_(generator=own)
    return draws


def generate(
    model: GPT,
    prompts: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    sampler: Sampler,
    generator: Generators = None,
    **options: Any,
) -> Iterator[Tensor]:
    """Session.generate() with a session of its own, whose arguments and options these are."""
    return Session(model, sampler, generator, B=len(prompts), **options).generate(prompts, max_new_tokens)


class Session:
    """Generates texts, one after the other, with one model, sampler and generator. What takes time to make stays from
    text to text: the cache, and on a CUDA GPU the CUDA graph of a token. So a chat runs only the tokens that are new.
    """

    def __init__(
        self,
        model: GPT,
        sampler: Sampler,
        generator: Generators = None,
        *,
        B: int = 1,
        cache: bool | KVCache = True,
        past_context: str = "slide",
    ):
        """The caller puts the model in eval mode: an iterator that is abandoned half-way could not restore it.

        B: sequences at a time.
        cache: keep keys and values, where refusal() of sampling/cache.py is None; or a KVCache that holds nothing. It
        changes the time, and logits by rounding.
        past_context: what the model sees of a text longer than its context.
            slide   the last context_length tokens. Each then has another position, so all run again at every token.
            half    when the context is full, its last half. That runs again as a new prompt, and the context fills up.
                    A longer prompt is seen as if its tokens had come one by one.
            stop    nothing is yielded after the first sequence has filled its context.
        """
        assert not model.training, "call model.eval() first: dropout would garble the text"
        assert past_context in ("slide", "half", "stop")
        self.model, self.sampler, self.generator, self.past_context = model, sampler, generator, past_context
        self.context, self.vocab_size = model.config.context_length, model.config.vocab_size or 0
        self.cache = cache if isinstance(cache, KVCache) else None
        if cache is True and refusal(model) is None:
            self.cache = KVCache(model, B)
        weight = model.embedding.weight
        self.cuda = weight.is_cuda
        # It stays at one place in memory, because a recorded token has its address.
        no_tokens = torch.zeros(B, 0, dtype=torch.int64, device=weight.device)
        self.used = sampler.tokens_used(list(no_tokens), self.vocab_size)
        choose = sampler.choose_unseen if self.cuda else sampler.choose
        self.choose = partial(choose, generator=generator, used=self.used)
        self.recorded: NextToken | None = None
        if self.cuda and self.cache is not None and self.cache.at is not None:
            logits = weight.new_empty(B, self.vocab_size, dtype=torch.float32)
            draw = partial(sampler.draw_ahead, logits, generator, self.used)
            self.recorded = NextToken(model, self.cache, self.choose, generator, draw)
        self.ran: list[int] = []  # in a chat: what the model has seen, and the last token, which it has not

    def generate(self, prompts: Tensor | Sequence[Tensor], max_new_tokens: int) -> Iterator[Tensor]:
        """Yields the next token of each sequence, int64 (B,), max_new_tokens times, each as soon as it is chosen. On a
        CUDA GPU the tensors are on the host, and each comes when the next token has been enqueued. So the cache may
        hold one token more than was yielded.

        prompts: int64 (B, T), or B tensors (T,) of different lengths, at least 1. The model sees the last
        context_length tokens of a prompt.
        """
        self.ran = []
        self.count(prompts)
        return self.go_on(prompts, max_new_tokens, False)

    def count(self, texts: Tensor | Sequence[Tensor]) -> None:
        """A penalty applies to the tokens of these B texts, int64 (T,), and to those that are chosen from now on."""
        if self.used is not None and (used := self.sampler.tokens_used(list(texts), self.vocab_size)) is not None:
            self.used.copy_(used)

    def go_on(self, prompts: Tensor | Sequence[Tensor], max_new_tokens: int, held: bool) -> Iterator[Tensor]:
        """generate() without count(). held: the cache holds all that the model sees of the prompts but their last
        tokens, or nothing. Otherwise it is begun anew."""
        made = self.enqueued(prompts, max_new_tokens, held)
        return to_host(made) if self.cuda else made

    @torch.inference_mode()
    def enqueued(self, prompts: Tensor | Sequence[Tensor], max_new_tokens: int, held: bool) -> Iterator[Tensor]:
        """go_on(), as the device makes the tokens. On a CUDA GPU it yields what choose_unseen() returns."""
        model, cache, context = self.model, self.cache, self.context
        lengths = [len(prompt) for prompt in prompts]
        texts = [prompt[-context:] for prompt in prompts]  # what the model may see: never more than the context
        if self.past_context == "stop":
            max_new_tokens = min(max_new_tokens, context - min(context, max(lengths)) + 1)
        # What the last token's choice gave.
        held = held and cache is not None and any(cache.lengths)
        found = torch.stack([text[-1] for text in texts]) if held else None
        tokens: list[Tensor] = []  # of all sequences, those that are not in `texts` yet
        for made in range(max_new_tokens):
            sees = [tokens_seen(length + made, context, self.past_context) for length in lengths]
            if cache is None or found is None or sees != [length + 1 for length in cache.lengths]:
                if tokens:
                    new = torch.stack(tokens, dim=1)  # (B, T)
                    texts = [torch.cat((text, row))[-context:] for text, row in zip(texts, new, strict=True)]
                    tokens.clear()
                seen = [text[-n:] for text, n in zip(texts, sees, strict=True)]
                found = self.choose(run_prompts(model, seen, cache))
            elif self.recorded is not None:
                found = self.recorded(found[: len(texts)])
            else:
                found = self.choose(model.next_logits(found[: len(texts), None], cache.advance()))
            yield found
            if cache is None or max(lengths) + max_new_tokens > context:  # or the texts are not needed again
                tokens.append(found[: len(texts)].clone())  # cloned, because a recorded token is always at one place

    def answer(self, text: list[int], max_new_tokens: int) -> Iterator[int]:
        """Yields the tokens that follow `text`, the whole of it. With past_context=stop, none if the text is too long.

        The answers are those that generate() gives without a cache, up to rounding, to the last tokens of the text: as
        many as past_context lets the model see. repetition_penalty counts the whole text.
        """
        if self.past_context == "stop" and len(text) > self.context:
            return
        idx = torch.tensor([text], device=self.model.embedding.weight.device)
        self.count(idx)
        n = tokens_seen(len(text), self.context, self.past_context)
        if self.cache is not None:
            self.catch_up(self.cache, text[-n:-1])
        self.ran = text[-n:]
        for token in self.go_on(idx[:, -n:], max_new_tokens, True):
            self.ran.append(int(token))
            yield self.ran[-1]

    @torch.inference_mode()
    def catch_up(self, cache: KVCache, text: list[int]) -> None:
        """Makes the cache hold `text`. What it holds of it already does not run again."""
        # The cache ends before the last token of `ran`, or after it if go_on() was a token ahead of what it yielded.
        # Its length tells which. In a text that slides both have the same length, but there no key can be kept. Of one
        # that stops, the cache never has more tokens than the context.
        n, T = cache.lengths[0], len(self.ran)
        last = self.context if self.past_context == "stop" else T
        ends = [e for e in (T - 1, T) if e <= last and tokens_seen(e, self.context, self.past_context) == n > 0]
        held: list[int] = self.ran[ends[0] - n : ends[0]] if len(ends) == 1 else []
        differ = (i for i, (new, old) in enumerate(zip(text, held, strict=False)) if new != old)
        same = next(differ, min(len(text), len(held)))
        if not cache.cut(same):
            cache.cut(same := 0)
        if text[same:]:
            setting = cache.extend(len(text) - same)
            self.model.hidden(torch.tensor([text[same:]], device=cache.device), setting=setting)


def to_host(made: Iterator[Tensor]) -> Iterator[Tensor]:
    """The tokens on the host, each when the next one has been enqueued. So the GPU has work while the host reads."""
    sent: deque[tuple[Tensor, torch.cuda.Event]] = deque()
    for found in made:
        arrival = torch.empty_like(found, device="cpu", pin_memory=True)
        arrival.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(found.device))  # the current device may be another one
        sent.append((arrival, event))
        if len(sent) > 1:
            yield arrived(*sent.popleft())
    while sent:
        yield arrived(*sent.popleft())


def arrived(made: Tensor, event: torch.cuda.Event) -> Tensor:
    """Waits for what choose_unseen() made, and returns the tokens int64 (B,)."""
    event.synchronize()
    return checked(made).clone()  # pageable, so that the pinned memory is used again


def checked(made: Tensor) -> Tensor:
    """The tokens int64 (B,) of what choose_unseen() made. Raises NotFinite if it had no choice."""
    if made[-1]:
        raise NotFinite(SPOILT)
    return made[:-1]


def tokens_seen(length: int, context: int, past_context: str) -> int:
    """How many of a text's `length` tokens the model sees: its last ones."""
    if length <= context or past_context != "half":
        return min(length, context)
    return context - (context - length) % (context - context // 2)  # half of it, and what has come since


def run_prompts(model: GPT, texts: list[Tensor], cache: KVCache | None) -> Tensor:
    """The logits (B, V) of the token after each text. If all texts are the same, one of them runs. Texts of different
    lengths run one by one, so that each gives what it gives alone."""
    B, same = len(texts), all(torch.equal(text, texts[0]) for text in texts[1:])
    together = len({len(text) for text in texts}) == 1
    logits = []
    for rows in [slice(B)] if together else [slice(b, b + 1) for b in range(B)]:
        idx = torch.stack(texts[:1] if same else texts[rows])  # (B or 1, T)
        setting = None if cache is None else cache.begin(idx.shape[1], rows, shared=same)
        logits.append(model.next_logits(idx, setting))
    return torch.cat(logits).expand(B, -1)
