"""The dropout mask of the attention weights: one pure function of a seed and a place.

A stored mask would take T x T_k booleans per head, and tiling exists to avoid memory of that size. So tiled and triton
compute it again in the backward. Rows and columns count from 0 in the whole sequence, whatever the tiles.

Source of the bits: Philox 4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with seven rounds,
the fewest that pass the paper's statistical tests. Its counter is four 32-bit words; a single one, (n*T + row)*T_k +
column (n = b*H + h), would overflow and repeat the mask from T = 18,919 on with 12 heads.

One Philox call gives 128 bits. With 32 bits per decision a GPU kernel would spend more time on the mask than on the
matrix products. So one call decides for 16 weights: rows r, r + 8, r + 16 and r + 24 of a square of 32 x 32, and
four columns 8 apart, because a thread has 8 or all of these 16 in a tensor core's result. Each gets 8 bits:

    word  of a weight = bits 3 and 4 of its row, counted from 0
    byte  of the word = bits 3 and 4 of its column
    counter           = ((row >> 5) << 3 | row & 7, the same of the column, b*H + h, 0): the other bits, pushed together
    key               = (low half of the seed, high half of the seed)

Row 13 = 0b01101 has 01 in bits 4 and 3, so its word is 1, and the counter has 0 << 3 | 0b101.

8 bits make the probability a multiple of 1/256: dropout_p = 0.1 drops 26 of 256 (0.1016). What is kept is divided by
the share that is actually kept, so the expectation is exact.
"""

import torch
from torch import Tensor

ROUNDS = 7
M0, M1 = 0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32  # the multipliers minus 2**32: see philox()
W0, W1 = 0x9E3779B9, 0xBB67AE85  # added to the key in each round
LOW = 0xFFFFFFFF
Word = Tensor | int  # 32 random or counter bits: int64 in [0, 2**32)


def draw_seeds(n: int, device: torch.device) -> tuple[Tensor, ...]:
    """n seeds from torch's generator, int64 scalars on the device. Tensors, so that a replayed CUDA graph draws new
    masks. 16 bytes apart: Triton would compile a kernel once more for a pointer that is no multiple of 16."""
    return torch.randint(2**63 - 1, (n, 2), device=device)[:, 0].unbind()


def drop_threshold(dropout_p: float) -> int:
    """How many of the 256 values of a byte drop a weight: round(256 * dropout_p). ValueError if that cannot be."""
    threshold = round(256 * dropout_p)
    if threshold == 256 or (threshold == 0 and dropout_p > 0):
        raise ValueError(f"attention.dropout_p={dropout_p}: the mask has steps of 1/256; use 0 or 0.002 to 0.998")
    return threshold


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word], rounds: int = ROUNDS) -> tuple[Word, ...]:
    """Philox 4x32: four counter words and two key words to four random words, all of one broadcast shape.

    The words are int64, because torch has no unsigned 32-bit product with a high half. In int64 c * M can exceed 2**63,
    which is undefined in C++: torch.compile drew other masks. So the code multiplies by M - 2**32 instead. That product
    p never overflows and has the same low half; its high half is too low by c, so (p >> 32) + c is right."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * M0, c2 * M1
        c0, c1, c2, c3 = ((p1 >> 32) + c2) ^ c1 ^ k0, p1 & LOW, ((p0 >> 32) + c0) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, heads: int, rows: range, columns: range, dropout_p: float) -> Tensor:
    """The keep-mask of one tile, for B*H heads: bool (heads, len(rows), len(columns)), True where the weight is kept.
    seed: int64 scalar tensor, on the device where the mask is needed."""
    # The Philox calls cover 32 x 32 squares. Draw whole squares, then cut the tile out of them.
    row0, row1 = rows.start // 32, -(-rows.stop // 32)
    column0, column1 = columns.start // 32, -(-columns.stop // 32)
    c0 = torch.arange(row0 * 8, row1 * 8, device=seed.device).view(1, -1, 1)  # the row without bits 3 and 4
    c1 = torch.arange(column0 * 8, column1 * 8, device=seed.device).view(1, 1, -1)
    c2 = torch.arange(heads, device=seed.device).view(-1, 1, 1)
    # ^ (seed & 0) changes no value. Without it torch.compile multiplies an arange in 32 bits, which overflows on a GPU.
    c0, c1, c2 = (c ^ (seed & 0) for c in (c0, c1, c2))
    words = philox((c0, c1, c2, 0), (seed & LOW, seed >> 32 & LOW))

    bits = torch.stack(torch.broadcast_tensors(*words), dim=-1).to(torch.int32).view(torch.uint8)
    # heads, row square, row bits 0-2, column square, column bits 0-2, word, byte
    bits = bits.view(heads, row1 - row0, 8, column1 - column0, 8, 4, 4)
    bits = bits.permute(0, 1, 5, 2, 3, 6, 4)  # word before row bits 0-2, byte before column bits 0-2
    bits = bits.reshape(heads, (row1 - row0) * 32, (column1 - column0) * 32)
    i, j = rows.start % 32, columns.start % 32
    return bits[:, i : i + len(rows), j : j + len(columns)] >= drop_threshold(dropout_p)
