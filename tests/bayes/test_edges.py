"""Corners that once went wrong."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bayesrnn as br


def test_a_fitted_prior_over_weights_that_are_all_zero_stays_finite() -> None:
    net = nn.Linear(3, 2)
    nn.init.zeros_(net.weight)
    model = br.bayesianize(net, br.Delta(), br.Normal(0.0, "fit"), where="weight")
    model(torch.ones(1, 3)).sum().backward()
    model.kl().backward()
    assert torch.isfinite(model.kl())
    assert torch.isfinite(model.blocks[0].loc.grad).all()


def test_a_draw_made_in_inference_mode_does_not_hinder_training() -> None:
    model = br.bayesianize(nn.Linear(3, 2))
    with torch.inference_mode():
        model(torch.ones(1, 3))
    model.kl("sample").backward()
    assert model.blocks[0].rho.grad is not None


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 1.0}])
def test_an_embedding_whose_weight_cannot_be_drawn_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"weight .* sparse=True or max_norm"):
        br.bayesianize(nn.Embedding(5, 3, **options))


def test_the_kl_of_half_precision_weights_is_summed_in_single_precision() -> None:
    model = br.bayesianize(nn.Linear(100, 100), prior=br.Normal(0.0, 0.5))
    model.resample()
    exact = model.kl("exact").item()
    half = model.to(torch.bfloat16)
    assert half.kl("exact").item() == pytest.approx(exact, rel=2e-3)
    half.kl("exact").backward()
    assert half.blocks[0].loc.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("posterior", "prior"),
    [
        (br.Delta(), br.Normal("fit", "fit")),
        (br.Delta(), br.Laplace(0.0, "fit")),
        (br.Gaussian(0.1), br.Laplace("learn", "learn")),
        (br.Gaussian(0.1), br.ScaleMixture("learn", "learn", 0.05, group="tensor")),
    ],
)
def test_a_priors_own_numbers_are_counted_in_single_precision(
    posterior: br.Posterior, prior: br.Prior
) -> None:
    """Of so many weights log 2b, say, is past the largest number of half precision."""
    torch.manual_seed(1)
    model = br.bayesianize(nn.Linear(500, 500, bias=False), posterior, prior)
    model.resample()
    exact = model.kl().item()
    kl = model.half().kl()
    assert kl.item() == pytest.approx(exact, rel=2e-3)
    kl.backward()
    assert model.blocks[0].loc.grad.isfinite().all()


def test_the_start_of_sigma_may_be_given_as_a_list() -> None:
    assert br.Gaussian(scale=[0.1, 0.2]) == br.Gaussian(scale=(0.1, 0.2))  # type: ignore[arg-type]


def test_the_whole_model_can_be_checkpointed_under_one_held_draw() -> None:
    model, x = br.bayesianize(nn.LSTM(3, 4)), torch.randn(5, 2, 3)
    rho = model.blocks[0].rho
    with model.hold():
        plain = torch.autograd.grad(model(x)[0].sum(), rho)[0]
        again = checkpoint(model, x, use_reentrant=False)[0].sum()
        recomputed = torch.autograd.grad(again, rho)[0]
    assert torch.equal(plain, recomputed)


def test_a_held_draw_stays_where_a_pruned_state_is_loaded() -> None:
    model, x = br.bayesianize(nn.Linear(5, 4), br.Gaussian(0.3)), torch.randn(3, 5)
    br.prune(model, 0.5)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with model.hold():
        drawn = model(x)
        model.load_state_dict(state)
        assert torch.equal(model(x), drawn)


def test_a_look_stays_that_of_its_draw_where_another_draw_comes_between() -> None:
    x = torch.randn(3, 5)
    model = br.bayesianize(nn.Linear(5, 4), br.Sharpened(0.3, order="second"))
    with model.hold():
        model.resample(nll=lambda: model(x).square().mean())
        look, drawn = model.look, model(x)
        model.eval()
        with model.weights("sample"):
            model(x)
        model.train()
        assert model.look is look
        assert look is not None
        assert torch.equal(model(x), drawn)
