"""Two outputs to one `Difference`: bit-exactness first, then sizes of the difference. And the files that show it.

Here: digests, comparing, saving arrays. Not here: which difference is acceptable (`verdict.py`). PSNR of a set is never
averaged: exact pairs have none (MSE 0), so a mean would be one of the others only.

**NaN and infinity.** JSON has neither, so no figure here is ever one. Positions whose bytes differ and where either
value is not finite count as differing and belong to the bounding box; their difference is no number, so `max_abs`
becomes `NOT_FINITE` (the largest float64), `psnr_db` None, and `mean_abs` and `rms` speak of the other positions.
Positions whose bytes are equal differ by 0, whatever they hold.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bcgbench.errors import BcgbenchError
from bcgbench.types import Difference

if TYPE_CHECKING:
    from collections.abc import Mapping

NDArray = np.ndarray[Any, Any]
Array = NDArray | torch.Tensor

NOT_FINITE = sys.float_info.max
"""`max_abs` where a finite value met NaN or infinity: above any limit, and valid JSON."""
CHUNK_VALUES = 1 << 22
"""Values converted to float64 at once: 32 MiB per array, whatever the size of the output."""
SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a value -> the integer to see them as; numpy has no bfloat16 or float8."""
PIXEL_RANGE = 255.0
SSIM_SIGMA, SSIM_WINDOW_PX = 1.5, 11
"""Wang et al., Image quality assessment: from error visibility to structural similarity, IEEE TIP 13(4), 2004."""
IMAGE_AXES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flat:
    """An array on the host: flat bytes for equality, flat values for arithmetic."""

    dtype: str
    shape: tuple[int, ...]
    raw: NDArray
    """Integers as wide as a value, one axis: equal integers are equal bytes, NaN or not."""
    values: torch.Tensor
    """One axis, in the original dtype."""

    @property
    def sha256(self) -> str:
        """Digest of dtype, shape and bytes, so that equal bytes of another shape differ."""
        digest = hashlib.sha256(f"{self.dtype}{list(self.shape)}".encode())
        digest.update(self.raw.data)
        return digest.hexdigest()

    def float64(self, start: int) -> NDArray:
        """One chunk of values: converted before any arithmetic, because uint8 wraps around and bfloat16 rounds."""
        return self.values[start : start + CHUNK_VALUES].to(torch.float64).numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """How large the differences are, over positions where they are numbers."""

    max_abs: float
    mean_abs: float
    rms: float
    all_finite: bool


def digest(array: Array) -> str:
    """SHA-256 (hex) of dtype, shape and bytes. A tensor and a numpy array of the same values have the same digest."""
    return _flatten(array).sha256


def compare(a: Array, b: Array, *, name: str, data_range: float | None = None, ssim: bool = False) -> Difference:
    """Compare `b` with the reference `a`, of equal shape and dtype; statistics in float64, one chunk at a time.

    `exact` means equal bytes: NaNs of another payload and zeros of another sign differ. `data_range` is the span that
    PSNR refers to: 255 for uint8, else as given, else twice the largest finite magnitude of `a`. `ssim` asks for the
    structural similarity of uint8 images (..., height, width, channels), the mean over frames; None below 11 px.
    BcgbenchError for unequal shapes or dtypes (nothing is resized or converted) and for complex values.
    """
    flat_a, flat_b = _flatten(a), _flatten(b)
    if (flat_a.shape, flat_a.dtype) != (flat_b.shape, flat_b.dtype):
        raise BcgbenchError(
            f"{name}: the outputs cannot be compared, the reference is {flat_a.dtype}{list(flat_a.shape)} and the "
            f"other {flat_b.dtype}{list(flat_b.shape)}. Nothing is resized or converted: run both at one size and dtype"
        )
    differs = flat_a.raw != flat_b.raw
    differing = int(differs.sum())
    sizes = _measure(flat_a, flat_b, differs=differs)
    span = _data_range(flat_a, given=data_range)
    sha256_a = flat_a.sha256
    return Difference(
        name=name,
        exact=not differing,
        sha256_a=sha256_a,
        sha256_b=flat_b.sha256 if differing else sha256_a,
        total=differs.size,
        differing=differing,
        max_abs=sizes.max_abs if sizes.all_finite else NOT_FINITE,
        mean_abs=sizes.mean_abs,
        rms=sizes.rms,
        bounding_box=_bounding_box(differs.reshape(flat_a.shape)) if differing else None,
        data_range=span,
        psnr_db=_psnr_db(sizes, data_range=span),
        ssim=_ssim(_pixels(a), _pixels(b)) if ssim else None,
    )


def save_png(image: Array, path: Path) -> None:
    """Write a uint8 image, (height, width) or (height, width, 3 or 4), losslessly. The file appears complete or not."""
    from PIL import Image

    pixels = _pixels(image)
    if not (pixels.ndim == IMAGE_AXES - 1 or (pixels.ndim == IMAGE_AXES and pixels.shape[2] in (3, 4))):
        raise BcgbenchError(
            f"a PNG holds one image, (height, width[, 3 or 4]); got {pixels.shape}. Save frame by frame"
        )
    with replacing(path) as draft:
        Image.fromarray(pixels).save(draft, format="PNG")


