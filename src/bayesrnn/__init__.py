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
    weight_bits,
)
from bayesrnn.data import (
    Batch,
    ExampleLoader,
    Examples,
    ImageData,
    ReviewData,
    StreamLoader,
    TextData,
    Vocabulary,
    load_images,
    load_reviews,
    load_text,
)
from bayesrnn.errors import Invalid, UserError
from bayesrnn.evaluate import (
    Categorical,
    DynamicEvaluation,
    Evaluation,
    LabelledEvaluation,
    Prediction,
    TextUncertainty,
    dynamic_evaluate,
    entropy_gap,
    evaluate_labelled,
    evaluate_text,
    generate,
    generate_text,
    outputs,
    predict,
    search_rate,
    text_uncertainty,
    write_predictions,
)
from bayesrnn.models import (
    DropoutSettings,
    LanguageModel,
    Mlp,
    MlpSettings,
    ReviewModel,
    ReviewSettings,
    detach,
)
from bayesrnn.objective import FreeEnergy, Loss
from bayesrnn.prune import (
    SAFE_THRESHOLD,
    Dead,
    Pruned,
    Structure,
    dead_units,
    prune,
    pruning_curve,
    signal_to_noise,
    structure,
)
from bayesrnn.pruned_run import PrunedRun, RunCurve, prune_run, run_curve
from bayesrnn.recipe import Recipe, read_recipe
from bayesrnn.saving import load, load_vocabulary, save
from bayesrnn.sparse import sparse_network
from bayesrnn.train.loop import train

__version__ = "0.1.0"

__all__ = [
    "SAFE_THRESHOLD",
    "Batch",
    "Bayesian",
    "Categorical",
    "Dead",
    "Delta",
    "DropoutSettings",
    "DynamicEvaluation",
    "Evaluation",
    "ExampleLoader",
    "Examples",
    "FreeEnergy",
    "Gaussian",
    "ImageData",
    "Invalid",
    "LabelledEvaluation",
    "LanguageModel",
    "Laplace",
    "Loss",
    "Mlp",
    "MlpSettings",
    "Normal",
    "Posterior",
    "Prediction",
    "Prior",
    "Pruned",
    "PrunedRun",
    "Recipe",
    "ReviewData",
    "ReviewModel",
    "ReviewSettings",
    "RunCurve",
    "ScaleMixture",
    "Sharpened",
    "StreamLoader",
    "Structure",
    "TextData",
    "TextUncertainty",
    "Uniform",
    "UserError",
    "Vocabulary",
    "bayesianize",
    "dead_units",
    "detach",
    "dynamic_evaluate",
    "entropy_gap",
    "evaluate_labelled",
    "evaluate_text",
    "generate",
    "generate_text",
    "load",
    "load_images",
    "load_reviews",
    "load_text",
    "load_vocabulary",
    "outputs",
    "predict",
    "prune",
    "prune_run",
    "pruning_curve",
    "read_recipe",
    "run_curve",
    "save",
    "search_rate",
    "signal_to_noise",
    "sparse_network",
    "structure",
    "text_uncertainty",
    "train",
    "weight_bits",
    "write_predictions",
]
