"""The GPT: embeddings, blocks of attention and MLP, a head. GPT-2 and Llama are settings of one class.

Shapes: B batch, T sequence length, C model width (n_embd), H query heads, H_kv key/value heads, D = C / H head size, L
layers (n_layer), V vocabulary.

A block projects to q, k and v, and calls attention() of model/attention.py.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from model import recompute
from model.attention import AttentionConfig, attention
from model.break_it import UNBROKEN, BreakIt
from model.dropout import draw_seeds, drop_threshold, dropped, keep_table
from model.loss import next_token_loss
from model.norm import Added, LayerNorm, RMSNorm, add_and_norm, last_norm
from model.rope import rope_table, rotate
from parallel.part import WHOLE, Part, to_heads, to_tokens
from parallel.ring import ring_attention
from sampling.cache import KVCache, LayerCache, has_decode_kernel

CHOICES = {
    "position": ("learned", "rope", "none"),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ("gelu_tanh", "gelu", "swiglu"),
    "residual_dtype": ("float32", "autocast"),
    "activation_checkpointing": ("false", "true", "selective", "auto"),
}


@dataclass
class GPTConfig:
    """The defaults are GPT-2's architecture. conf/model/ has the sizes and the modern family (rope, rmsnorm, swiglu).

    activation_checkpointing computes activations again in the backward, so that depth costs little memory.
        true        a block stores its input, (B, T, C), and computes everything else again
        selective   also stores attention's result, o and lse, and does not compute attention again
        auto        the fastest that fits; training/memory.py replaces it by false, true or selective
    With conf/model/nano.yaml, batch_size=16, float32 and attention=tiled, a block stores 42 MiB with false and 2 with
    true. A step on a CPU then takes a third longer, because of the second forward.

    chunk computes all of a block but attention in pieces of so many tokens, each again in its backward. So the hidden
    layer of one piece is in memory, and not that of the sequence. The gradients of the weights are sums over tokens,
    which then add up in another order. On a GPU a product of fewer rows may be rounded in another way, too.
    """

    n_layer: int = 12  # number of blocks, each attention and an MLP
    n_head: int = 12  # query heads; the head size is n_embd / n_head
    n_kv_head: int | None = None  # key/value heads; None: as many as n_head; fewer: grouped-query attention
    n_embd: int = 768  # width of the residual stream
    context_length: int = 1024  # the longest sequence, in tokens
    vocab_size: int | None = None  # size of the vocabulary; None: the tokenizer's (train.py sets it)
    vocab_multiple: int = 1  # rounds the embedding's rows up; on a GPU 50,304 rows run faster than 50,257
    position: str = "learned"  # learned | rope | none (no positions, or attention.alibi)
    norm: str = "layernorm"  # layernorm | rmsnorm
    mlp: str = "gelu_tanh"  # gelu_tanh (GPT-2's approximation) | gelu (exact, faster on a CPU) | swiglu
    mlp_hidden: int | None = None  # hidden width; None: 4 n_embd; swiglu: 8/3 n_embd, up to a multiple of 64
    bias: bool = True  # biases in the linear layers and in layernorm
    tie_head: bool = True  # the head uses the embedding's weight
    # dtype of the residual stream: float32 | autocast, which is bf16 with dtype=bf16. It moves less and rounds more.
    residual_dtype: str = "float32"
    dropout_p: float = 0.0  # dropout in training, of the embedding and what a block adds; in steps of 1/256
    rope_base: float = 10000.0  # base of rope's frequencies; the slowest is about 1 / rope_base radians a token
    rope_base_local: float | None = None  # the base in layers with an attention window; None: as in the other layers
    # YaRN stretches rope by this factor, for a longer context than trained; 1: off. It makes slow frequencies slower.
    # Layers that have rope_base_local stay as they are.
    yarn_factor: float = 1.0
    yarn_original: int | None = None  # the context_length before YaRN; None: that of the weights in init_from=
    norm_eps: float = 1e-5  # epsilon that a norm adds under its square root
    # recompute to save memory: false | true | selective (not attention) | auto
    activation_checkpointing: str = "false"
    chunk: int | None = None  # compute all but attention in pieces of so many tokens, each again; None: at once

    def __post_init__(self):
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"model.norm_eps={self.norm_eps} must be at least 0 and finite; 1e-5 is usual")
        for name in ("rope_base", "rope_base_local"):
            base = getattr(self, name)
            if base is not None and not 1 < base < math.inf:
                raise ValueError(f"model.{name}={base} must be above 1 and finite; 10000 is usual")
        for name in ("n_layer", "n_head", "n_kv_head", "n_embd", "context_length", "vocab_multiple", "mlp_hidden"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        self.check_yarn()
        if self.n_embd % self.n_head:
            raise ValueError(f"model.n_embd={self.n_embd} is not divisible by model.n_head={self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"model.n_head={self.n_head} is not divisible by model.n_kv_head={self.n_kv_head}; "
                f"set both, or model.n_kv_head=null for as many as n_head"
            )
        if self.chunk is not None and (not 1 <= self.chunk < 2**63 or self.chunk % 32):
            raise ValueError(f"model.chunk={self.chunk} must be a multiple of 32 below 2**63; null for no pieces")
        # The key is a string, and people type True. In older checkpoints it is a bool.
        self.activation_checkpointing = str(self.activation_checkpointing).lower()
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"model.{name}={getattr(self, name)} is not known; choose {' or '.join(known)}")
        if self.position == "rope" and self.head_size % 2:
            raise ValueError(f"model.n_embd / model.n_head = {self.head_size} is odd; rope turns pairs: make it even")
        drop_threshold(self.dropout_p, "model.dropout_p")

    def check_yarn(self) -> None:
        """Fills in yarn_original: without weights in init_from= it is context_length / yarn_factor. Raises ValueError
        for values of YaRN that do not fit together."""
        factor, before = self.yarn_factor, self.yarn_original
        if not 1 <= factor < math.inf:
            raise ValueError(f"model.yarn_factor={factor} must be at least 1 and finite; 1 leaves YaRN out")
        if factor == 1:
            if before is not None:
                raise ValueError(f"model.yarn_original={before} needs model.yarn_factor= above 1; or leave it out")
            return
        if self.position != "rope":
            raise ValueError(
                f"model.yarn_factor={factor:g} with model.position={self.position}: YaRN stretches rope, and only a "
                "model trained with model.position=rope can be extended; leave it out"
            )
        self.yarn_original = before = math.ceil(self.context_length / factor) if before is None else before
        if before < 1 or before * factor < self.context_length:
            raise ValueError(
                f"model.yarn_factor={factor:g} stretches model.yarn_original={before} tokens to {before * factor:g}, "
                f"and model.context_length is {self.context_length}: use model.yarn_factor="
                f"{self.context_length / max(1, before):g}"
            )

    @property
    def head_size(self) -> int:
        """D = C / H."""
        return self.n_embd // self.n_head


def norm(config: GPTConfig) -> RMSNorm | LayerNorm:
    """The norm that model.norm names, over the last axis, of size C."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, eps=config.norm_eps)
    return LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


