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
from collections.abc import Iterator
from dataclasses import field, fields, is_dataclass
from typing import Any, NamedTuple


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
            return ""
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
                raise ValueError(f"{prefix}{entry.name}{place}={item}{wrong}")


def check_typed(config: Any, typed: dict[str, str]) -> None:
    """ValueError, one line, for a key of the command line that nothing would read: the user expects something of it.
    typed: {key or group: value as it was typed}. A key that is off, such as top_k=null, asks for nothing."""
    known = dict(leaves(config))
    alone = {name: known[name][1].alone for name in typed if name in known and known[name][0] and known[name][1].alone}
    for name, text in typed.items():
        value, limits = known.get(name, (True, Key()))  # a group is no key
        if value is None or value is False or value in ("false", "disabled"):
            continue
        for mode, read in alone.items():
            if name != mode and not {name, name.partition(".")[0]}.intersection(read):
                raise ValueError(f"{mode}={typed[mode]} does not read {name}={text}; leave it out")
        partners = [(known[of][0], of, wanted) for of, _, wanted in (need.partition("=") for need in limits.needs)]
        if value and partners and not any(has == wanted if wanted else has for has, _, wanted in partners):
            now = f"{partners[0][1]}={'null' if partners[0][0] is None else partners[0][0]}"
            out = either(tuple(f"{of}={wanted or 'VALUE'}" for _, of, wanted in partners))
            raise ValueError(f"{name}={text} is not read with {now}; use {out}, or leave it out")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, tuple[Any, Key]]]:
    """(dotted key, (value, Key)) of a configuration and the groups in it."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, (value, entry.metadata.get("key", Key()))


def either(names: tuple[str, ...]) -> str:
    """naive, tiled or triton."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def written(limit: float) -> str:
    """A limit as people write it: 2**63 for 9223372036854775808."""
    power = limit >= 1 << 20 and math.log2(limit)
    return f"2**{power:g}" if power and power % 1 == 0 else f"{limit:g}".replace("e+", "e")
