"""A GPT that computes activations again in the backward: less memory, a longer step.

Shapes: B batch, T sequence length, n tokens of a piece, C model width, H heads, H_kv key/value heads, D head size.

    model.activation_checkpointing=true        a block stores its input x and computes everything else again
    model.activation_checkpointing=selective   it also stores attention's result, and does not compute attention again
    model.chunk=N                              all but attention is computed in pieces of N tokens, each again

The results are those of GPT: the same bits with the same seeds, but for the gradients of the weights with model.chunk,
which are then sums over pieces.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model.attention import AttentionConfig
from model.break_it import UNBROKEN, BreakIt
from model.gpt import GPT, Block, Context, GPTConfig
from model.norm import Added

# The ops whose results a selective checkpoint stores: those of attention, of all implementations but naive.
STORED = ("tilegpt::flash_forward", "tilegpt::tiled_forward", "tilegpt::ring_forward", "aten::_scaled_dot_product_")


class RecomputingGPT(GPT):
    """A GPT for training: its blocks run as model.activation_checkpointing and model.chunk say."""

    def __init__(self, config: GPTConfig, attention_config: AttentionConfig, break_it: BreakIt = UNBROKEN):
        if "unrestored_seed" in break_it.broken and config.activation_checkpointing != "true":
            raise ValueError(
                f"break_it={break_it.label}: no block is computed again; use model.activation_checkpointing=true"
            )
        super().__init__(config, attention_config, break_it)

    def layer(self, block: Block, x: Tensor, added: Added | None, context: Context) -> tuple[Tensor, Added | None]:
        form, chunk = self.config.activation_checkpointing, self.config.chunk
        if not self.training or (form == "false" and not chunk):
            return block.forward(x, added, context)
        return in_less_memory(block, x, context, form, chunk), None


def in_less_memory(block: Block, x: Tensor, context: Context, form: str, chunk: int | None) -> Tensor:
    """The block's output for the stream x (B, T, C), with the residuals added.

    form: model.activation_checkpointing, not auto. chunk: model.chunk.
    """
    if form == "false":
        return in_pieces(block, x, context, chunk)
    run: Callable[..., Any] = in_pieces
    config = block.attention_config
    restore = config.impl == "sdpa" and config.dropout_p > 0  # PyTorch draws its mask from torch's generator
    if "unrestored_seed" in block.break_it.broken:  # a compiled graph would keep the seed instead of drawing it again
        run, restore = torch.compiler.disable(redrawn), False
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=restore)
    if form == "true":
        return again(run, block, x, context, chunk)
    store = partial(create_selective_checkpoint_contexts, store_attention)
    x, o = again(up_to_attention, block, x, context, chunk, context_fn=store)
    return each_piece(partial(after_attention, block), chunk or x.shape[1], context, x, o)[0]


def redrawn(block: Block, x: Tensor, context: Context, chunk: int | None) -> Tensor:
    """For break_it=unrestored_seed: draws the seed here, so a block that is computed again gets another one."""
    return in_pieces(block, x, context._replace(seed=torch.randint(2**63 - 1, (), device=x.device)), None)


def in_pieces(block: Block, x: Tensor, context: Context, chunk: int | None) -> Tensor:
    """The block's output (B, T, C), all but attention in pieces of `chunk` tokens."""
    if not chunk:
        x, added = block.forward(x, None, context)
        return x if added is None else added.to(x)
    x, o = up_to_attention(block, x, context, chunk)
    return each_piece(partial(after_attention, block), chunk, context, x, o)[0]


def up_to_attention(block: Block, x: Tensor, context: Context, chunk: int | None) -> tuple[Tensor, Tensor]:
    """The stream x (B, T, C) to itself and attention's o (B, T, H, D)."""
    if chunk:
        q, k, v = each_piece(partial(before_attention, block), chunk, context, x)
    else:
        x, q, k, v, _ = block.before(x, None, context)
    return x, block.attend(q, k, v, context)


def before_attention(block: Block, context: Context, x: Tensor) -> tuple[Tensor, ...]:
    """The stream x (B, n, C) to q (B, n, H, D) and k, v (B, n, H_kv, D)."""
    return block.before(x, None, context)[1:4]


def after_attention(block: Block, context: Context, x: Tensor, o: Tensor) -> tuple[Tensor]:
    """Adds attention and the MLP to the stream: x (B, n, C) and o (B, n, H, D) to (B, n, C)."""
    x, added = block.after(x, o, context)
    return (x if added is None else added.to(x),)


def each_piece(
    compute: Callable[..., tuple[Tensor, ...]], chunk: int, context: Context, *wholes: Tensor
) -> tuple[Tensor, ...]:
    """compute(context, *pieces) of every piece of `chunk` tokens, each in a checkpoint, with the context of its tokens.

    wholes: (B, T, ...), and so are the results, put together again. compute treats each token by itself.
    """
    device = wholes[0].device.type
    # With its cache autocast would use one copy of each weight for all pieces, and add up its gradients in 16 bits.
    low, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    pieces = list(zip(*(x.split(chunk, dim=1) for x in wholes), strict=True))
    with torch.autocast(device, dtype, enabled=low, cache_enabled=len(pieces) == 1):
        parts = [
            checkpoint(compute, some(context, i * chunk, chunk), *piece, use_reentrant=False, preserve_rng_state=False)
            for i, piece in enumerate(pieces)
        ]
    return tuple(torch.cat(found, dim=1) for found in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]


def some(context: Context, first: int, n: int) -> Context:
    """The context of n tokens, for what treats each token by itself."""
    tokens = slice(first, first + n)
    rope = None if context.rope is None else (context.rope[0][..., tokens, :], context.rope[1][..., tokens, :])
    return context._replace(rope=rope, rows=None if context.rows is None else context.rows[tokens])


def store_attention(context: Any, op: Any, *args, **kwargs) -> CheckpointPolicy:
    """What a selective checkpoint does with an op's result: attention's is stored, everything else computed again."""
    return CheckpointPolicy.MUST_SAVE if op.name().startswith(STORED) else CheckpointPolicy.PREFER_RECOMPUTE
