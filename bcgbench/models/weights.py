"""Seeded random weights at any size: a model is laid out without memory, then filled in place on its device.

The arithmetic is the released model's, the picture is not. torch's own initialisation is neither used nor wanted: it
takes minutes for 20 billion parameters on a host, and it leaves gates, pad tokens and tables at zero, which hides
masking and padding errors.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

BIAS_STD = 0.1
TABLE_STD = 0.2
"""Pad tokens and scale-shift tables: released ones are zero-initialised and trained away from zero."""
NORM_STD = 0.1


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have parameters without memory; buffers and plain tensors (RoPE tables) stay real.

    `torch.device("meta")` would also take the plain tensor attributes, which nothing could restore afterwards.
    """
    from torch import nn

    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def lay_out(kind: str, config: Mapping[str, Any]) -> nn.Module:
    """The diffusers class `kind` in eval mode with parameters on the meta device: shapes without memory.

    A class that diffusers does not export at its top has its path there: `pipelines.ltx2.LTX2Vocoder`.
    """
    import diffusers

    with parameters_on_meta():
        return operator.attrgetter(kind)(diffusers)(**config).eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Where random weights go, and the seed they come from."""

    device: torch.device
    dtype: torch.dtype
    seed: int

    def model(self, kind: str, config: Mapping[str, Any], *, name: str) -> nn.Module:
        """The diffusers class `kind` in eval mode with weights drawn from the seed and `name`, on the device."""
        return self.filled(lay_out(kind, config), name=name)

    def filled(self, model: nn.Module, *, name: str) -> nn.Module:
        """A laid out model with weights drawn from the seed and `name`, on the device."""
        import torch
        from torch import nn

        generator = torch.Generator(self.device).manual_seed(self.seed + zlib.crc32(name.encode()))
        kept = _kept_in_float32(model, dtype=self.dtype)
        stored = set(model.state_dict())
        for path, module in model.named_modules():
            whole = kept.intersection(path.split("."))
            for own, parameter in module.named_parameters(recurse=False):
                dtype = torch.float32 if whole or own in kept else self.dtype
                # Drawn in float32, so that a bfloat16 model is the float32 model rounded.
                drawn = torch.empty(parameter.shape, device=self.device)
                fill(drawn, module=module, name=own, generator=generator)
                setattr(module, own, nn.Parameter(drawn.to(dtype), requires_grad=False))
            for own, buffer in module.named_buffers(recurse=False):
                # Loading casts what it reads; tables outside the checkpoint (RoPE frequencies) stay in float32.
                cast = buffer.is_floating_point() and ".".join(filter(None, (path, own))) in stored and not whole
                setattr(module, own, buffer.to(self.device, self.dtype if cast else buffer.dtype))
        tie = getattr(model, "tie_weights", None)
        if tie is not None:  # one embedding under two names, which was drawn twice
            tie()
        return model


def _kept_in_float32(model: nn.Module, *, dtype: torch.dtype) -> set[str]:
    """Names of the parts that loading leaves in float32: of transformers' two lists, one is for float16 only."""
    import torch

    strict = getattr(model, "_keep_in_fp32_modules_strict", None)
    if strict is not None and dtype != torch.float16:
        return set(strict)
    return set(getattr(model, "_keep_in_fp32_modules", None) or ()) | set(strict or ())


def fill(tensor: Tensor, *, module: nn.Module, name: str, generator: torch.Generator) -> None:
    """Draw one parameter in place: norms near 1, matrices scaled by fan-in, everything else live.

    With 1/sqrt(fan-in) every layer keeps the scale of its input, and since each block normalises its input, the
    residual stream of 60 blocks grows by about sqrt(120), well within bfloat16.
    """
    if "norm" in type(module).__name__.lower() and name in ("weight", "gamma"):
        tensor.normal_(1.0, NORM_STD, generator=generator)
    elif tensor.dim() <= 1:
        tensor.normal_(0.0, BIAS_STD, generator=generator)
    elif name == "weight":
        fan_in = tensor.numel() // tensor.shape[0]
        tensor.normal_(0.0, fan_in**-0.5, generator=generator)
    else:
        tensor.normal_(0.0, TABLE_STD, generator=generator)


def count_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all parameters and buffers."""
    return sum(t.numel() * t.element_size() for m in modules for t in (*m.parameters(), *m.buffers()))


def count_parameters(module: nn.Module) -> int:
    """Number of scalar parameters."""
    return sum(p.numel() for p in module.parameters())
