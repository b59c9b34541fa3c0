"""Plain modules; nothing here knows of distributions over weights."""

from bayesrnn.models.classifier import Mlp, MlpSettings, ReviewModel, ReviewSettings
from bayesrnn.models.language import LanguageModel, LanguageSettings, detach

__all__ = [
    "LanguageModel",
    "LanguageSettings",
    "Mlp",
    "MlpSettings",
    "ReviewModel",
    "ReviewSettings",
    "detach",
]
