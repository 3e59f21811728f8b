"""Faults of what goes into the transformer: padding, settings of one arm, weights, prompts, and the hook itself."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn

from bcgbench import arms, bench
from bcgbench.engine import trees
from bcgbench.faults.places import ARM, changed_model, changed_session, in_arm, replaced
from bcgbench.models import base, qwen_image, z_image
from bcgbench.models.padding import PadCache, pad_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bcgbench.types import Case

Patch = AbstractContextManager[Any]


# --- padding --------------------------------------------------------------------------------------------------------


def forgotten_mask() -> Patch:
    """Padded prompt rows are attended to like text."""

    def shaped(original: Callable[..., Any], self: Any, arguments: dict[str, Any], **how: Any) -> dict[str, Any]:
        padded = original(self, arguments, **how)
        return {**padded, qwen_image.MASK: torch.ones_like(padded[qwen_image.MASK])}

    return replaced(qwen_image.QwenImage, "_shaped", shaped)


def dropped_mask() -> Patch:
    """Prompt rows are padded and no mask is given."""

    def shaped(original: Callable[..., Any], self: Any, arguments: dict[str, Any], **how: Any) -> dict[str, Any]:
        return {**original(self, arguments, **how), qwen_image.MASK: None}

    return replaced(qwen_image.QwenImage, "_shaped", shaped)


def wrong_bucket() -> Patch:
    """Captions are padded past the multiple that the model itself rounds to: more rows, and the image's RoPE moves."""

    def fill_up(_original: Callable[..., Any], caption: torch.Tensor) -> torch.Tensor:
        return pad_to(caption, length=2 * z_image.CAPTION_MULTIPLE, dim=0)

    return replaced(z_image, "_fill_up", fill_up)


def cut_prompt() -> Patch:
    """A prompt longer than its bucket loses its end without a word."""
    return patch.object(qwen_image, "choose_bucket", lambda _length, buckets: min(buckets))


def stale_padding() -> Patch:
    """What was made of the first prompt is taken for every other."""
    made: dict[Any, Any] = {}

    def get(_original: Callable[..., Any], _self: PadCache, _source: Any, tag: Any, make: Callable[[], Any]) -> Any:
        return made.setdefault(tag, make())

    return replaced(PadCache, "get", get)


# --- settings -------------------------------------------------------------------------------------------------------


def _requested(**changes: Any) -> Patch:
    """Requests of one arm are made with other arguments."""

    def request(original: Callable[..., Any], self: Any, prompt: int, **how: Any) -> dict[str, Any]:
        return {**original(self, prompt, **how), **changes}

    return in_arm(lambda: replaced(base.Session, "request", request))


def other_guidance() -> Patch:
    """One arm denoises with another guidance scale."""
    return _requested(true_cfg_scale=2.0)


def other_steps() -> Patch:
    """One arm takes more denoise steps."""
    return _requested(num_inference_steps=5)


def other_precision() -> Patch:
    """One arm runs under autocast."""

    def half() -> ExitStack:
        stack = ExitStack()
        for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):  # a case may run on either
            stack.enter_context(torch.autocast(device, dtype=torch.bfloat16))
        return stack

    return in_arm(half)


def _loaded(**changes: Any) -> Patch:
    """A case is run with other settings than its partner's."""

    def load(original: Callable[..., Any], case: Case) -> Any:
        return original(replace(case, **changes))

    return replaced(base, "load", load)


def unlike_steps() -> Patch:
    """The second of two runs takes more steps."""
    return _loaded(steps=3)


def unlike_prior() -> Patch:
    """The second of two runs draws other noise."""
    return _loaded(seed=43)


@contextmanager
def unlike_switch() -> Iterator[None]:
    """The second of two runs multiplies matrices at another precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --- weights and calls ----------------------------------------------------------------------------------------------


def _first_linear(session: Any) -> nn.Linear:
    return next(module for module in session.pipe.transformer.modules() if isinstance(module, nn.Linear))


def broken_weights() -> Patch:
    """Weights are wrong in every arm of a run, so that its arms agree."""

    def change(session: Any) -> None:
        _first_linear(session).weight.mul_(-1)

    return changed_session(change)


def changed_weights() -> Patch:
    """A weight is replaced after the graphs were captured, as loading a LoRA does."""

    def prepare(original: Callable[..., None], self: Any, live: Any) -> None:
        original(self, live)
        if live.name == ARM:
            linear = _first_linear(self.session)
            linear.weight = nn.Parameter(linear.weight * 1.5, requires_grad=False)

    return replaced(bench.CaseBench, "_prepare", prepare)


def unhooked() -> Patch:
    """The hook of an arm sits on a module that the pipeline does not call."""

    def put(original: Callable[..., Any], module: nn.Module, forward: Any) -> Any:
        captured = isinstance(forward, arms.Hook) and forward.graphed.backend is not None
        return original(nn.Identity() if captured else module, forward)

    return replaced(arms, "replaced", put)


def skipped_prompt() -> Patch:
    """One arm serves the first prompt whatever it is asked for: a graph captured for the second is never called."""

    def produce(original: Callable[..., Any], self: Any, _prompt: int, **how: Any) -> Any:
        return original(self, 0, **how)

    return in_arm(lambda: replaced(base.Session, "produce", produce))


@contextmanager
def changed_flag() -> Iterator[None]:
    """A switch of the model, which no argument carries, is turned after the graphs were captured."""
    factor = [1.0]

    def forward(original: Callable[..., Any], **arguments: Any) -> Any:
        return trees.map_leaves(lambda leaf: leaf * factor[0], original(**arguments))

    def prepare(original: Callable[..., None], self: Any, live: Any) -> None:
        original(self, live)
        if live.name == ARM:
            factor[0] = 1.5

    with changed_model(forward), replaced(bench.CaseBench, "_prepare", prepare):
        yield


def unseeded_noise() -> Patch:
    """Every request begins from noise of its own."""
    seeds = itertools.count()

    def request(original: Callable[..., Any], self: Any, prompt: int, **how: Any) -> dict[str, Any]:
        return {**original(self, prompt, **how), "generator": torch.Generator().manual_seed(next(seeds))}

    return replaced(base.Session, "request", request)
