"""Inputs that were valid once: strategies that damage bytes, and values nested in each other."""

import copy
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

NASTY_VALUES = [
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")),
    *("", "x", "5", "None", "\0", "\ud800", "\x1b[2J", "$\\frac{$", "../../x.bin", "/etc/passwd"),
    *("x" * 5000, "{}{0}", "%s%n", "</script>", [], {}, [[]], [None], [[1, 2], "x"], {"": {}}),
]
EDITS = ("flip", "cut", "duplicate", "splice", "replace", "insert")


@st.composite
def damaged(draw: Any, valid: bytes, pieces: Sequence[bytes]) -> bytes:
    """Bytes with a few edits: bits flipped, stretches cut, doubled, moved, replaced by pieces."""
    content = valid
    for edit in draw(st.lists(st.sampled_from(EDITS), min_size=1, max_size=6)):
        at = draw(st.integers(0, len(content)))
        end = min(at + draw(st.integers(0, 60)), len(content))
        if edit == "flip" and at < len(content):
            flipped = content[at] ^ 1 << draw(st.integers(0, 7))
            content = content[:at] + bytes([flipped]) + content[at + 1 :]
        elif edit == "cut":
            content = content[:at] + content[end:]
        elif edit == "duplicate":
            content = content[:end] + content[at:end] * draw(st.integers(1, 50)) + content[end:]
        elif edit == "splice":
            other = draw(st.integers(0, len(content)))
            content = content[:at] + content[other : other + end - at] + content[at:]
        elif edit in ("replace", "insert"):
            piece = draw(st.sampled_from(pieces)) * draw(st.sampled_from([1, 1, 1, 2, 1000]))
            content = content[:at] + piece + content[end if edit == "replace" else at :]
    return content


@st.composite
def changed(draw: Any, valid: Any, values: Sequence[Any] = NASTY_VALUES) -> Any:
    """Values in dictionaries and lists, of which some are replaced, removed, moved or renamed."""
    content = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.sampled_from(_places(content)))
        if place is None:
            return copy.deepcopy(draw(st.sampled_from(values)))
        holder, key = place
        edit = draw(st.sampled_from(["replace", "replace", "replace", "remove", "move", "nest"]))
        if edit == "remove":
            del holder[key]
        elif edit == "nest":
            holder[key] = draw(st.sampled_from([[holder[key]], {"x": holder[key]}, str(key)]))
        elif edit == "move":
            moved = draw(st.sampled_from(_places(content)[1:]))
            holder[key] = copy.deepcopy(moved[0][moved[1]])
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(values)))
        if not _places(content)[1:]:
            break
    return content


def _places(content: Any) -> list[tuple[Any, Any] | None]:
    """Where there is a value: in the whole, and in each container."""
    places: list[tuple[Any, Any] | None] = [None]
    waiting = [content]
    while waiting:
        holder = waiting.pop()
        keys = holder if isinstance(holder, dict) else range(len(holder))
        for key in list(keys):
            places.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return places
