"""Sound files and their features; what is wrong with a file is said in one line."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bayesrnn.data.audio import STEP, SpeechData, filterbank, read_audio, spectrogram
from bayesrnn.errors import Invalid, UserError

soundfile = pytest.importorskip("soundfile")
RATE = 8000


def sine(hertz: float, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(RATE * seconds)) / RATE)


@pytest.mark.parametrize("form", ["flac", "wav", "sph"])
def test_samples_come_back(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"a.{form}"
    soundfile.write(path, sine(440), RATE, format="NIST" if form == "sph" else None)
    samples = read_audio(path, RATE)
    assert samples.dtype == torch.float32
    assert np.abs(samples.numpy() - sine(440)).max() < 1e-4


def test_a_streamed_wav_that_does_not_know_its_length_is_read(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", sine(440), RATE)
    data = bytearray((tmp_path / "a.wav").read_bytes())
    data[4:8] = b"\xff\xff\xff\xff"
    (tmp_path / "a.wav").write_bytes(data)
    assert len(read_audio(tmp_path / "a.wav", RATE)) == len(sine(440))


def test_channels_are_averaged(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.stack([sine(440), -sine(440)], axis=1), RATE)
    assert read_audio(tmp_path / "a.wav", RATE).abs().max() < 1e-3


def test_bad_audio_gets_a_clear_line(tmp_path: Path) -> None:
    good = tmp_path / "good.flac"
    soundfile.write(good, np.random.default_rng(0).normal(size=RATE) * 0.1, RATE)
    whole = good.read_bytes()
    soundfile.write(tmp_path / "good.wav", sine(300), RATE)
    soundfile.write(tmp_path / "nan.wav", np.full(RATE, np.nan), RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "nothing.wav", np.zeros(0), RATE)
    (tmp_path / "empty.flac").write_bytes(b"")
    (tmp_path / "text.wav").write_text("not a sound at all " * 20)
    (tmp_path / "cut.flac").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cut.wav").write_bytes((tmp_path / "good.wav").read_bytes()[:3000])
    for name, problem in (
        ("empty.flac", "is empty"),
        ("text.wav", "not audio"),
        ("cut.flac", "damaged or not audio|cut off"),
        ("cut.wav", "cut off"),
        ("nothing.wav", "no samples"),
        ("nan.wav", "no numbers"),
        ("missing.wav", "cannot read"),
    ):
        with pytest.raises(UserError, match=problem) as caught:
            read_audio(tmp_path / name, RATE)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="8000 samples a second, but 16000"):
        read_audio(good, 16_000)


@pytest.mark.parametrize("scale", ["mel", "linear"])
def test_a_tone_shows_in_its_band(scale: str) -> None:
    """Half an utterance low, half of it high: each band is loud where its tone is."""
    settings = SpeechData("x", rate=RATE, bands=16, scale=scale)  # type: ignore[arg-type]
    samples = np.concatenate([sine(500), sine(3000)]) + 1e-3 * np.random.default_rng(0).normal(
        size=RATE
    )
    found = spectrogram(torch.from_numpy(samples), settings, "x").float() * STEP
    centres = filterbank(settings) @ np.linspace(0, RATE / 2, settings.fft // 2 + 1)
    for hertz, loud in ((500, slice(2, 40)), (3000, slice(60, 95))):
        band = int(np.abs(centres - hertz).argmin())
        quiet = slice(60, 95) if hertz == 500 else slice(2, 40)
        assert found[loud, band].mean() > found[quiet, band].mean() + 1.5


def test_features_are_normalised_by_utterance_and_band() -> None:
    settings = SpeechData("x", rate=RATE, bands=6)
    samples = torch.randn(RATE) * torch.linspace(0.01, 1, RATE)
    found = spectrogram(samples, settings, "x").float() * STEP
    assert found.shape == (1 + (RATE - settings.fft) // settings.hop, 6)
    assert found.mean(dim=0).abs().max() < 0.01
    assert (found.std(dim=0) - 1).abs().max() < 0.02
    louder = spectrogram(10 * samples, settings, "x").float() * STEP
    assert (louder - found).abs().max() <= 1.01 * STEP
    silence = spectrogram(torch.zeros(RATE), settings, "x")
    assert (silence == 0).all()


@pytest.mark.parametrize("scale", ["mel", "linear"])
@pytest.mark.parametrize("bands", [1, 26, 128])
def test_every_filter_holds_something_and_sums_to_one(scale: str, bands: int) -> None:
    filters = filterbank(SpeechData("x", bands=bands, scale=scale))  # type: ignore[arg-type]
    assert (filters >= 0).all()
    np.testing.assert_allclose(filters.sum(axis=1), 1)
    centres = filters @ np.arange(filters.shape[1])
    assert (np.diff(centres) > 0).all()


def test_too_short_a_sound_is_named() -> None:
    with pytest.raises(UserError, match=r"hm\.wav is too short: 100 samples"):
        spectrogram(torch.zeros(100), SpeechData("x", rate=RATE), "hm.wav")


def test_impossible_settings_are_refused_together() -> None:
    with pytest.raises(Invalid) as caught:
        SpeechData("", valid=1.0, bands=0, rate=10)
    assert {key for key, _ in caught.value.problems} == {"path", "valid", "bands", "rate"}
