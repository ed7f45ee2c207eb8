"""model/abilities.py: what its table says is lacking is refused with a reason, and all else runs."""

import re
from dataclasses import replace

import pytest
import torch

from model.abilities import ABILITIES, IMPLEMENTATIONS, OF_MASK, OF_SCORE, resolve, wanted, why_not
from model.attention import AttentionConfig, attention
from tests.test_readme import README

# An option of every kind, as AttentionConfig has it.
OPTIONS = {
    "window": {"window": 5},
    "windows": {"windows": [5, None]},
    "documents": {"documents": True},
    "block_mask": {"block_mask": ["x.", "xx"], "block_mask_size": 8},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "dropout_p": {"dropout_p": 0.5},
    "order": {"order": "keys_outside"},
    "autotune": {"autotune": True},
    "kernel": {"kernel": "portable"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_option_runs_or_is_refused_with_its_value_and_a_way_out_that_is_one(impl, option):
    if impl == "triton":
        pytest.importorskip("triton", reason="triton is made for Linux")
        if torch.cuda.is_available():
            pytest.skip("the kernels run in Triton's interpreter, where there is no GPU")
    config = AttentionConfig(impl, **OPTIONS[option])
    assert option in wanted(config)
    if option not in ABILITIES[impl].lacks:
        q = torch.randn(1, 2, 16, 16)
        more = {"documents": torch.zeros(1, 16, dtype=torch.int64)} if option == "documents" else {}
        o = attention(q, q, q, resolve(config, "cpu").layer(0), seed=torch.tensor(1), **more)
        assert o.isfinite().all()
        return
    with pytest.raises(ValueError, match=rf"^attention\.{option}=.*; (leave it out|use attention=)") as refused:
        resolve(config, "cpu")
    assert "\n" not in str(refused.value)
    for other in IMPLEMENTATIONS:
        if f"use attention={other}" in str(refused.value):
            assert resolve(replace(config, impl=other), "cpu").impl == other


@pytest.mark.parametrize("thing", sorted(set(ABILITIES) - set(IMPLEMENTATIONS)))
def test_whatever_else_lacks_something_says_it_in_one_line_with_the_value(thing):
    for option in ABILITIES[thing].lacks:
        why = why_not(thing, {option: f"{option}=7"})
        assert why
        assert "\n" not in why
        assert not ABILITIES[thing].lacks[option].count("{}") or f"{option}=7" in why or why_not(thing, {})


def test_auto_is_an_implementation_that_can():
    for options in OPTIONS.values():
        config = AttentionConfig(**options)
        try:
            found = resolve(config, "cpu")
        except ValueError:
            assert why_not("tiled", wanted(replace(config, impl="tiled")))
        else:
            assert found.impl == "tiled"


def test_readmes_tables_are_those_of_the_table():
    implementations, options = (
        README.split(start)[1].split("\n\n")[0] for start in ("| `attention=` |", "| option | keys |")
    )
    assert re.findall(r"^\| `(\w+)`", implementations, re.M) == [*IMPLEMENTATIONS, "auto"]
    rows = [set(re.findall(r"attention\.(\w+)=", row)) for row in options.splitlines()[2:]]
    assert "sdpa has only the last two" in README
    assert set.union(*rows[:-2]) == {*OF_MASK, *OF_SCORE}
    for impl in IMPLEMENTATIONS:
        lacking = set(ABILITIES[impl].lacks) & set.union(*rows)
        assert lacking == (set.union(*rows[:-2]) if impl == "sdpa" else set())
