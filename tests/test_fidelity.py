"""fidelity: bit-exactness, statistics against closed forms and scikit-image, NaN, heat maps, saved files."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from safetensors.torch import load_file
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from bcgbench import fidelity
from bcgbench.errors import BcgbenchError
from bcgbench.fidelity import NOT_FINITE, compare, digest, save_latents, save_png
from bcgbench.store import to_json

IMAGES = hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3)))
FLOATS = st.floats(-1e3, 1e3, width=32)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    """Random pixels."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def flat(level: int, *shape: int) -> np.ndarray:
    """Pixels of one level."""
    return np.full(shape, level, dtype=np.uint8)


@given(IMAGES)
def test_an_image_equals_itself(image):
    """Equal bytes are exact; PSNR is then None, never infinity."""
    found = compare(image, image.copy(), name="image 0")
    assert found.exact
    assert (found.differing, found.max_abs, found.mean_abs, found.rms) == (0, 0.0, 0.0, 0.0)
    assert found.psnr_db is None
    assert found.bounding_box is None
    assert found.sha256_a == found.sha256_b == digest(image)


@given(st.data())
def test_swapping_the_arms_changes_no_figure(data):
    """|a - b| = |b - a|: only the digests change places."""
    a = data.draw(IMAGES)
    b = data.draw(hnp.arrays(np.uint8, a.shape))
    ab, ba = compare(a, b, name="x"), compare(b, a, name="x")
    assert (ab.sha256_a, ab.sha256_b) == (ba.sha256_b, ba.sha256_a)
    for field in ("exact", "total", "differing", "max_abs", "mean_abs", "rms", "bounding_box", "psnr_db", "data_range"):
        assert getattr(ab, field) == getattr(ba, field)


@given(st.integers(1, 255), st.integers(1, 8), st.integers(1, 8))
def test_a_constant_offset_has_a_closed_form(offset, height, width):
    """An offset of k levels everywhere: max = mean = rms = k, PSNR = 20 log10(255 / k)."""
    found = compare(flat(0, height, width, 3), flat(offset, height, width, 3), name="x")
    assert found.max_abs == found.mean_abs == offset
    assert found.rms == pytest.approx(offset)
    assert found.psnr_db == pytest.approx(20 * math.log10(255 / offset))
    assert found.differing == found.total == height * width * 3


def test_every_pixel_off_by_one_is_48_13_db():
    """The PSNR of one level everywhere in 8 bits."""
    assert compare(flat(7, 16, 16, 3), flat(8, 16, 16, 3), name="x").psnr_db == pytest.approx(48.13, abs=0.005)


def test_one_value_off_by_one_is_107_1_db():
    """The largest finite PSNR of a 512x512 RGB image, and where the value is."""
    a = noise(512, 512, 3)
    b = a.copy()
    b[100, 200, 1] ^= 1
    found = compare(a, b, name="x")
    assert found.psnr_db == pytest.approx(107.1, abs=0.05)
    assert found.differing == 1
    assert found.bounding_box == ((100, 100), (200, 200), (1, 1))


def test_uint8_differences_do_not_wrap_around():
    """250 and 10 differ by 240, not by 16; +16 levels are 24.05 dB in either direction."""
    assert compare(flat(250, 2, 2, 3), flat(10, 2, 2, 3), name="x").max_abs == 240
    for a, b in ((100, 116), (116, 100)):
        assert compare(flat(a, 4, 4, 3), flat(b, 4, 4, 3), name="x").psnr_db == pytest.approx(24.05, abs=0.005)


@given(st.data())
def test_psnr_agrees_with_scikit_image(data):
    """The same figure for random images, wherever it is finite."""
    a = data.draw(IMAGES)
    b = data.draw(hnp.arrays(np.uint8, a.shape))
    if not np.array_equal(a, b):
        expected = peak_signal_noise_ratio(a, b, data_range=255)
        assert compare(a, b, name="x").psnr_db == pytest.approx(expected)


