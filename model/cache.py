"""The keys and values of past tokens: one buffer a layer; all sequences have the same length."""

from typing import Any

import torch
from torch import Tensor

from model.attention import AttentionConfig, alibi_slopes, attention


class LayerCache:
    def __init__(self, cache: "KVCache", shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.cache = cache
        self.k = torch.zeros(shape, dtype=dtype, device=device)  # (B, H_kv, T, D)
        self.v = torch.zeros_like(self.k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, **others) -> Tensor:
        """Keeps k and v (B, H_kv, T, D) of the new tokens. Returns their attention to all that is held, like q. others:
        not needed, because sampling has no dropout and no documents, and a broken model has no cache."""
        cache, T = self.cache, q.shape[2]
        if T == 1 and cache.position is not None:  # decode() reads it on the device, and keeps k and v
            from kernels.decode import decode

            slopes = alibi_slopes(q.shape[1], q.device) if config.alibi else None
            scale = config.softmax_scale or q.shape[3] ** -0.5
            return decode(q, k, v, self.k, self.v, cache.position, scale, config.softcap, slopes, config.window)
        held = cache.length + T
        self.k[:, :, cache.length : held], self.v[:, :, cache.length : held] = k, v
        return attention(q, self.k[:, :, :held], self.v[:, :, :held], config)  # the last query is at the last key


class KVCache:
    """model(idx, sequence=cache) runs the tokens idx (B, T) behind those that are held. Then call cache.advance(T)."""

    def __init__(self, model, B: int, size: int | None = None):
        """size: how many tokens it can hold. None: a whole context."""
        config, weight = model.config, model.embedding.weight
        device, low = weight.device, torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(device.type) if low else weight.dtype
        shape = B, config.kv_heads, size or config.context_length, config.head_size
        self.layers = [LayerCache(self, shape, dtype, device) for _ in model.blocks]
        self.last = torch.zeros(B, 1, dtype=torch.int64, device=device)  # the last token that is held
        self.length = 0  # tokens that are held; self.position has it on the device, for kernels/decode.py
        triton = model.attention_config.impl == "triton"
        self.position: Any = torch.zeros(1, dtype=torch.int64, device=device) if triton else None

    def place(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of the next tokens (B, T), int64 (T,), and the token before each."""
        last = self.last if self.length else torch.full_like(self.last, -1)  # the first token has none before it
        before = torch.cat((last, idx[:, :-1]), dim=1)
        self.last.copy_(idx[:, -1:])  # in place, because a CUDA graph has its address
        at = torch.arange(idx.shape[1], device=idx.device)
        return at + (self.length if self.position is None else self.position), before

    def advance(self, T: int) -> None:
        self.length += T
        if self.position is not None:
            self.position += T
