"""The trainer's arithmetic, step by step, against formulas written out here.

A run of train.py is seen from outside, in metrics.jsonl and in its checkpoints. `plain` computes the same run in a few
lines of torch, without accumulation, fused optimizer, chunked loss or gradient scaler.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train
from data.dataset import open_data
from data.loader import Loader
from model.abilities import resolve
from model.attention import AttentionConfig
from model.break_it import UNBROKEN
from model.gpt import GPT, MLP, Block, Context, GPTConfig, norm
from model.layers import LAYERS
from model.rope import rope_table, rotate
from tests.reference import assert_float64_right, assert_within_budget
from tests.runs import last, losses, records
from training import checkpoint, config
from training.optimizer import base_rate


class Run(NamedTuple):
    losses: Tensor  # (steps,), nats a token
    norms: Tensor  # (steps,), of the gradient before it is clipped
    val_losses: list[float]
    weights: dict[str, Tensor]  # at the end: what is validated and kept
    cfg: train.Config


@pytest.fixture
def float64():
    """Everything that train.py makes is float64, the first weights too, so that a run leaves no rounding to hide in."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def run(small_run, tmp_path):
    """run(arguments): a run of train.py, as its files tell it."""

    def run(*arguments: str) -> Run:
        made = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        small_run(f"name={made.name} attention=naive {' '.join(arguments)}")
        kept = checkpoint.load(last(made))
        return Run(
            losses=torch.tensor(losses(made)),
            norms=torch.tensor([row["grad_norm"] for row in records(made)]),
            val_losses=[row["val_loss"] for row in records(made, "val_loss")],
            weights=kept.model,
            cfg=config.from_dict(train.Config, kept.state["config"]),
        )

    return run


def initial(cfg: train.Config) -> GPT:
    torch.manual_seed(cfg.seed)
    return GPT(cfg.model, resolve(cfg.attention, "cpu"))


