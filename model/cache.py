"""The keys and values of past tokens: two buffers a layer; all sequences have the same length."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model.attention import AttentionConfig, alibi_slopes, attention


class KVCache:
    """model(idx, sequence=cache) runs the tokens idx (B, T) behind those that are held. Then call cache.advance(T)."""

    def __init__(self, model, B: int, size: int | None = None):
        """size: how many tokens it can hold. None: a whole context."""
        config, weight = model.config, model.embedding.weight
        device, low = weight.device, torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(device.type) if low else weight.dtype
        shape = B, config.kv_heads, size or config.context_length, config.head_size
        zeros = partial(torch.zeros, shape, dtype=dtype, device=device)
        self.layers = [(zeros(), zeros()) for _ in model.blocks]  # keys and values, each (B, H_kv, size, D)
        self.last = torch.zeros(B, 1, dtype=torch.int64, device=device)  # the last token that is held
        self.length = 0  # tokens that are held; self.position has it on the device, for kernels/decode.py
        triton = model.attention_config.impl == "triton"
        self.position: Any = torch.zeros(1, dtype=torch.int64, device=device) if triton else None

    def place(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of the next tokens (B, T), int64 (T,), and the token before each. Stores the last of idx."""
        last = self.last if self.length else torch.full_like(self.last, -1)  # the first token has none before it
        before = torch.cat((last, idx[:, :-1]), dim=1)
        self.last.copy_(idx[:, -1:])  # in place, because a CUDA graph has its address
        at = torch.arange(idx.shape[1], device=idx.device)
        return at + (self.length if self.position is None else self.position), before

    def attends(self, n_layer: int) -> list[Callable[..., Tensor]]:
        return [partial(self.attend, keys, values) for keys, values in self.layers]

    def attend(self, keys, values, q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, **others) -> Tensor:
        """Keeps k and v (B, H_kv, T, D) of the new tokens in a layer's keys and values. Returns their attention to all
        that is held, like q. others: not needed, because sampling has no dropout and no documents, and a broken model
        has no cache."""
        T = q.shape[2]
        if T == 1 and self.position is not None:  # the kernel reads it on the device, and writes k and v
            from kernels.decode import decode

            slopes = alibi_slopes(q.shape[1], q.device) if config.alibi else None
            scale = config.softmax_scale or q.shape[3] ** -0.5
            return decode(q, k, v, keys, values, self.position, scale, config.softcap, slopes, config.window)
        held = self.length + T
        keys[:, :, self.length : held], values[:, :, self.length : held] = k, v
        return attention(q, keys[:, :, :held], values[:, :, :held], config)  # the last query is at the last key

    def advance(self, T: int) -> None:
        self.length += T
        if self.position is not None:
            self.position += T
