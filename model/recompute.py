"""Blocks that compute activations again in the backward: less memory, a longer step.

Shapes: B batch, T sequence length, n tokens of a piece, C model width, H heads, H_kv key/value heads, D head size.

    model.activation_checkpointing=true        a block stores its input x and computes everything else again
    model.activation_checkpointing=selective   it also stores attention's result, and does not compute attention again
    model.chunk=N                              all but attention is computed in pieces of N tokens, each again

The results are those of Block.forward(): the same bits with the same seeds, but for the gradients of the weights with
model.chunk, which are then sums over pieces.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model.attention import draws_itself
from model.norm import Added, add_and_norm, last_norm

if TYPE_CHECKING:
    from model.gpt import Block, Context

# The ops whose results a selective checkpoint keeps: those of attention, of all implementations but naive.
KEPT = ("tilegpt::flash_forward", "tilegpt::tiled_forward", "tilegpt::ring_forward", "aten::_scaled_dot_product_")


def in_less_memory(
    block: "Block",
    x: Tensor,
    context: "Context",
    form: str,
    chunk: int | None,
    run: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The block's output for the stream x (B, T, C), with the residuals added.

    form: model.activation_checkpointing, not auto. chunk: model.chunk. run(block, x, context): instead of the block,
    for break_it.restore_seed=false, which draws its own random numbers, also when it is run again.
    """
    restore = run is None and draws_itself(block.attention.attention_config)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=restore)
    if form == "true":
        return again(run or (in_pieces if chunk else whole), block, x, context, *([chunk] if chunk else []))
    if form == "selective":
        keep = partial(create_selective_checkpoint_contexts, keep_attention)
        x, o = again(up_to_attention, block, x, context, chunk, context_fn=keep)
        return each_piece(partial(after_attention, block, context), chunk or x.shape[1], x, o)[0]
    return in_pieces(block, x, context, chunk)


def whole(block: "Block", x: Tensor, context: "Context") -> Tensor:
    """The block's result (B, T, C)."""
    x, added = block.forward(x, None, context)
    return added.to(x)


def draw_and_run(block: "Block", x: Tensor, context: "Context") -> Tensor:
    """For break_it.restore_seed=false: draws the seed here, so a block that is computed again gets another one."""
    return whole(block, x, context._replace(seed=torch.randint(2**63 - 1, (), device=x.device)))


def in_pieces(block: "Block", x: Tensor, context: "Context", chunk: int | None) -> Tensor:
    """whole(), all but attention in pieces of `chunk` tokens."""
    x, o = up_to_attention(block, x, context, chunk)
    return each_piece(partial(after_attention, block, context), chunk or x.shape[1], x, o)[0]


def up_to_attention(block: "Block", x: Tensor, context: "Context", chunk: int | None) -> tuple[Tensor, Tensor]:
    """The stream x (B, T, C) to itself and attention's o (B, T, H, D)."""
    if chunk:
        q, k, v = each_piece(partial(project, block, context), chunk, x)
    else:
        x, y = add_and_norm(block.attention_norm, x, None)
        q, k, v = block.attention.project(y, context.rope)
    return x, block.attention.attend(q, k, v, context)


def project(block: "Block", context: "Context", first: int, x: Tensor) -> tuple[Tensor, ...]:
    """The stream x (B, n, C) of the tokens from `first` on to q (B, n, H, D) and k, v (B, n, H_kv, D)."""
    rope = context.rope
    if rope is not None:
        rope = rope[0][first : first + x.shape[1]], rope[1][first : first + x.shape[1]]
    return block.attention.project(last_norm(block.attention_norm, x, None), rope)


def after_attention(block: "Block", context: "Context", first: int, x: Tensor, o: Tensor) -> tuple[Tensor]:
    """Adds attention and the MLP to the stream of the tokens from `first` on: x (B, n, C) and o (B, n, H, D) to (B, n,
    C)."""
    B, n, _ = x.shape
    for_attention, for_mlp = block.kept(context, B, range(first, first + n))
    x, y = add_and_norm(block.mlp_norm, x, Added(block.attention.merge(o), for_attention, block.dropout_p))
    return (Added(block.mlp(y), for_mlp, block.dropout_p).to(x),)


def each_piece(compute: Callable[..., tuple[Tensor, ...]], chunk: int, *wholes: Tensor) -> tuple[Tensor, ...]:
    """compute(first, *pieces) of every piece of `chunk` tokens, each in a checkpoint. `first` is its first token.

    wholes: (B, T, ...), and so are the results, put together again. compute treats each token by itself.
    """
    T, device = wholes[0].shape[1], wholes[0].device.type
    # With its cache autocast would use one copy of each weight for all pieces, and add up its gradients in 16 bits.
    low, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with torch.autocast(device, dtype, enabled=low, cache_enabled=chunk >= T):
        parts = [
            checkpoint(compute, i * chunk, *piece, use_reentrant=False, preserve_rng_state=False)
            for i, piece in enumerate(zip(*(x.split(chunk, dim=1) for x in wholes), strict=True))
        ]
    return tuple(torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]


def keep_attention(context: Any, op: Any, *args, **kwargs) -> CheckpointPolicy:
    """What a selective checkpoint does with an op's result: attention's is kept, everything else is computed again."""
    return CheckpointPolicy.MUST_SAVE if op.name().startswith(KEPT) else CheckpointPolicy.PREFER_RECOMPUTE