@given(hnp.arrays(np.float32, 12, elements=FLOATS), hnp.arrays(np.float32, 12, elements=FLOATS))
def test_float_statistics_agree_with_numpy(a, b):
    """Statistics of latents are those of float64 arithmetic."""
    found = compare(torch.from_numpy(a), torch.from_numpy(b), name="latents 0", data_range=2.0)
    gaps = np.abs(a.astype(np.float64) - b)
    assert found.max_abs == pytest.approx(gaps.max())
    assert found.mean_abs == pytest.approx(gaps.mean())
    assert found.rms == pytest.approx(math.sqrt(np.mean(gaps**2)))


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_do_not_change_the_figures(monkeypatch, chunk):
    """An output larger than a chunk is compared as a whole."""
    a, b = noise(4, 5, 3), noise(4, 5, 3, seed=1)
    whole = compare(a, b, name="x")
    monkeypatch.setattr(fidelity, "CHUNK_VALUES", chunk)
    assert compare(a, b, name="x") == whole


def test_a_tensor_and_an_array_have_one_digest():
    """Where the values are kept does not matter; their dtype and shape do."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert digest(values) == digest(torch.from_numpy(values))
    assert len({digest(values), digest(values.reshape(3, 2)), digest(values.view(np.int32))}) == 3


def test_a_view_has_the_digest_of_its_copy():
    """Strides are no part of an output."""
    values = torch.arange(6.0).reshape(2, 3).T
    assert digest(values) == digest(values.clone(memory_format=torch.contiguous_format))
    assert digest(np.arange(6)[::-1]) == digest(np.arange(6)[::-1].copy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32, torch.int64])
def test_every_dtype_of_a_model_can_be_compared(dtype):
    """numpy has no bfloat16 and no float8."""
    a = torch.tensor([1.0, 2.0, 4.0]).to(dtype)
    b = torch.tensor([1.0, 2.0, 8.0]).to(dtype)
    found = compare(a, b, name="x", data_range=16.0)
    assert (found.differing, found.max_abs, found.bounding_box) == (1, 4.0, ((2, 2),))
    assert compare(a, a.clone(), name="x").exact


@pytest.mark.parametrize(("dtype", "small"), [(torch.bfloat16, 2.0**-9), (torch.float32, 2.0**-30)])
def test_differences_are_taken_in_float64(dtype, small):
    """1 minus a small value would round back to 1 in the original dtype."""
    a, b = torch.tensor([1.0], dtype=dtype), torch.tensor([small], dtype=dtype)
    assert compare(a, b, name="x").max_abs == 1.0 - small


def test_squares_are_taken_in_float64():
    """The square of 1e30 is no float32."""
    found = compare(torch.tensor([0.0]), torch.tensor([1e30]), name="x", data_range=1.0)
    assert found.rms == pytest.approx(1e30)
    assert found.psnr_db == pytest.approx(-600)


def test_zeros_of_another_sign_are_not_exact():
    """Equal values, other bytes: something was computed differently."""
    found = compare(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), name="x")
    assert not found.exact
    assert (found.differing, found.max_abs, found.psnr_db) == (1, 0.0, None)


def test_equal_nans_are_exact_and_other_payloads_are_not():
    """NaN is compared by its bits."""
    a = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    b = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert compare(a, a.clone(), name="x").exact
    found = compare(a, b, name="x")
    assert not found.exact
    assert (found.differing, found.max_abs, found.psnr_db) == (1, NOT_FINITE, None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_never_looks_small(value):
    """NaN in one arm is above every limit, and the record stays valid JSON."""
    a = torch.tensor([1.0, 2.0, 3.0])
    b = torch.tensor([1.0, 2.5, value])
    for found in (compare(a, b, name="x"), compare(b, a, name="x")):
        assert found.max_abs == NOT_FINITE
        assert (found.differing, found.mean_abs, found.psnr_db) == (2, 0.25, None)
        assert found.bounding_box == ((1, 2),)
        json.dumps(to_json(found), allow_nan=False)


def test_equal_infinities_do_not_hide_the_rest():
    """inf - inf is NaN, but positions of equal bytes differ by 0."""
    found = compare(torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 1.5]), name="x", data_range=1.0)
    assert (found.differing, found.max_abs, found.mean_abs) == (1, 0.5, 0.25)
    assert found.psnr_db is not None


def test_huge_values_do_not_overflow_the_record():
    """Squares and differences past float64 are capped."""
    found = compare(np.array([1e300, -1.7e308]), np.array([-1e300, 1.7e308]), name="x")
    json.dumps(to_json(found), allow_nan=False)
    assert found.max_abs == NOT_FINITE


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)),
        (np.zeros((2, 3), np.uint8), np.zeros((3, 2), np.uint8)),
        (np.zeros(4, np.float32), np.zeros(4, np.float64)),
        (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)),
    ],
)
def test_another_size_or_dtype_is_an_error(a, b):
    """Resizing or converting would hide a wrong output."""
    with pytest.raises(BcgbenchError, match="cannot be compared"):
        compare(a, b, name="image 0")


def test_complex_values_are_refused():
    """A magnitude alone would hide a phase."""
    with pytest.raises(BcgbenchError, match="real and imaginary"):
        compare(torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64), name="x")


@pytest.mark.parametrize(
    ("reference", "given_range", "expected"),
    [([1.0, -4.0], None, 8.0), ([0.0, 0.0], None, 1.0), ([1.0, -4.0], 3.0, 3.0), ([1.0, math.inf], None, 2.0)],
)
def test_the_data_range_is_stated(reference, given_range, expected):
    """Twice the largest finite magnitude of the reference unless given; never 0."""
    found = compare(torch.tensor(reference), torch.tensor([1.0, 1.0]), name="x", data_range=given_range)
    assert found.data_range == expected


@pytest.mark.parametrize("data_range", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_data_range_is_refused(data_range):
    """PSNR needs a span."""
    with pytest.raises(BcgbenchError, match="data range"):
        compare(torch.zeros(2), torch.ones(2), name="x", data_range=data_range)


def test_scalars_and_empty_outputs():
    """No axis, or no value."""
    assert compare(torch.tensor(1.0), torch.tensor(2.0), name="x").bounding_box == ()
    assert compare(torch.zeros(0, 4), torch.zeros(0, 4), name="x").exact


def test_ssim_is_that_of_wang_et_al():
    """Gaussian window of 11 px and sigma 1.5, mean over channels and frames; 1 for equal images."""
    a, b = noise(2, 24, 16, 3), noise(2, 24, 16, 3, seed=1)
    settings = {"gaussian_weights": True, "sigma": 1.5, "win_size": 11, "use_sample_covariance": False}
    frames = zip(a, b, strict=True)
    expected = [structural_similarity(x, y, **settings, data_range=255, channel_axis=-1) for x, y in frames]
    assert compare(a, b, name="x", ssim=True).ssim == pytest.approx(np.mean(expected))
    assert compare(a, a, name="x", ssim=True).ssim == pytest.approx(1.0)
    assert compare(a, b, name="x").ssim is None


@pytest.mark.parametrize(("height", "width", "has_ssim"), [(11, 11, True), (10, 64, False), (64, 10, False)])
def test_ssim_needs_a_whole_window(height, width, has_ssim):
    """Below 11 px on a side there is none."""
    found = compare(noise(height, width, 3), noise(height, width, 3, seed=1), name="x", ssim=True)
    assert (found.ssim is not None) == has_ssim


def test_ssim_of_floats_is_refused():
    """Their range would be a guess."""
    with pytest.raises(BcgbenchError, match="uint8"):
        compare(np.zeros((16, 16, 3)), np.zeros((16, 16, 3)), name="x", ssim=True)


def test_a_png_keeps_every_pixel(tmp_path):
    """What is read back is what was written; no draft is left."""
    image, path = noise(5, 7, 3), tmp_path / "new" / "image.png"
    save_png(image, path)
    assert np.array_equal(np.asarray(Image.open(path)), image)
    assert [p.name for p in path.parent.iterdir()] == ["image.png"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """A file is replaced as a whole or not at all."""
    path = tmp_path / "image.png"
    save_png(flat(1, 2, 2, 3), path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        args[1].write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_png(flat(2, 2, 2, 3), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["image.png"]


@pytest.mark.parametrize("shape", [(2, 4, 4, 3), (4, 4, 2), (4,)])
def test_a_png_holds_one_image(tmp_path, shape):
    """Frames are saved one by one."""
    with pytest.raises(BcgbenchError, match="one image"):
        save_png(noise(*shape), tmp_path / "x.png")


def test_latents_come_back_bit_for_bit(tmp_path):
    """bfloat16, views and names survive."""
    latents = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).T
    save_latents(latents, tmp_path / "a.safetensors")
    save_latents({"video": latents, "audio": torch.ones(2)}, tmp_path / "b.safetensors")
    assert compare(latents, load_file(tmp_path / "a.safetensors")["latents"], name="x").exact
    assert sorted(load_file(tmp_path / "b.safetensors")) == ["audio", "video"]
