"""train.py's configuration: its own keys, and the groups whose dataclasses are beside the code that they configure.

The files in conf/ override the defaults. conf/keys.py says what a key is.
"""

from dataclasses import dataclass, field

from conf.keys import check, key
from data.made import SHORTEST
from data.prepare import DataConfig
from data.tokenizer import TokenizerConfig
from model.attention import AttentionConfig
from model.break_it import BreakIt
from model.gpt import GPTConfig
from parallel.processes import ParallelConfig
from training.optimizer import OptimizerConfig
from training.probe import ProbeConfig
from training.wandb_run import WandbConfig

FEWEST = 32  # tokens of the shortest context that training/context.py measures


@dataclass
class Config:
    """Every key of the command line, with its default. Raises ValueError for a value that is not allowed."""

    model: GPTConfig = field(default_factory=GPTConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    break_it: BreakIt = field(default_factory=BreakIt)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    name: str | None = key(None, "name of the run and its folder; null: date, size and attention", least=1)
    runs: str = key("runs", "folder of all runs", least=1)
    # A resumed run takes its configuration from the checkpoint. Keys on the command line override it.
    resume: str | None = key(
        None,
        "resume from: auto (run name=, or the newest that is not broken) | a run's name | a path",
        least=1,
    )
    eval_only: bool = key(
        False,
        "only measure what the context is worth to the best checkpoint of the run in resume=",
        alone="name runs resume experiment model.context_length attention data tokenizer batch_size eval_tokens "
        "device dtype",
    )
    # The model and the tokenizer are then those of the weights.
    init_from: str | None = key(
        None, "weights to begin a new run with: a Hugging Face name (gpt2), a folder, or a run", least=1
    )
    seed: int = key(1337, "seed of the initial weights, the data's order, dropout and samples", least=0, below=2**63)

    steps: int = key(700, "number of training steps (updates of the weights)", least=1)
    # The time begins at the run's first step. Compilation, evaluations, samples and checkpoints count, and a resumed
    # run has what is left. At the limit the run evaluates, saves and ends. The learning rate follows the clock, so no
    # two such runs have the same bits. steps=N without a limit repeats a run of N steps, with about the same rates;
    # metrics.jsonl has its rate of each step.
    max_minutes: float | None = key(
        None,
        "time limit in minutes, when the rate is lowest; to repeat N steps: steps=N",
        above=0,
        usual="null: no limit",
    )
    batch_size: int = key(16, "sequences per pass, shared by torchrun's processes; fewer need less memory", least=1)
    tokens_per_step: int | None = key(
        None, "tokens per update, by gradient accumulation over passes", least=1, usual="null: one pass"
    )
    # The sequences begin with length_warmup_from tokens and grow to model.context_length, each length for as many
    # steps. A step has more of them, so that it has as many tokens.
    length_warmup_steps: int = key(0, "steps of the sequence-length warm-up", least=0, usual="0: off")
    length_warmup_from: int = key(128, "tokens of the first sequences in a length warm-up", needs="length_warmup_steps")
    length_warmup_by: int = key(
        2, "how many times as long the next sequences are, up to model.context_length", needs="length_warmup_steps"
    )
    pack: bool = key(False, "pack documents into windows (best fit), so that only those longer than a window are cut")
    z_loss: float = key(
        0.0,
        "weight of the z-loss, mean(logsumexp(logits)^2), added to the loss",
        least=0,
        usual="1e-4 is usual, 0: off",
    )
    # The average is over about the last 1 / (1 - ema_decay) steps; early in training, over the last ninth of them.
    ema_decay: float = key(
        0.0,
        "decay of the moving average of weights (EMA), evaluated and saved",
        least=0,
        below=1,
        usual="0.999 is usual, 0: off",
    )
    eval_every: int = key(100, "steps between evaluations", least=1)
    eval_tokens: int = key(65536, "about how many validation tokens an evaluation takes, always the same ones", least=1)
    # With init_from= the first is before any step.
    context_every: int = key(0, "steps between measurements of what the context is worth", least=0, usual="0: none")
    sample_every: int = key(200, "steps between samples", least=0, usual="0: no samples")
    sample_tokens: int = key(
        200, "maximum tokens of a sample; it ends earlier if the model ends the document", needs="sample_every", least=0
    )
    checkpoint_every: int = key(100, "steps between checkpoints; the best is one of those that were evaluated", least=1)
    keep_last: int = key(2, "number of newest checkpoints to keep; the best one is kept too", least=1)
    log_every: int = key(1, "steps between log lines", least=1)

    device: str = key("auto", "auto (a GPU if there is one) | cpu | cuda | cuda:1 | mps")
    dtype: str = key(
        "auto", among="auto (bf16 if the GPU supports it, else float32) | float32 | bf16 | fp16 (with loss scaling)"
    )
    # graph records the whole step once and replays it, so that a small model does not wait for Python. auto: on a CUDA
    # GPU graph where that is possible, else true; false with attention=tiled and on any other device.
    compile: str = key(
        "auto", among="auto | false (plain PyTorch) | true (torch.compile) | graph (compiled, as one CUDA graph)"
    )
    stop_on_nan: bool = key(True, "stop before an update with NaN or infinity; false: train on and see what happens")

    def __post_init__(self):
        self.compile = self.compile.lower()  # this key is a string, and people type True
        check(self)
        # Windows and wandb refuse these characters, and Unix refuses /. Windows drops a dot or a space at the end. A
        # run may be moved or sent there later.
        refused = self.name and (set(self.name) & set('/\\:*?"<>|') or not self.name.isprintable())
        if refused or self.name in ("latest", "auto") or (self.name and self.name != self.name.strip(" .")):
            raise ValueError(
                f"name={self.name!r} cannot name a run; use letters, digits and - (runs= chooses the folder)"
            )
        if self.eval_only and self.resume is None:
            raise ValueError("eval_only=true has no run to measure; name one with resume=NAME, or resume=auto")
        if (self.eval_only or self.context_every) and self.model.context_length < FEWEST:
            raise ValueError(
                f"model.context_length={self.model.context_length} is too short for context_every= and eval_only=, "
                f"which measure contexts of {FEWEST} tokens and more; leave them out"
            )
        self.check_length_warmup()
        if self.pack and self.data.source in SHORTEST and not self.eval_only:
            raise ValueError(
                f"pack=true with data={self.data.source}: its documents fill windows already; leave it out"
            )

    def check_length_warmup(self) -> None:
        """Raises ValueError for a length warm-up that cannot be."""
        steps, short, by, T = (
            self.length_warmup_steps, self.length_warmup_from, self.length_warmup_by, self.model.context_length
        )  # fmt: skip
        if not steps or self.eval_only:  # which trains nothing, and may have another context
            return
        if by < 2:
            raise ValueError(f"length_warmup_by={by} must be at least 2; 2 doubles the sequences")
        if not 0 < short < T or self.lengths[-1] != T:
            grows = "double" if by == 2 else f"grow {by}-fold"
            divided = ", ".join(str(by**i) for i in (1, 2, 3))
            way_out = (
                f"model.context_length divided by {divided}, ..."
                if T % by == 0
                else "a length_warmup_by that divides it"
            )
            raise ValueError(f"length_warmup_from={short} does not {grows} to model.context_length={T}; use {way_out}")
        if steps < len(self.lengths) - 1:
            raise ValueError(
                f"length_warmup_steps={steps} must be at least {len(self.lengths) - 1}, the number of lengths that are "
                f"shorter than model.context_length={T}; 0 leaves the warm-up out"
            )
        if self.data.source == "recall":
            raise ValueError(
                f"length_warmup_steps={steps} with data=recall: its strings are repeated after half a window, and no "
                "shorter sequence has both; leave the warm-up out"
            )

    @property
    def lengths(self) -> list[int]:
        """The tokens of a sequence, from the first of a length warm-up on; the last is model.context_length."""
        found = [self.length_warmup_from if self.length_warmup_steps else self.model.context_length]
        while found[-1] < self.model.context_length:
            found.append(found[-1] * self.length_warmup_by)
        return found

    def length_at(self, step: int) -> int:
        """The tokens of a sequence in update number `step`, which counts from 1."""
        if step > self.length_warmup_steps:
            return self.model.context_length
        return self.lengths[(step - 1) * (len(self.lengths) - 1) // self.length_warmup_steps]
