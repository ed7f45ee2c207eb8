"""Sampling with a cache: the keys and values of past tokens, and attention of one new token against them.

Shapes: B sequences, H query heads, H_kv key/value heads, D head size, S slots in a layer's buffer, T_k keys looked at.
    q, o (B, H, 1, D)
As in model/tiled.py the G = H / H_kv query heads of a key head are rows of one matrix, with N = B * H_kv:
    q, acc (N, G, D)    k, v (N, T_k, D)    m, l (N, G, 1)
In pages, with P tokens a page: k, v (pages, H_kv, P, D)

No token sees a later one, so the keys and values of a token stay as they are. A prompt runs through attention() as in
training, and each layer keeps its keys and values. After that a token is one query row, and decode() computes it: the
algorithm of sampling/decode.py in plain PyTorch. On a GPU the kernel there runs. It reads the sequences' positions from
the device, where they are counted too.

A layer keeps a buffer of all positions for each sequence, or with pages only blocks of P tokens, which a table finds.
Then memory follows the lengths of the texts, and texts that begin alike have the pages of their beginning together.
A layer with a window keeps its buffer, which is as small as the window.

Source of the pages: Kwon et al. 2023, arXiv 2309.06180.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.problem import Problem
from model.abilities import wanted, why_not
from model.attention import AttentionConfig, attention, problem_of
from model.gpt import GPT, Setting
from model.layers import LAYERS, Layers
from model.mask import WHOLE, Tile
from model.tiled import INF, LOG2E, LOWEST, State, add_product, merge, scores, sum_dtype

PAGE = 64  # tokens in a page of sample.py; sampling/decode.py wants a multiple of its tiles
ANY = Tile(range(0), range(0), WHOLE)  # scores() uses a tile's place for alibi alone


Rope = tuple[Tensor, Tensor] | None  # cos, sin of every position, float32 (positions, D / 2)


class Place(NamedTuple):
    """Where the next token's key goes, and what the token sees. Layers with as many slots share a Place."""

    slots: int | Tensor  # the slot of the new key; int64 (B,) if the sequences differ
    T_k: int  # slots 0 to T_k - 1 are looked at
    back: Tensor | None = None  # how many positions each slot's key is before the query, int64 (1 or B, T_k); for alibi
    hidden: Tensor | None = None  # bool (B, T_k): slots that a shorter sequence has not filled; None: all are filled


def on_device(numbers: list, device: torch.device) -> Tensor:
    """The integers as an int64 tensor on the device. The host does not wait for a GPU."""
    found = torch.tensor(numbers)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


