"""Is naive dropout here what torch's own is? The same small network trained by this package and by
a plain torch loop, on any text; the validation perplexities of every epoch as one JSON object.

    python benchmarks/dropout_check.py book.txt --seeds 1,2,3 > dropout-check.json

The two draw different masks, so they agree no better than two seeds do.
"""

import argparse
import json
import math
import platform
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bayesrnn as br
from bayesrnn.models import DropoutSettings, LanguageSettings
from bayesrnn.models.layers import State
from bayesrnn.recipe import Recipe
from bayesrnn.train.loop import train
from bayesrnn.train.schedule import learning_rate
from bayesrnn.train.settings import TrainSettings

UNITS, RATE = 200, 0.5
SETTINGS = {"epochs": 8, "decay": 0.8, "decay_after": 4, "drop_last": True, "valid_streams": 20}


class Plain(nn.Module):
    """The network as torch writes it."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, UNITS)
        self.rnn = nn.LSTM(UNITS, UNITS, 2, dropout=RATE)
        self.decoder = nn.Linear(UNITS, words)
        self.drop = nn.Dropout(RATE)
        for name, parameter in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
                parameter.requires_grad_("bias_hh" not in name)
            else:
                nn.init.uniform_(parameter, -0.05, 0.05)

    def forward(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        hidden, state = self.rnn(self.drop(self.embedding(x)), state)
        return self.decoder(self.drop(hidden)), state


def by_torch(text: br.TextData, seed: int) -> list[float]:
    torch.manual_seed(seed)
    corpus, settings = br.load_text(text), TrainSettings(**SETTINGS)  # type: ignore[arg-type]
    network = Plain(len(corpus.vocabulary))
    parameters = [p for p in network.parameters() if p.requires_grad]
    loader = br.StreamLoader(corpus.ids["train"], settings.streams, settings.unroll, True)
    valid = br.StreamLoader(corpus.ids["valid"], settings.valid_streams, settings.unroll)
    found = []
    for epoch in range(settings.epochs):
        rate = learning_rate(epoch, settings.lr, settings.decay, settings.decay_after)
        network.train()
        state: State | None = None
        for batch in loader:
            carried = None if batch.first or state is None else br.detach(state)
            logits, state = network(batch.x, carried)
            nll = cross_entropy(logits.flatten(0, 1), batch.y.flatten(), reduction="sum")
            network.zero_grad()
            (nll / settings.streams).backward()
            nn.utils.clip_grad_norm_(parameters, settings.clip)
            with torch.no_grad():
                for parameter in parameters:
                    parameter.sub_(rate * parameter.grad)  # type: ignore[operator]
        network.eval()
        total, state = 0.0, None
        with torch.no_grad():
            for batch in valid:
                logits, state = network(batch.x, state)
                total += cross_entropy(
                    logits.flatten(0, 1), batch.y.flatten(), reduction="sum"
                ).item()
        found.append(math.exp(total / valid.targets))
    return found


def here(text: br.TextData, seed: int) -> list[float]:
    recipe = Recipe(
        data=text,
        model=LanguageSettings(embedding=UNITS, hidden=UNITS, layers=2, init=0.05),
        dropout=DropoutSettings("naive", input=RATE, output=RATE),
        posterior=br.Delta(),
        prior=br.Uniform(),
        train=TrainSettings(seed=seed, device="cpu", **SETTINGS),  # type: ignore[arg-type]
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(recipe, Path(folder) / "run", quiet=True)
    return [line["valid_perplexity"] for line in outcome.epochs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("--seeds", default="1,2,3")
    given = parser.parse_args()
    text = br.TextData(given.text, tokens="words", lowercase=True, max_vocabulary=5000)
    found = [
        {"by": name, "seed": seed, "valid_perplexity": [round(x, 2) for x in way(text, seed)]}
        for seed in map(int, given.seeds.split(","))
        for name, way in (("torch", by_torch), ("here", here))
    ]
    facts = {"torch": torch.__version__, "machine": platform.machine(), "units": UNITS}
    print(json.dumps({**facts, "rate": RATE, **SETTINGS, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
