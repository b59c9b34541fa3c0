"""`bayesrnn transcribe`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bayesrnn.commands.options import (
    AsJson,
    Device,
    DrawSeed,
    RunFolder,
    SpeechDecoding,
    check_draws,
    recipe_of,
)
from bayesrnn.commands.tables import watching
from bayesrnn.data import SpeechData, read_audio, spectrogram
from bayesrnn.data.audio import STEP, import_soundfile
from bayesrnn.errors import UserError
from bayesrnn.evaluate import transcribe as transcribe_features
from bayesrnn.evaluate.ctc import decoder
from bayesrnn.files import to_json
from bayesrnn.saving import load, load_vocabulary
from bayesrnn.train.loop import choose_device


def transcribe(
    run: RunFolder,
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Sound files: flac, wav.")],
    samples: Annotated[
        int, typer.Option(min=0, help="How many draws say how sure it is (0: the mean alone).")
    ] = 0,
    decoding: SpeechDecoding = "prefix",
    seed: DrawSeed = 1,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Write down what is said in sound files, and how sure that is.

    Beside a label stands the probability that it is that one. A file that cannot be read is named,
    with the reason; the others are transcribed all the same.

    bayesrnn transcribe runs/an4-adaptive-weight-noise hello.flac

    bayesrnn transcribe runs/an4-adaptive-weight-noise *.wav --samples 10 --json
    """
    place = choose_device(device, "--device")
    model = load(run).to(place)
    settings = recipe_of(run).data
    if not isinstance(settings, SpeechData):
        raise UserError(f"{run} is a run on {settings.kind}, which hears nothing")
    if samples:
        check_draws(run, model, "--samples")
    import_soundfile()
    vocabulary = load_vocabulary(run)

    def listen(path: Path) -> dict[str, Any]:
        try:
            heard = spectrogram(read_audio(path, settings.rate), settings, str(path))
        except UserError as error:
            return {"file": str(path), "error": str(error)}
        generator = torch.Generator(place).manual_seed(seed)
        x = heard.to(place).float() * STEP
        said = transcribe_features(model, x, decoder(decoding), samples, generator)
        return {
            "file": str(path),
            settings.targets: vocabulary.decode(said.labels),
            "confidence": [round(value, 4) for value in said.confidence],
        }

    found: list[dict[str, Any]] = []
    with watching() as watch:
        advance = watch("listening", len(files))
        for path in files:
            found.append(listen(path))
            advance(1)
    if as_json:
        print(to_json({"run": str(run), "decoding": decoding, "files": found}))
    for one in found:
        if "error" in one:
            print(f"error: {one['error']}", file=sys.stderr)
        elif not as_json:
            print(f"{one['file']}: {_line(one[settings.targets], one['confidence'])}")
    if any("error" in one for one in found):
        raise typer.Exit(1)


def _line(labels: list[str], confidence: list[float]) -> str:
    """`Y(0.99) EH(0.97) S(1.00)`, or that nothing was said."""
    if not labels:
        return "(nothing)"
    pairs = zip(labels, confidence, strict=True)
    return " ".join(f"{label}({value:.2f})" for label, value in pairs)
