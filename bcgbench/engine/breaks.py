"""Which calls break a capture, and how a running capture is reached.

A policy patches the named functions for the length of one capture and always restores them. `eager_on_graph` and
`break_graph` mark breaks in a user's own code. Outside a capture all of them call straight through.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from bcgbench.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


class Breakable(Protocol):
    """A capture in progress, or a rehearsal of one."""

    def run_break(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the running segment, call eagerly, begin the next."""


_current: ContextVar[Breakable | None] = ContextVar("bcgbench_capture", default=None)


@contextlib.contextmanager
def active(capture: Breakable) -> Iterator[None]:
    """Make `capture` the one that breaks reach in this context."""
    token = _current.set(capture)
    try:
        yield
    finally:
        _current.reset(token)


def eager_on_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it always runs eagerly between two segments of a captured graph.

    At replay it is called again on the same argument objects: tensors hold the replay's data, constants are frozen.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        capture = _current.get()
        if capture is None:
            return function(*args, **kwargs)
        result: R = capture.run_break(function, args, kwargs)
        return result

    return wrapper


def _nothing() -> None:
    """The body of a bare break."""


break_graph: Callable[[], None] = eager_on_graph(_nothing)
"""End the running segment and begin another; does nothing outside a capture."""


@dataclass(frozen=True, slots=True)
class BreakPolicy:
    """Names of the functions that break. `attention` also breaks every backend of diffusers' attention registry."""

    names: tuple[str, ...] = ()
    attention: bool = False

    @classmethod
    def parse(cls, text: str) -> BreakPolicy:
        """`attention`, `none`, or dotted names separated by commas. Raises `UsageError` for anything else."""
        if text == "none":
            return cls()
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        bad = [name for name in names if name != "attention" and "." not in name]
        if bad or not names:
            raise UsageError(
                f"Unknown break policy {', '.join(bad) or text!r}: expected attention, none, or dotted names such as "
                "torch.nn.functional.scaled_dot_product_attention."
            )
        return cls(names=tuple(name for name in names if name != "attention"), attention="attention" in names)

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Turn the named functions into breaks until the block ends, however it ends."""
        undo: list[Callable[[], None]] = []
        try:
            undo.extend(_patch_name(name) for name in self.names)
            if self.attention:
                undo.append(_patch_name("torch.nn.functional.scaled_dot_product_attention"))
                undo.append(_patch_attention_registry())
            yield
        finally:
            for restore in reversed(undo):
                restore()


def _patch_name(name: str) -> Callable[[], None]:
    owner, attribute = _resolve(name)
    original = owner.__dict__.get(attribute, getattr(owner, attribute))
    setattr(owner, attribute, eager_on_graph(getattr(owner, attribute)))
    return lambda: setattr(owner, attribute, original)


def _resolve(name: str) -> tuple[Any, str]:
    """Owner and attribute of a dotted name: the longest importable module, then attributes."""
    *parts, attribute = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:size]))
        except ImportError:
            continue
        with contextlib.suppress(AttributeError):
            for part in parts[size:]:
                owner = getattr(owner, part)
            getattr(owner, attribute)
            return owner, attribute
        break
    raise UsageError(f"Break {name!r} does not exist. Name a function as module.function or module.Class.method.")


def _patch_attention_registry() -> Callable[[], None]:
    """Break every attention backend of diffusers, if diffusers is loaded: models import the dispatcher by name, so the
    registry entry is the one place that all of them pass (11 of 12 models checked)."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is None:
        return _nothing
    backends = dispatch._AttentionBackendRegistry._backends
    original = dict(backends)
    for key, function in original.items():
        backends[key] = eager_on_graph(function)
    return lambda: backends.update(original)
