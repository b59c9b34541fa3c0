"""Recurrent networks, and any other torch module, made Bayesian.

>>> import torch, bayesrnn as br
>>> model = br.bayesianize(torch.nn.LSTM(3, 4), br.Gaussian(), br.ScaleMixture())
>>> output, state = model(torch.zeros(5, 2, 3))  # one draw for the whole sequence
>>> output.shape
torch.Size([5, 2, 4])
"""

from bayesrnn.bayes import (
    Bayesian,
    Delta,
    Gaussian,
    Laplace,
    Normal,
    Posterior,
    Prior,
    ScaleMixture,
    Sharpened,
    Uniform,
    bayesianize,
)
from bayesrnn.data import Batch, StreamLoader, TextData, Vocabulary, load_text
from bayesrnn.errors import Invalid, UserError
from bayesrnn.evaluate import (
    Categorical,
    DynamicEvaluation,
    Evaluation,
    Prediction,
    dynamic_evaluate,
    evaluate_text,
    generate,
    generate_text,
    outputs,
    predict,
    search_rate,
)
from bayesrnn.models import DropoutSettings, LanguageModel, detach
from bayesrnn.objective import FreeEnergy, Loss
from bayesrnn.recipe import Recipe, read_recipe
from bayesrnn.saving import load, load_vocabulary, save
from bayesrnn.train.loop import train

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Bayesian",
    "Categorical",
    "Delta",
    "DynamicEvaluation",
    "DropoutSettings",
    "Evaluation",
    "FreeEnergy",
    "Gaussian",
    "Sharpened",
    "Invalid",
    "LanguageModel",
    "Laplace",
    "Loss",
    "Normal",
    "Posterior",
    "Prediction",
    "Prior",
    "Recipe",
    "ScaleMixture",
    "StreamLoader",
    "TextData",
    "Uniform",
    "UserError",
    "Vocabulary",
    "bayesianize",
    "detach",
    "dynamic_evaluate",
    "evaluate_text",
    "generate",
    "generate_text",
    "load",
    "load_text",
    "load_vocabulary",
    "outputs",
    "predict",
    "read_recipe",
    "save",
    "search_rate",
    "train",
]
