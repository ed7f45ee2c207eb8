"""The GPT: embeddings, blocks of attention and MLP, a head. GPT-2 and Llama are settings of one class.

Shapes: B batch, T sequence length, C model width (n_embd), H query heads, H_kv key/value heads, D = C / H head size, L
layers (n_layer), V vocabulary.

A block projects to q, k and v, and calls attention() of model/attention.py.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from conf.keys import check, key
from model.attention import AttentionConfig, attention
from model.break_it import UNBROKEN, BreakIt
from model.dropout import draw_seeds, drop_threshold, dropped, keep_table
from model.layers import LAYERS, Layers
from model.loss import next_token_loss
from model.norm import Added, LayerNorm, Norm, RMSNorm, last_norm
from model.rope import rope_table, rotate


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

    n_layer: int = key(12, "number of blocks, each attention and an MLP", least=1)
    n_head: int = key(12, "query heads; the head size is n_embd / n_head", least=1)
    n_kv_head: int | None = key(
        None, "key/value heads; fewer: grouped-query attention", least=1, usual="null: as many as n_head"
    )
    n_embd: int = key(768, "width of the residual stream", least=1)
    context_length: int = key(1024, "the longest sequence, in tokens", least=1)
    vocab_size: int | None = key(None, "size of the vocabulary; null: the tokenizer's (train.py sets it)")
    vocab_multiple: int = key(1, "rounds the embedding's rows up; on a GPU 50,304 rows run faster than 50,257", least=1)
    position: str = key("learned", among="learned | rope | none (no positions, or attention.alibi)")
    norm: str = key("layernorm", among="layernorm | rmsnorm")
    mlp: str = key("gelu_tanh", among="gelu_tanh (as GPT-2) | gelu (exact, faster on a CPU) | relu2 (squared) | swiglu")
    mlp_hidden: int | None = key(None, "width; null: 4 n_embd; swiglu: 8/3 n_embd, up to a multiple of 64", least=1)
    bias: bool = key(True, "biases in the linear layers and in layernorm")
    tie_head: bool = key(True, "the head uses the embedding's weight")
    # autocast moves less and rounds more
    residual_dtype: str = key(
        "float32", "dtype of the residual stream", among="float32 | autocast, which is bf16 with dtype=bf16"
    )
    dropout_p: float = key(0.0, "dropout in training, of the embedding and what a block adds; in steps of 1/256")
    rope_base: float = key(
        10000.0, "rope's slowest frequency is 1 / base", needs="model.position=rope", above=1, usual="10000 is usual"
    )
    rope_base_local: float | None = key(
        None, "the base in layers with an attention window", above=1, usual="null: as in the other layers"
    )
    # YaRN makes slow frequencies slower. Layers that have rope_base_local stay as they are.
    yarn_factor: float = key(
        1.0, "YaRN stretches rope by this factor, for a longer context than trained", least=1, usual="1: off"
    )
    yarn_original: int | None = key(None, "the context_length before YaRN; null: that of the weights in init_from=")
    qk_norm: bool = key(False, "RMS norm of each head's q and k, before rope")
    norm_eps: float = key(1e-5, "epsilon that a norm adds under its square root", least=0, usual="1e-5 is usual")
    activation_checkpointing: str = key(
        "false", "recompute to save memory", among="false | true | selective (not attention) | auto"
    )
    chunk: int | None = key(None, "compute all but attention in pieces of so many tokens, each again; null: at once")

    def __post_init__(self):
        # The key is a string, and people type True. In older checkpoints it is a bool.
        self.activation_checkpointing = str(self.activation_checkpointing).lower()
        check(self, "model.")
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
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
        if self.position == "rope" and self.head_size % 2:
            raise ValueError(f"model.n_embd / model.n_head = {self.head_size} is odd; rope turns pairs: make it even")
        drop_threshold(self.dropout_p, "model.dropout_p")

    def check_yarn(self) -> None:
        """Fills in yarn_original: without weights in init_from= it is context_length / yarn_factor. Raises ValueError
        for values of YaRN that do not fit together."""
        factor, before = self.yarn_factor, self.yarn_original
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


def norm(config: GPTConfig) -> Norm:
    """The norm that model.norm names, over the last axis, of size C."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, eps=config.norm_eps)
    return LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


