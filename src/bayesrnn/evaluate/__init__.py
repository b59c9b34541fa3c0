"""Scores and predictions: by the mean, by draws, and what the draws disagree about."""

from bayesrnn.evaluate import outputs
from bayesrnn.evaluate.dynamic import (
    DynamicEvaluation,
    RateSearch,
    Trial,
    dynamic_evaluate,
    search_rate,
)
from bayesrnn.evaluate.generation import generate, generate_text
from bayesrnn.evaluate.labelled import (
    LabelledEvaluation,
    evaluate_labelled,
    write_predictions,
)
from bayesrnn.evaluate.outputs import Categorical, Prediction
from bayesrnn.evaluate.perplexity import Evaluation, evaluate_text
from bayesrnn.evaluate.prediction import predict

__all__ = [
    "Categorical",
    "DynamicEvaluation",
    "Evaluation",
    "LabelledEvaluation",
    "Prediction",
    "evaluate_labelled",
    "RateSearch",
    "Trial",
    "dynamic_evaluate",
    "evaluate_text",
    "generate",
    "generate_text",
    "outputs",
    "predict",
    "write_predictions",
    "search_rate",
]
