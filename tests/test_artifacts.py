"""Files of a run: every frame and every sample comes back, and nothing is written twice."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bcgbench.answers import Final, Finals
from bcgbench.artifacts import Saver, save_video, save_wav
from bcgbench.models.media import Media, Sound
from tests import factories as make


def frames(count: int, *, seed: int = 0) -> np.ndarray:
    """Noise, the hardest to pack."""
    return np.random.default_rng(seed).integers(0, 256, (count, 16, 24, 3), dtype=np.uint8)


def finals(count: int, *, heard: Sound | None = None, seed: int = 0) -> Finals:
    return Finals(by_prompt={0: Final(torch.zeros(3), Media(images=frames(count, seed=seed), sound=heard))})


def test_a_video_keeps_every_pixel_of_every_frame(tmp_path: Path):
    """Lossless, in order, played at the model's rate."""
    made = frames(9)
    save_video(made, tmp_path / "v.webp", frame_rate=24.0)
    with Image.open(tmp_path / "v.webp") as video:
        assert video.n_frames == 9
        for index, frame in enumerate(made):
            video.seek(index)
            assert (np.asarray(video.convert("RGB")) == frame).all()
            assert video.info["duration"] == 42
    assert [path.name for path in tmp_path.iterdir()] == ["v.webp"]


def test_a_sound_is_pcm_at_its_own_rate(tmp_path: Path):
    """Channels interleaved, full scale at 32767, clipped beyond."""
    heard = Sound(samples=np.array([[0.0, 1.0, -1.0], [0.5, 2.0, -2.0]], np.float32), rate_hz=48_000)
    save_wav(heard, tmp_path / "a.wav")
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()) == (2, 2, 48_000, 3)
        values = np.frombuffer(file.readframes(3), "<i2").reshape(3, 2).T
    assert values.tolist() == [[0, 32767, -32767], [16384, 32767, -32767]]


@pytest.mark.parametrize(("count", "heard", "kinds"), [
    (1, None, ["png", "safetensors"]),
    (5, None, ["png", "safetensors", "webp"]),
    (5, Sound(samples=np.zeros((1, 9), np.float32), rate_hz=8_000), ["png", "safetensors", "wav", "webp"]),
])  # fmt: skip
def test_what_is_written(count: int, heard: Sound | None, kinds: list[str], tmp_path: Path):
    """A picture is a PNG; a video all its frames and the first as a PNG; a sound a WAV."""
    paths = Saver(tmp_path, make.case(), 24.0).save(finals(count, heard=heard), runner="eager")
    assert sorted(path.rpartition(".")[2] for path in paths.values()) == kinds
    assert all((tmp_path / path).is_file() for path in paths.values())


def test_equal_outputs_share_their_files(tmp_path: Path):
    """An exact graph costs no disk; an arm that differs gets files of its own."""
    saver = Saver(tmp_path, make.case(), 24.0)
    eager, bcg = (saver.save(finals(5), runner=name) for name in ("eager", "bcg"))
    wrong = saver.save(finals(5, seed=1), runner="graph")
    assert eager == bcg
    assert not set(eager.values()) & set(wrong.values())
    assert len(list((tmp_path / "artifacts").iterdir())) == 6
