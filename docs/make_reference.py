"""Write docs/reference.md: every public name, how it is called, and its docstring's first sentence.

    python docs/make_reference.py           # write it
    python docs/make_reference.py --check   # write nothing; exit 1 when it differs

The themes and their order stand below. A public name (of `bayesrnn` and `bayesrnn.evaluate`) that
is in no theme, or has no docstring, is an error; all are told at once.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bayesrnn
import bayesrnn.evaluate.caption_scores

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "results"))
from tables import cell, code, table  # noqa: E402 (a module of results/, which is no package)

PAGE = ROOT / "docs" / "reference.md"
INTERNAL = {"model", "losses", "charges", "local", "look"}
"""What a result holds for the code that made it."""
INTRO = """# Reference

Generated from the docstrings by `make reference`; do not edit by hand.

Every public name, how it is called, and what it is in one sentence; Python's `help` has the rest.
What begins with `data.`, `models.` or `evaluate.` is imported from there (`bayesrnn.data`, say),
all else from `bayesrnn`. What functions return is shown with what it holds. How all of this goes
together is in the [tutorial](tutorial.md); the commands are in the
[README](../README.md#on-the-command-line).
"""


class Theme(NamedTuple):
    """A part of the page: what is called, and what one gets back without making it."""

    title: str
    called: str
    returned: str = ""
    page: str = ""


THEMES = (
    Theme(
        "Making a model Bayesian",
        "bayesianize Bayesian.weights Bayesian.hold Bayesian.resample Bayesian.kl Bayesian.moments "
        "Bayesian.tuned Ensemble plain_network sharpen with_prior",
        "Bayesian",
        "tutorial.md",
    ),
    Theme(
        "Posteriors and priors",
        "Delta Gaussian Sharpened Uniform Normal Laplace ScaleMixture Posterior Prior",
        page="tutorial.md#which-weights-and-what-they-are-drawn-from",
    ),
    Theme(
        "Objective and training",
        "FreeEnergy FreeEnergy.restart Loss.backward detach NaturalGradient train describe",
        "Loss Description",
        "tutorial.md#training",
    ),
    Theme(
        "Data",
        "TextData load_text Vocabulary StreamLoader ImageData load_images ReviewData load_reviews "
        "Examples ExampleLoader SeriesData load_series CaptionData load_captions CaptionLoader "
        "SpeechData load_speech UtteranceLoader",
        "data.Corpus data.Labelled data.Series data.Rows data.Captions data.Pictures data.Speech "
        "data.Utterance Batch",
        "recipes.md",
    ),
    Theme(
        "Networks",
        "LanguageModel Mlp MlpSettings ReviewModel ReviewSettings Forecaster SeriesSettings "
        "Captioner CaptionerSettings build_speech_network SpeechSettings DropoutSettings "
        "models.Linear",
        page="recipes.md",
    ),
    Theme(
        "Prediction and evaluation",
        "predict outputs Categorical outputs.Normal outputs.Normal.mixture NormalMixture "
        "NormalMixture.cdf NormalMixture.quantile NormalMixture.interval NormalMixture.nll "
        "NormalMixture.crps evaluate_text evaluate_labelled "
        "write_predictions dynamic_evaluate search_rate",
        "Prediction Evaluation LabelledEvaluation DynamicEvaluation evaluate.RateSearch "
        "evaluate.Trial",
        "tutorial.md#prediction-and-what-the-model-does-not-know",
    ),
    Theme(
        "What a model does not know",
        "text_uncertainty entropy_gap evaluate.reversed_text evaluate.shuffled_text "
        "evaluate.unigram_entropy evaluate.detect evaluate.auroc evaluate.aupr "
        "evaluate.write_tokens evaluate.labelled_uncertainty",
        "TextUncertainty evaluate.EntropyGap evaluate.Detection",
        "uncertainty.md",
    ),
    Theme(
        "Calibration",
        "evaluate.calibration.calibration evaluate.calibration_of_top evaluate.classwise_error "
        "evaluate.reliability evaluate.risk_coverage search_temperature calibration_of_numbers "
        "evaluate.coverage",
        "evaluate.Calibration evaluate.Reliability evaluate.RiskCoverage "
        "evaluate.TemperatureSearch evaluate.TemperatureTrial evaluate.NumberCalibration "
        "evaluate.Coverage",
        "uncertainty.md#calibration",
    ),
    Theme(
        "Series of numbers",
        "read_series evaluate_series forecast backtest best_season",
        "evaluate.series.Reading evaluate.SeriesEvaluation Forecast evaluate.Backtest",
        "series.md",
    ),
    Theme(
        "Text, captions and speech",
        "generate generate_text evaluate_captions evaluate.caption_uncertainty decode_captions "
        "Decoding caption_pictures evaluate.caption_scores.compare evaluate_speech "
        "evaluate.transcribe",
        "evaluate.CaptionEvaluation evaluate.Caption CaptionFile SpeechEvaluation "
        "evaluate.Transcription",
        "captions.md",
    ),
    Theme(
        "Pruning",
        "signal_to_noise prune SAFE_THRESHOLD pruning_curve prune_run run_curve weight_bits "
        "structure dead_units sparse_network",
        "Pruned PrunedRun RunCurve Structure Dead",
        "pruning.md",
    ),
    Theme(
        "Compression",
        "compression_curve coarsest_step compress_run compression_of_run",
        "Compressed CompressedRun CompressionCurve",
        "compression.md",
    ),
    Theme("Recipes and saving", "read_recipe Recipe save load load_vocabulary", page="recipes.md"),
    Theme("Errors", "UserError Invalid"),
)


def public_names() -> list[str]:
    """Those that must have a theme: in the package first, if a name is in both."""
    own = bayesrnn.__all__
    return [*own, *(f"evaluate.{n}" for n in bayesrnn.evaluate.__all__ if n not in own)]


def problems(themes: tuple[Theme, ...] = THEMES) -> list[str]:
    """What is wrong with the themes and the docstrings, one line each."""
    named = [name for theme in themes for name in f"{theme.called} {theme.returned}".split()]
    twice = [name for name, count in Counter(named).items() if count > 1]
    unknown = [name for name in named if find(name) is None]
    found = [f"{name} has no theme in {Path(__file__).name}" for name in public_names()]
    lines = [line for line in found if line.split()[0] not in named]
    lines += [f"{name} is in the themes twice" for name in twice]
    lines += [f"{name} is in a theme, and bayesrnn has no such name" for name in unknown]
    return lines + [f"{n} has no docstring" for n in named if n not in unknown and not doc(n)]


def find(name: str) -> Any:
    """The object of a dotted name; None where there is none."""
    found: Any = bayesrnn
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def doc(name: str) -> str:
    """An object's own docstring; of a number the one below it in the source."""
    thing = find(name)
    if isinstance(thing, float):
        return constant_doc(name)
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    made_up = inspect.isclass(thing) and text.startswith(f"{thing.__name__}(")  # by dataclass
    return "" if made_up else text


def constant_doc(name: str) -> str:
    for module in [m for key, m in sys.modules.items() if key.startswith("bayesrnn.")]:
        body = ast.parse(inspect.getsource(module)).body if name in vars(module) else []
        for line, below in pairwise(body):
            here = isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name
            if here and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                return inspect.cleandoc(str(below.value.value))
    return ""


def first_sentence(text: str) -> str:
    """
    >>> first_sentence("The gap (Shen et al. 2024, eq. 7). Large is good.")
    'The gap (Shen et al. 2024, eq. 7).'
    """
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)(?<!al\.)(?<!eq\.)(?<!eqs\.)\s+(?=[^a-z])", paragraph)[0]


