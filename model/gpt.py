"""The GPT. GPT-2 and Llama are settings of one class.

B batch, T tokens, C width (n_embd), H query heads, H_kv key/value heads, D = C / H head size, L layers, V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from conf.keys import check, key
from model.attention import AttentionConfig, attention
from model.break_it import UNBROKEN, BreakIt
from model.dropout import draw_seeds
from model.loss import next_token_loss
from model.mask import spans_of

ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu2": lambda y: F.relu(y).square()}


@dataclass
class GPTConfig:
    """The defaults are GPT-2's architecture. conf/model/ has sizes and the modern family (rope, rmsnorm, swiglu)."""

    n_layer: int = key(12, "number of blocks", least=1)
    n_head: int = key(12, "query heads; the head size is n_embd / n_head", least=1)
    n_kv_head: int | None = key(None, "key/value heads; fewer: grouped-query attention", least=1, note="null: n_head")
    n_embd: int = key(768, "width of the residual stream", least=1)
    context_length: int = key(1024, "the longest sequence, in tokens", least=1)
    vocab_size: int | None = key(None, "null: the tokenizer's, rounded up to a multiple of 64 on a GPU", least=1)
    position: str = key("learned", among="learned | rope | none (no positions, or attention.alibi)")
    norm: str = key("layernorm", among="layernorm | rmsnorm")
    mlp: str = key("gelu_tanh", among="gelu_tanh (as GPT-2) | gelu (exact, faster on a CPU) | relu2 (squared) | swiglu")
    mlp_hidden: int | None = key(None, "width; null: 4 n_embd; swiglu: 8/3 n_embd, up to a multiple of 64", least=1)
    bias: bool = key(True, "biases in the linear layers and in layernorm")
    tie_head: bool = key(True, "the head uses the embedding's weight")
    bigram_rows: int | None = key(0, "rows of a second embedding, read at a hash of a token and the one before",
                                  least=0, note="null: 131072, or none for a text below 2.6 M tokens")  # fmt: skip
    bigram_width: int = key(64, "width of these rows, before a matrix widens them to n_embd", least=1)
    mix_x0: bool = key(False, "before each block x = a x + b x0: x0 is the embedding, a and b are learned")
    residual_dtype: str = key("float32", "dtype of the stream", among="float32 | autocast (bf16 with dtype=bf16)")
    dropout_p: float = key(0.0, "dropout in training, of the embedding and what a block adds", least=0, below=1)
    rope_base: float = key(10000.0, "rope's slowest frequency is about 1 / base", above=1)
    qk_norm: bool = key(False, "RMS norm of each head's q and k, before rope")
    norm_eps: float = key(1e-5, "epsilon that a norm adds under its square root", least=0)
    recompute: str = key("false", "recompute blocks in the backward", among="false | true | selective (not attention)")

    def __post_init__(self):
        self.recompute = str(self.recompute).lower()  # a string, and people type True
        check(self, "model.")
        if self.n_embd % self.n_head:
            raise ValueError(f"model.n_embd={self.n_embd} is no multiple of model.n_head={self.n_head}: choose another")
        if self.n_head % self.kv_heads:
            raise ValueError(f"model.n_head={self.n_head} is no multiple of n_kv_head={self.n_kv_head}: choose another")
        if self.position == "rope" and self.head_size % 2:
            raise ValueError(f"model.n_embd / model.n_head = {self.head_size} is odd; rope turns pairs: make it even")

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head


class RMSNorm(nn.RMSNorm):
    """torch's RMS norm. It has no fast kernel for x and weight of different dtypes, so x gets the weight's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


def rope_table(positions: Tensor, D: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base**(-2i / D), float32 (T, D / 2): bf16 would round position 8188 to 8192."""
    frequency = base ** -(torch.arange(0, D, 2, dtype=torch.float32, device=positions.device) / D)
    angle = torch.outer(positions.float(), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864) of x (B, H, T, D): pairs (i, i + D/2), as in GPT-NeoX."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = rope
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Bigrams(nn.Module):
    """An embedding of a token and the one before: a table of bigrams, in which pairs with the same hash share a row.
    Its rows are narrow, so that it can have many of them."""

    def __init__(self, rows: int, width: int, C: int):
        super().__init__()
        self.table, self.widen = nn.Embedding(rows, width), nn.Linear(width, C, bias=False)

    def forward(self, idx: Tensor, before: Tensor) -> Tensor:
        return self.widen(self.table(((idx * 36313) ^ (before * 27191)) % self.table.num_embeddings))


