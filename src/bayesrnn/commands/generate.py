"""`bayesrnn generate`."""

from typing import Annotated

import torch
import typer

from bayesrnn.commands.options import AsJson, RunFolder, Weights, note, recipe_of
from bayesrnn.data import TextData
from bayesrnn.data.text import tokenise
from bayesrnn.data.vocabulary import UNKNOWN
from bayesrnn.errors import UserError
from bayesrnn.evaluate import generate_text
from bayesrnn.files import to_json
from bayesrnn.saving import load, load_vocabulary


def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many more tokens.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0, help="Below 1 is safer, above 1 bolder; 0 takes the likeliest.")
    ] = 1.0,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, metavar="N", help="The same seed gives the same text."),
    ] = 1,
    weights: Annotated[
        Weights, typer.Option(help="The posterior mean, or one draw for the whole text.")
    ] = "mean",
    as_json: AsJson = False,
) -> None:
    """Write text with a run's model.

    bayesrnn generate runs/ptb --prompt "the company said" --tokens 50 --temperature 0.8
    """
    model = load(run)
    settings = recipe_of(run).data
    if not isinstance(settings, TextData):
        raise UserError(f"{run} is a run on {settings.kind}, which writes no text")
    generator = torch.Generator().manual_seed(seed)
    vocabulary = load_vocabulary(run)
    unknown = sorted(
        {t for piece in tokenise([prompt], settings) for t in piece if t not in vocabulary.index}
    )
    if unknown:
        note(
            f"the model does not know {', '.join(map(repr, unknown))} of the prompt, and reads "
            f"{UNKNOWN} there"
        )
    text = generate_text(
        model, prompt, settings, vocabulary, tokens, temperature, weights, generator
    )
    if as_json:
        print(to_json({"prompt": prompt, "text": text, "seed": seed, "weights": weights}))
    else:
        print(prompt + ("" if settings.tokens == "characters" or not prompt else " ") + text)
