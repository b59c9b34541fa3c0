"""Sound files to spectrograms."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesrnn.errors import UserError, require
from bayesrnn.files import read_chunks

STEP = 0.04
"""Of a feature, in standard deviations: features are kept as bytes, from -5.08 to 5.08."""
SILENCE = 1e-10
"""The power below which nothing is told apart; a full-scale sine has about 1e4."""


@dataclass(frozen=True)
class SpeechData:
    """The `[data]` table of a recipe for speech.

    - `path`: a folder in the layout of CMU Sphinx (AN4: etc/*_train.fileids, *_train.transcription,
      the same of test, and a dictionary etc/*.dic, with the audio in any folder beside etc) or of
      TIMIT (TRAIN/DR1/SPEAKER/NAME.WAV beside NAME.PHN, and TEST), or a folder that
      `bayesrnn prepare` made. Files are wav, flac or whatever else libsndfile reads.
    - `targets`: "phones" or "words".
    - `variants`: a word is spoken as the first entry of the dictionary says, unless this names
      another one: "A(2)".
    - `valid`, `split_seed`: of the speakers of train, the part `valid`, chosen by `split_seed`, is
      for validation; with 0 there is no validation set, and all train.
    - `rate`: the sampling rate of the audio, in hertz.
    - `hop_ms`, `window_ms`: a spectrogram has a frame every `hop_ms`, each of `window_ms`.
    - `bands`, `scale`: a frame has the log power in `bands` bands, equally wide in hertz ("linear")
      or in "mel", normalised by utterance and band.
    """

    path: str
    targets: Literal["phones", "words"] = "phones"
    variants: tuple[str, ...] = ()
    valid: float = 0.1
    split_seed: int = 1
    rate: int = 16_000
    scale: Literal["mel", "linear"] = "mel"
    bands: int = 26
    window_ms: float = 25.0
    hop_ms: float = 10.0
    kind: ClassVar[str] = "speech"

    def __post_init__(self) -> None:
        most = self.fft // 2 if math.isfinite(self.window_ms) else math.inf
        require(
            (self.path != "", "path", "must name a folder of speech, got ''"),
            (
                self.targets in ("phones", "words"),
                "targets",
                f'must be "phones" or "words", got {self.targets!r}',
            ),
            (0 <= self.valid < 1, "valid", f"must be 0 (none) to below 1, got {self.valid}"),
            (self.split_seed >= 0, "split_seed", f"must be 0 or above, got {self.split_seed}"),
            (self.rate >= 1000, "rate", f"must be in hertz, at least 1000, got {self.rate}"),
            (
                self.scale in ("mel", "linear"),
                "scale",
                f'must be "mel" or "linear", got {self.scale!r}',
            ),
            (
                0 < self.hop_ms < math.inf,
                "hop_ms",
                f"must be a number above 0, got {self.hop_ms}",
            ),
            (
                0 < self.window_ms < math.inf,
                "window_ms",
                f"must be a number above 0, got {self.window_ms}",
            ),
            (
                1 <= self.bands <= most,
                "bands",
                f"must be from 1 to {most} for this window, got {self.bands}",
            ),
        )

    @property
    def window(self) -> int:
        """The length of a window, in samples."""
        return max(2, round(self.rate * self.window_ms / 1000))

    @property
    def hop(self) -> int:
        """The samples from one frame to the next."""
        return max(1, round(self.rate * self.hop_ms / 1000))

    @property
    def fft(self) -> int:
        """The power of two that holds a window, in samples."""
        return 1 << (self.window - 1).bit_length()


def read_audio(path: Path, rate: int) -> Tensor:
    """The samples of a sound file, between -1 and 1, with its channels averaged.

    A file that is no audio, is empty, is cut off, or has another sampling rate raises an error of
    one line.
    """
    import_soundfile()
    import soundfile

    for _ in read_chunks(path):  # says what is wrong with a path that cannot be read
        break
    else:
        raise UserError(f"{path} is empty: there is no audio in it")
    try:
        with soundfile.SoundFile(str(path)) as file:
            wanted, found = file.frames, file.samplerate
            samples = file.read(dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError, TypeError, MemoryError) as error:
        # TypeError: a name.raw, which says nothing of itself; MemoryError: a length that is absurd.
        detail = str(error).rpartition(": ")[2].strip().rstrip(".")
        raise UserError(
            f"{path} is damaged or not audio ({detail}); give a wav or flac file"
        ) from error
    if found != rate:
        raise UserError(
            f"{path} has {found} samples a second, but {rate} are needed; convert it, say with "
            f"`sox {path.name} -r {rate} new.wav`"
        )
    if len(samples) == 0:
        raise UserError(f"{path} holds no sound: it has a header and no samples")
    if len(samples) < wanted or _is_cut_off(path):
        raise UserError(f"{path} is cut off: it ends before the length its header says")
    if not np.isfinite(samples).all():
        raise UserError(f"{path} holds samples that are no numbers (NaN or infinite)")
    return torch.from_numpy(samples.mean(axis=1))


def import_soundfile() -> None:
    """Say what to install where the library that reads audio is missing."""
    try:
        import soundfile  # noqa: F401
    except (ImportError, OSError) as error:
        raise UserError(
            'reading audio needs the package soundfile: pip install "bayesrnn[speech]"'
        ) from error


def _is_cut_off(path: Path) -> bool:
    """Whether a wav file is shorter than it says (libsndfile reads on without a word). One that was
    streamed says all ones: it did not know."""
    with path.open("rb") as file:
        head = file.read(8)
    said = int.from_bytes(head[4:], "little")
    return head[:4] == b"RIFF" and said != 2**32 - 1 and said + 8 > path.stat().st_size + 1


def spectrogram(samples: Tensor, settings: SpeechData, name: str) -> Tensor:
    """The features of an utterance, int8 [frames, bands].

    Each band's log power has mean 0 and deviation 1 over the utterance, in steps of `STEP`. `name`
    is what an error message calls the utterance.
    """
    if len(samples) < settings.fft:
        raise UserError(
            f"{name} is too short: {len(samples)} samples, fewer than one window "
            f"({settings.fft}, {1000 * settings.fft / settings.rate:g} ms)"
        )
    waves = torch.stft(
        samples.double(),
        settings.fft,
        settings.hop,
        settings.window,
        torch.hann_window(settings.window, dtype=torch.float64),
        center=False,
        return_complex=True,
    )
    filters = torch.from_numpy(filterbank(settings))
    power = filters @ waves.abs().square()  # [bands, frames]
    log_power = power.clamp_min(SILENCE).log()
    mean = log_power.mean(dim=1, keepdim=True)
    deviation = log_power.std(dim=1, keepdim=True, correction=0).clamp_min(1e-3)
    steps = ((log_power - mean) / deviation / STEP).round().clamp(-127, 127)
    return steps.to(torch.int8).T.contiguous()


def filterbank(settings: SpeechData) -> NDArray[np.float64]:
    """Triangles [bands, fft / 2 + 1], equally spaced up to half the rate; each sums to 1.

    Every triangle is at least two bins wide, so that none is empty.
    """
    top = settings.rate / 2
    places = np.linspace(0, _mel(top) if settings.scale == "mel" else top, settings.bands + 2)
    edges = _hertz(places) if settings.scale == "mel" else places
    bins = np.linspace(0, top, settings.fft // 2 + 1)
    width = bins[1]
    left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    up = (bins - centre) / np.maximum(centre - left, width) + 1
    down = (centre - bins) / np.maximum(right - centre, width) + 1
    triangles = np.maximum(np.minimum(up, down), 0)
    return triangles / triangles.sum(axis=1, keepdims=True)


def _mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return 700 * (10 ** (mel / 2595) - 1)
