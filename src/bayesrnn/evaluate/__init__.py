"""Scores and predictions: by the mean, by draws, and what the draws disagree about."""

from bayesrnn.evaluate import outputs
from bayesrnn.evaluate.baselines import best_season
from bayesrnn.evaluate.calibration import (
    Calibration,
    Reliability,
    RiskCoverage,
    calibration_of_top,
    classwise_error,
    reliability,
    risk_coverage,
)
from bayesrnn.evaluate.captioned import CaptionFile, caption_pictures
from bayesrnn.evaluate.captions import CaptionEvaluation, caption_uncertainty, evaluate_captions
from bayesrnn.evaluate.decoding import Caption, Decoding, decode_captions
from bayesrnn.evaluate.dynamic import (
    DynamicEvaluation,
    RateSearch,
    Trial,
    dynamic_evaluate,
    search_rate,
)
from bayesrnn.evaluate.generation import generate, generate_text
from bayesrnn.evaluate.intervals import (
    Coverage,
    NumberCalibration,
    calibration_of_numbers,
    coverage,
)
from bayesrnn.evaluate.labelled import (
    LabelledEvaluation,
    evaluate_labelled,
    labelled_uncertainty,
    write_predictions,
)
from bayesrnn.evaluate.mixture import NormalMixture
from bayesrnn.evaluate.outputs import Categorical, Prediction
from bayesrnn.evaluate.perplexity import Evaluation, evaluate_text
from bayesrnn.evaluate.prediction import predict
from bayesrnn.evaluate.series import (
    Backtest,
    Forecast,
    SeriesEvaluation,
    backtest,
    evaluate_series,
    forecast,
    read_series,
)
from bayesrnn.evaluate.speech import (
    SpeechEvaluation,
    Transcription,
    evaluate_speech,
    transcribe,
)
from bayesrnn.evaluate.temperature import (
    TemperatureSearch,
    TemperatureTrial,
    search_temperature,
)
from bayesrnn.evaluate.uncertainty import (
    Detection,
    EntropyGap,
    TextUncertainty,
    aupr,
    auroc,
    detect,
    entropy_gap,
    reversed_text,
    shuffled_text,
    text_uncertainty,
    unigram_entropy,
    write_tokens,
)

__all__ = [
    "Backtest",
    "Calibration",
    "Caption",
    "CaptionEvaluation",
    "CaptionFile",
    "Categorical",
    "Coverage",
    "Decoding",
    "Detection",
    "DynamicEvaluation",
    "EntropyGap",
    "Evaluation",
    "Forecast",
    "LabelledEvaluation",
    "NormalMixture",
    "NumberCalibration",
    "Prediction",
    "RateSearch",
    "Reliability",
    "RiskCoverage",
    "SeriesEvaluation",
    "SpeechEvaluation",
    "TemperatureSearch",
    "TemperatureTrial",
    "TextUncertainty",
    "Transcription",
    "Trial",
    "aupr",
    "auroc",
    "backtest",
    "best_season",
    "calibration_of_numbers",
    "calibration_of_top",
    "caption_pictures",
    "caption_uncertainty",
    "classwise_error",
    "coverage",
    "decode_captions",
    "detect",
    "dynamic_evaluate",
    "entropy_gap",
    "evaluate_captions",
    "evaluate_labelled",
    "evaluate_series",
    "evaluate_speech",
    "evaluate_text",
    "forecast",
    "generate",
    "generate_text",
    "labelled_uncertainty",
    "outputs",
    "predict",
    "read_series",
    "reliability",
    "reversed_text",
    "risk_coverage",
    "search_rate",
    "search_temperature",
    "shuffled_text",
    "text_uncertainty",
    "transcribe",
    "unigram_entropy",
    "write_predictions",
    "write_tokens",
]
