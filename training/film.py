"""The film of a run: every head's attention weights on one validation text, step by step. probe.film=N

    runs/NAME/film/step_000100.png    a frame: a picture of each head, layers below each other, heads side by side
    runs/NAME/film.png                the film strip: a row for each head, a column for each frame

Dark blue is a large weight (its square root), red one that is not finite. A point may stand for a block of tokens
(training/weights.py).
"""

from pathlib import Path

import numpy as np
import torch

from training.files import replacing
from training.metrics import drawable, frames, rewrite, writing
from training.weights import PATTERNS, Reading

SIZE = 64  # points along a side of a picture
COLUMNS, ROWS = 12, 24  # of the strip at most: frames, and heads (those whose last picture has the most contrast)
BLUE, RED = np.array([20, 40, 140]), np.array([192, 28, 75])


def shares(found: list[Reading]) -> dict[str, float]:
    """{film.PATTERN: the largest share that any head has of it}, to be logged."""
    of = {name: [one.shares[name].nan_to_num(0.0).max() for one in found if name in one.shares] for name in PATTERNS}
    return {f"film.{name}": float(torch.stack(x).max()) for name, x in of.items() if x}


def keep(folder: Path, step: int, found: list[Reading]) -> None:
    """Writes the frame of a step into the run's folder."""
    from PIL import Image  # matplotlib needs it too; imported late, as that is

    maps = torch.stack([one.maps for one in found]).numpy()  # (L, H, N, N)
    L, H, N, _ = maps.shape
    shade = np.sqrt(np.nan_to_num(maps, nan=0.0, posinf=0.0, neginf=0.0).clip(0, 1))[..., None]
    ink = np.where(np.isfinite(maps)[..., None], 255 - shade * (255 - BLUE), RED)
    image = ink.swapaxes(1, 2).reshape(L * N, H * N, 3).astype(np.uint8)
    (folder / "film").mkdir(exist_ok=True)
    path = folder / "film" / f"step_{step:06}.png"
    with writing(path), replacing(path) as file:
        Image.fromarray(image).save(file, "png")


def picture_of(file: Path, size: tuple[int, int]) -> np.ndarray | None:
    """The frame, uint8 (height, width, 3), if it is a picture of this size (width, height)."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            return np.array(image.convert("RGB")) if image.size == size else None
    except (OSError, SyntaxError, Image.DecompressionBombError):  # as Pillow says that it is none
        return None


def draw(folder: Path, last: int, found: list[Reading], title: str, broken: str) -> Path:
    """Draws film.png of the frames up to step `last`. found: the readings of that step, for the names of the heads."""
    from matplotlib.figure import Figure

    of_step = frames(folder, last)  # the next frame may be there before the strip of this one is drawn
    steps = list(of_step)
    if len(steps) > COLUMNS:  # the first, the last, and between them as even as they come
        steps = [steps[round(i * (len(steps) - 1) / (COLUMNS - 1))] for i in range(COLUMNS)]
    L, (H, N, _) = len(found), found[0].maps.shape
    read = {step: picture_of(of_step[step], (H * N, L * N)) for step in steps}
    pictures = {step: x for step, x in read.items() if x is not None}  # another model's are left out
    heads = [(layer, head) for layer in range(L) for head in range(H)]
    if len(heads) > ROWS:
        contrast = {(layer, head): float(found[layer].maps[head].nan_to_num(0.0).std()) for layer, head in heads}
        heads = sorted(sorted(heads, key=contrast.__getitem__)[-ROWS:])

    gap, names = max(2, N // 16), []
    strip = np.full((len(heads) * (N + gap), len(pictures) * (N + gap), 3), 255, np.uint8)
    for row, (layer, head) in enumerate(heads):
        pattern = found[layer].pattern(head)
        names.append(f"{pattern}  {layer}.{head}" if pattern else f"{layer}.{head}")
        for column, picture in enumerate(pictures.values()):
            y, x = row * (N + gap), column * (N + gap)
            strip[y : y + N, x : x + N] = picture[layer * N : (layer + 1) * N, head * N : (head + 1) * N]
    figure = Figure(figsize=(1.6 + 0.85 * len(pictures), 0.8 + 0.85 * len(heads)), layout="constrained")
    axes = figure.add_subplot(xlabel="step")
    axes.imshow(strip, interpolation="nearest")
    axes.set_xticks([i * (N + gap) + N / 2 for i in range(len(pictures))], map(str, pictures))
    axes.set_yticks([i * (N + gap) + N / 2 for i in range(len(heads))], names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = drawable(f"{title} - BROKEN: {broken}" if broken else title)
    axes.set_title(title, color="red" if broken else "black", parse_math=False)
    rewrite(folder / "film.png", figure)
    return folder / "film.png"