def shown(value: object) -> str:
    """A default, alike on every version of Python: short, numbers to four digits."""
    if isinstance(value, float) and len(repr(value)) > 6:
        return f"{value:.4g}"
    if isinstance(value, str):
        return f'"{value}"'
    if callable(value):
        return str(getattr(value, "__name__", value))
    if isinstance(value, tuple) and len(value) > 7:
        return f"({shown(value[0])}, {shown(value[1])}, ..., {shown(value[-1])})"
    if isinstance(value, tuple) and value:
        return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
    return repr(value)


def call(name: str) -> str:
    """The name with its arguments and their defaults; alone, where they are not our own."""
    thing = find(name)
    if dataclasses.is_dataclass(thing):
        fields = [one for one in dataclasses.fields(thing) if one.init]
        return f"{name}({', '.join(map(field, fields))})"
    taken = inspect.isclass(thing) and "__init__" not in vars(thing)  # from torch or Python
    if taken or not callable(thing):
        return name
    given: list[str] = []
    for parameter in inspect.signature(thing).parameters.values():
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={shown(parameter.default)}"
        given.append(f"{stars}{parameter.name}{default}")
    return f"{name}({', '.join(given[1:] if given[:1] == ['self'] else given)})"


def field(one: dataclasses.Field[Any]) -> str:
    if one.default_factory is not dataclasses.MISSING:
        return f"{one.name}=..."
    return one.name if one.default is dataclasses.MISSING else f"{one.name}={shown(one.default)}"


def held(name: str) -> str:
    """What an object holds: its fields, properties and methods, but for those of the code alone."""
    thing = find(name)
    own = {n: value for n, value in vars(thing).items() if n[0] != "_"}
    if dataclasses.is_dataclass(thing):
        names = [one.name for one in dataclasses.fields(thing)]
    else:
        names = list(getattr(thing, "_fields", ()))
    names += [n for n, value in own.items() if isinstance(value, property)]
    if not issubclass(thing, torch.nn.Module):  # its methods stand above, those that matter
        names += [f"{n}()" for n, value in own.items() if inspect.isfunction(value)]
    return ", ".join(code(n) for n in names if n not in INTERNAL)


def page(themes: tuple[Theme, ...] = THEMES) -> str:
    parts = [INTRO]
    for theme in themes:
        see = f"More: [{theme.page.split('.')[0]}]({theme.page}).\n\n" if theme.page else ""
        parts.append(f"## {theme.title}\n\n{see}".rstrip("\n") + "\n")
        rows = [[code(call(name)), sentence(name)] for name in theme.called.split()]
        parts.append(table(["called", "what it is"], rows))
        rows = [[code(n), sentence(n), held(n)] for n in theme.returned.split()]
        if rows:
            parts.append(table(["returned", "what it is", "it holds"], rows))
    return "\n".join(parts)


def sentence(name: str) -> str:
    return cell(first_sentence(doc(name)))


def main() -> int:
    parser = argparse.ArgumentParser(description="The reference from the docstrings.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    check = parser.parse_args().check
    if lines := problems():
        print(*lines, sep="\n", file=sys.stderr)
        return 1
    wanted = page()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == wanted:
        return 0
    if check:
        print(f"{PAGE.name} differs from the docstrings: make reference", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
