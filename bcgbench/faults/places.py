"""Where faults are put in: a function of a class or module, the model's forward, or one arm alone. Always taken out."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bcgbench import bench
from bcgbench.models import base

if TYPE_CHECKING:
    from collections.abc import Callable

    from bcgbench.answers import Final

ARM = "bcg"
"""The arm that faults of one arm are put into."""


def replaced(owner: Any, name: str, other: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`owner.name(...)` is `other(original, ...)` while the context is open."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return other(original, *args, **kwargs)

    return patch.object(owner, name, stand_in)


def changed_session(change: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Every session that is loaded while the context is open goes through `change` first."""

    def load(original: Callable[..., Any], case: Any) -> Any:
        session = original(case)
        change(session)
        return session

    return replaced(base, "load", load)


def changed_model(forward: Callable[..., Any]) -> AbstractContextManager[Any]:
    """The denoiser's forward is `forward(original, **arguments)`, for all arms alike."""

    def change(session: Any) -> None:
        module = session.pipe.transformer
        module.forward = functools.wraps(module.forward)(functools.partial(forward, module.forward))

    return changed_session(change)


def in_arm(make: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """The context of `make` is open during the requests of `ARM` only."""

    def image(original: Callable[..., Final], self: Any, live: Any, **turn: Any) -> Final:
        if live.name != ARM:
            return original(self, live, **turn)
        with make():
            return original(self, live, **turn)

    return replaced(bench.CaseBench, "_image", image)


def changed_final(change: Callable[[Final], None]) -> AbstractContextManager[Any]:
    """What a request of `ARM` ends with goes through `change`, which writes in place."""

    def image(original: Callable[..., Final], self: Any, live: Any, **turn: Any) -> Final:
        final = original(self, live, **turn)
        if live.name == ARM:
            change(final)
        return final

    return replaced(bench.CaseBench, "_image", image)