@contextmanager
def without_numbers() -> Iterator[None]:
    """A model made inside has shapes, but no numbers and no memory. Drawing weights on the device meta would import
    torch._dynamo, which takes a second or two."""
    with torch.device("meta"), Undrawn():
        yield


class Undrawn(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


class Context(NamedTuple):
    """What a layer gets besides the residual stream."""

    rope: tuple[Tensor, Tensor] | None  # cos, sin of rope_table()
    seed: Tensor | None  # seed of the layer's attention dropout, int64 scalar; None: no dropout
    stream_seed: Tensor | None  # the same for the dropout of what the layer adds to the stream
    documents: Tensor | None  # (B, T) integers; None: one document
    past: LayerCache | None = None  # the layer's keys and values, in sampling with a cache
    part: Part = WHOLE  # which part of the batch this is
    length: int = 0  # how many tokens of each sequence the part has


class CausalSelfAttention(nn.Module):
    """The projections before and after attention; model/attention.py computes the attention itself."""

    def __init__(self, config: GPTConfig, attention_config: AttentionConfig, break_it: BreakIt):
        super().__init__()
        self.head_size = config.head_size
        kv_heads = config.n_kv_head or config.n_head
        self.widths = [heads * config.head_size for heads in (config.n_head, kv_heads, kv_heads)]
        self.attention_config, self.break_it = attention_config, break_it
        self.qkv = nn.Linear(config.n_embd, sum(self.widths), bias=config.bias)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x (B, T, C) to (B, T, C)."""
        qkv = self.qkv(x)
        # With a rotary embedding q and k are tensors of their own, with a cache longer than x, and of several processes
        # each has other heads.
        whole = qkv if context.rope is None and context.past is None and context.part.ranks == 1 else None
        return self.merge(self.attend(*self.heads(qkv, context.rope), context, whole))

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) to q (B, T, H, D) and k, v (B, T, H_kv, D)."""
        return self.heads(self.qkv(x), rope)

    def heads(self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Splits the fused qkv into heads and applies rope: q (B, H, T, D), k and v (B, H_kv, T, D)."""
        # Split into q, k, v, then into heads. The other order costs the backward a copy.
        q, k, v = (y.unflatten(-1, (-1, self.head_size)) for y in qkv.split(self.widths, dim=-1))
        if rope is not None:
            q, k = (rotate(y.transpose(1, 2), *rope).transpose(1, 2) for y in (q, k))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context, qkv: Tensor | None = None) -> Tensor:
        """q (B, T, H, D); k, v (B, T, H_kv, D) to o (B, T, H, D). qkv: as in attention()."""
        part, past = context.part, context.past
        if part.ring:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            return ring_attention(q, k, v, self.attention_config, part, context.documents).transpose(1, 2)
        if part.ranks > 1:
            q, k, v = (to_heads(y, part) for y in (q, k, v))  # the whole T, and H / N or H_kv / N heads
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (B, H or H_kv, T, D)
        if past is not None and past.step is not None:
            o = past.attend(q, k, v)  # one token, which sees what the cache holds
        else:
            if past is not None:
                k, v = past.fill(q, k, v)
            o = attention(
                q, k, v, self.attention_config,
                seed=context.seed, documents=context.documents, break_it=self.break_it, qkv=qkv,
                numbers=None if context.seed is None else part.numbers(len(q), q.shape[1], q.device),
                slopes=part.slopes(q.shape[1], q.device) if self.attention_config.alibi else None,
            )  # fmt: skip
        o = o.transpose(1, 2)
        return to_tokens(o, part) if part.ranks > 1 else o

    def merge(self, o: Tensor) -> Tensor:
        """o (B, T, H, D) to (B, T, C)."""
        return self.out(o.flatten(2))


class MLP(nn.Module):
    """(B, T, C) to (B, T, C) with hidden width model.mlp_hidden: GELU, or SwiGLU with a gate (arXiv 2002.05202)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.approximate = "tanh" if config.mlp == "gelu_tanh" else "none"
        hidden = config.mlp_hidden
        if hidden is None:  # the gate is a third matrix, so a width of 8/3 C has as many parameters as 4 C without it
            hidden = -(-config.n_embd * 8 // (3 * 64)) * 64 if self.gated else 4 * config.n_embd
        self.up = nn.Linear(config.n_embd, hidden, bias=config.bias)
        if self.gated:
            self.gate = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.down = nn.Linear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Unit(nn.Module):
    """A part of the model whose weights come and go together where ranks share them (parallel/shard.py)."""

    def within(self, compute: Callable, *inputs, **more):
        """compute(*inputs, **more). It may read the weights; outside of this and of a call of the module they may be
        away. All tensors with a gradient are to be handed in."""
        return compute(*inputs, **more)


class Block(Unit):
    """Adds attention, then the MLP, to the residual stream. The input of each is a norm of the stream (pre-norm)."""

    def __init__(self, config: GPTConfig, attention_config: AttentionConfig, break_it: BreakIt):
        super().__init__()
        self.attention_norm = norm(config)
        self.attention = CausalSelfAttention(config, attention_config, break_it)
        self.mlp_norm = norm(config)
        self.mlp = MLP(config)
        self.dropout_p = config.dropout_p

    def forward(self, x: Tensor, added: Added | None, context: Context) -> tuple[Tensor, Added]:
        """The residual stream x (B, T, C), and what the block before it still has to add (None: nothing). Returns the
        same for the block after it. An addition waits for the next norm, because one kernel makes their backward."""
        B, T, _ = x.shape
        for_attention, for_mlp = self.kept(context, B, range(T))
        x, y = add_and_norm(self.attention_norm, x, added)
        added = Added(self.attention(y, context), for_attention, self.dropout_p)
        x, y = add_and_norm(self.mlp_norm, x, added)
        return x, Added(self.mlp(y), for_mlp, self.dropout_p)

    def kept(self, context: Context, B: int, tokens: range) -> Sequence[Tensor | None]:
        """What dropout keeps, of what attention adds and of what the MLP adds: bool (B, tokens, C); None: all."""
        if context.stream_seed is None:
            return None, None
        rows = context.part.tokens(context.length, tokens)
        C, (b, batch) = self.attention.out.out_features, context.part.sequences(B)
        if B == batch:
            return kept_rows(context.stream_seed, range(2 * B), rows, C, self.dropout_p).split(B)
        both = b, range(batch + b.start, batch + b.stop)
        return [kept_rows(context.stream_seed, n, rows, C, self.dropout_p) for n in both]


def kept_rows(seed: Tensor, numbers: range, pieces: list[range], C: int, dropout_p: float) -> Tensor:
    """keep_table() of the rows of all pieces, one after the other."""
    tables = [keep_table(seed, numbers, rows, C, dropout_p) for rows in pieces]
    return tables[0] if len(tables) == 1 else torch.cat(tables, dim=1)


class GPT(Unit):
    """config: the architecture, with vocab_size set. attention_config: a resolved AttentionConfig (not auto)."""

    def __init__(self, config: GPTConfig, attention_config: AttentionConfig, break_it: BreakIt = UNBROKEN):
        super().__init__()
        assert config.vocab_size is not None, "train.py sets vocab_size from the tokenizer"
        attention_config.check_length(config.context_length)
        self.draw_and_run = None
        if not break_it.restore_seed:
            if config.activation_checkpointing != "true":
                raise ValueError(
                    f"break_it={break_it.label}: no block is computed again; use model.activation_checkpointing=true"
                )
            # A compiled graph would keep the seed instead of drawing it again.
            self.draw_and_run = torch.compiler.disable(recompute.draw_and_run)
        self.config, self.attention_config, self.break_it = config, attention_config, break_it
        rows = -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple
        self.embedding = nn.Embedding(rows, config.n_embd)
        if config.position == "learned":
            self.positions = nn.Embedding(config.context_length, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, attention_config.layer(i), break_it) for i in range(config.n_layer))
        windows = [attention_config.layer(i).window for i in range(config.n_layer)]
        has_two = config.position == "rope" and config.rope_base_local is not None
        self.local_ropes = [has_two and window is not None for window in windows]  # which layers read rope_base_local
        if config.rope_base_local is not None and not any(self.local_ropes):
            raise ValueError(
                f"model.rope_base_local={config.rope_base_local}: no layer has both a rotary embedding and a window; "
                "leave it out, or use model.position=rope and attention.windows="
            )
        self.norm = norm(config)
        self.head = nn.Linear(config.n_embd, rows, bias=False)
        if config.tie_head:
            self.head.weight = self.embedding.weight
        self.initialise()

    def initialise(self) -> None:
        """GPT-2's initialisation: normal with std 0.02. The stream is a sum of 2 L terms, so matrices that add to it
        have 0.02 / sqrt(2 L)."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                adds = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * self.config.n_layer) if adds else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def hidden(
        self, idx: Tensor, documents: Tensor | None = None, cache: KVCache | None = None, part: Part = WHOLE
    ) -> Tensor:
        """The residual stream after the last norm: token ids int64 (B, T) to (B, T, C).

        documents: integers (B, T), from the loader; used if attention.documents is on. None: one document.
        cache: as in next_logits().
        part: which part of the batch idx is. documents are those of its whole sequences.
        """
        return last_norm(self.norm, *self.through_blocks(idx, documents, cache, part))

    def through_blocks(
        self,
        idx: Tensor,
        documents: Tensor | None,
        cache: KVCache | None = None,
        part: Part = WHOLE,
        embed: Callable | None = None,
        layer: Callable | None = None,
    ) -> tuple[Tensor, Added | None]:
        """The residual stream (B, T, C) after the blocks, and what the last of them still has to add.

        idx, documents, cache, part: as in hidden(). embed, layer: self.embed and self.layer, or what compiles them.
        """
        length = idx.shape[1]
        if length * part.ranks > self.config.context_length:
            raise ValueError(
                f"{length * part.ranks} tokens are more than model.context_length={self.config.context_length}"
            )
        if not self.attention_config.documents:
            documents = None
        assert documents is not None or not (self.training and self.attention_config.documents), "hand in documents"
        seeds, stream_seeds = self.seeds(idx.device)
        x, ropes = (embed or self.embed)(idx, stream_seeds[-1], cache, part)
        added: Added | None = None  # to x, before anything reads it
        layers: Sequence[LayerCache | None] = [None] * self.config.n_layer if cache is None else cache.layers
        parts = zip(self.blocks, self.local_ropes, seeds, stream_seeds[:-1], layers, strict=True)
        for block, local, seed, stream_seed, past in parts:
            context = Context(ropes.get(local), seed, stream_seed, documents, past, part, length)
            x, added = cast(Unit, block).within(layer or self.layer, block, x, added, context)
        return x, added

    def embed(
        self, idx: Tensor, seed: Tensor | None, cache: KVCache | None, part: Part
    ) -> tuple[Tensor, dict[bool, tuple[Tensor, Tensor]]]:
        """The residual stream (B, T, C) before the blocks, and ropes() of the tokens' positions. seed: of dropout."""
        length = idx.shape[1]
        T = length * part.ranks  # of the whole sequence
        positions = part.positions(length, idx.device) if cache is None else cache.positions
        x = self.embedding(idx)  # (B, T, C)
        ropes = self.ropes(T, idx.device) if cache is None else cache.ropes
        if part.ranks > 1:
            ropes = {local: (cos[positions], sin[positions]) for local, (cos, sin) in ropes.items()}
        if self.config.position == "learned":
            x = x + self.positions.weight[positions]
        if cache is not None:
            ropes = {
                local: (cos[positions].unsqueeze(-3), sin[positions].unsqueeze(-3))  # (1 or B, 1, T, D / 2)
                for local, (cos, sin) in ropes.items()
            }
        if seed is not None:
            rows = part.tokens(length, range(length))
            keep = kept_rows(seed, part.sequences(len(x))[0], rows, x.shape[2], self.config.dropout_p)
            x = dropped(x, keep, self.config.dropout_p)
        device = x.device.type
        if self.config.residual_dtype == "autocast" and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        return x, ropes

    def layer(self, block: nn.Module, x: Tensor, added: Added | None, context: Context) -> tuple[Tensor, Added | None]:
        """The block. In training it computes activations again, if the configuration says so."""
        form, chunk = self.config.activation_checkpointing, self.config.chunk
        if self.training and (form != "false" or chunk):
            return recompute.in_less_memory(cast(Block, block), x, context, form, chunk, self.draw_and_run), None
        return block.forward(x, added, context)

    def loss(self, x: Tensor, added: Added | None, targets: Tensor, z_loss: float) -> Tensor:
        """What through_blocks() returns, to the mean loss. targets and z_loss: as in forward()."""
        x = last_norm(self.norm, x, added)
        return next_token_loss(x.flatten(0, 1), self.head.weight, targets.flatten(), z_loss, self.config.vocab_size)

    def compiled(self, compile: Callable[[Callable], Callable]) -> Callable[..., Tensor]:
        """forward() with targets, compiled in parts: the embedding, a block, the loss. Blocks that are alike are
        compiled once. So compiling takes a fraction of the time that it takes for the whole model. The kernels are as
        many, because a block leaves its last addition to the next norm."""
        # There are as many kinds of blocks as windows, at most; beyond 8 torch would run them uncompiled.
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 2 + self.config.n_layer)
        embed, layer, loss = (compile(part) for part in (self.embed, self.layer, self.loss))

        def forward(
            idx: Tensor, targets: Tensor, documents: Tensor | None = None, z_loss: float = 0.0, part: Part = WHOLE
        ) -> Tensor:
            x, added = self.through_blocks(idx, documents, part=part, embed=embed, layer=layer)
            return loss(x, added, targets, z_loss)

        return partial(self.within, forward)

    def ropes(self, length: int, device: torch.device) -> dict[bool, tuple[Tensor, Tensor]]:
        """rope_table() with model.rope_base and YaRN (False) and with model.rope_base_local (True), each if a layer
        reads it. Empty without a rotary embedding."""
        if self.config.position != "rope":
            return {}
        config, tables = self.config, {}
        if False in self.local_ropes:
            yarn = None if config.yarn_original is None else (config.yarn_factor, config.yarn_original)
            tables[False] = rope_table(length, config.head_size, config.rope_base, device, yarn)
        if config.rope_base_local is not None and True in self.local_ropes:
            tables[True] = rope_table(length, config.head_size, config.rope_base_local, device)
        return tables

    def seeds(self, device: torch.device) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """The seeds of this forward's dropout: of each layer's attention; of each layer's stream and, last, of the
        embedding. Each is an int64 scalar on the device, or None where nothing is dropped.

        They are drawn here and passed down as tensors. So the backward gets the same mask and the next step a new one,
        also with activation checkpointing and with CUDA graphs.
        """
        L = self.config.n_layer
        attention = L if self.training and self.attention_config.dropout_p > 0 and self.break_it.restore_seed else 0
        stream = L + 1 if self.training and self.config.dropout_p > 0 else 0
        drawn = draw_seeds(attention + stream, device).unbind() if attention + stream else ()
        return drawn[:attention] or [None] * L, drawn[attention:] or [None] * (L + 1)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        z_loss: float = 0.0,
        part: Part = WHOLE,
    ) -> Tensor:
        """Token ids int64 (B, T) to logits (B, T, V); with targets int64 (B, T), to the mean loss in nats per token.

        documents and part: as in hidden(). z_loss: as in model/loss.py; it changes the gradient, not the returned loss.
        """
        if targets is None:
            return self.logits(self.hidden(idx, documents, part=part))
        return self.loss(*self.through_blocks(idx, documents, part=part), targets, z_loss)

    def next_logits(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids int64 (B, T) to the logits (B, V) of the next token. The head runs on the last position only.

        cache: keeps the keys and values of idx. After cache.begin() idx are prompts; after cache.advance() idx is one
        token of each sequence, (B, 1), which follows what the cache holds.
        """
        return self.logits(self.hidden(idx, cache=cache)[:, -1])

    def new_cache(self, B: int, splits: int | None = None, kernel: bool = True, page: int | None = None) -> KVCache:
        """An empty cache for B sequences. splits: into how many parts the keys are cut; None: as suits the device.
        kernel: compute the tokens with sampling/decode.py where it can run. page: keep keys and values in pages of so
        many tokens, a power of 2; None: in one buffer. Raises ValueError as cache_refusal() says.
        """
        if (refused := self.cache_refusal()) is not None:
            raise ValueError(refused)
        config, weight = self.config, self.embedding.weight
        device = weight.device
        layers = [self.attention_config.layer(i) for i in range(config.n_layer)]
        kernel = kernel and has_decode_kernel(self.attention_config, weight.dtype, config.head_size, device)
        cache = KVCache(layers, B, config.context_length, device, splits, kernel, page)
        cache.ropes = self.ropes(config.context_length, device)
        return cache

    def cache_refusal(self) -> str | None:
        """Why this model samples without a cache; None if it has one. decode() reads no switch of break_it: it would
        compute whole attention."""
        if self.break_it.label:
            return f"break_it={self.break_it.label}: a cache would compute whole attention, not the broken one"
        if self.attention_config.block_mask is not None:
            return "attention.block_mask: the cache has no block masks"
        return None

    def logits(self, x: Tensor) -> Tensor:
        """The residual stream (..., C), after the last norm, to the logits (..., V)."""
        return self.head(x)[..., : self.config.vocab_size]  # without the rows that vocab_multiple added

    def parameter_count(self) -> int:
        """The number of weights; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T: int) -> float:
        """FLOPs of a forward and backward per token, as PaLM counts them (arXiv 2204.02311, appendix B), but with
        causal attention at half.

        Each weight that multiplies counts 6. A table that is only looked up does not count. In each layer attention
        adds 12 C for every key that a query sees: 2 products of 2 C in the forward, and twice that in the backward. A
        query sees T / 2 keys on average, fewer with a window. Nothing is deducted for documents and block_mask: what
        they skip depends on the text and on the tiles.
        """
        tables = 0 if self.config.tie_head else self.embedding.weight.numel()
        if self.config.position == "learned":
            tables += self.positions.weight.numel()
        keys = 0.0
        for i in range(self.config.n_layer):
            window = min(self.attention_config.layer(i).window or T, T)
            keys += window - window**2 / (2 * T)
        return 6 * (self.parameter_count() - tables) + 12 * self.config.n_embd * keys
