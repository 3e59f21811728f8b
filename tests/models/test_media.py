"""Sound beside the frames: read, checked, compared and counted by the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bcgbench import answers, bench
from bcgbench.answers import CallTally, Final, Finals
from bcgbench.errors import BcgbenchError
from bcgbench.models import adapter, base, media
from bcgbench.models.media import Media, Sound
from bcgbench.types import Case, Fidelity
from bcgbench.verdict import compare
from tests.running import records_of


def sound(*, change: float = 0.0, samples: int = 100, rate_hz: int = 24_000) -> Sound:
    """Two channels of a sine at half of full scale, one sample changed in the second."""
    wave = np.tile(0.5 * np.sin(np.arange(samples) / 5), (2, 1)).astype(np.float32)
    wave[1, 7] += change
    return Sound(samples=wave, rate_hz=rate_hz)


def final(heard: Sound | None) -> Final:
    return Final(torch.zeros(4), Media(images=np.zeros((5, 16, 16, 3), np.uint8), sound=heard))


def answer(a: Sound | None, b: Sound | None) -> Fidelity:
    """Equal in all but the sound."""
    tally = CallTally()
    tally.add((torch.ones(1),), (torch.ones(1),))
    expected, got = Finals(by_prompt={0: final(a)}), Finals(by_prompt={0: final(b)}, again=[final(b)])
    return answers.answer("graph", reference="eager-padded", tally=tally, expected=expected, got=got)


def test_equal_sounds_are_exact():
    """Compared for every prompt and for the repetition."""
    found = answer(sound(), sound())
    assert found.exact
    assert [d.name for d in found.audio] == ["audio 0", "audio 0 again"]


def test_a_difference_in_the_sound_alone_is_a_difference():
    """Where it is, by channel and sample, and how large: the SNR is 10 log10 of signal over error power."""
    found = answer(sound(), sound(change=0.25))
    assert not found.exact
    assert all(d.exact for d in (*found.latents, *found.images))
    difference = found.audio[0]
    assert (difference.differing, difference.bounding_box) == (1, ((1, 1), (7, 7)))
    assert difference.max_abs == pytest.approx(0.25)
    power, error = np.square(sound().samples.astype(float)).mean(), 0.25**2 / 200
    assert difference.psnr_db == pytest.approx(10 * np.log10(power / error))
    assert not final(sound()).equals(final(sound(change=0.25)))


def test_silence_has_a_range():
    """An RMS of 0 is no span; full scale stands in for it."""
    silent = replace(sound(), samples=np.zeros((2, 100), np.float32))
    assert answer(silent, silent).audio[0].data_range == 1.0


@pytest.mark.parametrize(("other", "message"), [
    (sound(samples=99), r"audio 0: .*\[2, 100\].*\[2, 99\]"),
    (sound(rate_hz=48_000), "audio 0: .* 24000 samples a second and the other 48000"),
    (None, "audio 0: one of the outputs has no sound"),
])  # fmt: skip
def test_sounds_that_cannot_be_compared_are_an_error(other: Sound | None, message: str):
    """Another length, rate or none at all is never a small difference."""
    with pytest.raises(BcgbenchError, match=message):
        answer(sound(), other)


def test_images_alone_have_no_audio_to_compare():
    """Nothing is claimed about a sound that no model made."""
    assert answer(None, None).audio == ()
    assert answer(None, None).exact


@pytest.mark.parametrize("waveform", [torch.zeros(100), torch.zeros(2, 2, 100), torch.zeros(1, 100, 2)])
def test_a_waveform_of_another_shape_is_an_error(waveform: torch.Tensor):
    """Batches, mono without its axis and swapped axes would be read as something else."""
    with pytest.raises(BcgbenchError, match=r"expected \[1, channels, samples\]"):
        media.sound(waveform, rate_hz=24_000)


@pytest.mark.parametrize(("model", "rate_hz"), [("tiny/ltx-2", 24_000), ("tiny/ltx-2.3", 48_000)])
def test_ltx_hands_its_sound_on_at_the_vocoders_rate(model: str, rate_hz: int):
    """float32 whatever the dtype of the model, finite, not silent, as long as the pipeline's own."""
    case = Case(model=model, width_px=32, height_px=32, frames=5, steps=2, prompts=("a", "b"), device="cpu")
    session = base.load(case)
    with torch.no_grad():
        heard = session.produce(0).sound
        plain = session.pipe(**session.request(0)).audio[0].float().numpy()
    assert heard is not None
    assert (heard.rate_hz, heard.samples.dtype) == (rate_hz, np.float32)
    assert (heard.samples == plain).all()
    assert heard.samples.std() > 0


def test_minimax_hands_its_sound_on():
    """From the state of the modular pipeline."""
    state = {"audio": torch.ones(1, 2, 30), "sampling_rate": 44_100}
    heard = adapter("tiny/minimax-h3").audio(state, pipe=None)
    assert heard is not None
    assert (heard.rate_hz, heard.samples.shape) == (44_100, (2, 30))


def test_a_sound_with_nan_fails_like_a_picture():
    """The message names the model and the dtype."""
    model = adapter("tiny/ltx-2")
    output = SimpleNamespace(audio=torch.full((1, 2, 30), float("nan")), frames=np.zeros((1, 5, 32, 32, 3)))
    pipe = SimpleNamespace(vocoder=SimpleNamespace(config=SimpleNamespace(output_sampling_rate=24_000)))
    case = Case(model="tiny/ltx-2", width_px=32, height_px=32, steps=2, prompts=("a", "b"), device="cpu")
    with pytest.raises(BcgbenchError, match="tiny/ltx-2 made a sound with NaN or infinity in bfloat16"):
        media.collect(output, pipe=pipe, adapter=model, case=case)


def test_a_wrong_sound_makes_the_verdict_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whole case: latents and every frame are right, one sample of one request's sound is not, exit code 3."""
    image = bench.CaseBench._image

    def wrong(self: bench.CaseBench, live: bench.Live, **turn: object) -> Final:
        made = image(self, live, **turn)  # type: ignore[arg-type]
        if live.name == "bcg" and turn["phase"] == "req2":
            made.media.sound.samples[0, 3] += 1e-3  # type: ignore[union-attr]
        return made

    monkeypatch.setattr(bench.CaseBench, "_image", wrong)
    case = Case(model="tiny/ltx-2", width_px=32, height_px=32, frames=5, steps=2, prompts=("a", "b"), device="cpu",
                dtype="float32", rounds=1, profile=False, runners=("eager", "bcg"))  # fmt: skip
    records = records_of(case, tmp_path)
    verdict = compare(records["eager"], records["bcg"])
    assert (verdict.exact, verdict.exit_code) == (False, 3)
    assert "SNR" in verdict.fidelity
    assert "audio 1" in verdict.fidelity
