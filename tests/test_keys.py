"""key() and check(): limits said once."""

import math
from dataclasses import dataclass

import pytest

from conf.keys import check, key


@dataclass
class Keys:
    count: int = key(1, "a count", least=1, most=9)
    share: float | None = key(None, "a share", above=0, below=1)
    kind: str = key("a", among="a (the first) | b")
    sizes: list[int] = key([2], "sizes", least=1)

    def __post_init__(self):
        check(self, "group.")


@pytest.mark.parametrize(
    ("given", "said"),
    [({"count": 0}, "group.count=0 must be at least 1"), ({"count": 10}, "at most 9"), ({"share": 0.0}, "above 0"),
     ({"share": 1.0}, "below 1"), ({"share": math.nan}, "nan"), ({"kind": "c"}, "choose a, b"),
     ({"sizes": [3, 0]}, "at least 1")],
)  # fmt: skip
def test_a_value_outside_a_limit_is_one_line_with_the_limit(given, said):
    with pytest.raises(ValueError, match=said) as caught:
        Keys(**given)
    assert "\n" not in str(caught.value)


def test_a_value_at_a_limit_is_taken_and_a_list_is_each_instances_own():
    a, b = Keys(9, 0.5, "b"), Keys(1)
    a.sizes.append(4)
    assert b.sizes == [2]
