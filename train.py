"""Train a GPT: the whole run, read top to bottom.

    python train.py                                                    a small GPT on Python's standard library
    python train.py data=text data.path=FILE_OR_FOLDER tokenizer=bpe   your own text
    python train.py model=gpt2 tokenizer=gpt2 data=text data.path=...  GPT-2's size, for one GPU
    python train.py attention=naive                                    the same run through another attention
    python train.py break_it=no_max break_it.score_gain=100            take a line out and see what it was for
    python train.py resume=auto                                        go on where the last run stopped
    python train.py --cfg job                                          every key and its value

Everything a run makes lies in runs/NAME: config.yaml, metrics.jsonl, loss.png, samples.txt, checkpoints, wandb.
"""

import math
import shlex
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from data.loader import Loader, open_data, validation_batches
from data.prepare import DataConfig
from data.tokenizer import END_OF_TEXT, TextStream, TokenizerConfig, to_json
from model.attention import AttentionConfig, BreakIt, beyond_sdpa, resolve
from model.generate import NotFinite, Sampler, generate
from model.gpt import GPT, GPTConfig
from training import checkpoint, config
from training.machine import about, keep_memory, memory_gib, peak_flops, pick_device
from training.metrics import Metrics, WandbConfig, stamp
from training.optimizer import OptimizerConfig, base_rate, build_optimizer, learning_rate

# ---------------------------------------------------------------------------------------------------------------------
# Configuration. The groups' dataclasses stand beside the code that they configure; conf/ only overrides.


