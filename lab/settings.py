"""The keys of bench.py and breakit.py: each with the modes that read it.

A key that its mode does not read is refused, because the user expects something of it.
"""
# ruff: noqa: RUF009 (of() makes a field)

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from conf.keys import check, key
from lab.entrants import IMPLS, Case
from lab.steps import CASES
from lab.story import ORDERS, STORY_FAILURES
from model.attention import AttentionConfig
from model.break_it import FAILURES
from model.dropout import drop_threshold


def of(modes: str, default: Any, meaning: str, **limits: Any) -> Any:
    """A key that these modes read. The rest as of conf/keys.py's key()."""
    made = key(default, meaning, **limits)
    made.metadata = {**made.metadata, "modes": modes.split()}
    return made


def given(config: Any) -> Iterator[tuple[str, Any, list[str]]]:
    """Each key that has another value than its default: its name, its value, and the modes that read it."""
    for entry in fields(config):
        usual = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if (value := getattr(config, entry.name)) != usual:
            yield entry.name, value, entry.metadata["modes"]


MODES = "race pictures traffic train length learn decode roofline"
RACE, SIZE = "race pictures", {"least": 1, "below": 2**31}
STEPS = ("naive", "tiled", "sdpa", "triton")  # the attention of train.py


@dataclass
class Bench:
    """The keys of bench.py. Raises ValueError for invalid values, and for keys that the mode does not read."""

    mode: str = of(MODES, "race", "", among=MODES.replace(" ", " | "))
    impls: list[str] | None = of(f"{RACE} length", None, "naive, tiled, triton and the peers; null: all that run here")
    lengths: list[int] = of(
        f"{RACE} traffic length roofline", [512, 1024, 2048, 4096], "T, tokens per sequence", **SIZE
    )
    head_sizes: list[int] = of(f"{RACE} traffic roofline", [32], "D, the size of a head", **SIZE)
    heads: list[int] = of(f"{RACE} roofline", [2], "H: one number for each head size, or one for all", **SIZE)
    kv_heads: int | None = of(RACE, None, "heads of k and v, a divisor of heads; null: as many as heads", **SIZE)
    tokens: int = of(
        f"{RACE} length roofline", 1, "tokens per batch: B = max(1, tokens // T) sequences; 32768 fill a GPU", **SIZE
    )
    causal: list[bool] | None = of(
        f"{RACE} traffic roofline", None, "[true] | [false] | [true,false] (both); null: both, in traffic [false]"
    )
    window: int | None = of(f"{RACE} traffic", None, "keys that a query sees, itself included", least=1)
    documents: int | None = of(
        RACE, None, "mean length of a document in tokens; a token sees its own document only", **SIZE
    )
    block_mask: list[str] | None = of(RACE, None, "as attention.block_mask, stretched over each length: [x..,xx.,.xx]")
    dropout_p: list[float] = of(RACE, [0.0, 0.1], "probability of dropping an attention weight")
    dtype: str = of(f"{RACE} roofline", "float32", "of q, k and v", among="float32 | bf16 | fp16")
    block: int = of("race", 128, "tile size of tiled, its block_m and block_n", **SIZE)
    patience: float = of(
        "race", 1.0, "seconds: a forward and backward that is expected to take longer is left out", above=0,
        most=float("inf"),
    )  # fmt: skip
    on_chip: list[int] = of("traffic", [4096, 8192, 16384, 32768], "traffic: words that the chip holds")
    backward: bool = of("traffic", False, "traffic: count the backward too")
    cases: list[str] | None = of("train", None, "", among=" | ".join(CASES), usual="null: all")
    impl: str = of("train", "auto", "train: our attention", among="auto | naive | tiled | sdpa | triton")
    bias: bool | None = of("train", None, "train: whether both models have biases; null: as in the case")
    peer: str | None = of(
        "train learn", None, "train, learn: path of nanoGPT's model.py; null: a plain GPT-2, in learn its recipe"
    )
    seconds: float = of("learn", 150.0, "learn: time of each training", above=0)
    seeds: list[int] = of("learn", [1, 2, 3], "learn: each recipe is trained with each", least=0, below=2**63)
    also: str = of("learn", "", "learn: arguments of train.py for every recipe, as in 'also=data=shakespeare'")
    device: str = of(
        "race train length learn decode roofline", "auto", "auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps"
    )
    out: str = of(MODES, "runs/bench", "the folder for tables and pictures", least=1)

    def __post_init__(self):
        check(self)
        for name, value, modes in given(self):
            if self.mode not in modes:
                raise ValueError(f"{name}={value}: mode={self.mode} does not read it; leave it out")
            if value == []:
                raise ValueError(f"{name}=[]: nothing to measure; give at least one")
        known = STEPS if self.mode == "length" else IMPLS
        for name in self.impls or []:
            if name not in known:
                raise ValueError(f"impls={self.impls}: {name} is not known; choose {', '.join(known)}")
        try:
            AttentionConfig(block_mask=self.block_mask)
        except ValueError as error:  # it names the key as train.py does
            raise ValueError(str(error).replace("attention.", "")) from error
        if len(self.heads) not in (1, len(self.head_sizes)):
            raise ValueError(
                f"heads={self.heads} for head_sizes={self.head_sizes}: give one for each head size, or one for all"
            )
        for H in self.heads:
            if self.kv_heads is not None and H % self.kv_heads:
                raise ValueError(f"kv_heads={self.kv_heads}: heads={H} is no multiple of it; use a divisor")
        for p in self.dropout_p:
            drop_threshold(p)
        for name in {"roofline": ("head_sizes", "heads", "causal"), "traffic": ("head_sizes",)}.get(self.mode, ()):
            if len(getattr(self, name) or []) > 1:
                raise ValueError(f"{name}={getattr(self, name)}: mode={self.mode} measures one; give one")
        least = 4 * self.head_sizes[0]
        for words in self.on_chip if self.mode == "traffic" else []:
            if words < least:
                raise ValueError(f"on_chip={words} holds no row of q, k, v and o: use {least} or more")

    def series(self) -> list[list[Case]]:
        """The cases of the race: a list for each head size, dropout and mask, shortest first."""
        heads = self.heads * len(self.head_sizes) if len(self.heads) == 1 else self.heads
        picture = None if self.block_mask is None else tuple(self.block_mask)
        masks = self.causal or ([True, False] if self.mode in RACE else [False])
        return [
            [
                Case(max(1, self.tokens // T), H, T, D, causal, p, self.kv_heads, self.window, self.documents, picture)
                for T in sorted(set(self.lengths))
            ]
            for (D, H), p, causal in product(zip(self.head_sizes, heads, strict=True), self.dropout_p, masks)
        ]


# breakit.py's modes, and what turns each of them on
LAB = {"lab": "the lab", "trace": "trace=true", "look": "look=true", "explorer": "explorer=true"}
LAB |= {"replay": "replay=PATH"}
INSTEAD = {  # why the mode does not read other keys
    "explorer": "it shows a trace that was kept with out=; give that as real=PATH",
    "replay": "the configuration comes with the fault",
}
NEEDS_RUN = {  # keys that mean nothing without run=, and why
    "lab": (("runs",), "the lab trains its own model; add run=NAME to take another"),
    "trace": (("runs", "layer", "head", "tokens", "prompt"), "the worked example has no such choice; add run=NAME"),
}


@dataclass
class BreakIt:
    """The keys of breakit.py. Raises ValueError for invalid values, and for keys that the mode does not read."""

    trace: bool = of("trace", False, "print one row of attention tile by tile, instead of the lab")
    look: bool = of("look", False, "make a page of a run's attention weights on a text, instead of the lab")
    explorer: bool = of("explorer", False, "make the page docs/explorer.html, instead of the lab")
    replay: str | None = of(
        "replay", None, "PATH in runs/NAME/faults: run the batch that gave NaN again, instead of the lab"
    )
    failure: str | None = of(
        "lab trace", None, "a name as in train.py's break_it=; null: all failures in the lab, none in a trace"
    )
    steps: int = of("lab", 200, "lab: updates of each short training of a failure", least=1)
    seed: int = of("lab", 1337, "lab: the seed of all its trainings", least=0, below=2**63)
    device: str = of("lab replay", "auto", "lab, replay: auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps")
    score_gain: float = of("trace", 1.0, "trace: multiplies the scores", above=0, most=1e30, usual="1 changes nothing")
    dtype: str = of("trace", "float64", "trace", among="float64 | float32, which overflows at a log-sum-exp of 88.7")
    causal: bool | None = of("trace", None, "trace: causal mask; null: false in the worked example, true in a run")
    block_m: int | None = of("trace", None, "trace: query rows of a tile; null: 2, in a run 8", least=1)
    block_n: int | None = of("trace", None, "trace: keys of a tile; null: 2, in a run 8", least=1)
    order: str = of("trace", "queries_outside", "trace: the outer loop", among=" | ".join(ORDERS))
    row: int | None = of("trace", None, 'trace: the query row; null: "on", in a run the last one', least=0)
    run: str | None = of(
        "lab trace look",
        None,
        "name or folder of a run, or latest; null: a new small model | the worked example | latest",
    )
    runs: str = of("lab trace look", "runs", "the folder of all runs")
    layer: int = of("trace", 0, "trace of a run: which layer, from 0", least=0)
    head: int = of("trace", 0, "trace of a run: which head, from 0", least=0)
    prompt: str | None = of(
        "trace look", None, "trace of a run, look: the text; null: the beginning of its validation text", least=1
    )
    tokens: int | None = of(
        "trace look", None, "how many tokens of the validation text; null: 32 in a trace, 256 in look", least=1
    )
    real: str = of("explorer", "docs/head.json", "explorer: the trace of a trained head")
    out: str | None = of(
        "lab trace look explorer",
        None,
        "lab: folder; null: runs/breakit | trace: .json | look: .html; null: its run | explorer: .html",
    )

    def __post_init__(self):
        mode, *others = self.modes()
        if others:
            said = " ".join(LAB[name].replace("PATH", str(self.replay)) for name in (mode, *others))
            raise ValueError(f"{said}: choose one of them, or none for the lab")
        if mode == "trace" and self.failure in FAILURES.keys() - {*STORY_FAILURES}:
            raise ValueError(f"failure={self.failure}: no trace of it; python breakit.py failure={self.failure} has it")
        known = FAILURES if mode == "lab" else STORY_FAILURES
        if self.failure not in (None, *known):
            raise ValueError(f"failure={self.failure} is not known; choose {', '.join(known)}")
        check(self)
        if self.prompt is not None and self.tokens is not None:
            raise ValueError(f"prompt= and tokens={self.tokens} are both given; leave one out")
        names, why = NEEDS_RUN.get(mode, ((), ""))
        for name, value, modes in given(self):
            if mode not in modes:
                instead = INSTEAD.get(mode, f"it is for {LAB[modes[0]]}")
                raise ValueError(f"{name}={value}: {LAB[mode]} does not read it; {instead}")
            if self.run is None and name in names:
                raise ValueError(f"{name}={value}: {why}")
        ending = {"trace": ".json", "look": ".html", "explorer": ".html"}.get(mode, "")
        if self.out is not None and not self.out.endswith(ending):
            raise ValueError(f"out={self.out}: name a file that ends in {ending}")
        if mode == "lab" and self.out is not None and (not self.out or Path(self.out).is_file()):
            raise ValueError(f"out={self.out}: the lab wants a folder for its pictures")

    def modes(self) -> list[str]:
        """The modes that are on: one of LAB."""
        on = {"trace": self.trace, "look": self.look, "explorer": self.explorer, "replay": self.replay is not None}
        return [mode for mode in on if on[mode]] or ["lab"]
