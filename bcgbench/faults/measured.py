"""Faults of what is measured and compared: clocks, stages, metrics, pictures and sound."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from bcgbench import bench, fidelity, measure
from bcgbench.faults.places import ARM, changed_final, in_arm, replaced
from bcgbench.floor import peak_of
from bcgbench.models import z_image
from bcgbench.published import FIGURES
from bcgbench.tap import DenoiseTap
from bcgbench.types import Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bcgbench.answers import Final
    from bcgbench.types import Record, Sample

Patch = AbstractContextManager[Any]


# --- clocks: these need records of a GPU, where times count -----------------------------------------------------------


def timer_stopped_early() -> Patch:
    """The device's timer is read after the first step, while the others are still to come."""

    def early_s(tap: DenoiseTap) -> float:
        return tap._clock.elapsed_s(tap._marks[0], tap._marks[1])

    return patch.object(DenoiseTap, "denoise_event_s", property(early_s))


def no_event_time() -> Patch:
    """Only the host's clock was read."""
    return patch.object(DenoiseTap, "denoise_event_s", property(lambda _tap: None))


@contextmanager
def standing_clock() -> Iterator[None]:
    """Neither clock moves while the transformer runs."""
    nothing = property(lambda _tap: 0.0)
    with patch.object(DenoiseTap, "denoise_event_s", nothing), patch.object(DenoiseTap, "denoise_host_s", nothing):
        yield


def lost_stage() -> Patch:
    """The stage after denoising, decoding, is billed to nobody."""

    def request(original: Callable[..., Any], *args: Any, **kwargs: Any) -> measure.Measured:
        whole: measure.Measured = original(*args, **kwargs)
        return dataclasses.replace(whole, after_s=0.0)

    return replaced(measure, "request", request)


def moved_time() -> Patch:
    """Both clocks of one arm stop after its first step; the rest of denoising counts as decoding."""

    def request(original: Callable[..., Any], *args: Any, **kwargs: Any) -> measure.Measured:
        whole: measure.Measured = original(*args, **kwargs)
        first_s = whole.step_s[0]
        moved_s = whole.denoise_host_s - first_s
        return dataclasses.replace(
            whole, denoise_event_s=first_s, denoise_host_s=first_s, after_s=whole.after_s + moved_s
        )

    return in_arm(lambda: replaced(measure, "request", request))


@contextmanager
def published_times() -> Iterator[None]:
    """Times as published for Z-Image-Turbo at 512x512 on a B200, with the FLOPs of that denoise."""
    figure = next(f for f in FIGURES if f.model == "Tongyi-MAI/Z-Image-Turbo")
    assert figure.denoise_s
    assert figure.total_s
    assert figure.floor_s
    flops = figure.floor_s * (peak_of(figure.gpu) or 0.0)
    times = dict(zip(("eager", ARM), zip(figure.denoise_s, figure.total_s, strict=True), strict=True))

    def sample(original: Callable[..., Sample], *args: Any, **kwargs: Any) -> Sample:
        made = original(*args, **kwargs)
        denoise_s, total_s = times.get(made.runner, times["eager"])
        return dataclasses.replace(made, denoise_event_s=denoise_s, denoise_host_s=denoise_s, before_s=0.0,
                                   after_s=total_s - denoise_s, end_to_end_s=total_s)  # fmt: skip

    def assemble(original: Callable[..., Record], *args: Any, **kwargs: Any) -> Record:
        return original(*args, **{**kwargs, "denoise_flops": flops})

    with replaced(bench, "sample_of", sample), replaced(bench, "assemble", assemble):
        yield


@contextmanager
def slower_for_memory() -> Iterator[None]:
    """The graph arm denoises in twice the time, and holds 4 GB more."""

    def sample(original: Callable[..., Sample], *args: Any, **kwargs: Any) -> Sample:
        made = original(*args, **kwargs)
        denoise_s = 2.0 if made.runner == ARM else 1.0
        return dataclasses.replace(made, denoise_event_s=denoise_s, denoise_host_s=denoise_s, before_s=0.0,
                                   after_s=0.5, end_to_end_s=denoise_s + 0.5)  # fmt: skip

    def assemble(original: Callable[..., Record], *args: Any, **kwargs: Any) -> Record:
        made = original(*args, **kwargs)
        pool_bytes = 4 * 10**9 if made.runner == ARM else 0
        held = Memory(weights_bytes=10**9, peak_allocated_bytes=2 * 10**9 + pool_bytes, peak_reserved_bytes=10**10,
                      pool_bytes=pool_bytes)  # fmt: skip
        return dataclasses.replace(made, memory=held)

    with replaced(bench, "sample_of", sample), replaced(bench, "assemble", assemble):
        yield


# --- metrics and outputs --------------------------------------------------------------------------------------------


@contextmanager
def wrapped_psnr() -> Iterator[None]:
    """Every pixel is 16 levels off, and the metric squares differences as bytes, where 16 * 16 is 0."""

    def values(original: Callable[..., Any], self: Any, start: int) -> Any:
        pixels = self.dtype == "uint8"
        return self.values[start : start + fidelity.CHUNK_VALUES].numpy() if pixels else original(self, start)

    def shift(final: Final) -> None:
        np.add(final.images, 16, out=final.images)

    with changed_final(shift), replaced(fidelity._Flat, "float64", values):
        yield


def resized_image() -> Patch:
    """One arm's picture was made at half the size and scaled up."""

    def change(final: Final) -> None:
        final.images[:] = final.images[:, ::2, ::2].repeat(2, axis=1).repeat(2, axis=2)

    return changed_final(change)


def other_size() -> Patch:
    """One arm's picture has half the size."""

    def pixels(original: Callable[..., Any], self: Any, output: Any) -> Any:
        return original(self, output)[:, ::2, ::2]

    return in_arm(lambda: replaced(z_image.ZImage, "pixels", pixels))


def wrong_in_a_round() -> Patch:
    """The requests are right, and a measured picture is not."""

    def image(original: Callable[..., Final], self: Any, live: Any, **turn: Any) -> Final:
        final = original(self, live, **turn)
        if live.name == ARM and turn["phase"] == "measure":
            final.latents.add_(1)
        return final

    return replaced(bench.CaseBench, "_image", image)


def other_sound() -> Patch:
    """Frames and latents are right, the sound is a little louder."""

    def change(final: Final) -> None:
        assert final.sound is not None
        np.multiply(final.sound.samples, 1.01, out=final.sound.samples)

    return changed_final(change)


def one_wrong_frame() -> Patch:
    """The last pixel of the last frame of a video is one level off."""

    def change(final: Final) -> None:
        final.images[-1, -1, -1] ^= 1

    return changed_final(change)