class Pages:
    """Which pages hold the tokens of each sequence. All layers without a window share one such table.

    Token p of sequence b is in page table[b, p // size], at place p % size. Sequences may share a page; the first to
    write into it gets a copy. Page 0 belongs to no sequence and holds zeros: the table has it where no page is needed.
    """

    def __init__(self, B: int, context_length: int, size: int, device: torch.device):
        """size: the tokens of a page, a power of 2."""
        assert size.bit_count() == 1, f"pages of {size} tokens"
        self.size, self.device = size, device
        # It stays at one place in memory, because a recorded token has its address.
        self.table = torch.zeros(B, -(-context_length // size), dtype=torch.int32, device=device)
        self.held: list[list[int]] = [[] for _ in range(B)]  # the pages of each sequence
        self.owners = [1]  # how many sequences have each page
        self.free: list[int] = []
        self.capacity = 0  # the pages for which the layers have memory
        self.moved = 0  # how often the layers' memory has moved
        self.changed = False  # whether the device's table is out of date
        self.copies: list[tuple[int, int]] = []  # pages to be copied: from, to

    def trim(self, b: int, T: int) -> None:
        """Sequence b keeps the pages of its first T tokens alone."""
        count = -(-T // self.size)
        for page in self.held[b][count:]:
            self.owners[page] -= 1
            if not self.owners[page]:
                self.free.append(page)
            self.changed = True
        del self.held[b][count:]

    def own(self, b: int, start: int, stop: int) -> None:
        """Gives sequence b pages of its own for its tokens from start to stop - 1. It has those before."""
        held = self.held[b]
        for i in range(start // self.size, -(-stop // self.size)):
            if i < len(held) and self.owners[held[i]] == 1:
                continue
            if not self.free:
                self.free.append(len(self.owners))
                self.owners.append(0)
            page = self.free.pop()
            if i < len(held):
                self.owners[held[i]] -= 1
                self.copies.append((held[i], page))
            held[i : i + 1] = [page]
            self.owners[page] = 1
            self.changed = True

    def share(self, rows: range) -> None:
        """The sequences `rows`, which have no pages, get those of the first of them."""
        pages = self.held[rows[0]]
        for page in pages:
            self.owners[page] = len(rows)
        for b in rows[1:]:
            self.held[b] = pages.copy()

    def settle(self, layers: "list[LayerCache]") -> None:
        """Brings the device's table and the layers' memory up to date."""
        if not self.changed:
            return
        if len(self.owners) > self.capacity:
            most = 1 + self.table.numel()
            self.capacity = max(len(self.owners), min(self.capacity * 3 // 2, most))  # it seldom moves
            self.moved += 1
        copies = on_device(list(zip(*self.copies, strict=True)), self.device) if self.copies else None
        for layer in layers:
            if layer.pages is not None and hasattr(layer, "k"):
                layer.k, layer.v = (self.settled(buffer, copies) for buffer in (layer.k, layer.v))
        width = self.table.shape[1]
        self.table.copy_(on_device([held + [0] * (width - len(held)) for held in self.held], self.device))
        self.copies.clear()
        self.changed = False

    def settled(self, buffer: Tensor, copies: Tensor | None) -> Tensor:
        """A layer's keys or values (pages, H_kv, P, D): enough pages, and copied ones."""
        if len(buffer) < self.capacity:
            grown = buffer.new_zeros(self.capacity, *buffer.shape[1:])
            grown[: len(buffer)] = buffer
            buffer = grown
        if copies is not None:
            buffer[copies[1]] = buffer[copies[0]]
        return buffer

    def read(self, buffer: Tensor, T: int) -> Tensor:
        """The first T places of every sequence, (B, H_kv, T, D)."""
        return buffer[self.table[:, : -(-T // self.size)]].transpose(1, 2).flatten(2, 3)[:, :, :T]

    def write(self, buffer: Tensor, rows: Tensor, positions: Tensor, x: Tensor) -> None:
        """x (R, H_kv, T, D), of the sequences `rows` int64 (R, 1) at `positions` int64 (R or 1, T)."""
        buffer[self.table[rows, positions // self.size], :, positions % self.size] = x.transpose(1, 2)


class LayerCache:
    """The keys (after the rotary embedding) and values of one layer. Position p is in slot p % S, or in a page."""

    k: Tensor  # (N, S, D), or (pages, H_kv, P, D); made by the first fill()
    v: Tensor
    problem: Problem  # the scale, softcap and slopes of the layer
    tickets: Tensor  # for the kernel

    def __init__(
        self, config: AttentionConfig, B: int, context_length: int, splits: int | None, pages: Pages | None, rope: Rope
    ):
        """config: the layer's own. pages: for a layer whose window is no shorter than the context. rope: for the
        kernel, cos and sin of every position."""
        self.config, self.B, self.splits, self.rope = config, B, splits, rope
        # Under a window a new key takes the slot of the one that has just left the window.
        self.size = min(config.window or context_length, context_length)
        self.pages = pages if self.size == context_length else None
        self.rows = slice(B)  # the sequences whose prompts run now
        self.past = 0  # how many tokens of these are in the cache already
        # None: prompts run now. With the kernel: the position of each sequence's token, int64 (B,) on the device.
        self.place: Place | Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, **options: Any) -> Tensor:
        """What attention() computes: of prompts, or of one token of every sequence over all that the cache holds."""
        if self.place is None:
            k, v = self.fill(q, k, v)
            return attention(q, k, v, config, **options | {"qkv": None})  # qkv would be without earlier tokens
        return self.of_token(q, k, v)

    def fill(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps the last S keys and values of prompts, and returns all that their queries see: after earlier tokens
        those too, in the order of their positions. q, k, v as in attention(), of the sequences `rows` alone."""
        (R, H_kv, T, D), pages = k.shape, self.pages
        if not hasattr(self, "k"):
            # Zeros, because a hidden slot has weight 0, and 0 times what new memory holds may be NaN.
            shape = (self.B * H_kv, self.size, D) if pages is None else (pages.capacity, H_kv, pages.size, D)
            self.k, self.v = (k.new_zeros(shape) for _ in "kv")
            self.tickets = k.new_zeros(self.B * H_kv, dtype=torch.int32)
            self.problem = problem_of(q, k, self.config)
        T_last = min(T, self.size)
        before = torch.arange(max(0, self.past - self.size), self.past, device=k.device) % self.size
        positions = torch.arange(self.past + T - T_last, self.past + T, device=k.device)
        seen = []
        for buffer, x in ((self.k, k), (self.v, v)):
            if pages is None:
                rows = buffer.view(self.B, -1, *buffer.shape[1:])[self.rows]
                seen.append(torch.cat((rows[:, :, before], x), dim=2) if self.past else x)
                rows[:, :, positions % self.size] = x[:, :, T - T_last :]
            else:
                seen.append(torch.cat((pages.read(buffer, self.past), x), dim=2) if self.past else x)
                of = torch.arange(self.B, device=k.device)[self.rows][:R, None]  # the first, if they share the prompt
                pages.write(buffer, of, positions[None], x)
        return seen[0], seen[1]

    def of_token(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keeps the key and value of one new token of every sequence, and returns its o. All are (B, heads, 1, D). With
        the kernel, q and k are not yet rotated."""
        assert self.place is not None
        if isinstance(self.place, Tensor):
            from sampling import decode as kernel  # imported here: triton is not installed everywhere

            at = self.k, self.v, self.place
            table = None if self.pages is None else (self.pages.table, self.size)
            return kernel.decode(q, k, v, *at, self.problem, self.tickets, self.splits, self.rope, table)
        slots, T_k, back, hidden = self.place
        seen = []
        for buffer, x in ((self.k, k), (self.v, v)):
            if self.pages is not None:
                positions = torch.as_tensor(slots, device=x.device).view(-1, 1)
                self.pages.write(buffer, torch.arange(self.B, device=x.device)[:, None], positions, x)
                seen.append(self.pages.read(buffer, T_k).flatten(0, 1))
                continue
            if isinstance(slots, int):
                buffer.select(1, slots).copy_(x.reshape(len(buffer), -1))
            else:
                buffer.view(self.B, -1, *buffer.shape[1:])[torch.arange(self.B, device=x.device), :, slots] = x[:, :, 0]
            seen.append(buffer[:, :T_k])
        return decode(q, seen[0], seen[1], self.problem, back, hidden, self.splits or 1)


class KVCache:
    """The keys and values of all layers for B sequences of up to context_length tokens, each at its own position.

    begin(), extend() and advance() say which tokens run next, and return the Setting for the model to run them in.
    """

    def __init__(self, model: GPT, B: int, splits: int | None = None, kernel: bool = True, page: int | None = None):
        """An empty cache. splits: into how many parts the keys are cut; None: as suits the device. kernel: compute the
        tokens after the prompts with sampling/decode.py where it can run. page: keep keys and values in pages of so
        many tokens, a power of 2; None: in one buffer. Raises ValueError as refusal() says."""
        if (refused := refusal(model)) is not None:
            raise ValueError(refused)
        config, weight = model.attention_config, model.embedding.weight
        context_length, device = model.config.context_length, weight.device
        self.pages = None if page is None else Pages(B, context_length, page, device)
        self.ropes = model.ropes(context_length, device)  # cos, sin of every position
        self.layers = [
            LayerCache(config.layer(i), B, context_length, splits, self.pages, self.ropes.get(local))
            for i, local in enumerate(model.local_ropes)
        ]
        self.lengths = [0] * B  # the number of tokens of each sequence
        self.context_length, self.device, self.alibi = context_length, device, config.alibi
        # With the kernel: the position of each sequence's last token. It stays at one place in memory, because a
        # recorded token has its address.
        kernel = kernel and not why_not("decode", wanted(config), device, weight.dtype, model.config.head_size)
        self.at = torch.zeros(B, dtype=torch.int64, device=device) if kernel else None

    def setting(self, positions: slice | Tensor, ropes: dict | None = None, layers: Layers = LAYERS) -> Setting:
        """For tokens at these positions. ropes: {} if attention's kernel rotates; None: self.ropes."""
        attend = [layer.attend for layer in self.layers]
        ropes = self.ropes if ropes is None else ropes
        return Setting(self.context_length, positions, attend, ropes=ropes, layers=layers)

    @property
    def moved(self) -> int:
        """How often the keys and values have moved in memory. A recorded token would read the old place."""
        return 0 if self.pages is None else self.pages.moved

    def begin(self, T: int, rows: slice, shared: bool = False) -> Setting:
        """Next, the model runs the prompts of the sequences `rows`, of T tokens each. What they had is forgotten.
        shared: they have the same prompt, and the model runs it once."""
        if self.pages is not None:
            every = range(len(self.lengths))[rows]
            for b in every:
                self.pages.trim(b, 0)
            for b in every[:1] if shared else every:
                self.pages.own(b, 0, T)
            if shared:
                self.pages.share(every)
            self.pages.settle(self.layers)
        return self.prompts(rows, 0, T)

    def extend(self, T: int) -> Setting:
        """Next, the model runs T more tokens of every sequence. All sequences have as many tokens."""
        past, B = self.lengths[0], len(self.lengths)
        assert self.lengths == [past] * B, "sequences of different lengths"
        assert past + T <= self.context_length, "more tokens than the context has"
        setting = self.prompts(slice(B), past, T)
        self.own([past] * B)
        return setting

    def prompts(self, rows: slice, past: int, T: int) -> Setting:
        """For T tokens of the sequences `rows`, which have `past` tokens already."""
        self.lengths[rows] = [past + T] * len(self.lengths[rows])
        if self.at is not None:
            self.at[rows] = past + T - 1
        for layer in self.layers:
            layer.rows, layer.past, layer.place = rows, past, None
        return self.setting(slice(past, past + T))

    def cut(self, T: int) -> bool:
        """Forgets all but the first T tokens of every sequence, and returns True. Returns False, and forgets nothing,
        if keys that the next token sees may be gone, because a window's buffer has been full."""
        whole = all(max(self.lengths) <= layer.size for layer in self.layers)
        if possible := T == 0 or whole or self.lengths == [T] * len(self.lengths):
            self.lengths = [min(T, length) for length in self.lengths]
            if self.at is not None:
                self.at.clamp_(max=T - 1)
            if self.pages is not None:
                for b, length in enumerate(self.lengths):
                    self.pages.trim(b, length)
                self.pages.settle(self.layers)
        return possible

    def advance(self) -> Setting:
        """Next, the model runs one token of every sequence, idx (B, 1)."""
        self.grow()
        return self.move()

    def grow(self) -> None:
        """The part of advance() that a recorded token leaves to the host: lengths and pages."""
        assert max(self.lengths) < self.context_length, "a sequence is full: begin() it again with a shorter prompt"
        before, self.lengths = self.lengths, [length + 1 for length in self.lengths]
        self.own(before)

    def own(self, before: list[int]) -> None:
        """Gives every sequence pages for its tokens from `before` on."""
        if self.pages is not None:
            for b, start in enumerate(before):
                self.pages.own(b, start, self.lengths[b])
            self.pages.settle(self.layers)

    def move(self, layers: Layers = LAYERS) -> Setting:
        """The other part of advance(): what the token's position is. With the kernel the device counts it. layers: what
        computes the token's layers."""
        if self.at is not None:
            self.at += 1
            for layer in self.layers:
                layer.place = self.at
            return self.setting(self.at[:, None], {}, layers)
        at = [length - 1 for length in self.lengths]
        together = len(set(at)) == 1
        places = {size: self.place(at, together, size) for size in {layer.size for layer in self.layers}}
        for layer in self.layers:
            layer.place = places[layer.size]
        return self.setting(slice(at[0], at[0] + 1) if together else torch.tensor(at, device=self.device)[:, None])

    def place(self, at: list[int], together: bool, size: int) -> Place:
        """For tokens at the positions `at`, in buffers of `size` slots."""
        T_k = min(max(at) + 1, size)
        if together and not self.alibi:
            return Place(at[0] % size, T_k)
        position = torch.tensor(at[:1] if together else at, device=self.device)[:, None]
        back = (position - torch.arange(T_k, device=self.device)) % size
        if together:
            return Place(at[0] % size, T_k, back)
        return Place(position[:, 0] % size, T_k, back, back > position)


def refusal(model: GPT) -> str | None:
    """Why a model samples without a cache; None if it has one. decode() reads no failure of break_it: it would compute
    whole attention."""
    return why_not("cache", wanted(model.attention_config, model.break_it)) or None


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    back: Tensor | None = None,
    hidden: Tensor | None = None,
    splits: int = 1,
) -> Tensor:
    """Attention of one query row a head: o (B, H, 1, D) in q's dtype.

    q (B, H, 1, D); k, v (N, T_k, D), the keys in any order. problem: its scale, softcap and slopes count.
    back: int64 (1 or B, T_k), how far each key is before the query; for slopes. hidden: bool (B, T_k), keys that are
    not seen, never all of a row; None: all are seen. splits: into how many parts the keys are cut, at most. It changes
    the result by rounding.
    """
    rows = q.reshape(len(k), -1, q.shape[-1])  # (N, G, D)
    masks = [[None] * splits if x is None else x.chunk(splits, dim=1) for x in (back, hidden)]
    parts = zip(k.chunk(splits, dim=1), v.chunk(splits, dim=1), *masks, strict=False)  # chunk may give fewer
    # Autocast leaves the sums of one_split() in float32, because it passes over products that are written with out=.
    states = [one_split(rows, k_i, v_i, back_i, hidden_i, problem) for k_i, v_i, back_i, hidden_i in parts]
    _, l, acc = states[0] if len(states) == 1 else merge(states)
    return (acc / l).to(q.dtype).view(q.shape)  # 6


def one_split(q: Tensor, k: Tensor, v: Tensor, back: Tensor | None, hidden: Tensor | None, problem: Problem) -> State:
    """Steps 1 to 5 over some of the keys: m (in base 2), l (N, G, 1) and acc (N, G, D), in the dtype of sums."""
    (N, G, _), T_k, wide = q.shape, k.shape[1], sum_dtype(q.dtype)
    memory = q.new_empty(N * G * T_k, dtype=wide)
    slopes = problem.score.slopes  # scores() takes the distances from the places of the keys, and here those may be any
    s = scores(ANY, q, k, problem._replace(score=problem.score._replace(slopes=None)), memory)  # 1: in base 2
    if slopes is not None:
        assert back is not None, "alibi needs the distances"
        s.view(-1, len(slopes), T_k).addcmul_(slopes[:, None], back[:, None].to(wide), value=-LOG2E)  # (B, H, T_k)
    if hidden is not None:
        s.view(len(hidden), -1, T_k).masked_fill_(hidden[:, None], -INF)  # 2
    m = s.amax(-1, keepdim=True)  # 3
    if hidden is not None:  # as in tiled: where all of a part is hidden, p is 0 and not exp(-inf - -inf)
        m.clamp_(min=LOWEST)
    p = s.sub_(m).exp2_()
    l = p.sum(-1, keepdim=True)
    return m, l, add_product(torch.empty_like(q, dtype=wide), p.to(v.dtype), v, beta=0.0)  # 5
