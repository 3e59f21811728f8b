"""What to change on the command line so that a miss does not happen: one sentence from the fields that differ.

Here: reading the lines of a `Miss`. Not here: finding the nearest signature (`engine/cache.py`).
"""

from __future__ import annotations

import re

from bcgbench.types import Miss

_SHAPES = re.compile(r"^(?P<path>[^:]+): captured \w+\[(?P<held>[\d, ]*)\].*?, asked \w+\[(?P<asked>[\d, ]*)\]")
_TEXT = re.compile(r"encoder|cap_feats|caption|prompt|text|txt|llm", re.IGNORECASE)
_FRAMES = re.compile(r"frames")
_AMBIENT = re.compile(r"^\((?P<name>[^)]+)\): captured (?P<held>.+), asked (?P<asked>.+)$")
_LENGTH = re.compile(r"prompt has (\d+) tokens")


def hint(miss: Miss) -> str:
    """The change that would let this call replay; "" where none is known."""
    if length := _LENGTH.search(miss.reason):
        return f"add a bucket of at least {length[1]} to --buckets"
    if miss.reason == "nothing was captured":
        return "the reason of the failed capture stands in this arm's record; --break auto finds what must run eagerly"
    if miss.reason.startswith("weights or switches changed"):
        return "load weights and adapters, and switch them, before the run: its graphs are captured once"
    if miss.reason.startswith(("host read", "a break returned")):
        return (
            "a value that the host reads changes: pass it as a tensor, or break around the code that uses it (--break)"
        )
    return next(filter(None, map(_of_field, miss.difference)), "")


def _of_field(line: str) -> str:
    if ambient := _AMBIENT.match(line):
        name, held, asked = ambient.groups()
        return f"{name} was {held} when captured and is {asked} now: set it before the run, for all requests"
    if _FRAMES.search(line):
        return "give the frames that are asked for: --res WxHxFRAMES"
    shapes = _SHAPES.match(line)
    return _of_shape(shapes["path"], *map(_sizes, (shapes["held"], shapes["asked"]))) if shapes else ""


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _of_shape(path: str, held: tuple[int, ...], asked: tuple[int, ...]) -> str:
    changed = [new for old, new in zip(held, asked, strict=False) if old != new]
    if len(held) != len(asked) or not changed:
        return ""
    if held[0] != asked[0] and len(changed) == 1 and len(held) > 1:
        return "another batch size: run with the guidance and the number of prompts of the captured calls (--guidance)"
    if _TEXT.search(path):
        return f"another prompt length: add {max(changed)} to --buckets, or capture with such a --prompt"
    return "another size: give it as --res, so that it is captured in preparation"