def save_latents(
    latents: torch.Tensor | Mapping[str, torch.Tensor], path: Path, *, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors in safetensors format, a single one under the name "latents". Complete or not at all."""
    from safetensors.torch import save_file

    named = {"latents": latents} if isinstance(latents, torch.Tensor) else latents
    with replacing(path) as draft:
        save_file({key: value.detach().cpu().contiguous() for key, value in named.items()}, draft, metadata)


def _flatten(array: Array) -> _Flat:
    """Copy to the host where needed. BcgbenchError for complex values and for dtypes that torch does not know."""
    try:
        tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array, order="C"))
    except TypeError as error:
        raise BcgbenchError(f"cannot compare an array of dtype {np.asarray(array).dtype}: {error}") from error
    if tensor.is_complex():
        raise BcgbenchError(f"cannot compare {tensor.dtype}: compare the real and imaginary parts on their own")
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return _Flat(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        raw=values.view(SAME_WIDTH[values.element_size()]).numpy(),
        values=values,
    )


def _measure(a: _Flat, b: _Flat, *, differs: NDArray) -> _Sizes:
    """Largest, mean and root mean square difference. Sums are capped at the largest float64 instead of overflowing."""
    largest = total = squares = 0.0
    numbers = differs.size
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, differs.size, CHUNK_VALUES):
            part = differs[start : start + CHUNK_VALUES]
            if not part.any():
                continue
            gaps = np.abs(a.float64(start)[part] - b.float64(start)[part])
            finite = gaps[np.isfinite(gaps)]
            numbers -= gaps.size - finite.size
            largest = max(largest, float(finite.max(initial=0.0)))
            total += float(finite.sum())
            squares += float(np.square(finite).sum())
    count = max(numbers, 1)
    return _Sizes(
        max_abs=largest,
        mean_abs=min(total / count, NOT_FINITE),
        rms=math.sqrt(min(squares / count, NOT_FINITE)),
        all_finite=numbers == differs.size,
    )


def _data_range(a: _Flat, *, given: float | None) -> float:
    """255 for uint8, else `given`, else twice the largest finite magnitude of the reference (1.0 if that is 0)."""
    if a.dtype == "uint8":
        return PIXEL_RANGE
    if given is not None:
        if not (given > 0 and math.isfinite(given)):
            raise BcgbenchError(f"a data range must be above 0 and finite, got {given}")
        return float(given)
    magnitudes = (np.abs(a.float64(start)) for start in range(0, a.values.numel(), CHUNK_VALUES))
    largest = max((float(m[np.isfinite(m)].max(initial=0.0)) for m in magnitudes), default=0.0)
    return min(2 * largest, NOT_FINITE) or 1.0


def _psnr_db(sizes: _Sizes, *, data_range: float) -> float | None:
    """10 log10(data_range² / MSE), by the root so that neither square overflows; None where it is infinite or NaN."""
    if sizes.rms <= 0 or not sizes.all_finite:
        return None
    return 20 * (math.log10(data_range) - math.log10(sizes.rms))


def _bounding_box(differs: NDArray) -> tuple[tuple[int, int], ...]:
    """First and last differing index of each axis."""
    box = []
    for axis in range(differs.ndim):
        others = tuple(other for other in range(differs.ndim) if other != axis)
        found = np.flatnonzero(differs.any(axis=others))
        box.append((int(found[0]), int(found[-1])))
    return tuple(box)


def _pixels(image: Array) -> NDArray:
    """A uint8 numpy array; BcgbenchError for any other dtype, whose range could only be guessed."""
    pixels = image.detach().cpu().numpy() if isinstance(image, torch.Tensor) else np.asarray(image)
    if pixels.dtype != np.uint8:
        raise BcgbenchError(f"expected an image of uint8 pixels, got {pixels.dtype}: convert it with a stated range")
    return pixels


def _ssim(a: NDArray, b: NDArray) -> float | None:
    """Mean structural similarity over frames and channels; None where no whole window fits."""
    from skimage import metrics

    similarity: Any = metrics.structural_similarity  # untyped
    if a.ndim < IMAGE_AXES or min(a.shape[-3:-1]) < SSIM_WINDOW_PX:
        return None
    frames = zip(a.reshape(-1, *a.shape[-3:]), b.reshape(-1, *b.shape[-3:]), strict=True)
    scores = [
        1.0 if np.array_equal(x, y) else similarity(  # a second per frame of a video that is exact
            x, y, gaussian_weights=True, sigma=SSIM_SIGMA, use_sample_covariance=False, data_range=255, channel_axis=-1
        )
        for x, y in frames
    ]  # fmt: skip
    return float(np.mean(scores)) if scores else None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes `path`'s place at the end, or is removed after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
