"""conf/keys.py: a value outside a key's limits is refused, beside each limit of every key of every script."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import bench
import breakit
import sample
import train
from conf.keys import Key, check, key
from training import config

ROOT = Path(__file__).parent.parent


@dataclass
class Some:
    count: int = key(3, "how many", least=1, usual="2 is usual")
    share: float = key(0.5, "the share", least=0, below=1)
    rate: float | None = key(None, "the rate", above=0, usual="null: chosen")
    norm: float = key(1.0, least=0, most=math.inf)
    seed: int = key(0, least=0, below=2**63)
    kind: str = key("a", "the kind", among="a (the first) | b, the second | c", usual="a is usual")
    path: str | None = key(None, least=1)
    sizes: list[int | None] = key([1, None], least=1)
    plain: int = field(default=0)

    def __post_init__(self) -> None:
        check(self, "some.")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"count": 0}, "some.count=0 must be at least 1; 2 is usual"),
        (
            {"count": 2**63},
            "some.count=9223372036854775808 must be below 2**63",
        ),  # as larger ones were tracebacks later
        ({"count": 10**300}, f"some.count={str(10**300)[:200]} must be below 2**63"),
        ({"share": 1.0}, "some.share=1.0 is outside [0, 1)"),
        ({"share": math.nan}, "some.share=nan is outside [0, 1)"),
        ({"rate": 0.0}, "some.rate=0.0 must be finite and above 0; null: chosen"),
        ({"rate": math.inf}, "some.rate=inf must be finite and above 0; null: chosen"),
        ({"norm": -1.0}, "some.norm=-1.0 is outside [0, inf]"),
        ({"seed": 2**63}, "some.seed=9223372036854775808 is outside [0, 2**63)"),
        ({"kind": "d"}, "some.kind=d is not known; choose a, b or c"),
        ({"path": ""}, "some.path= is empty; give it a value or leave it out"),
        ({"sizes": [1, None, 0]}, "some.sizes[2]=0 must be at least 1"),
        ({"sizes": (1, 0)}, "some.sizes[1]=0 must be at least 1"),  # it was compared as a whole: a TypeError
    ],
)
def test_a_value_outside_a_limit_is_one_line_with_the_way_out(given, said):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (compared as a whole)
        Some(**given)
    assert str(error.value) == said


def test_a_value_at_a_limit_is_taken_and_a_list_is_each_instances_own():
    Some(count=1, share=0.0, rate=None, norm=math.inf, seed=2**63 - 1, kind="c", sizes=(64, None))
    Some().sizes.append(3)
    assert Some().sizes == [1, None]
    assert {name: f.metadata["key"].meaning for name, f in Some.__dataclass_fields__.items() if f.metadata}["kind"] == (
        "the kind: a (the first) | b, the second | c; a is usual"
    )


UNREAD = [  # what is typed, what nothing reads of it, and the words beside which it would be read
    ("train length_warmup_from=64", "length_warmup_from=64", "length_warmup_steps=9"),
    ("train length_warmup_by=4", "length_warmup_by=4", "length_warmup_steps=9 length_warmup_from=16"),
    ("train experiment=long_16k length_warmup_steps=0 length_warmup_by=4", "length_warmup_by=4", None),
    ("train sample_every=0 sample_tokens=5", "sample_tokens=5", "sample_every=1"),
    ("train attention.block_mask_size=16", "attention.block_mask_size=16", "attention.block_mask=[x]"),
    ("train attention=sdpa attention.block_m=16", "attention.block_m=16", "attention=tiled"),
    ("train attention=naive attention.block_n=16", "attention.block_n=16", "probe.every=1"),
    ("train -m attention=sdpa seed=1,2 attention.block_n=16", "attention.block_n=16", "attention=auto"),
    ("train attention={impl:sdpa,block_m:16}", "attention.block_m=16", None),
    ("train model=gpt2 model.rope_base=9", "model.rope_base=9", "model.position=rope"),
    *(
        (f"sample temperature=0 {name}", name, "temperature=1")
        for name in ("top_k=5", "top_p=0.5", "min_p=0.1", "seed=3")
    ),
    ("sample run=x checkpoint=runs/y/checkpoints/step_000010", "run=x", "checkpoint=step_000010"),
    ("sample list_runs=true seed=3", "seed=3", "list_runs=false"),
    ("sample export=x temperature=0", "temperature=0", "export=null"),
    ("sample hellaswag=9 prompt=x", "prompt=x", "hellaswag=0"),
]


def composed(typed: str) -> list:
    module = {"train": train, "sample": sample}[typed.split()[0]]
    name = {train: "config", sample: "sample"}[module]
    return config.compose(typed.split()[1:], module.Config, name, ROOT / "conf", module.__name__)


@pytest.mark.parametrize(("typed", "unread", "beside"), UNREAD)
def test_a_key_that_was_typed_is_read_or_refused(typed, unread, beside):
    with pytest.raises(ValueError, match=rf"\A.*{re.escape(unread)}.*leave it out\Z"):
        composed(typed)
    assert beside is None or composed(f"{typed} {beside}")


@pytest.mark.parametrize(
    "typed",
    [
        "train experiment=long_16k length_warmup_steps=0",
        "train sample_every=0 sample_tokens=200",
        "sample temperature=0 top_k=null top_p=1 min_p=0",
        "train -m attention=naive,tiled attention.block_m=16",  # of a sweep one job reads it
        "sample -m temperature=0,1 top_k=5",
        "train eval_only=true resume=x experiment=smoke context_every=0 break_it=none compile=false",
        "sample list_runs=true num_samples=1",
    ],
)
def test_a_key_of_an_experiment_or_of_a_sweep_or_with_its_default_needs_no_partner(typed):
    assert composed(typed)


@pytest.mark.parametrize("typed", ["steps=9", "optimizer.lr=1", "model.n_layer=4", "model=gpt2", "seed=1"])
def test_a_measurement_refuses_what_is_for_training(typed):
    measuring = "train eval_only=true resume=x name=x wandb.mode=disabled data=text batch_size=2 attention.block_m=16"
    measuring += " hydra.searchpath=[]"
    assert composed(measuring)
    with pytest.raises(ValueError, match=rf"\Aeval_only=true does not read {typed}; leave it out\Z"):
        composed(f"{measuring} {typed}")


def outside(limits: Key, kind: str) -> list[Any]:
    """The nearest values that the limits leave out; of a number with a fraction also NaN, and infinity."""
    found: list[Any] = ["", *limits.among[-1:]] if limits.among or ("str" in kind and limits.least) else []
    found[1:] = [name.upper() for name in found[1:]]
    ends = [limits.least, limits.above, limits.most, limits.below]
    if ends.count(None) < 4 and "float" in kind:
        found += [-math.inf, math.nan, *([] if limits.most == math.inf else [math.inf])]
    step = 1 if "int" in kind else 1e-9
    found += [limits.above, limits.below, limits.least is not None and limits.least - step]
    found += [limits.most not in (None, math.inf) and limits.most + step * limits.most]
    return [value for value in found if value is not None and value is not False]


def limited(schema: type) -> Iterator[tuple[type, str, Any]]:
    """Every key that has limits, of the schema and of what is nested in it, with a value outside of them."""
    for entry in fields(schema):
        factory: Any = entry.default_factory
        if is_dataclass(factory):
            yield from limited(factory)
        elif "key" in entry.metadata:
            for value in outside(entry.metadata["key"], str(entry.type)):
                if entry.name in ("compile", "activation_checkpointing"):  # where True is true
                    value = f"no {value}".lower()
                yield schema, entry.name, [value] if "list" in str(entry.type) else value


SCHEMAS = [train.Config, sample.Config, breakit.Config, bench.Config]


@pytest.mark.parametrize(
    ("schema", "name", "value"), {repr(found): found for schema in SCHEMAS for found in limited(schema)}.values()
)
def test_every_key_refuses_what_is_beside_its_limits(schema, name, value):
    start = f"{name}[0]={value[0]}" if isinstance(value, list) else f"{name}={value}"
    with pytest.raises(ValueError, match=rf"\A([a-z_]+\.)?{re.escape(start)}.*\Z"):
        schema(**{name: value})


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__module__)
def test_every_key_refuses_a_value_of_another_type(schema):
    for dotted, hint in config.known_keys(schema).items():
        if is_dataclass(hint):
            continue
        *path, last = dotted.split(".")
        if dotted == "break_it.broken":  # of older versions, too
            continue
        for value in ({"a": [{}]}, [[1]], 1.5 if hint in (int, int | None, bool) else b""):
            given = reduce(lambda inner, group: {group: inner}, reversed(path), {last: value})
            with pytest.raises(ValueError, match=rf"\A{re.escape(dotted)}=.* is not .*\Z"):
                config.from_dict(schema, given)


def test_a_bool_of_an_older_version_is_text_where_a_text_is():
    """compile=true was a bool. A listing of runs ended in an AttributeError."""
    made = config.from_dict(train.Config, {"compile": True, "name": False, "pack": True})
    assert (made.compile, made.name, made.pack) == ("true", "false", True)
