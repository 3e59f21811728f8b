"""Side streams that a forward uses while it is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def watch_forks(stream: torch.cuda.Stream, forks: list[torch.cuda.Stream]) -> Iterator[None]:
    """Note every stream that is made to wait on another: its captured work must be joined before a segment ends.

    CUDA ends a capture with an error while a forked stream is not joined; patched for one capture only.
    """
    original = {name: getattr(torch.cuda.Stream, name) for name in ("wait_stream", "wait_event")}

    def watched(name: str) -> Callable[[torch.cuda.Stream, Any], None]:
        def wait(self: torch.cuda.Stream, other: Any) -> None:
            original[name](self, other)
            if self != stream and self not in forks:
                forks.append(self)

        return wait

    for name in original:
        setattr(torch.cuda.Stream, name, watched(name))
    try:
        yield
    finally:
        for name, method in original.items():
            setattr(torch.cuda.Stream, name, method)
