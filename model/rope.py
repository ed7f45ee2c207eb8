"""Rotary embedding: the table of angles, YaRN, and the rotation of queries and keys.

Shapes: B batch, T sequence length, H heads, D head size.
"""

import math

import torch
from torch import Tensor


def rope_table(
    length: int, head_size: int, base: float, device: torch.device, yarn: tuple[float, int] | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base**(-2i / D), float32 (length, D / 2). yarn: yarn_factor and yarn_original.

    Always float32, because in bf16 the positions 8188 to 8191 all round to 8192. Made anew in each forward, because
    model.bfloat16() would round a buffer. Making it costs as much as one norm.
    """
    frequency = base ** -(torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size)
    if yarn is not None:
        frequency = frequency * stretch(head_size, base, *yarn, device)
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequency)
    if yarn is None:
        return angle.cos(), angle.sin()
    scale = 0.1 * math.log(yarn[0]) + 1  # of q and of k, so that the scores grow, and longer rows stay as sharp
    return angle.cos() * scale, angle.sin() * scale


def stretch(head_size: int, base: float, factor: float, original: int, device: torch.device) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): what each of rope's frequencies is multiplied with, float32 (D / 2).

    A pair that turned 32 times or more within the original context keeps its frequency: it tells near tokens apart.
    One that turned once at most gets 1 / factor, so that it meets no angle that it was not trained with. Between them
    the multiplier falls in a straight line over the pairs. 32 and 1 are the paper's. As transformers does, the ends of
    the line are rounded to whole pairs.
    """
    fast, slow = (
        head_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1)
    )  # the pairs, as fractions, that turned so often
    first, last = max(math.floor(fast), 0), min(math.ceil(slow), head_size - 1)
    pairs = torch.arange(head_size // 2, dtype=torch.float32, device=device)
    slowed = ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
    return 1 - slowed * (1 - 1 / factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864): rotates the pair (i, i + D/2) of each head by its angle.

    x (B, H, T, D) of any float dtype, cos and sin float32 (T, D / 2). A pair has one element from each half of the
    head, not two neighbours, as in Llama's published weights.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