@dataclass
class Config:
    model: GPTConfig = field(default_factory=GPTConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    break_it: BreakIt = field(default_factory=BreakIt)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    name: str | None = None  # of the run; None: date, size and attention
    runs: str = "runs"  # the folder that runs lie in
    resume: str | None = None  # auto: the last checkpoint of run `name`, or of the newest run; or a path
    seed: int = 1337

    steps: int = 700  # updates of the weights
    batch_size: int = 16  # sequences that go through the model at once: lower it when memory runs out
    tokens_per_step: int | None = None  # of one update, in as many passes as it takes; None: one pass
    eval_every: int = 100  # steps
    eval_tokens: int = 65536  # about as many validation tokens, always the same ones
    sample_every: int = 200  # steps; 0: never
    sample_tokens: int = 200
    checkpoint_every: int = 100  # steps; the best is chosen among those that were evaluated too
    keep_last: int = 2  # checkpoints; the best is kept besides
    log_every: int = 1  # steps

    device: str = "auto"  # auto | cpu | cuda | cuda:1 | mps
    dtype: str = "auto"  # bf16 (autocast) | float32; auto: bf16 on a GPU that has it
    compile: str = "auto"  # true | false; auto: on a GPU, but not for tiled, whose loop would be unrolled
    stop_on_nan: bool = True  # false lets a broken run go on, to see where it ends

    def __post_init__(self):
        for name in ("steps", "batch_size", "eval_every", "eval_tokens", "checkpoint_every", "keep_last", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("name", "runs", "resume"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}= is empty; give it a value or leave it out")
        if self.name and (
            self.name in (".", "..", "latest", "auto") or "/" in self.name or not self.name.isprintable()
        ):
            raise ValueError(
                f"name={self.name!r} cannot name a run; use letters, digits and - (runs= chooses the folder)"
            )
        if self.tokens_per_step is not None and self.tokens_per_step < 1:
            raise ValueError(f"tokens_per_step={self.tokens_per_step} must be at least 1; null takes one pass")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is outside [0, 2**63)")
        for name in ("sample_every", "sample_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        self.compile = self.compile.lower()  # True, as Python and YAML spell it, is a text here
        for name, known in {"dtype": ("auto", "bf16", "float32"), "compile": ("auto", "true", "false")}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)} is not known; choose {', '.join(known)}")


def main(cfg: Config) -> int:
    # -----------------------------------------------------------------------------------------------------------------
    # Where it runs, and in what precision.
    keep_memory()
    device = pick_device(cfg.device)
    dtype = cfg.dtype
    if dtype == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bf16" if has_bf16 else "float32"
    autocast = torch.autocast(device.type, torch.bfloat16) if dtype == "bf16" else nullcontext()
    torch.set_float32_matmul_precision("high" if dtype == "bf16" else "highest")
    attention = resolve(cfg.attention, device.type, cfg.break_it)
    compiled = cfg.compile == "true" or (cfg.compile == "auto" and device.type == "cuda" and attention.impl != "tiled")

    T = cfg.model.context_length
    per_pass = cfg.batch_size * T  # tokens that go through the model at once
    tokens_per_step = per_pass if cfg.tokens_per_step is None else cfg.tokens_per_step
    accumulation, rest = divmod(tokens_per_step, per_pass)
    if rest or not accumulation:
        raise ValueError(
            f"tokens_per_step={tokens_per_step} is no multiple of batch_size * model.context_length = {per_pass}; "
            f"use tokens_per_step={max(1, round(tokens_per_step / per_pass)) * per_pass} or another batch_size"
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Name and resume. A broken run carries its fault in its name.
    broken = cfg.break_it.label
    name, runs = cfg.name, Path(cfg.runs)
    if broken and name and broken not in name:
        name = f"{name}-BROKEN-{broken}"
    resumed = None
    if cfg.resume:
        path = checkpoint.find_resume(cfg.resume, runs, name)
        resumed = checkpoint.load(path)
        if path.resolve().parent.name == checkpoint.FOLDER:  # of a run, and not a copy that lies somewhere else
            name = name or path.resolve().parents[1].name
        refuse_another_model(resumed, cfg, broken)
        changes = changed(resumed.state["config"], asdict(cfg))

    # -----------------------------------------------------------------------------------------------------------------
    # Data. Prepared at first use, cached by content.
    dataset = open_data(cfg.data, cfg.tokenizer)
    encoding = dataset.encoding
    if cfg.model.vocab_size not in (None, encoding.n_vocab):
        raise ValueError(f"model.vocab_size={cfg.model.vocab_size}, the tokenizer has {encoding.n_vocab}; leave it out")
    cfg.model.vocab_size = encoding.n_vocab
    loader = Loader(dataset.train, dataset.train_documents, batch_size=cfg.batch_size, context_length=T, seed=cfg.seed)
    validation = (dataset.val, dataset.val_documents, cfg.batch_size, T, cfg.eval_tokens)
    validation_batches(*validation)  # refuses a text that is too short now, not at the first evaluation
    bytes_of = torch.from_numpy(dataset.token_bytes).to(device)  # (n_vocab,): makes bits per byte exact for any batch

    # -----------------------------------------------------------------------------------------------------------------
    # Model and optimizer.
    if cfg.optimizer.lr is None:
        cfg.optimizer.lr = base_rate(cfg.model.n_embd)
    torch.manual_seed(cfg.seed)
    model = GPT(cfg.model, attention, cfg.break_it).to(device)
    optimizer = build_optimizer(model, cfg.optimizer)
    step, val_loss = 0, math.inf
    if resumed:
        step, tensors = resumed.step, resumed.optimizer()
        model.load_state_dict(resumed.model)
        checkpoint.load_optimizer_tensors(optimizer, model.named_parameters(), tensors)
        checkpoint.set_rng_state(tensors)
        loader.load_state_dict(resumed.state["loader"])
        if step >= cfg.steps:
            raise ValueError(f"{resumed.path} is at step {step} of steps={cfg.steps}; give a larger steps= to go on")
    loss_of = torch.compile(model) if compiled else model

    if name is None:
        size = f"{model.parameter_count() / 1e6:.3g}M"
        first = time.strftime("%Y%m%d-%H%M%S") + f"-{size}-{attention.impl}" + (f"-BROKEN-{broken}" if broken else "")
        names = [first, *(f"{first}-{number}" for number in range(2, 100))]  # a sweep's jobs may take under a second
        name = next(name for name in names if not (runs / name).exists())
    folder = runs / name
    same_run = resumed is not None and resumed.path.resolve().is_relative_to(folder.resolve())
    held = checkpoint.lock(folder)
    if folder.exists() and not same_run:
        raise ValueError(f"the run {folder} exists already: go on with it by resume=auto, or use another name=")

    # -----------------------------------------------------------------------------------------------------------------
    # A run explains itself: who, where, what, in its first lines and in its checkpoints.
    facts = {**about(device), "dtype": dtype, "attention": attention.impl}
    as_given = asdict(cfg)
    metrics = Metrics(
        folder,
        cfg.steps,
        config={**as_given, "about": facts},
        wandb_config=cfg.wandb,
        broken=broken,
        resume_step=step if same_run else None,
    )
    (folder / "config.yaml").write_text(config.to_yaml(cfg), encoding="utf-8")
    say = metrics.say
    say(f"run: {folder}" + (f", resumed from {resumed.path}" if resumed else ""))
    if resumed and changes:
        say(f"changed since the checkpoint: {', '.join(changes)}")
    say(" | ".join(f"{key} {value}" for key, value in facts.items()))
    tile = f", tiles of {attention.block_m} x {attention.block_n}" if attention.impl == "tiled" else ""
    special = f", {beyond_sdpa(attention)}" if beyond_sdpa(attention) else ""
    say(f"attention: {attention.impl}{tile}{special} (asked for: {cfg.attention.impl}) | compiled: {compiled}")
    say(f"model: {model.parameter_count():,} parameters, {cfg.model.n_layer} layers, context {T}, V {encoding.n_vocab}")
    say(
        f"data: {dataset.folder}, {len(dataset.train):,} training tokens, {len(dataset.val):,} for validation | "
        f"{tokens_per_step:,} tokens a step in {accumulation} passes, {cfg.steps * tokens_per_step:,} in all"
    )
    if broken:
        say(f"{stamp(broken)}attention is broken on purpose ({broken}): this run's numbers and text are worth nothing")

    # -----------------------------------------------------------------------------------------------------------------
    # What the loop calls.
    @torch.no_grad()
    def evaluate() -> dict:
        """Mean loss over the validation windows, in nats a token and in bits a byte."""
        model.eval()
        nats = tokens = text_bytes = 0.0
        for batch in validation_batches(*validation):
            x, y, documents = (part.to(device) for part in batch)
            with autocast:
                nats += float(model(x, y, documents)) * y.numel()
            tokens += y.numel()
            text_bytes += int(bytes_of[y].sum())
        model.train()
        return {"val_loss": nats / tokens, "val_bits_per_byte": nats / (math.log(2) * max(1, text_bytes))}

    def write_sample() -> str:
        """What the model writes after an end-of-text token, that is, as the beginning of a document."""
        model.eval()
        generator = torch.Generator(device).manual_seed(cfg.seed)  # its own: sampling must not disturb training's
        idx = torch.tensor([[encoding.encode_single_token(END_OF_TEXT)]], device=device)
        stream = TextStream(encoding)
        with autocast:
            tokens = generate(model, idx, cfg.sample_tokens, Sampler(), generator)
            text = "".join(stream.feed(int(token)) for token in tokens) + stream.flush()
        model.train()
        return text

    def save() -> Path:
        return checkpoint.save(
            folder / checkpoint.FOLDER,
            step,
            model=model.state_dict(),
            optimizer=checkpoint.optimizer_tensors(optimizer, model.named_parameters()) | checkpoint.rng_state(),
            state={
                "config": as_given,
                "about": facts,
                "broken": broken,
                "loader": loader.state_dict(),
                "val_loss": val_loss if math.isfinite(val_loss) else None,
            },
            tokenizer=to_json(encoding),
            keep_last=cfg.keep_last,
        )

    # Ctrl-C and SIGTERM let the step end, save and leave; a second one leaves at once.
    stop = []

    def on_signal(number, frame):
        if stop:
            raise KeyboardInterrupt
        stop.append(number)
        print(f"\n{signal.Signals(number).name}: saving after this step; once more leaves at once", file=sys.stderr)

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

    # -----------------------------------------------------------------------------------------------------------------
    # The loop.
    code = 1
    saved = resumed.path if resumed else None
    flops = model.flops_per_token(T) * tokens_per_step
    peak = peak_flops(device) if dtype == "bf16" else None
    pace = None  # seconds a step, smoothed, for the time left
    model.train()
    try:
        while step < cfg.steps:
            started = time.perf_counter()
            lr = learning_rate(step + 1, cfg.steps, cfg.optimizer)
            for group in optimizer.param_groups:
                group["lr"] = lr
            total, text_bytes = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
            for _ in range(accumulation):
                batch = loader.next()
                if device.type == "cuda":  # pinned memory lets the copy run beside the computation
                    batch = [part.pin_memory() for part in batch]
                x, y, documents = (part.to(device, non_blocking=True) for part in batch)
                with autocast:
                    loss = loss_of(x, y, documents) / accumulation
                loss.backward()
                total += loss.detach()
                text_bytes += bytes_of[y].sum()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optimizer.grad_clip or math.inf)

            # Reading the loss waits for the device, once a step. That is its price for stopping before a bad update and
            # not after: from NaN weights there is no way back.
            loss, norm = float(total), float(norm)
            spoilt = cfg.stop_on_nan and not (math.isfinite(loss) and math.isfinite(norm))
            if not spoilt:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1

            seconds = time.perf_counter() - started
            pace = seconds if pace is None else 0.9 * pace + 0.1 * seconds
            if step % cfg.log_every == 0 or step == cfg.steps or spoilt:
                metrics.log({
                    "step": step,
                    "loss": loss,
                    "bits_per_byte": loss * tokens_per_step / (math.log(2) * max(1, int(text_bytes))),
                    "lr": lr,
                    "grad_norm": norm,
                    "ms": seconds * 1e3,
                    "tokens_per_second": tokens_per_step / seconds,
                    "mfu": flops / seconds / peak if peak else None,
                    "memory_gib": memory_gib(device),
                    "eta_s": pace * (cfg.steps - step),
                })  # fmt: skip
            if spoilt:
                say(stamp(broken) + what_to_try(step, loss, norm, cfg, dtype, saved))
                return 1

            last = step == cfg.steps
            val_loss = math.inf  # of this step's weights: unknown unless it is measured now
            if step % cfg.eval_every == 0 or last:
                found = evaluate()
                val_loss = found["val_loss"]
                metrics.log({"step": step, **found})
            if cfg.sample_every and cfg.sample_tokens and (step % cfg.sample_every == 0 or last):
                try:
                    metrics.sample(step, write_sample())
                except NotFinite:  # of the weights that this step made; the next step's loss will say so too
                    say(f"{stamp(broken)}no sample at step {step}: the logits are NaN")
                    model.train()
            if step % cfg.checkpoint_every == 0 or last or stop:
                saved = save()
            if val_loss < math.inf:
                metrics.picture()
            if stop and not last:
                say(f"stopped at step {step}, saved {saved}; to go on: {again(name, cfg.steps)}")
                code = 128 + stop[0]
                return code
        code = 0
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"out of GPU memory with batch_size={cfg.batch_size} sequences of {T} tokens; "
            f"use batch_size={max(1, cfg.batch_size // 2)} tokens_per_step={tokens_per_step}, which learns the same"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        try:
            if step:
                metrics.picture()
        finally:
            metrics.close(code)
            held.close()

    # -----------------------------------------------------------------------------------------------------------------
    # What there is now, and what to do next.
    best_loss, best_step = metrics.best or (math.nan, step)
    print(f"{stamp(broken)}done: best validation loss {best_loss:.4f} at step {best_step}")
    print(f"  picture      {folder / 'loss.png'}\n  metrics      {folder / 'metrics.jsonl'}")
    print(f"  samples      {folder / 'samples.txt'}\n  checkpoints  {folder / checkpoint.FOLDER}")
    where = [] if cfg.runs == "runs" else [f"runs={cfg.runs}"]
    print("next:\n  " + shlex.join(["python", "sample.py", f"run={name}", *where, "prompt=def "]))
    print(f"  {again(name, 2 * cfg.steps)}  # the rate rises again")
    return 0


# ---------------------------------------------------------------------------------------------------------------------


def refuse_another_model(resumed: checkpoint.Checkpoint, cfg: Config, broken: str) -> None:
    """ValueError when the checkpoint's model, tokenizer or faults are not this run's."""
    theirs, ours = resumed.state["config"], asdict(cfg)
    for group in ("model", "tokenizer"):
        for key, value in ours[group].items():
            other = theirs[group].get(key, value)
            if value != other and key not in ("vocab_size", "dropout_p"):
                raise ValueError(
                    f"{resumed.path} is of another model: {group}.{key} is {other} there and {value} here; "
                    f"use {group}.{key}={other}, or start a new run without resume="
                )
    for key in ("window", "windows", "softmax_scale", "softcap", "alibi", "documents", "block_mask", "block_mask_size"):
        value = ours["attention"][key]
        other = theirs["attention"].get(key, value)
        if value != other:
            raise ValueError(
                f"{resumed.path} was trained with attention.{key}={other}, this run has {value}; "
                "resume with the same, or start a new run without resume="
            )
    if resumed.state["broken"] != broken:
        raise ValueError(
            f"{resumed.path} was trained with break_it: {resumed.state['broken'] or 'none'}, this run has "
            f"{broken or 'none'}; resume with the same, or start a new run without resume="
        )


def changed(theirs: dict, ours: dict, prefix: str = "") -> list[str]:
    """What of the configuration differs from the checkpoint's, as "key old -> new": a resumed run is the same run only
    where nothing that matters does."""
    found = []
    for key, value in ours.items():
        old = theirs.get(key, value)
        if isinstance(value, dict):
            found += changed(old, value, f"{prefix}{key}.")
            continue
        path = prefix + key
        filled_in_later = value is None and path in ("model.vocab_size", "optimizer.lr")  # and to the same, as then
        if value != old and not filled_in_later and path not in ("name", "runs", "resume"):
            found.append(f"{path} {old} -> {value}")
    return found


def what_to_try(step: int, loss: float, norm: float, cfg: Config, dtype: str, saved: Path | None) -> str:
    """The message of a run that met NaN or infinity."""
    tries = [f"a lower optimizer.lr (it is {cfg.optimizer.lr:g})", "a longer optimizer.warmup_steps"]
    if cfg.attention.impl != "naive":
        tries.append("attention=naive, to see whether attention does it")
    if dtype != "float32":
        tries.append("dtype=float32")
    if cfg.break_it.label:
        tries = ["break_it=none: attention is broken on purpose", "stop_on_nan=false, to watch it go on"]
    kept = f"the last good checkpoint is {saved}" if saved else "no checkpoint had been saved yet"
    return (
        f"step {step}: loss {loss}, gradient norm {norm}: stopped before the optimizer step; {kept}.\n"
        f"try: {'; '.join(tries)}"
    )


def again(name: str, steps: int) -> str:
    """The command line that takes this run on to `steps`."""
    mine = [a for a in sys.argv[1:] if a.split("=")[0] not in ("name", "resume", "steps", "-m", "--multirun")]
    return shlex.join(["python", "train.py", *mine, f"steps={steps}", f"name={name}", "resume=auto"])


if __name__ == "__main__":
    config.run(main, Config, "config")
