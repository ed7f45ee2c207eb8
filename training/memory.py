"""How much memory a training step takes, by arithmetic; and which activation checkpointing fits.

    settled, why = settle(cfg.model, attention, cfg.batch_size, dtype, device, ema=cfg.ema_decay > 0)

Only model.activation_checkpointing=auto is replaced, by the fastest of FORMS that fits. `why` is for the run's first
lines. bytes_of() counts what the operations of an eager step hold. A compiled step holds no more than that, but for the
allocator's slack: FITS leaves room for it.

Shapes: B batch, T sequence length, C model width, H query heads, F hidden width of the MLP, L layers, V vocabulary.
"""

import math
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from model.abilities import wanted, why_not
from model.attention import AttentionConfig
from model.gpt import GPT, GPTConfig, without_values
from model.loss import KERNEL_CHUNK
from training.machine import DTYPES

GIB = 2**30
FITS = 0.9  # of the memory that is free; the rest is for the allocator's slack and for the kernels' workspaces
COMPILED = 1.5  # on an H200 a compiled step took up to 1.47 times what is counted, where it computed something again
PIECE = 16_384  # model.chunk that auto sets
# (activation_checkpointing, whether in pieces), the fastest first. Pieces take time, for launches and a third forward
# of all but attention. With true attention is computed again too, which for long sequences is most of a forward.
FORMS = (("false", False), ("selective", False), ("selective", True), ("true", True))


def settle(
    model: GPTConfig,
    attention: AttentionConfig,
    batch_size: int,
    dtype: str,
    device: torch.device,
    ema: bool,
    shards: int = 1,
) -> tuple[GPTConfig, str]:
    """The model's configuration without auto, and the line that says what was chosen and why; "" without auto.

    attention: resolved. dtype: float32 | bf16 | fp16. ema: whether the weights are averaged. shards: among how many
    GPUs they are shared. model.vocab_size is set.
    """
    if model.activation_checkpointing != "auto":
        return model, ""
    if device.type != "cuda":
        why = f"activation checkpointing: false (auto counts the memory of a CUDA GPU, not of {device.type})"
        return replace(model, activation_checkpointing="false"), why
    free, _ = torch.cuda.mem_get_info(device)
    asked = wanted(attention), device, DTYPES[dtype], model.head_size
    hopper = attention.impl == "triton" and not why_not("hopper backward", *asked)
    return fastest(free, model, attention, batch_size=batch_size, dtype=dtype, ema=ema, shards=shards, hopper=hopper)


