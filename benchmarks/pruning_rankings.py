"""What to prune a trained run by: the rise of its figure under each ranking, at several fractions.

    python benchmarks/pruning_rankings.py RUN [--split valid] [--streams 20] [--device cuda] > FILE

Beside the rankings that `prune` offers it tries others, so that the choice can be checked on any
run: the data's share of the signal to noise, sigma smoothed over rows and columns or over a whole
tensor, mean and sigma weighed otherwise, the cost of a weight in bits; and all tensor by tensor.
"""

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bayesrnn as br
from bayesrnn.prune import _places, _pruned
from bayesrnn.train.loop import choose_device
from bayesrnn.watched import Figure, run_task, watched_figure

Values = dict[str, Tensor]

DATA = ("kind", "tokens", "max_vocabulary", "split")


def prior_precision(model: br.Bayesian) -> Values:
    """How sharply the prior bends at each weight: 1 / s^2 of a Normal, of a scale mixture that of
    the components by their responsibilities, 0 otherwise."""
    found: Values = {}
    for block in model.each_block():
        hyper = model.hyper(block)
        prior, values = hyper.prior, hyper.values()
        moments = block.moments()
        for weight in block.layout.weights:
            loc, scale = moments[weight.name]
            assert scale is not None
            bend = torch.zeros_like(loc)
            if isinstance(prior, br.ScaleMixture):
                sums = prior.gather(loc.square() + scale.square(), weight.axis)
                count = prior.group_size(weight.shape, weight.axis)
                bend = prior.settle(sums, count, values)[1].expand_as(loc)
            elif isinstance(prior, br.Normal):
                bend = bend + values["scale"] ** -2
            found[weight.name] = bend
    return found


def smoothed(scale: Tensor) -> Tensor:
    """sigma as a row's part times a column's: what noise each single one has is averaged out."""
    if scale.dim() != 2:
        return scale
    log = scale.log()
    return (log.mean(1, keepdim=True) + log.mean(0, keepdim=True) - log.mean()).exp()


def rankings(model: br.Bayesian) -> dict[str, Values]:
    """By name, what weights are ranked by: the lowest go first."""
    moments = {name: (loc, scale) for name, (loc, scale) in model.moments().items()}
    bend = prior_precision(model)
    found: dict[str, Values] = {
        "snr": {},
        "magnitude": {},
        "mean^2 / sigma": {},
        "mean^2 * sigma": {},
        "snr, sigma smoothed": {},
        "snr, sigma of the tensor": {},
        "snr of the data alone": {},
        "bits of a weight": {},
        "snr, biases kept": {},
    }
    for name, (loc, scale) in moments.items():
        assert scale is not None
        size = loc.abs()
        values = (
            size / scale,
            size,
            loc.square() / scale,
            loc.square() * scale,
            size / smoothed(scale),
            size / scale.log().mean().exp(),
            loc.square() * (scale**-2 - bend[name]).clamp_min(0),
            bend[name] * (loc.square() + scale.square()) - (bend[name] * scale.square()).log(),
            size / scale if loc.dim() > 1 else torch.full_like(loc, torch.inf),
        )
        for one, value in zip(found.values(), values, strict=True):
            one[name] = value
    return found


def rises(
    model: br.Bayesian, figure: Figure, values: Values, fractions: list[float], per_tensor: bool
) -> Iterator[float]:
    """The figure with each fraction pruned."""
    groups = [[name] for name in values] if per_tensor else [list(values)]
    places: Values = {}
    size: dict[str, int] = {}
    for names in groups:
        places |= dict(zip(names, _places([values[name] for name in names]), strict=True))
        size |= dict.fromkeys(names, sum(values[name].numel() for name in names))
    for fraction in fractions:
        masks = {
            block: {
                w.name: places[w.name] >= round(fraction * size[w.name])
                for w in block.layout.weights
            }
            for block in model.each_block()
        }
        with _pruned(model, masks):
            yield figure.of(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--split", default="valid")
    parser.add_argument("--streams", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--fractions", default="0.5,0.7,0.8,0.9")
    given = parser.parse_args()
    device = choose_device(given.device, "--device")
    model = br.load(given.run).to(device)
    recipe = br.read_recipe(given.run / "recipe.toml")
    figure = watched_figure(run_task(given.run, recipe, device), given.split, given.streams)
    fractions = [float(part) for part in given.fractions.split(",")]
    facts: dict[str, Any] = {
        "figure": figure.name,
        "streams": given.streams,
        "whole": figure.of(model),
        "weights": model.weight_count,
        "model": asdict(recipe.model),
        "train": asdict(recipe.train),
        "data": {key: value for key, value in asdict(recipe.data).items() if key in DATA},
        "device": str(device),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "fractions": fractions,
    }
    rows = []
    for per_tensor in (False, True):
        for name, values in rankings(model).items():
            if per_tensor and name == "snr, biases kept":
                continue  # a fraction of each tensor, biases among them
            found = list(rises(model, figure, values, fractions, per_tensor))
            percent = [100 * (value / facts["whole"] - 1) for value in found]
            rows.append({"ranking": name, "per_tensor": per_tensor, "rise_percent": percent})
            print(per_tensor, name, *(f"{rise:+.2f} %" for rise in percent), file=sys.stderr)
    print(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
