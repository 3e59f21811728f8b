"""The calls that a pipeline makes of its denoisers, with what they get and give: kept, to be repeated by any arm."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from bcgbench.arms import Arm, Hook
from bcgbench.binding import Arguments, Traced
from bcgbench.engine import trees
from bcgbench.engine.buffers import clone_strided, version
from bcgbench.variant import replaced


class Tracer:
    """Keeps inputs and outputs of every denoiser call of an arm; an object that does not change is kept once."""

    def __init__(self, arm: Arm) -> None:
        self.calls: list[Traced] = []
        self._arm = arm
        self._kept: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}

    def _keep(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        count = version(leaf)
        if count is None:
            return clone_strided(leaf)
        # the source is kept beside its copy, so that its identity cannot be reused
        _, copy = self._kept.setdefault((id(leaf), count), (leaf, clone_strided(leaf)))
        return copy

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """The pipeline runs through the arm, traced, until the block ends; the arm itself must not be attached."""
        with contextlib.ExitStack() as stack:
            for name, hook in self._arm.hooks.items():
                stack.enter_context(replaced(hook.module, functools.partial(self._call, name, hook)))
            yield

    def _call(self, name: str, hook: Hook, /, *args: Any, **kwargs: Any) -> Any:
        return hook.share(functools.partial(self._kept_call, name, hook), hook.bind(args, kwargs))

    def _kept_call(self, name: str, hook: Hook, arguments: Arguments) -> Any:
        kept = trees.map_leaves(self._keep, arguments)
        output = hook.call(arguments)
        self.calls.append(Traced(name, kept, trees.clone(output)))
        return output