def step_on_cpu(
    model: GPTConfig, attention: AttentionConfig, batch_size: int, passes: int, dtype: str, ema: bool, shards: int
) -> int:
    """The bytes that a step takes at least on a machine's CPUs, of all its ranks. The arguments are those of settle(),
    and the passes of a step, on one rank."""
    if model.activation_checkpointing == "auto":
        model = replace(model, activation_checkpointing="false")
    batches = 16 * passes * batch_size * model.context_length  # x and y
    least = bytes_of(model, attention, batch_size, dtype, ema, norm_kernel=False, shards=shards) + batches
    return least * int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def memory_of_machine() -> float:
    """Bytes of this machine's memory, or of the container's limit. Infinity where that cannot be asked (Windows)."""
    if not hasattr(os, "sysconf"):
        return math.inf
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # another system; "max"
        there = min(there, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return there


def fastest(free: int, model: GPTConfig, attention: AttentionConfig, **of_step: Any) -> tuple[GPTConfig, str]:
    """settle() for a GPU with `free` bytes: the first of FORMS that fits, or the one that takes least. of_step: the
    other arguments of bytes_of()."""
    options, counted, fitting = [], [], []
    for form, pieces in FORMS:
        if form == "selective" and attention.impl == "naive":
            continue  # naive has no op whose result could be kept
        chunk = model.chunk or (PIECE if pieces and model.context_length > PIECE else None)
        options.append(replace(model, activation_checkpointing=form, chunk=chunk))
        counted.append(bytes_of(options[-1], attention, **of_step))
        if counted[-1] * (1.0 if form == "false" and not chunk else COMPILED) <= FITS * free:
            fitting.append(len(counted) - 1)
    best = fitting[0] if fitting else counted.index(min(counted))
    name = options[best].activation_checkpointing
    if options[best].chunk:
        name += f" with model.chunk={options[best].chunk}"
    said = f"about {counted[best] / GIB:.1f} GiB of {free / GIB:.1f} free" + ("" if fitting else ", which may not fit")
    before = f"; {options[best - 1].activation_checkpointing} takes {counted[best - 1] / GIB:.1f}" if best else ""
    return options[best], f"activation checkpointing: {name} (auto: {said}{before})"


def bytes_of(
    model: GPTConfig,
    attention: AttentionConfig,
    batch_size: int,
    dtype: str,
    ema: bool,
    norm_kernel: bool = True,
    shards: int = 1,
    hopper: bool = False,
) -> int:
    """The peak memory of a step in bytes: weights, gradients, AdamW's state and activations. The arguments are those of
    settle(), with model.activation_checkpointing settled. norm_kernel: whether kernels/norm.py computes the backward of
    norms, as on a GPU. hopper: whether kernels/hopper/backward.py computes that of attention."""
    with without_values():
        whole = GPT(model, attention)
    C, H, L, V = model.n_embd, model.n_head, model.n_layer, whole.head.weight.shape[0]
    K, F = (model.n_kv_head or H) * model.head_size, whole.get_parameter("blocks.0.mlp.up.weight").shape[0]
    tokens = batch_size * model.context_length
    low = 4 if dtype == "float32" else 2  # bytes of an element in products
    stream = low if model.residual_dtype == "autocast" else 4

    # Bytes a token, in one layer. First a norm's input, and its result in the products' dtype.
    norm = (stream if norm_kernel else 4) * C + low * C
    norm += 4 * C * (model.norm == "rmsnorm" and not norm_kernel)  # and its result before the weight
    qkv = (C + 2 * K) * low
    turned = (C + K) * low if model.position == "rope" else 0  # q and k once more
    turned += model.qk_norm * (C + K) * (4 if low == 4 else 8)  # and in float32, before and after their norm
    table = H * model.context_length if attention.impl == "naive" else 0  # a row of each head's weights, which are
    # kept in float32 and in the products' dtype; and lse, which triton has twice
    o = C * low + (8 if attention.impl == "triton" else 4) * H + (4 + low) * table
    hidden = (4 if model.mlp == "swiglu" else 2) * F * low  # what autograd keeps: swiglu's product has two factors
    back = (3 if model.mlp == "relu2" else 1) * F * low  # gradients of the hidden layer
    project, rest = norm + qkv + turned, norm + hidden + 2 * C * (model.dropout_p > 0)  # with dropout's masks

    # What a layer keeps for the backward, and what its own backward takes at most. There the gradients of q, k and v,
    # or of the hidden layer, come on top of what is computed again. A float32 stream is a norm's input itself.
    form, pieces = model.activation_checkpointing, batch_size * (model.chunk or 0)
    kept = {"false": project + o + rest, "true": stream * C, "selective": stream * C + o}[form]
    gradients = 2 * stream * C  # of the stream, after the block and before it
    shared = 4 * C if stream == 4 else 0
    if model.chunk:
        kept = stream * C + qkv + o if form == "false" else kept
        again = {"false": 0, "true": qkv + o, "selective": qkv}[form]
        around = min(tokens, pieces) * max(project, rest + back)
        work = tokens * (gradients + low * C) + max(tokens * (again + qkv), around)
    elif form == "false":
        work = tokens * (gradients + back)
    elif form == "true":
        work = tokens * (project + o + rest + back + gradients - shared)
    else:
        work = tokens * (max(project + qkv + 4 * C, rest + back) + gradients - shared)
    work += tokens * 17 * table  # four more in float32 and a mask, in naive's backward
    if hopper:
        from kernels.hopper.backward import key_heads_at_once  # imported here: only Hopper needs Gluon

        work += math.prod(key_heads_at_once(batch_size, H, model.n_kv_head or H, model.context_length, model.head_size))

    # The loss: the last norm, the gradient of its result, the logits of a chunk of tokens, and the head's gradient.
    loss = tokens * (norm + 4 * C + low * C) + min(tokens, KERNEL_CHUNK) * V * low + V * C * (4 + low)
    return weights_of(whole, ema, shards) + tokens * L * kept + max(work, loss)


def weights_of(model: GPT, ema: bool, shards: int) -> int:
    """The bytes of the weights, the gradients, AdamW's state and the average, on one of `shards` GPUs."""
    count = model.parameter_count()
    if shards == 1:
        return count * (16 + 4 * ema)
    # What is together for a while: the embedding and the head, a block and the one after it.
    block = sum(p.numel() for p in model.blocks[0].parameters())
    return count * (16 + 4 * ema) // shards + 4 * (2 * (count - len(model.blocks) * block) + 4 * block)
