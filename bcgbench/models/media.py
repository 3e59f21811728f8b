"""What a request ends with besides its latents: frames as uint8 and sound as float32, both checked.

Here: the checks that hold for every model. Not here: where a pipeline keeps its frames and its sound (the adapters),
comparing (`answers`), writing files (`artifacts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bcgbench.errors import BcgbenchError

if TYPE_CHECKING:
    import numpy as np

    from bcgbench.models.base import Adapter
    from bcgbench.types import Case

CHANNELS_LIMIT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """A waveform on the host."""

    samples: np.ndarray[Any, Any]
    """float32 (channels, samples); full scale is -1 to 1."""
    rate_hz: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """Frames and sound of one request."""

    images: np.ndarray[Any, Any]
    """uint8 (images or frames, height, width, 3)."""
    sound: Sound | None = None
    """None where the model makes none."""

    def equals(self, other: Media) -> bool:
        """Whether frames and sound have the same bytes."""
        import numpy as np

        mine, others = [each and (each.rate_hz, each.samples.tobytes()) for each in (self.sound, other.sound)]
        return np.array_equal(self.images, other.images) and mine == others


def sound(waveform: Any, *, rate_hz: int) -> Sound:
    """A pipeline's waveform [1, channels, samples] or [channels, samples], any float dtype, as a `Sound`.

    BcgbenchError for another shape, which would be read as many channels or many sounds.
    """
    import torch

    tensor = torch.as_tensor(waveform).detach()
    one = tensor[0] if tensor.ndim == 3 and len(tensor) == 1 else tensor  # noqa: PLR2004 - a batch of one
    if one.ndim != 2 or not 1 <= len(one) <= CHANNELS_LIMIT:  # noqa: PLR2004 - (channels, samples)
        raise BcgbenchError(
            f"A waveform has the shape {list(tensor.shape)}, expected [1, channels, samples] with up to "
            f"{CHANNELS_LIMIT} channels. Check what the installed diffusers' pipeline returns as audio."
        )
    return Sound(samples=one.float().cpu().numpy(), rate_hz=int(rate_hz))


def collect(output: Any, *, pipe: Any, adapter: Adapter, case: Case) -> Media:
    """A pipeline's output, checked: BcgbenchError when the size is not the asked one or NaN or infinity is in it."""
    import numpy as np

    heard = adapter.audio(output, pipe=pipe)
    if heard is not None and not np.isfinite(heard.samples).all():
        raise BcgbenchError(f"{adapter.facts.id} made a sound with NaN or infinity in {case.dtype}.")
    return Media(images=frames(adapter.pixels(output), adapter=adapter, case=case), sound=heard)


def frames(pixels: Any, *, adapter: Adapter, case: Case) -> np.ndarray[Any, Any]:
    """Float pixels in [0, 1] as uint8; BcgbenchError as `collect`."""
    import numpy as np

    pixels = np.asarray(pixels)
    asked = (case.frames or len(pixels), case.height_px, case.width_px)
    if pixels.shape[:3] != asked:
        raise BcgbenchError(
            f"{adapter.facts.pipeline} made {pixels.shape[2]}x{pixels.shape[1]} pixels, asked were "
            f"{asked[2]}x{asked[1]}, and {len(pixels)} of {asked[0]} frames. Use a multiple of "
            f"{adapter.facts.multiple_px} pixels, and a number of frames that the model makes."
        )
    if not np.isfinite(pixels).all():
        raise BcgbenchError(f"{adapter.facts.id} made a picture with NaN or infinity in {case.dtype}.")
    return (pixels * 255).round().astype(np.uint8)