@contextmanager
def without_values() -> Iterator[None]:
    """A model made inside has shapes, but no numbers and no memory. Drawing weights on the device meta would import
    torch._dynamo, which takes a second or two."""
    with torch.device("meta"), Undrawn():
        yield


class Undrawn(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


class Setting(NamedTuple):
    """How the tokens of a forward differ from a whole batch: data and callables, on which no block branches.

    Without one, the batch is whole: T tokens at 0 to T - 1. parallel/processes.py has settings for a part of it, and
    sampling/cache.py for tokens whose past is in a cache.
    """

    T: int  # tokens of the whole sequences
    positions: slice | Tensor  # of the tokens here, an index of tables: slice, or int64 (T,) or (B, 1)
    attend: Iterable[Callable[..., Tensor]] | None = None  # for each layer what is called like attention(); None: that
    first: int = 0  # number of the first sequence here in the whole batch
    batch: int | None = None  # sequences of the whole batch; None: those here are all
    ropes: dict[bool, tuple[Tensor, Tensor]] | None = None  # as in GPT.ropes(), of all positions; None: to be made
    layers: Layers = LAYERS


class Context(NamedTuple):
    """What a block gets besides the residual stream."""

    rope: tuple[Tensor, Tensor] | None  # cos, sin of rope_table() at the tokens' positions, (1 or B, 1, T, D / 2)
    seed: Tensor | None  # seed of the layer's attention dropout, int64 scalar; None: no dropout
    stream_seed: Tensor | None  # the same for the dropout of what the layer adds to the stream
    documents: Tensor | None  # (B, T) integers, of the whole sequences; None: one document
    rows: Tensor | None = None  # int64 (T,): the tokens' positions; None: no dropout of the stream
    numbers: Tensor | None = None  # int64 (2 B,): of each sequence's dropout masks, after attention, then after the MLP
    attend: Callable[..., Tensor] = attention
    layers: Layers = LAYERS


class Attention(nn.Module):
    """The weights before and after attention. It has no forward: Block computes with them."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_size, kv_heads = config.head_size, config.n_kv_head or config.n_head
        self.widths = [heads * config.head_size for heads in (config.n_head, kv_heads, kv_heads)]
        self.qkv = nn.Linear(config.n_embd, sum(self.widths), bias=config.bias)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        qk_norm = RMSNorm if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = (qk_norm(self.head_size, eps=config.norm_eps) for _ in "qk")


class MLP(nn.Module):
    """The weights of an MLP with hidden width model.mlp_hidden. SwiGLU has a gate (arXiv 2002.05202)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        gated, hidden = config.mlp == "swiglu", config.mlp_hidden
        if hidden is None:  # the gate is a third matrix, so a width of 8/3 C has as many parameters as 4 C without it
            hidden = -(-config.n_embd * 8 // (3 * 64)) * 64 if gated else 4 * config.n_embd
        self.up = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.gate = nn.Linear(config.n_embd, hidden, bias=config.bias) if gated else None
        self.down = nn.Linear(hidden, config.n_embd, bias=config.bias)


class Block(nn.Module):
    """Adds attention, then the MLP, to the residual stream. The input of each is a norm of the stream (pre-norm). The
    last addition is left to the next norm (Added), because one kernel makes the backward of both."""

    def __init__(self, config: GPTConfig, attention_config: AttentionConfig, break_it: BreakIt):
        super().__init__()
        self.config, self.attention_config, self.break_it = config, attention_config, break_it
        self.attention_norm = norm(config)
        self.attention = Attention(config)
        self.mlp_norm = norm(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, added: Added | None, context: Context, layer: Callable | None = None
    ) -> tuple[Tensor, Added | None]:
        """The residual stream x (B, T, C), and what the block before it still has to add (None: nothing). Returns the
        same for the block after it. layer(block, x, added, context): computes it in another way, such as compiled. It
        is called in here, where all of the weights are, also when ranks share them (parallel/shard.py)."""
        if layer is not None:
            return layer(self, x, added, context)
        x, q, k, v, qkv = self.before(x, added, context)
        return self.after(x, self.attend(q, k, v, context, qkv), context)

    def before(
        self, x: Tensor, added: Added | None, context: Context
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The stream with what was to be added, and of its norm q (B, T, H, D) and k, v (B, T, H_kv, D); last, what
        these are views of, side by side; None if they are not."""
        x, qkv = context.layers.read(self.attention_norm, x, added, self.attention.qkv)
        # Split into q, k, v, then into heads. The other order costs the backward a copy.
        q, k, v = (y.unflatten(-1, (-1, self.attention.head_size)) for y in qkv.split(self.attention.widths, dim=-1))
        if self.config.qk_norm:  # bounds the scores, so that training stays stable at a higher learning rate
            q, k = self.attention.q_norm(q).to(v.dtype), self.attention.k_norm(k).to(v.dtype)
        if context.rope is not None:
            q, k = (rotate(y.transpose(1, 2), *context.rope).transpose(1, 2) for y in (q, k))
        return x, q, k, v, qkv if context.rope is None and not self.config.qk_norm else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context, qkv: Tensor | None = None) -> Tensor:
        """q, k, v and qkv of before() to o (B, T, H, D)."""
        o = context.attend(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.attention_config,
            seed=context.seed, documents=context.documents, break_it=self.break_it, qkv=qkv,
        )  # fmt: skip
        return o.transpose(1, 2)

    def after(self, x: Tensor, o: Tensor, context: Context) -> tuple[Tensor, Added | None]:
        """The stream and attention's o (B, T, H, D), to what forward() returns."""
        p = self.config.dropout_p
        keep: Sequence[Tensor | None] = (None, None)
        if context.stream_seed is not None:
            assert context.numbers is not None
            assert context.rows is not None
            keep = keep_table(context.stream_seed, context.numbers, context.rows, x.shape[-1], p).chunk(2)
        x, added = context.layers.write(x, self.attention.out, o.flatten(2), keep[0], p)
        mlp = self.mlp
        x, y = context.layers.read(self.mlp_norm, x, added, mlp.up, mlp.gate, self.config.mlp)
        return context.layers.write(x, mlp.down, y, keep[1], p)


class Stages(NamedTuple):
    """What a forward calls instead of GPT.embed(), Block.forward() and GPT.loss(): the same, compiled."""

    embed: Callable
    layer: Callable
    loss: Callable


class GPT(nn.Module):
    """config: the architecture, with vocab_size set. attention_config: a resolved AttentionConfig (not auto)."""

    # layer(block, x, added, context): another way to compute what Block.forward() does. model/recompute.py has one.
    layer: Callable[..., tuple[Tensor, Added | None]] | None = None

    def __init__(self, config: GPTConfig, attention_config: AttentionConfig, break_it: BreakIt = UNBROKEN):
        super().__init__()
        assert config.vocab_size is not None, "train.py sets vocab_size from the tokenizer"
        attention_config.check_length(config.context_length)
        self.config, self.attention_config, self.break_it = config, attention_config, break_it
        rows = -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple
        self.embedding = nn.Embedding(rows, config.n_embd)
        learned = config.position == "learned"
        self.positions = nn.Embedding(config.context_length, config.n_embd) if learned else None
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

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        z_loss: float = 0.0,
        setting: Setting | None = None,
        stages: Stages | None = None,
    ) -> Tensor:
        """Token ids int64 (B, T) to logits (B, T, V); with targets int64 (B, T), to the mean loss in nats per token.

        documents, setting, stages: as in through_blocks(). z_loss: as in model/loss.py; it changes the gradient, not
        the returned loss.
        """
        if targets is None:
            return self.logits(self.hidden(idx, documents, setting))
        x, added = self.through_blocks(idx, documents, setting, stages)
        return (self.loss if stages is None else stages.loss)(x, added, targets, z_loss)

    def hidden(self, idx: Tensor, documents: Tensor | None = None, setting: Setting | None = None) -> Tensor:
        """The residual stream after the last norm: token ids int64 (B, T) to (B, T, C)."""
        return last_norm(self.norm, *self.through_blocks(idx, documents, setting))

    def next_logits(self, idx: Tensor, setting: Setting | None = None) -> Tensor:
        """Token ids int64 (B, T) to the logits (B, V) of the next token. The head runs on the last position only."""
        x, added = self.through_blocks(idx, None, setting)
        if added is not None:
            added = added._replace(value=added.value[:, -1])
        y = (LAYERS if setting is None else setting.layers).logits(self.norm, x[:, -1], added, self.head)
        return y[..., : self.config.vocab_size]

    def logits(self, x: Tensor) -> Tensor:
        """The residual stream (..., C), after the last norm, to the logits (..., V)."""
        return self.head(x)[..., : self.config.vocab_size]  # without the rows that vocab_multiple added

    def through_blocks(
        self, idx: Tensor, documents: Tensor | None, setting: Setting | None = None, stages: Stages | None = None
    ) -> tuple[Tensor, Added | None]:
        """The residual stream (B, T, C) after the blocks, and what the last of them still has to add.

        documents: integers (B, T), from the loader, of the whole sequences; used if attention.documents is on. None:
        one document. stages: what is called instead of the model's own.
        """
        if setting is None:
            setting = Setting(idx.shape[1], slice(idx.shape[1]))
        if setting.T > self.config.context_length:
            raise ValueError(f"{setting.T} tokens are more than model.context_length={self.config.context_length}")
        if not self.attention_config.documents:
            documents = None
        assert documents is not None or not (self.training and self.attention_config.documents), "hand in documents"
        embed, layer = (self.embed, self.layer) if stages is None else stages[:2]
        seeds, stream_seeds = self.seeds(idx.device)
        x, ropes, rows, numbers = embed(idx, stream_seeds[-1], setting)
        added: Added | None = None  # to x, before anything reads it
        attends = repeat(attention) if setting.attend is None else setting.attend
        by_layer = zip(self.blocks, self.local_ropes, seeds, stream_seeds, attends, strict=False)
        for block, local, seed, stream_seed, attend in by_layer:
            context = Context(ropes.get(local), seed, stream_seed, documents, rows, numbers, attend, setting.layers)
            x, added = block(x, added, context, layer)
        return x, added

    def embed(
        self, idx: Tensor, seed: Tensor | None, setting: Setting
    ) -> tuple[Tensor, dict[bool, tuple[Tensor, Tensor]], Tensor | None, Tensor | None]:
        """The residual stream (B, T, C) before the blocks, and rope, rows and numbers of their Context. seed: of the
        embedding's dropout, or None."""
        at = setting.positions
        x = setting.layers.embed(self.embedding, self.positions, idx, at)  # (B, T, C)
        ropes = self.ropes(setting.T, idx.device) if setting.ropes is None else setting.ropes
        ropes = {local: (cos[at].unsqueeze(-3), sin[at].unsqueeze(-3)) for local, (cos, sin) in ropes.items()}
        rows = numbers = None
        if seed is not None:
            (B, _, C), p = x.shape, self.config.dropout_p
            rows = torch.arange(at.start or 0, at.stop, device=idx.device) if isinstance(at, slice) else at
            numbers = torch.arange(setting.first, setting.first + B, device=idx.device)
            x = dropped(x, keep_table(seed, numbers, rows, C, p), p)
            numbers = torch.cat((numbers, numbers + (setting.batch or B)))
        device = x.device.type
        if self.config.residual_dtype == "autocast" and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        return x, ropes, rows, numbers

    def loss(self, x: Tensor, added: Added | None, targets: Tensor, z_loss: float) -> Tensor:
        """What through_blocks() returns, to the mean loss. targets and z_loss: as in forward()."""
        x = last_norm(self.norm, x, added)
        return next_token_loss(x.flatten(0, 1), self.head.weight, targets.flatten(), z_loss, self.config.vocab_size)

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
        one_mask = self.attention_config.dropout_p > 0 and "unrestored_seed" not in self.break_it.broken
        attention = L if self.training and one_mask else 0
        stream = L + 1 if self.training and self.config.dropout_p > 0 else 0
        drawn = draw_seeds(attention + stream, device).unbind() if attention + stream else ()
        return drawn[:attention] or [None] * L, drawn[attention:] or [None] * (L + 1)

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
        if self.positions is not None:
            tables += self.positions.weight.numel()
        keys = 0.0
        for i in range(self.config.n_layer):
            window = min(self.attention_config.layer(i).window or T, T)
            keys += window - window**2 / (2 * T)
        return 6 * (self.parameter_count() - tables) + 12 * self.config.n_embd * keys
