"""Two tensors of one place in a model, one of them computed on a padded prompt: which rows to compare, and how.

A prompt of t rows that was padded to T makes tensors longer along one dimension. Where the pad rows lie depends on the
model: at the end (text alone, or after the image), or between text and image. Both are tried, and tensors count as
equal if they are in one of them; the rows of the prompt itself are in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bcgbench import fidelity
from bcgbench.binding import Arguments
from bcgbench.engine import trees
from bcgbench.engine.diagnose import bit_equal, bits
from bcgbench.thresholds import DEFAULTS
from bcgbench.types import Difference


@dataclass(frozen=True, slots=True)
class Growth:
    """Rows of an argument as the pipeline gave it, one number for each tensor of a list, and after padding."""

    native: tuple[int, ...]
    padded: int


@dataclass(frozen=True, slots=True)
class Aligned:
    """Equal shapes, to be compared element by element."""

    rows: str
    """Which rows of both tensors these are."""
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """One tensor of two arms, where it differs."""

    difference: Difference
    """Arm b against arm a, over the rows compared."""
    share: float
    """The larger of max/max and mean/mean of |b - a| against |a|; the largest float where it is no number."""
    rows: str
    index: tuple[int, ...]
    """Of the first element that differs (under a limit: by more than it)."""
    value_a: str
    value_b: str


def growths(native: Arguments, padded: Arguments) -> tuple[Growth, ...]:
    """How far each argument was extended, alike ones once."""
    found: dict[Growth, None] = {}
    for name in sorted(native.keys() & padded.keys()):
        before, after = trees.tensors(native[name]), trees.tensors(padded[name])
        lengths: dict[int, list[int]] = {}
        for a, b in zip(before, after, strict=False):
            if a.dim() == b.dim():
                for short, long in zip(a.shape, b.shape, strict=True):
                    if short < long:
                        lengths.setdefault(long, []).append(short)
        found |= {Growth(tuple(shorts), long): None for long, shorts in lengths.items()}
    return tuple(found)


def alignments(a: Tensor, b: Tensor, known: tuple[Growth, ...]) -> list[Aligned]:
    """The ways to compare two tensors; none where dtype, rank or more than one dimension differ."""
    if a.dtype != b.dtype or a.dim() != b.dim():
        return []
    dims = [dim for dim in range(a.dim()) if a.shape[dim] != b.shape[dim]]
    if not dims:
        return [Aligned("all", a, b)]
    if len(dims) > 1:
        return []
    dim = dims[0]
    short, long = sorted((a.shape[dim], b.shape[dim]))
    found = {parts: None for growth in known for parts in _layouts(growth, short=short, long=long)}
    return [_cut(a, b, dim=dim, parts=parts) for parts in found or {(Part(0, 0, short),): None}]


class Part(NamedTuple):
    """Neighbouring rows that both tensors have."""

    short: int
    """Where they begin in the shorter tensor."""
    long: int
    """Where they begin in the longer one."""
    rows: int


def _layouts(growth: Growth, *, short: int, long: int) -> Iterator[tuple[Part, ...]]:
    """The rows that both tensors have, by where the prompts may lie in them.

    `inner` are the rows that a prompt takes in the shorter one: some models round it up.
    """
    native, gap = min(growth.native), long - short
    count = long // growth.padded
    if count > 1 and long == count * growth.padded and short % count == 0:  # prompts one after the other
        rows = growth.native if len(growth.native) == count else (native,) * count
        if max(rows) <= short // count:
            yield tuple(Part(i * (short // count), i * growth.padded, each) for i, each in enumerate(rows))
    inner = growth.padded - gap
    if native <= inner <= short:
        yield (Part(0, 0, short - inner + native),)
        if inner < short:
            yield Part(0, 0, native), Part(inner, growth.padded, short - inner)


def _cut(a: Tensor, b: Tensor, *, dim: int, parts: tuple[Part, ...]) -> Aligned:
    of_a, of_b = [(p.short, p.rows) for p in parts], [(p.long, p.rows) for p in parts]
    if a.shape[dim] > b.shape[dim]:
        of_a, of_b = of_b, of_a

    def of(tensor: Tensor, spans: list[tuple[int, int]]) -> Tensor:
        return torch.cat([tensor.narrow(dim, start, rows) for start, rows in spans], dim=dim)

    def text(tensor: Tensor, spans: list[tuple[int, int]]) -> str:
        return f"{', '.join(f'{start}..{start + rows - 1}' for start, rows in spans)} of {tensor.shape[dim]}"

    rows = f"{text(a, of_a)} in dimension {dim}, of the other {text(b, of_b)}"
    return Aligned(rows, of(a, of_a), of(b, of_b))


def limit(dtype: torch.dtype) -> float:
    """What padding may change by rounding, as a share."""
    wide = dtype in {torch.float32, torch.float64, torch.complex64, torch.complex128}
    return DEFAULTS.max_padding_float32 if wide else DEFAULTS.max_padding_half


def share(a: Tensor, b: Tensor) -> float:
    """Size of b - a relative to a: the larger of max/max and mean/mean; infinity where it is no number."""
    if bit_equal(a, b):
        return 0.0
    a, b = _real(a), _real(b)
    gap = torch.where(a == b, 0.0, (b - a).abs())
    sizes = [(gap.max().item(), a.abs().max().item()), (gap.mean().item(), a.abs().mean().item())]
    shares = [0.0 if top == 0 else top / bottom if bottom else math.inf for top, bottom in sizes]
    return max(shares) if all(map(math.isfinite, shares)) else math.inf


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().double()


def differs(found: list[Aligned], *, rounding: bool) -> Aligned | None:
    """The alignment with the smallest difference; None where it is none, or with `rounding` within the limit."""
    if not found:
        return None
    if not rounding:
        return found[0] if all(not bit_equal(each.a, each.b) for each in found) else None
    sized = min(((share(each.a, each.b), number) for number, each in enumerate(found)))
    best = found[sized[1]]
    return best if sized[0] > limit(best.a.dtype) else None


def contrast(pair: Aligned, *, name: str, rounding: bool) -> Contrast:
    """What is shown of a pair that differs."""
    a, b = pair.a.detach().cpu(), pair.b.detach().cpu()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    index = _first(a, b, rounding=rounding)
    return Contrast(
        difference=fidelity.compare(a, b, name=name), share=min(share(a, b), fidelity.NOT_FINITE), rows=pair.rows,
        index=index, value_a=_text(a[index]), value_b=_text(b[index]),
    )  # fmt: skip


def _text(value: Tensor) -> str:
    plain: Any = value.item()
    return f"{plain:.9g}" if isinstance(plain, float) else str(plain)


def _first(a: Tensor, b: Tensor, *, rounding: bool) -> tuple[int, ...]:
    unlike = (bits(a) != bits(b)).flatten()
    if rounding:
        wide = (_real(a) - _real(b)).abs().flatten() > limit(a.dtype) * _real(a).abs().max()
        unlike = wide if bool(wide.any()) else unlike
    at = int(unlike.int().argmax())
    return tuple(int(axis) for axis in torch.unravel_index(torch.tensor(at), a.shape))
