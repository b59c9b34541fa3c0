"""Posteriors, priors, their KL, and `bayesianize`."""

from bayesrnn.bayes.bayesian import Bayesian, check_bayesian
from bayesrnn.bayes.bayesianize import bayesianize, default_input_axis, with_prior
from bayesrnn.bayes.cost import weight_bits
from bayesrnn.bayes.ensemble import Ensemble, Network, members_of
from bayesrnn.bayes.plain import plain_network
from bayesrnn.bayes.posterior import Delta, Gaussian, Posterior
from bayesrnn.bayes.prior import Laplace, Normal, Prior, ScaleMixture, Uniform
from bayesrnn.bayes.sharpening import Sharpened, sharpen

__all__ = [
    "Bayesian",
    "Delta",
    "Ensemble",
    "Gaussian",
    "Laplace",
    "Network",
    "Normal",
    "Posterior",
    "Prior",
    "ScaleMixture",
    "Sharpened",
    "Uniform",
    "bayesianize",
    "check_bayesian",
    "default_input_axis",
    "members_of",
    "plain_network",
    "sharpen",
    "weight_bits",
    "with_prior",
]
