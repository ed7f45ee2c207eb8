"""Loads a run's model and text, and replays the batch that ended a run.

model = model_of_run("latest", Path("runs"), device)
replay(Path("runs/NAME/faults/step_000123"), device)
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from tiktoken import Encoding

from data.dataset import Dataset, open_data
from data.loader import Batch
from data.prepare import DataConfig, cache_of
from data.text import counted
from data.tokenizer import TokenizerConfig, encode, from_json
from model.abilities import OF_MASK, OF_SCORE, wanted, why_not
from model.attention import AttentionConfig
from model.gpt import GPT
from model.loss import IGNORE
from training import checkpoint, config
from training.metrics import show, stamp
from training.probe import find, gauges, record
from training.state import set_rng_state


class Model(NamedTuple):
    """The model of a run's best checkpoint, and the run's text."""

    name: str
    path: Path
    net: GPT
    dataset: Dataset
    data: DataConfig
    tokenizer: TokenizerConfig
    attention: AttentionConfig
    begin: int  # the token before a text


def model_of_run(run: str, runs: Path, device: torch.device) -> Model:
    """Loads the best checkpoint of a run, in evaluation mode on device. run: a name in `runs`, a folder, or latest.

    Raises ValueError if there is no such run, or if its attention has more than the causal mask.
    """
    path = checkpoint.find(run, runs, option="run", which="best")
    found = checkpoint.load(path)
    trained = found.state["config"]
    attention = config.from_dict(AttentionConfig, trained["attention"])
    if beyond := beyond_causal(attention):
        raise ValueError(f"run={run} has {', '.join(beyond)}: only look=true shows more than the causal mask")
    # auto, so that a run from a GPU can be loaded on any machine
    attention = AttentionConfig("auto", softmax_scale=attention.softmax_scale)
    net = found.network(attention, device).eval()
    name = f"{stamp(found.state['broken'])}run {path.resolve().parents[1].name}, {path.name}"
    data, tokenizer, dataset = text_of(found)
    if tokenizer.kind == "kept" and data.source != "bin":  # with init_from=; other runs can open the prepared text
        data = DataConfig("bin", str(dataset.folder), cache=data.cache)
    begin = found.state.get("begin", dataset.encoding.eot_token)
    return Model(name, path, net, dataset, data, tokenizer, attention, begin)


def beyond_causal(attention: AttentionConfig) -> list[str]:
    """The options of the mask and the score, as they are typed: the lab and the trace know the causal mask alone."""
    return [typed for name, typed in wanted(attention).items() if name in (*OF_MASK, *OF_SCORE)]


def text_of(found: checkpoint.Checkpoint) -> tuple[DataConfig, TokenizerConfig, Dataset]:
    """The text that a checkpoint was trained on."""
    trained = found.state["config"]
    data = config.from_dict(DataConfig, trained.get("data", {}))
    data.cache = cache_of(data.source, data.cache, DataConfig.cache)
    tokenizer = config.from_dict(TokenizerConfig, trained.get("tokenizer", {}))
    dataset = open_data(data, tokenizer, from_json(found.tokenizer), trained["model"]["context_length"])
    return data, tokenizer, dataset


def ids_of(encoding: Encoding, begin: int, prompt: str) -> torch.Tensor:
    """A text of the user's as the model reads it, int64 (1, T): first the token that begins a document in training."""
    return torch.tensor([[begin, *encode(encoding, prompt).tolist()]])


def replay(path: Path, device: torch.device) -> None:
    """Runs the kept batch again and prints the gauges of every attention call, and the first tile that is not finite.

    path: a folder under runs/NAME/faults. Raises ValueError for another checkpoint, because that holds no batch.
    """
    kept = checkpoint.load(path)
    tensors, dtype = kept.optimizer(), kept.state["about"]["dtype"]
    if "batch.x" not in tensors:
        raise ValueError(
            f"replay={path} holds no batch: name a folder under runs/NAME/faults, which a run with probe.every= writes"
        )
    attention = config.from_dict(AttentionConfig, kept.state["config"]["attention"])
    if attention.documents and "batch.documents" not in tensors:
        raise ValueError(f"replay={path} holds no numbers of documents, which its attention.documents=true needs")
    impl = kept.state["about"]["attention"]
    if impl == "triton" and (why := why_not("triton", {}, device)):
        show(f"{why}: using tiled instead")
        impl = "tiled"
    attention = replace(attention, impl=impl)
    if impl != "triton":  # the others refuse its options
        attention = replace(attention, autotune=False, kernel="auto")
    net = kept.network(attention, device).train()
    V = net.head.weight.shape[0]
    for name, least in (("batch.x", 0), ("batch.y", IGNORE)):
        if not ((tensors[name] >= least) & (tensors[name] < V)).all():
            raise ValueError(f"replay={path}: {name} has numbers outside {least} to {V - 1}, which are no tokens")
    set_rng_state(tensors)  # for the same dropout
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
    batch = Batch(tensors["batch.x"], tensors["batch.y"], tensors.get("batch.documents"))
    with torch.autocast(device.type, low) if low else nullcontext():
        calls = record(net, *batch.to(device))
    sequences = counted(len(batch.x), "sequence")
    show(f"{stamp(kept.state['broken'])}{path}: {sequences}, {impl}, {dtype}, on {device}")
    show("score, weight: the largest; headroom: nats until exp overflows; l: the least; error: |o - right| / |right|")
    show("layer     score  headroom   weight         l     error   o         dq        dk        dv")
    for call in calls:
        g = gauges(call)
        results = "".join(f"{kind_of(x):10}" for x in (call.o, *call.gradients))
        show(f"{call.layer:5}{g.max_score:10.2f}{g.headroom:10.2f}{g.max_weight:9.4f}{g.min_l:10.3g}{g.error:10.1e}   "
             f"{results}".rstrip())  # fmt: skip
    place = find(calls)
    show(f"first: {place}" if place else "in this batch it does not begin in attention")


def kind_of(x: torch.Tensor) -> str:
    """What a result has at its worst: NaN, infinity, or finite numbers alone."""
    return "NaN" if x.isnan().any() else "infinity" if x.isinf().any() else "finite"