def place(idx: Tensor) -> tuple[Tensor, Tensor]:
    """Of whole sequences (B, T): the positions, int64 (T,), and the token before each, (B, T); -1 before the first."""
    return torch.arange(idx.shape[1], device=idx.device), F.pad(idx, (1, -1), value=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, attention_config: AttentionConfig, break_it: BreakIt):
        super().__init__()
        self.attention_config, self.break_it, self.head_size = attention_config, break_it, config.head_size
        self.heads = [config.n_head, config.kv_heads, config.kv_heads]
        self.qkv = nn.Linear(config.n_embd, sum(self.heads) * config.head_size, bias=config.bias)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        qk_norm = RMSNorm if config.qk_norm else nn.Identity  # which takes any arguments
        self.q_norm = qk_norm(config.head_size, eps=config.norm_eps)
        self.k_norm = qk_norm(config.head_size, eps=config.norm_eps)

    def forward(self, x: Tensor, rope=None, seed=None, spans=None, attend=attention) -> Tensor:
        """attend: attention(), or what a KVCache, a Ulysses or a Recorder puts around it."""
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, -1, self.head_size)
        q, k, v = (y.transpose(1, 2) for y in qkv.split(self.heads, dim=2))  # (B, H or H_kv, T, D)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        o = attend(q, k, v, self.attention_config, seed=seed, spans=spans, break_it=self.break_it)  # causal
        return self.out(o.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202) has a third matrix, the gate. With a width of 8/3 C it is as large as 4 C without."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        gated = config.mlp == "swiglu"
        hidden = config.mlp_hidden or (64 * math.ceil(config.n_embd / 24) if gated else 4 * config.n_embd)
        self.act: Any = F.silu if gated else ACTIVATIONS[config.mlp]
        self.up = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.gate = nn.Linear(config.n_embd, hidden, bias=config.bias) if gated else None
        self.down = nn.Linear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(self.act(y) if self.gate is None else self.act(self.gate(x)) * y)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attention_config: AttentionConfig, break_it: BreakIt):
        super().__init__()
        self.config = config
        self.attention_norm, self.mlp_norm = norm(config), norm(config)
        self.attention, self.mlp = Attention(config, attention_config, break_it), MLP(config)
        self.dropout = nn.Dropout(config.dropout_p)
        self.mix = nn.Parameter(torch.tensor([1.0, 0.1])) if config.mix_x0 else None

    def forward(self, x: Tensor, x0: Tensor, rope=None, seed=None, spans=None, attend=attention) -> Tensor:
        if self.mix is not None:
            x = self.mix[0] * x + self.mix[1] * x0
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, seed, spans, attend))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """config: with vocab_size set. attention_config: not auto, but resolved."""

    def __init__(self, config: GPTConfig, attention_config: AttentionConfig, break_it: BreakIt = UNBROKEN):
        super().__init__()
        assert config.vocab_size is not None, "train.py sets vocab_size from the tokenizer"
        self.config, self.attention_config, self.break_it = config, attention_config, break_it
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.bigrams = Bigrams(config.bigram_rows, config.bigram_width, config.n_embd) if config.bigram_rows else None
        self.positions = nn.Embedding(config.context_length, config.n_embd) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config, attention_config.layer(i), break_it) for i in range(config.n_layer))
        self.norm = norm(config)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_head:
            self.head.weight = self.embedding.weight
        self.dropout = nn.Dropout(config.dropout_p)
        self.initialise()

    def initialise(self) -> None:
        """nanoGPT's: normal with std 0.02; 0.02 / sqrt(2 L) for matrices that add to the stream, a sum of 2 L terms."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                adds = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * self.config.n_layer) if adds else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if self.bigrams is not None:
            nn.init.zeros_(self.bigrams.table.weight)  # a pair adds nothing until it is learned
            nn.init.normal_(self.bigrams.widen.weight, std=self.config.bigram_width**-0.5)

    def forward(self, idx: Tensor, targets=None, documents: Tensor | None = None, sequence=None, last=False):
        """Token ids (B, T) to logits (B, T, V), with last (B, 1, V); with targets (B, T) to the mean loss in nats.

        documents: integers, (B, T) of whole sequences, read only with attention.documents. sequence: None, or an object
        whose place() says where the tokens are, and whose attends() has each layer's attention: see model/cache.py."""
        x = self.hidden(idx, documents, sequence)
        if targets is not None:
            return next_token_loss(x.flatten(0, 1), self.head.weight, targets.flatten())
        return self.head(x[:, -1:] if last else x)

    def hidden(self, idx: Tensor, documents: Tensor | None = None, sequence=None) -> Tensor:
        """The residual stream after the last norm: (B, T, C)."""
        T, config, device = idx.shape[1], self.config, idx.device
        if T > config.context_length:
            raise ValueError(f"{T} tokens are more than model.context_length={config.context_length}")
        spans = spans_of(documents) if self.attention_config.documents and documents is not None else None  # (B, T, 2)
        positions, before = place(idx) if sequence is None else sequence.place(idx)
        x = self.embedding(idx)  # (B, T, C)
        if self.bigrams is not None:
            if spans is not None:  # a document's first token has none before it (nor has position 0)
                first = spans[:, positions, 0]  # of each token's document (with Ulysses idx has T / N tokens)
                before = before.where(first < positions, -1)
            x = x + self.bigrams(idx, before)
        if self.positions is not None:
            x = x + self.positions(positions)
        if config.residual_dtype == "autocast" and torch.is_autocast_enabled(device.type):
            x = x.to(torch.get_autocast_dtype(device.type))
        x = x0 = self.dropout(x)
        rope = rope_table(positions, config.head_size, config.rope_base) if config.position == "rope" else None
        # Drawn here and passed down as tensors, so that the backward and a block computed again get the same mask.
        dropping = self.training and self.attention_config.dropout_p > 0
        seeds = draw_seeds(config.n_layer, device) if dropping else [None] * config.n_layer
        attends = [attention] * config.n_layer if sequence is None else sequence.attends(config.n_layer)
        for block, seed, attend in zip(self.blocks, seeds, attends, strict=True):
            call = partial(recomputed, block) if self.training and config.recompute != "false" else block
            x = call(x, x0, rope, seed, spans, attend)
        return self.norm(x)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T: int) -> float:
        """Forward and backward, as PaLM counts them (arXiv 2204.02311, appendix B), but without hidden scores: 6 for
        each weight that multiplies, and in each layer 12 C for each key that a query sees."""
        tables = [m.weight for m in self.modules() if isinstance(m, nn.Embedding) and m.weight is not self.head.weight]
        windows = [min(self.attention_config.layer(i).window or T, T) for i in range(self.config.n_layer)]
        keys = sum(w - w**2 / (2 * T) for w in windows)  # seen on average (the first w see 1 to w), summed
        return 6 * (self.parameter_count() - sum(w.numel() for w in tables)) + 12 * self.config.n_embd * keys


def keep_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    """What recompute=selective keeps: the results of these ops."""
    kept = op.name().startswith(("tilegpt::attention", "aten::_scaled_dot_product_"))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def draws_from_torch(config: GPTConfig, attention_config: AttentionConfig) -> bool:
    """Whether a block draws from torch's generator: nn.Dropout and sdpa do, our attention gets a seed from outside."""
    return config.dropout_p > 0 or (attention_config.impl == "sdpa" and attention_config.dropout_p > 0)


def recomputed(block: Any, *inputs: Any) -> Tensor:
    """block(*inputs), computed again in the backward. With selective, all but attention."""
    restore = draws_from_torch(block.config, block.attention.attention_config)
    selective = partial(create_selective_checkpoint_contexts, keep_attention)
    keep = selective if block.config.recompute == "selective" else noop_context_fn
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=restore, context_fn=keep)
