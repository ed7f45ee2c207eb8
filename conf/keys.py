"""A key of the configuration: its default, its meaning and its limits, said once, beside the code that it configures.

    @dataclass
    class ProbeConfig:
        every: int = key(0, "steps between two probes of attention", least=0, usual="0: never")

        def __post_init__(self):
            check(self, "probe.")  # then the rules between several keys

--help shows the meanings (training/config.py), check() refuses what is outside the limits, and tests/test_keys.py tries
the values beside each limit. Nothing of the project is imported here, so that every room may import this.
"""

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, NamedTuple

LONGEST = 200  # characters of a value that a message shows
# What a terminal would obey, or what would break a line.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Key(NamedTuple):
    """What a field's metadata holds as "key". The limits are those of key()."""

    meaning: str = ""
    among: tuple[str, ...] = ()
    usual: str = ""
    needs: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def complaint(self, value: Any) -> str:
        """What is wrong with one value, to stand behind KEY=VALUE; "" if nothing is."""
        if self.among:
            return "" if value in self.among else f" is not known; choose {either(self.among)}"
        if isinstance(value, str):
            return "" if value or not self.least else " is empty; give it a value or leave it out"
        low = [("at least", self.least, operator.ge), ("above", self.above, operator.gt)]
        high = [("at most", self.most, operator.le), ("below", self.below, operator.lt)]
        limits = [(words, limit, holds) for words, limit, holds in low + high if limit is not None]
        bounded = self.most is not None or self.below is not None
        finite = bool(limits) and not bounded and isinstance(value, float)
        if all(holds(value, limit) for _, limit, holds in limits) and (not finite or value < math.inf):  # false for NaN
            return " must be below 2**63" if type(value) is int and value >= 1 << 63 else ""
        if len(limits) == 2:
            opening, closing = "[" if self.above is None else "(", "]" if self.below is None else ")"
            said = f" is outside {opening}{written(limits[0][1])}, {written(limits[1][1])}{closing}"
        else:
            said = f" must be {'finite and ' * finite}{limits[0][0]} {written(limits[0][1])}"
        return said + (f"; {self.usual}" if self.usual else "")


def key(
    default: Any,
    meaning: str = "",
    *,
    among: str = "",
    usual: str = "",
    needs: str = "",
    alone: str = "",
    **limits: float,
) -> Any:
    """A dataclass field. Its type is checked where the configuration is composed or read, and None is right wherever
    the type says so; of a list, the limits are each element's.

    meaning: one line for --help. More than fits there is a comment above the field.
    usual: a usual value, or what null, 0 or 1 mean. It ends both the line of --help and the message about a limit.
    limits: least <= value <= most, above < value < below. A number that has no upper limit must be finite;
        most=math.inf lets infinity in. least=1 of a string: it is not empty.
    needs: its partners, as "window" or "attention.impl=tiled". Without one of them, the key does nothing.
    alone: of a key that does something else than usual, all other keys and groups that are then read.
    among: the values of a string, as --help shows them behind the meaning: "auto (a GPU if there is one) | cpu | cuda".
    """
    options = among.split(" | ") if among else []
    names = tuple(option.split()[0].rstrip(",") for option in options)
    said = ": ".join(filter(None, (meaning, among))) + (f"; {usual}" if usual else "")
    metadata = {"key": Key(said, names, usual, tuple(needs.split()), tuple(alone.split()), **limits)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check(config: Any, prefix: str = "") -> None:
    """ValueError, one line with the value and the way out, for the first of a dataclass's keys that is outside its
    limits. prefix: the group's, as in "model."."""
    for entry in fields(config):
        value, limits = getattr(config, entry.name), entry.metadata.get("key")
        items = enumerate(value) if isinstance(value, list | tuple) else [(None, value)]
        for number, item in items:
            if limits and item is not None and (wrong := limits.complaint(item)):
                place = "" if number is None else f"[{number}]"
                raise ValueError(f"{prefix}{entry.name}{place}={str(item)[:LONGEST]}{wrong}")


class Leaf(NamedTuple):
    """A key of a configuration, or of a group in it."""

    value: Any
    default: Any
    limits: Key


def check_typed(jobs: list[tuple[Any, dict[str, str]]]) -> None:
    """ValueError, one line, for a key of the command line that nothing would read: the user expects something of it.
    jobs: each configuration with {key or group: value as it was typed}. A key that has its default, such as top_k=null,
    asks for nothing. In a sweep one job may read what the others do not."""
    unread = []
    for config, typed in jobs:
        known = dict(leaves(config))
        refuse_beside_a_mode(known, typed)
        unread.append(without_partner(known, typed))
    for name in unread[0] if unread else ():
        if all(name in job for job in unread):
            raise ValueError(unread[0][name])


def refuse_beside_a_mode(known: dict[str, Leaf], typed: dict[str, str]) -> None:
    """ValueError for a typed key that is not among those that a typed mode reads (alone= of its key)."""
    off = {name for name, text in typed.items() if text in ("none", "null", "false", "disabled")}
    off |= {name for name in typed if name in known and known[name].value == known[name].default}
    asked = {name: text for name, text in typed.items() if name not in off}
    for mode in (name for name in asked if name in known and known[name].limits.alone):
        for name, text in asked.items():
            if name != mode and not {name, name.partition(".")[0]}.intersection(known[mode].limits.alone):
                raise ValueError(f"{mode}={typed[mode]} does not read {name}={text}; leave it out")


def without_partner(known: dict[str, Leaf], typed: dict[str, str]) -> dict[str, str]:
    """{typed key: a line}, for those whose partners (needs= of the key) are all off."""
    found = {}
    for name in (name for name in typed if name in known and known[name].value != known[name].default):
        partners = [need.partition("=")[::2] for need in known[name].limits.needs]  # ("attention.impl", "tiled")
        if not partners or any(known[of].value == value if value else known[of].value for of, value in partners):
            continue
        first, wanted = partners[0]
        now = typed.get(first, "null" if known[first].value is None else known[first].value)
        out = f"{first.removesuffix('.impl')}={wanted}" if wanted else f"another {first}="
        found[name] = f"{name}={typed[name]} is not read with {first}={now}; use {out}, or leave it out"
    return found


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Every dotted key of a configuration and the groups in it."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{entry.name}.")
        else:
            default = entry.default if entry.default_factory is MISSING else entry.default_factory()
            yield prefix + entry.name, Leaf(value, default, entry.metadata.get("key", Key()))


def either(names: tuple[str, ...]) -> str:
    """naive, tiled or triton."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def one_line(text: str) -> str:
    """text with its control characters escaped."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def written(limit: float) -> str:
    """A limit as people write it: 2**63 for 9223372036854775808."""
    power = limit >= 1 << 20 and math.log2(limit)
    return f"2**{power:g}" if power and power % 1 == 0 else f"{limit:g}".replace("e+", "e")
