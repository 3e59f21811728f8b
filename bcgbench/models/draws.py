"""Draws from a request's generator: seen, kept and replaced, by patching torch's functions for one request.

Here: what is patched and always put back. Not here: what the draws are for and where they are kept (`prior.py`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bcgbench.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)

OnDraw = Callable[["torch.Generator", Callable[[], "Tensor"]], "Tensor"]
"""(generator, the draw itself) -> what the caller gets."""

NAMES = ("randn", "rand", "randint", "randperm", "multinomial")
"""Functions of torch that diffusers calls with a generator; nearly always `randn`, through its `randn_tensor`."""
OTHER_REQUEST = "It was saved by a run of another size, dtype, number of steps or version: draw a new one."


class Recorder:
    """Keeps what is drawn. A generator that moves between two draws was used by something that is not seen."""

    def __init__(self) -> None:
        self._draws: list[Tensor] = []
        self._known: dict[int, tuple[torch.Generator, Tensor]] = {}

    def __call__(self, generator: torch.Generator, draw: Callable[[], Tensor]) -> Tensor:
        import torch

        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        self._check(generator, self._known.get(id(generator), (fresh, fresh.get_state()))[1])
        made = draw()
        self._known[id(generator)] = generator, generator.get_state()
        self._draws.append(made.detach().to("cpu", copy=True))  # a pipeline may go on in the same memory
        return made

    def finish(self) -> tuple[Tensor, ...]:
        """The draws, in order."""
        for generator, state in self._known.values():
            self._check(generator, state)
        return tuple(self._draws)

    def _check(self, generator: torch.Generator, expected: Tensor) -> None:
        if not bool((generator.get_state() == expected).all()):
            log.warning("the request's generator was used by more than %s: the prior lacks it", ", ".join(NAMES))


class Server:
    """Hands out saved draws. The request's own draw is made as well: it gives shape, device and memory format."""

    def __init__(self, draws: tuple[Tensor, ...]) -> None:
        self._draws, self._next = draws, 0

    def __call__(self, generator: torch.Generator, draw: Callable[[], Tensor]) -> Tensor:
        del generator
        made = draw()
        if self._next == len(self._draws):
            raise UsageError(f"The request draws more noise than the prior's {len(self._draws)} draws. {OTHER_REQUEST}")
        saved = self._draws[self._next]
        self._next += 1
        if (saved.shape, saved.dtype) != (made.shape, made.dtype):
            raise UsageError(
                f"Draw {self._next} of the request is {tuple(made.shape)} {made.dtype}, in the prior it is "
                f"{tuple(saved.shape)} {saved.dtype}. {OTHER_REQUEST}"
            )
        return made.copy_(saved)


@contextmanager
def patched(on_draw: OnDraw) -> Iterator[None]:
    """Draws of torch's functions that are given a generator go through `on_draw`; calls without one are untouched."""
    import torch

    def watched(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draw(*args: Any, **kwargs: Any) -> Tensor:
            generator = kwargs.get("generator")
            made = functools.partial(original, *args, **kwargs)
            return made() if generator is None else on_draw(generator, made)

        return draw

    originals = {name: getattr(torch, name) for name in NAMES}
    for name, original in originals.items():
        setattr(torch, name, watched(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


@contextmanager
def sampling(device: torch.device, *, seed: int) -> Iterator[torch.Generator]:
    """Within: no gradients, torch's global generators seeded, and put back afterwards; yields a CPU generator.

    A language model samples from the global generators only.
    """
    import torch

    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield torch.Generator("cpu").manual_seed(seed)