def plain(cfg: train.Config, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The run of cfg by the formulas: losses, norms and the weights that are kept."""
    rate, T = cfg.optimizer, cfg.model.context_length
    dataset = open_data(cfg.data, cfg.tokenizer)
    sequences = (cfg.tokens_per_step or cfg.batch_size * T) // T  # all passes of a step at once
    split = dataset.train, dataset.train_documents
    batches = Loader(*split, batch_size=sequences, context_length=T, seed=cfg.seed)
    model = initial(cfg).to(dtype)
    weights = dict(model.named_parameters())
    average = {name: p.detach().clone() for name, p in weights.items()}
    m, v = ({name: torch.zeros_like(p) for name, p in weights.items()} for _ in range(2))
    losses, norms = [], []
    for t in range(1, cfg.steps + 1):
        x, y, _ = batches.next()
        symbols = model.head.weight[: model.config.vocab_size]  # without the rows that vocab_multiple adds
        logits = model.hidden(x).flatten(0, 1) @ symbols.T
        loss = F.cross_entropy(logits, y.flatten())
        penalty = cfg.z_loss * logits.logsumexp(-1).square().mean()
        gradients = torch.autograd.grad(loss + penalty, list(weights.values()))
        length = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        scale = min(1.0, rate.grad_clip / (float(length) + 1e-6)) if rate.grad_clip else 1.0
        if t <= rate.warmup_steps:
            lr = rate.lr * t / rate.warmup_steps
        else:
            done = (t - rate.warmup_steps) / (cfg.steps - rate.warmup_steps)
            lr = rate.lr * (rate.min_lr_ratio + (1 - rate.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)
        keep = min(cfg.ema_decay, t / (9 + t))
        with torch.no_grad():
            for (name, p), g in zip(weights.items(), gradients, strict=True):
                g = scale * g
                m[name] = rate.beta1 * m[name] + (1 - rate.beta1) * g
                v[name] = rate.beta2 * v[name] + (1 - rate.beta2) * g * g
                decay = rate.weight_decay if p.dim() == 2 else 0.0
                direction = (m[name] / (1 - rate.beta1**t)) / ((v[name] / (1 - rate.beta2**t)).sqrt() + 1e-8)
                p.copy_(p - lr * decay * p - lr * direction)
                average[name] = keep * average[name] + (1 - keep) * p
        losses.append(loss.detach())
        norms.append(length)
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), **average}


# Four steps, two of them of the warm-up. Without biases: a key's bias has no gradient but rounding, which AdamW makes
# as large as any other.
FOUR = ["steps=4", "optimizer.lr=1e-2", "optimizer.warmup_steps=2", "eval_every=4", "model.bias=false"]
PROPERTIES = {
    "the gradient is clipped": ["optimizer.grad_clip=0.1"],
    "a clip of 0 clips nothing": ["optimizer.grad_clip=0"],
    "betas": ["optimizer.beta1=0.6", "optimizer.beta2=0.8"],
    "matrices decay and norms do not": ["optimizer.weight_decay=5"],
    "epsilon is 1e-8": ["optimizer.grad_clip=1e-6"],  # entries of about 1e-8
    "the loss is divided by the passes": ["batch_size=1", "optimizer.grad_clip=0"],
    "the rate falls to its floor": ["optimizer.min_lr_ratio=0.5"],
    "the penalty is in the gradient only": ["z_loss=0.1", "optimizer.grad_clip=0"],
    "the average is kept": ["ema_decay=0.2"],
    "dropout": ["attention.dropout_p=0.5"],
}


# A weight is the end of sums over 4 steps of 128 tokens, of C terms each.
TERMS = 4 * 128 * 32


@pytest.mark.parametrize("arguments", PROPERTIES.values(), ids=PROPERTIES)
def test_a_run_is_its_formulas(float64, run, arguments):
    """Losses, norms and every weight after four steps."""
    ran = run(*FOUR, *arguments)
    reference = plain(ran.cfg)
    found = {"losses": ran.losses, "norms": ran.norms, **ran.weights}
    assert_float64_right({name: found[name] for name in reference}, reference, TERMS)


# --- evaluation -----------------------------------------------------------------------------------------------------

DROPOUT = ["model.dropout_p=0.5", "attention.dropout_p=0.5"]


def test_the_validation_loss_is_the_mean_over_its_windows_without_dropout(float64, run):
    """Ten windows, evenly spread, go through the model by four, four and two: a mean of three means is another. The
    weights are the moving average, which is what a checkpoint keeps."""
    ran = run(*DROPOUT, "steps=2", "eval_every=2", "eval_tokens=320", "ema_decay=0.2")
    dataset = open_data(ran.cfg.data, ran.cfg.tokenizer)
    tokens = torch.from_numpy(dataset.val.astype("int64"))
    windows = (len(tokens) - 1) // 32
    x, y = (torch.stack([tokens[i : i + 32] for i in range(first, 32 * windows + first, 32)]) for first in (0, 1))
    spread = [i * windows // 10 for i in range(10)]
    model = initial(ran.cfg).eval()
    model.load_state_dict(ran.weights)
    with torch.no_grad():
        logits = model.logits(model.hidden(x[spread]))
        right = {"val_loss": F.cross_entropy(logits.flatten(0, 1), y[spread].flatten())}
    assert_float64_right({"val_loss": torch.tensor(ran.val_losses[-1])}, right, terms=320)


def test_what_is_done_between_steps_leaves_training_as_it_was(run):
    """Bit for bit: the same random numbers are drawn, and dropout is on again afterwards."""
    quiet = run(*DROPOUT, "steps=4", "eval_every=4")
    each = [f"{key}=1" for key in ("eval_every", "sample_every", "sample_tokens", "context_every", "probe.every")]
    watched = run(*DROPOUT, "steps=4", *each)
    assert torch.equal(watched.losses, quiet.losses)


# --- the learning rate ----------------------------------------------------------------------------------------------


def test_the_usual_rate_is_gpt3s_for_gpt2s_width_and_falls_with_the_width():
    assert base_rate(768) == 6e-4
    assert base_rate(128) == 6 * base_rate(768)


# --- the first weights ----------------------------------------------------------------------------------------------

MODERN = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 2, "tie_head": False}
FAMILIES = {"gpt2": {}, "modern": MODERN}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_weights_are_normal_of_002_and_less_where_a_matrix_adds_to_the_stream(family):
    """n numbers have a standard error of sigma / sqrt(2 n) in their deviation and of sigma / sqrt(n) in their mean.
    Each matrix may be five of these off. Without the 1 / sqrt(2 L), a half here, it would be off by 100 %."""
    torch.manual_seed(0)
    size = {"n_layer": 2, "n_head": 4, "n_embd": 64, "context_length": 64, "vocab_size": 300}
    model = GPT(GPTConfig(**size, **FAMILIES[family]), AttentionConfig("naive"))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.full_like(p, float("norm.weight" in name)))
            continue
        sigma = 0.02 / math.sqrt(2 * 2) if name.endswith((".out.weight", ".down.weight")) else 0.02
        n = p.numel()
        assert abs(float(p.detach().std()) / sigma - 1) < 5 / math.sqrt(2 * n), name
        assert abs(float(p.detach().mean())) < 5 * sigma / math.sqrt(n), name


# --- the model's parts ----------------------------------------------------------------------------------------------

# The rest of them is transformers' in tests/test_exchange.py: layer norm, RMS norm, GELU and SwiGLU.


def test_relu2_is_the_square_of_what_is_positive(float64):
    torch.manual_seed(0)
    config = GPTConfig(n_embd=24, mlp="relu2", n_head=2)
    mlp, before, stream = MLP(config), norm(config), torch.randn(5, 24)
    up = before(stream).detach() @ mlp.up.weight.T + mlp.up.bias
    right = torch.where(up > 0, up * up, 0.0) @ mlp.down.weight.T + mlp.down.bias
    _, hidden = LAYERS.read(before, stream, None, mlp.up, mlp.gate, config.mlp)
    assert_float64_right({"mlp": mlp.down(hidden)}, {"mlp": right.detach()}, terms=mlp.up.out_features)


def test_q_and_k_are_normed_head_by_head_before_they_are_turned(float64):
    torch.manual_seed(0)
    config = GPTConfig(n_embd=24, n_head=3, n_kv_head=1, position="rope", qk_norm=True, norm_eps=0.01)
    block = Block(config, AttentionConfig("naive"), UNBROKEN)
    of_norm = {"q": block.attention.q_norm.weight, "k": block.attention.k_norm.weight}
    for weight in of_norm.values():
        weight.data.normal_()
    x, rope = 0.1 * torch.randn(2, 5, 24), rope_table(5, 8, 100.0, "cpu")
    _, q, k, v, side_by_side = block.before(x, None, Context(rope, None, None, None))
    flat = block.attention.qkv(block.attention_norm(x))
    right = dict(zip("qkv", (y.unflatten(-1, (-1, 8)) for y in flat.split([24, 8, 8], dim=-1)), strict=True))
    for name, weight in of_norm.items():
        y = right[name]
        y = y / (y.square().mean(-1, keepdim=True) + 0.01).sqrt() * weight
        right[name] = rotate(y.transpose(1, 2), *rope).transpose(1, 2)
    assert side_by_side is None
    assert_float64_right({"q": q, "k": k, "v": v}, right, terms=24)


def test_a_position_turns_by_a_power_of_the_base():
    """Position 63 in complex numbers; the budget is that of the same powers and products in NumPy's float32."""
    angles = {
        dtype: np.outer(np.arange(64, dtype=dtype), dtype(500.0) ** (-np.arange(0, 16, 2, dtype=dtype) / dtype(16)))
        for dtype in (np.float32, np.float64)
    }
    cos, sin = rope_table(64, 16, 500.0, "cpu")
    naive, right = ({"cos": torch.tensor(np.cos(a)), "sin": torch.tensor(np.sin(a))} for a in angles.values())
    assert_within_budget({"cos": cos, "sin": sin}, naive, right)
    x = torch.randn(1, 1, 64, 16)
    a, b = x.double().chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.exp(1j * torch.tensor(angles[np.float64]))
    by_float32 = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(naive["cos"], naive["sin"])
    found, naive, right = rotate(x, cos, sin), *(torch.cat((z.real, z.imag), -1) for z in (by_float32, turned))
    assert_within_budget({"x": found}, {"x": naive}, {"x": right})


# --- on record ------------------------------------------------------------------------------------------------------

RUNS = {"gpt2": [], "modern": [f"model.{key}={value}" for key, value in (MODERN | {"n_kv_head": 1}).items()]}
RECORDED = {
    "gpt2": [5.55830717, 5.42828862, 5.14867851, 4.93967743, 4.79217887,
             4.62050053, 4.51222312, 4.43780438, 4.38924505, 4.36241699],
    "modern": [5.56378535, 5.50575846, 5.37789538, 5.16375416, 4.97988508,
               4.83045587, 4.73078554, 4.66191120, 4.61999330, 4.58962390],
}  # fmt: skip


@pytest.mark.parametrize("family", RUNS)
def test_the_first_ten_losses_are_those_on_record(run, family):
    """`plain` computed them in float64 from the float32 first weights. It uses the run's own text, tokenizer, loader,
    first weights, forward pass and dropout bits, so only a record can notice that one of these has changed.

    A fixed number of ulps is not robust: two processors round differently, and ten steps of AdamW magnify that. So the
    test measures the rounding where it runs, as the difference between `plain` in float32 and in float64; that allows
    about 1.5e-6. Processors without AVX2 draw first weights that differ in the last bit, which moves a loss by 3e-8.
    """
    rate = ["optimizer.lr=5e-3", "optimizer.warmup_steps=2"]
    ran = run("steps=10", *rate, "attention.dropout_p=0.25", *RUNS[family])
    recorded = torch.tensor(RECORDED[family], dtype=torch.float64)
    rounding = plain(ran.cfg, torch.float32)["losses"] - plain(ran.cfg)["losses"]
    assert_within_budget({"losses": ran.losses}, {"losses": recorded + rounding}, {"losses": recorded})
