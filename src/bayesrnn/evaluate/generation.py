"""Text from a language model, token by token."""

import math
from typing import Any, Literal

import torch

from bayesrnn.bayes import Bayesian, check_bayesian
from bayesrnn.data import TextData, Vocabulary, decode_text, encode_text
from bayesrnn.data.vocabulary import END, UNKNOWN
from bayesrnn.errors import UserError, require
from bayesrnn.evaluate.draws import evaluating

Weights = Literal["mean", "sample"]


def generate(
    model: Bayesian,
    prompt: list[int],
    length: int,
    temperature: float = 1.0,
    weights: Weights = "mean",
    generator: torch.Generator | None = None,
    forbidden: tuple[int, ...] = (),
) -> list[int]:
    """`length` more token ids after the prompt's, each drawn from softmax(logits / temperature).

    - `temperature`: 0 takes the most probable token.
    - `weights`: the posterior "mean", or a "sample", which is one draw kept for the whole text.
    - `forbidden`: ids (of an unknown word, say) that are never chosen.
    """
    require(
        (len(prompt) > 0, "prompt", "must hold at least one token"),
        (length >= 0, "length", f"must be at least 0, got {length}"),
        (
            0 <= temperature < math.inf,
            "temperature",
            f"must be a finite number, 0 or above, got {temperature}",
        ),
    )
    device = next(model.parameters()).device
    ids: list[int] = []
    state: Any = None
    x = torch.tensor(prompt, device=device)[:, None]
    check_bayesian(model)
    with evaluating(model), model.weights(weights):
        if weights == "sample":
            model.resample(generator=generator)
        for _ in range(length):
            logits, state = model(x, state)
            last = logits[-1, 0].double()
            last[list(forbidden)] = -math.inf
            if last.isneginf().all():
                raise UserError(
                    "there is no token that may be chosen: the model knows none but those that are "
                    "left out; train with a larger vocabulary (a lower data.min_count)"
                )
            if temperature == 0:
                x = last.argmax().view(1, 1)
            else:
                probabilities = torch.softmax((last - last.max()) / temperature, dim=0)
                x = torch.multinomial(probabilities, 1, generator=generator).view(1, 1)
            ids.append(int(x.item()))
    return ids


def generate_text(
    model: Bayesian,
    prompt: str,
    settings: TextData,
    vocabulary: Vocabulary,
    length: int,
    temperature: float = 1.0,
    weights: Weights = "mean",
    generator: torch.Generator | None = None,
) -> str:
    """What the model writes after `prompt` (an empty one: from the start of a line).

    `settings` and `vocabulary` are those of the text that it was trained on; an unknown word is
    never written. `length` is in tokens. The other arguments are those of `generate`.
    """
    ids = encode_text(prompt, settings, vocabulary)
    end = vocabulary.index.get(END)
    if ids and ids[-1] == end and not prompt.endswith("\n"):
        ids.pop()  # the prompt's line goes on
    start = ids or [end if end is not None else vocabulary.index.get("\n", 0)]
    unknown = (vocabulary.index[UNKNOWN],)
    new = generate(model, start, length, temperature, weights, generator, unknown)
    return decode_text(new, settings, vocabulary)
