"""Plain modules; nothing here knows of distributions over weights."""

from bayesrnn.models.language import LanguageModel, LanguageSettings

__all__ = ["LanguageModel", "LanguageSettings"]
