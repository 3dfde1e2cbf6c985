"""Each noise level, weight, loss and noise against its paper's formula. The affine law itself:
tests/comfy/test_sampling.py."""

import dataclasses
import math
from functools import partial

import pytest
import torch

from graft.training import rng
from graft.training.config import ObjectiveConfig, TrainConfig, from_dict
from graft.training.model import Batch
from graft.training.objective import sigmas
from graft.training.objective.loss import (
    check_sampling,
    differential_target,
    draw_loss,
    loss_at,
    noise_input,
    noised_mask,
    with_guidance,
)
from graft.training.objective.noise import add_offset, add_pyramid, draw_noise
from graft.training.objective.preservation import is_due, preservation_weight
from graft.training.objective.settled import settled
from graft.training.objective.sigmas import SIGMAS, draw_sigmas, is_flow, shift_for
from graft.training.objective.weighting import LOSSES, SPACES, WEIGHTINGS, Level

from ..support.tiny import FAMILY, Flow, TinyDataset, TinyDenoiser

CONFIG = ObjectiveConfig()
U = torch.linspace(0.01, 0.99, 99)
SHAPE = torch.Size((4, 4, 16, 16))


class Eps(Flow):
    """Epsilon prediction with sigma = sqrt(1 - abar) / sqrt(abar), as ComfyUI's EPS."""

    sigma_min, sigma_max = torch.tensor(0.03), torch.tensor(14.6)

    def noise_scaling(self, sigma, noise, latent_image):
        return latent_image + sigma * noise

    def percent_to_sigma(self, percent):
        return 0.03 * (14.6 / 0.03) ** (1.0 - percent)


class V(Eps):
    def calculate_denoised(self, sigma, model_output, model_input):
        sigma = sigma.reshape(-1, 1, 1, 1)
        return model_input / (sigma**2 + 1) - model_output * sigma / (sigma**2 + 1).sqrt()


class ShiftedFlow(Flow):
    """A flow whose own schedule is shifted, as that of Wan 2.2."""

    def percent_to_sigma(self, percent):
        return 5.0 * (1.0 - percent) / (1.0 + 4.0 * (1.0 - percent))


def generator(key="test"):
    return rng.generator(0, key)


def draw(count=4000, sampling=None, *, seed=0, tokens=4096, family=FAMILY, **settings):
    return draw_sigmas(
        count,
        ObjectiveConfig(**settings),
        family,
        sampling or Flow(),
        generator=rng.generator(seed, "sigma"),
        tokens=tokens,
    )


# Noise levels


def test_uniform_levels_are_uniform():
    assert torch.allclose(draw(sigmas="uniform").sort().values, (torch.arange(4000) + 0.5) / 4000, atol=2e-3)


@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (-0.5, 0.7), (1.0, 2.0)])
def test_logit_normal_levels_have_the_density_of_esser_2024_eq_19(mean, std):
    levels = torch.logit(draw(sigmas="logit-normal", mean=mean, std=std).double())
    assert abs(levels.mean() - mean) < 0.02 * std and abs(levels.std() - std) < 0.02 * std


def test_sigmoid_levels_are_the_sigmoid_of_a_scaled_normal():
    torch.testing.assert_close(
        SIGMAS["sigmoid"](U, ObjectiveConfig(std=2.0)), torch.sigmoid(2 * torch.special.ndtri(U))
    )


@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.81, 1.29, 1.75])
def test_mode_levels_are_esser_2024_eq_20_and_increase(scale):
    v = 1 - U
    expected = 1 - v - scale * (torch.cos(math.pi / 2 * v) ** 2 - 1 + v)
    found = SIGMAS["mode"](U, ObjectiveConfig(mode_scale=scale))
    torch.testing.assert_close(found, expected)
    assert (found.diff() > 0).all() and 0 < found.min() and found.max() < 1


def test_cosmap_levels_have_the_density_of_esser_2024_eq_21():
    levels = draw(20000, sigmas="cosmap")
    counts = torch.histc(levels, 10, 0, 1) / len(levels)
    t = (torch.arange(1000) + 0.5) / 1000
    density = 2 / (math.pi - 2 * math.pi * t + 2 * math.pi * t**2)
    assert torch.allclose(counts, density.reshape(10, 100).mean(1) / 10, atol=2e-3)


def test_schedule_levels_are_the_models_own_sigmas_uniformly_in_time():
    found = draw(1000, Eps(), sigmas="schedule").log().sort().values
    expected = torch.tensor([math.log(Eps().percent_to_sigma(1 - (i + 0.5) / 1000)) for i in range(1000)])
    assert torch.allclose(found, expected, atol=0.02)


def test_schedule_levels_of_a_flow_are_not_shifted_twice():
    family = dataclasses.replace(FAMILY, shift=3.0, resolution_shift="sd3")
    assert shift_for(1024, ObjectiveConfig(sigmas="schedule"), family) == 1.0
    assert shift_for(1024, ObjectiveConfig(sigmas="schedule", shift=2.0), family) == 2.0
    assert shift_for(4096, ObjectiveConfig(sigmas="schedule", resolution_shift="sd3"), family) == 3.0


def test_levels_of_models_that_are_no_flow_are_positions_in_their_schedule():
    assert is_flow(Flow()) and not is_flow(Eps())
    levels = draw(2000, Eps(), sigmas="logit-normal")
    position = torch.log(levels / 0.03) / math.log(14.6 / 0.03)
    assert abs(torch.logit(position.double().clamp(1e-6, 1 - 1e-6)).std() - 1) < 0.02


def test_shift_is_esser_2024_eq_23_and_undone_by_its_inverse():
    torch.testing.assert_close(sigmas.shift_timesteps(U, 3.0), 3 * U / (1 + 2 * U))
    torch.testing.assert_close(sigmas.shift_timesteps(sigmas.shift_timesteps(U, 3.0), 1 / 3), U)


@pytest.mark.parametrize("tokens, mu", [(1024, 0.95), (2560, 1.5), (4096, 2.05), (9000, 2.05)])
def test_ltx_shifts_by_exp_mu_linear_in_the_tokens_up_to_4096(tokens, mu):
    assert shift_for(tokens, ObjectiveConfig(resolution_shift="ltx"), FAMILY) == pytest.approx(math.exp(mu))


@pytest.mark.feature(72)
@pytest.mark.parametrize("tokens, mu", [(256, 0.5), (4096, 1.15), (1024, 0.63)])
def test_flux_shifts_by_exp_mu_linear_in_the_tokens(tokens, mu):
    assert shift_for(tokens, ObjectiveConfig(resolution_shift="flux"), FAMILY) == pytest.approx(math.exp(mu))
    t, shift = 0.3, math.exp(mu)  # and a shift of exp(mu) is the time shift of flux/sampling.py
    assert sigmas.shift_timesteps(torch.tensor(t), shift).item() == pytest.approx(
        shift / (shift + (1 / t - 1))
    )


@pytest.mark.feature(72)
def test_sd3_shifts_by_the_square_root_of_the_size():
    family = dataclasses.replace(FAMILY, shift=3.0, resolution_shift="sd3")
    assert shift_for(4096, CONFIG, family) == pytest.approx(3.0)
    assert shift_for(1024, CONFIG, family) == pytest.approx(1.5)


def test_a_shift_set_by_hand_is_kept_at_every_size():
    family = dataclasses.replace(FAMILY, shift=3.0, resolution_shift="flux")
    assert shift_for(256, ObjectiveConfig(shift=2.0), family) == 2.0
    assert shift_for(1024, ObjectiveConfig(shift=2.0, resolution_shift="sd3"), family) == 1.0


def test_only_the_schedule_takes_the_place_in_a_flows_own_schedule():
    assert torch.equal(draw(sampling=ShiftedFlow(), sigmas="logit-normal"), draw(sigmas="logit-normal"))
    u = draw(sigmas="schedule", sampling=Flow())
    found = draw(sigmas="schedule", sampling=ShiftedFlow())
    torch.testing.assert_close(found, 5 * u / (1 + 4 * u), atol=5e-3, rtol=0)  # the ends are the model's


@pytest.mark.feature(73)
def test_bias_triples_the_odds_of_the_upper_half():
    assert (draw(sigmas="uniform", bias=1.0) > 0.5).float().mean() == pytest.approx(0.75, abs=1e-3)
    assert (draw(sigmas="uniform", bias=-1.0) > 0.5).float().mean() == pytest.approx(1 - 0.5**0.5, abs=1e-3)


def test_levels_are_squeezed_between_minimum_and_maximum():
    levels = draw(sigmas="logit-normal", min_noise=0.2, max_noise=0.6)
    assert 0.2 <= levels.min() and levels.max() <= 0.6 and abs(levels.mean() - 0.4) < 1e-3


@pytest.mark.feature(148)
@pytest.mark.parametrize("name", SIGMAS)
def test_two_ranges_that_are_cut_out_share_no_level_and_together_are_the_whole_distribution(name):
    """As Wan 2.2's two experts are trained, at a boundary of 0.875 of the noise."""
    chosen = {"sigmas": name, "shift": 5.0, "sampling": ShiftedFlow()}
    whole = draw(20_000, **chosen)
    high = draw(20_000, **chosen, noise_range="cut", min_noise=0.875)
    low = draw(20_000, **chosen, noise_range="cut", max_noise=0.875)
    assert low.max() < 0.875 <= high.min()
    share = (whole >= 0.875).float().mean()
    assert 0.1 < share < 0.9
    edges = torch.linspace(0, 1, 17)
    expected, above, below = (torch.histogram(levels, edges).hist / 20_000 for levels in (whole, high, low))
    torch.testing.assert_close(share * above + (1 - share) * below, expected, atol=2e-3, rtol=0)


def test_a_range_without_a_level_of_the_model_is_refused():
    with pytest.raises(ValueError, match=r"min_noise 0.2 and max_noise 0.3: the model has no noise level"):
        draw(sigmas="logit-normal", mean=9.0, std=0.01, noise_range="cut", min_noise=0.2, max_noise=0.3)


@pytest.mark.feature(129)
def test_a_stratified_batch_has_one_level_in_each_part_and_the_same_expectation():
    for seed in range(20):
        assert (draw(8, sigmas="uniform", seed=seed) * 8).long().sort().values.tolist() == list(range(8))
    many = torch.cat([draw(4, sigmas="uniform", seed=seed) for seed in range(1000)])
    assert abs(many.mean() - 0.5) < 0.01 and abs(many.var() - 1 / 12) < 0.005


def test_unstratified_levels_are_independent():
    means = torch.stack([draw(8, sigmas="uniform", seed=s, stratified=False).mean() for s in range(500)])
    assert means.var().item() == pytest.approx(1 / 12 / 8, rel=0.2)


@pytest.mark.parametrize("name", SIGMAS)
def test_every_distribution_draws_within_the_models_range_and_equally_for_equal_keys(name):
    for sampling in (Flow(), Eps()):
        levels = draw(500, sampling, sigmas=name)
        assert sampling.sigma_min <= levels.min() and levels.max() <= sampling.sigma_max
        assert torch.equal(levels, draw(500, sampling, sigmas=name))
        assert not torch.equal(levels, draw(500, sampling, sigmas=name, seed=1))


def test_levels_at_the_very_ends_are_the_models_last_ones():
    ends = torch.tensor([0.0, 1.0])
    assert sigmas.to_sigmas(Flow(), ends, flow=True).tolist() == pytest.approx([0.001, 1.0])
    assert sigmas.to_sigmas(Eps(), ends, flow=False).tolist() == pytest.approx([0.03, 14.6])
    assert draw(20_000, sigmas="uniform").min() >= Flow.sigma_min


def test_an_unknown_distribution_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match="sigmas: 'normal' is unknown; choose one of auto, uniform, logit-normal"
    ):
        draw(4, sigmas="normal")


# Weights


def level(sampling, *sigma):
    return Level.of(sampling, torch.tensor(sigma), 4)


def total(name, space, at, **settings):
    """The weight of the image's squared error: of one output error, in a space, per error of the image."""
    gain = SPACES[space](at)
    return (WEIGHTINGS[name](at, gain, ObjectiveConfig(**settings)) * (gain / at.slope) ** 2).flatten()


@pytest.mark.parametrize("sampling", [Flow(), Eps(), V()])
def test_every_space_measures_the_error_it_is_named_after(sampling):
    """With one x_t and a wrong image, the errors of x0, eps, v and velocity follow from their definitions."""
    sigma = torch.tensor([0.3])
    x0, wrong, noise = torch.randn(3, 1, 4, 8, 8, generator=generator())
    at = Level.of(sampling, sigma, 4)
    x_t = at.image * x0 + at.noise * noise
    alpha, beta = at.image / (at.image**2 + at.noise**2).sqrt(), at.noise / (at.image**2 + at.noise**2).sqrt()
    eps = (x_t - at.image * wrong) / at.noise
    expected = {
        "x0": wrong - x0,
        "eps": eps - noise,
        "v": alpha * (eps - noise) - beta * (wrong - x0),
        "velocity": (eps - noise) - (wrong - x0),
        "output": (wrong - x0) / at.slope,
    }
    for name, error in expected.items():
        found = SPACES[name](at) * (wrong - x0) / at.slope
        torch.testing.assert_close(found.abs(), error.abs(), rtol=1e-4, atol=1e-5)


def test_the_slope_is_that_of_the_output_alone():
    class Offset(Flow):
        def calculate_denoised(self, sigma, model_output, model_input):
            return 0.25 + super().calculate_denoised(sigma, model_output, model_input)

    torch.testing.assert_close(level(Offset(), 0.3, 0.7).slope.flatten(), torch.tensor([-0.3, -0.7]))


@pytest.mark.parametrize("sampling, space", [(Flow(), "velocity"), (Eps(), "eps"), (V(), "v")])
def test_the_output_is_velocity_noise_or_v_by_model_type(sampling, space):
    at = level(sampling, 0.1, 0.5, 0.9)
    torch.testing.assert_close(SPACES[space](at), torch.ones(3, 1, 1, 1))


def test_the_flow_time_of_a_level_has_its_signal_to_noise_ratio():
    sigma = torch.tensor([0.1, 1.0, 9.0])
    level = Level.of(Eps(), sigma, 4)  # x + sigma * n
    torch.testing.assert_close(level.flow.flatten(), sigma / (1 + sigma))
    torch.testing.assert_close(((1 - level.flow) / level.flow).square(), level.snr)


@pytest.mark.feature(74)
def test_min_snr_is_hang_2023_for_eps_v_and_x0():
    at, gamma = level(Eps(), 0.05, 0.4, 1.0, 5.0), 5.0
    snr = at.snr.flatten()
    clamped = snr.clamp(max=gamma)
    weight = partial(WEIGHTINGS["min-snr"], at, config=ObjectiveConfig(min_snr_gamma=gamma))
    torch.testing.assert_close(snr, torch.tensor([0.05, 0.4, 1.0, 5.0]) ** -2)
    torch.testing.assert_close(weight(gain=SPACES["x0"](at)).flatten(), clamped)
    torch.testing.assert_close(weight(gain=SPACES["eps"](at)).flatten(), clamped / snr)
    torch.testing.assert_close(weight(gain=SPACES["v"](at)).flatten(), clamped / (snr + 1))


def test_debiased_is_one_over_the_root_of_snr_on_the_noise():
    at = level(Eps(), 0.1, 1.0, 10.0)
    found = WEIGHTINGS["debiased"](at, SPACES["eps"](at), CONFIG).flatten()
    torch.testing.assert_close(found, torch.tensor([0.1, 1.0, 10.0]))


def test_no_end_of_the_schedule_outweighs_the_rest():
    at = level(Eps(), 1e-3, 1e3)  # SNR 1e6 and 1e-6
    torch.testing.assert_close(total("debiased", "x0", at), torch.tensor([1e3, 1e-3]).sqrt())
    found = WEIGHTINGS["sigma-sqrt"](level(Flow(), 1e-3), None, CONFIG).flatten()
    torch.testing.assert_close(found, torch.tensor([1e4]))


@pytest.mark.parametrize("name", ["min-snr", "debiased"])
@pytest.mark.parametrize("sampling", [Flow(), Eps(), V()])
def test_snr_weights_mean_the_same_in_every_space(name, sampling):
    at = level(sampling, 0.1, 0.5, 0.9)
    expected = total(name, "x0", at)
    for space in SPACES:
        torch.testing.assert_close(total(name, space, at), expected)


def test_sigma_sqrt_and_cosmap_are_the_weights_of_diffusers():
    training_utils = pytest.importorskip("diffusers.training_utils")
    sigma = torch.tensor([0.05, 0.3, 0.9])
    for name, theirs in (("sigma-sqrt", "sigma_sqrt"), ("cosmap", "cosmap")):
        expected = training_utils.compute_loss_weighting_for_sd3(theirs, sigma)
        found = WEIGHTINGS[name](level(Flow(), *sigma.tolist()), None, CONFIG).flatten()
        torch.testing.assert_close(found, expected)


@pytest.mark.feature(71)
def test_densities_are_those_of_diffusers():
    training_utils = pytest.importorskip("diffusers.training_utils")
    density = training_utils.compute_density_for_timestep_sampling
    torch.manual_seed(0)
    for ours, theirs in (("logit-normal", "logit_normal"), ("mode", "mode")):
        expected = density(theirs, 20000, logit_mean=0.3, logit_std=0.8, mode_scale=1.29)
        found = draw(20000, sigmas=ours, mean=0.3, std=0.8)
        quantiles = torch.linspace(0.05, 0.95, 19)
        assert torch.allclose(found.quantile(quantiles), expected.quantile(quantiles), atol=0.015)


# Losses


@pytest.mark.feature(75)
def test_losses_are_their_formulas():
    error = torch.tensor([-2.0, -0.05, 0.0, 0.05, 0.5])
    torch.testing.assert_close(LOSSES["mse"](error, 0.1), error**2)
    torch.testing.assert_close(LOSSES["l1"](error, 0.1), error.abs())
    expected = torch.where(error.abs() <= 0.1, error**2, 0.2 * error.abs() - 0.01)
    torch.testing.assert_close(LOSSES["huber"](error, 0.1), expected)
    torch.testing.assert_close(LOSSES["pseudo-huber"](error, 0.1), 0.2 * ((error**2 + 0.01).sqrt() - 0.1))


def test_differential_guidance_multiplies_the_gradient_of_mse():
    output = torch.tensor([0.3, -1.0], requires_grad=True)
    target = torch.tensor([1.0, 1.0])
    (differential_target(output.detach(), target, 3.0) - output).square().sum().backward()
    torch.testing.assert_close(output.grad, 3.0 * 2 * (output.detach() - target))


def at_half(config=CONFIG, *, denoiser=None, batch=None, **kwargs):
    denoiser = denoiser or TinyDenoiser()
    batch = batch or TinyDataset().batch(4, seed=0, index=0)
    noise = torch.randn(batch.latents.shape, generator=generator())
    sigma = torch.tensor([0.2, 0.4, 0.6, 0.8])
    with torch.no_grad(), denoiser.hold(torch.float32):
        return loss_at(denoiser, batch, batch.latents, sigma, noise, config, **kwargs)


class Constant(TinyDenoiser):
    """Predicts the same network output everywhere."""

    def denoise(self, x_t, sigma, batch):
        return self.sampling.calculate_denoised(sigma, torch.full_like(x_t, 0.25), x_t)


def test_the_loss_is_the_mean_squared_error_of_velocity_for_a_flow_model():
    batch = TinyDataset().batch(4, seed=0, index=0)
    noise = torch.randn(batch.latents.shape, generator=generator())
    expected = (0.25 - (noise - batch.latents)).square().mean()
    torch.testing.assert_close(at_half(denoiser=Constant()), expected)


def test_weights_multiply_each_samples_loss():
    batch = TinyDataset().batch(4, seed=0, index=0)
    noise = torch.randn(batch.latents.shape, generator=generator())
    each = (0.25 - (noise - batch.latents)).square().mean((1, 2, 3))
    sigma = torch.tensor([0.2, 0.4, 0.6, 0.8])
    found = at_half(ObjectiveConfig(weighting="sigma-sqrt"), denoiser=Constant())
    torch.testing.assert_close(found, (each * sigma**-2).mean())
    found = at_half(ObjectiveConfig(space="x0"), denoiser=Constant())
    torch.testing.assert_close(found, (each * sigma**2).mean())


def test_an_image_of_half_the_weight_counts_half_in_the_mean():
    batch = TinyDataset().batch(4, seed=0, index=0)
    noise = torch.randn(batch.latents.shape, generator=generator())
    each = (0.25 - (noise - batch.latents)).square().mean((1, 2, 3))
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0])
    found = at_half(denoiser=Constant(), batch=dataclasses.replace(batch, weights=weights))
    torch.testing.assert_close(found, (each * weights).mean())


def test_masked_loss_is_renormalized_and_leaves_out_what_is_masked():
    batch = TinyDataset().batch(4, seed=0, index=0)
    masks = torch.zeros(4, 1, 8, 8)
    masks[:, :, :, :4] = 1.0
    masks[0, :, :, 1:] = 0.0
    noise = torch.randn(batch.latents.shape, generator=generator())
    error = (0.25 - (noise - batch.latents))[..., :4].square()
    expected = (error[0, ..., :1].mean() + 3 * error[1:].mean()) / 4  # every image counts the same
    found = at_half(denoiser=Constant(), batch=dataclasses.replace(batch, masks=masks))
    torch.testing.assert_close(found, expected)


def test_a_mask_weighs_every_frame_of_a_video_alike():
    x0, noise = torch.randn(2, 1, 4, 3, 8, 6, generator=generator())
    masks = torch.rand(1, 1, 8, 6, generator=generator("mask"))
    batch = Batch(x0, [{}], masks=masks)
    found = loss_at(Constant(), batch, x0, torch.tensor([0.5]), noise)
    expected = ((0.25 - (noise - x0)).square() * masks[:, :, None] / masks.mean()).mean()
    torch.testing.assert_close(found, expected)


def test_what_a_sample_gives_clean_is_not_trained_and_a_sample_without_such_a_mask_is_whole():
    x0, noise = torch.randn(2, 2, 4, 3, 8, 6, generator=generator())
    clean = torch.ones(1, 1, 3, 1, 1)
    clean[:, :, 0] = 0
    batch = Batch(x0, [{"denoise_mask": clean}, {}])
    masks = noised_mask(batch, x0)
    torch.testing.assert_close(masks, torch.cat([clean, torch.ones_like(clean)]).expand(2, 1, 3, 8, 6))
    error = (0.25 - (noise - x0)).square()
    expected = (error[0, :, 1:].mean() + error[1].mean()) / 2
    torch.testing.assert_close(loss_at(Constant(), batch, x0, torch.tensor([0.5, 0.5]), noise), expected)
    assert noised_mask(Batch(x0, [{}, {}]), x0) is None
    sigma = torch.tensor([0.5, 0.5])
    seen = noise_input(Constant().sampling, batch, sigma, noise, x0, CONFIG, None)
    noised = noise_input(Constant().sampling, Batch(x0, [{}, {}]), sigma, noise, x0, CONFIG, None)
    assert torch.equal(seen[0, :, 0], x0[0, :, 0]) and torch.equal(seen[0, :, 1:], noised[0, :, 1:])
    assert torch.equal(seen[1], noised[1]) and not torch.equal(noised, x0)


@pytest.mark.parametrize(("share", "due"), [(1.0, range(8)), (0.5, [1, 3, 5, 7]), (0.25, [3, 7])])
def test_preservation_is_spread_evenly_and_weighs_the_same_in_all(share, due):
    config = ObjectiveConfig(preservation=0.6, preservation_share=share)
    assert [step for step in range(8) if is_due(config, step)] == list(due)
    assert len(due) * preservation_weight(config) == pytest.approx(8 * 0.6)
    assert not any(is_due(ObjectiveConfig(preservation_share=share), step) for step in range(8))


def test_input_perturbation_changes_what_is_seen_and_not_what_is_asked_for():
    """Ning et al. 2023, alg. 1: y = sqrt(abar) x0 + sqrt(1 - abar)(eps + gamma xi), target eps."""
    seen = []

    class Watching(Constant):
        def denoise(self, x_t, sigma, batch):
            seen.append(x_t)
            return super().denoise(x_t, sigma, batch)

    extra = torch.randn(4, 4, 8, 8, generator=generator("extra"))
    plain = at_half(denoiser=Watching())
    perturbed = at_half(ObjectiveConfig(input_perturbation=0.1), denoiser=Watching(), perturbation=extra)
    torch.testing.assert_close(plain, perturbed)
    sigma = torch.tensor([0.2, 0.4, 0.6, 0.8]).reshape(-1, 1, 1, 1)
    torch.testing.assert_close(seen[1] - seen[0], sigma * 0.1 * extra, rtol=1e-4, atol=1e-6)


# Noise


def test_add_offset_adds_one_value_to_each_channel():
    noise = torch.randn(SHAPE, generator=generator())
    added = add_offset(noise, 0.1, generator=generator("offset")) - noise
    assert added.flatten(2).std(2).max() < 1e-6
    values = add_offset(torch.zeros(500, 4, 1, 1), 0.1, generator=generator("offset"))
    assert values.std().item() == pytest.approx(0.1, rel=0.05)


def test_pyramid_noise_keeps_its_variance_and_gains_low_frequencies():
    noise = torch.randn(64, 4, 32, 32, generator=generator())
    found = add_pyramid(noise, 0.5, generator=generator("pyramid"))
    torch.testing.assert_close(found.flatten(1).std(1), torch.ones(64))

    def low(x):
        return torch.nn.functional.avg_pool2d(x, 8).std().item()

    assert low(found) > 1.5 * low(noise)


@pytest.mark.feature(76)
def test_each_layer_of_pyramid_noise_is_coarser_and_counts_by_the_discount_once_more():
    noise, draws = torch.randn(2, 4, 24, 16, generator=generator()), generator("pyramid")
    layers, side = [noise], 1.0
    while side < 16:
        side *= 2 + 2 * torch.rand((), generator=draws).item()
        coarse = torch.randn(2, 4, max(1, round(24 / side)), max(1, round(16 / side)), generator=draws)
        layers.append(torch.nn.functional.interpolate(coarse, size=(24, 16), mode="bilinear"))
    total = sum(0.6**i * layer for i, layer in enumerate(layers))
    expected = total / total.std((1, 2, 3), keepdim=True)
    torch.testing.assert_close(add_pyramid(noise, 0.6, generator=generator("pyramid")), expected)


def test_pyramid_noise_works_on_video_latents():
    noise = torch.randn(2, 4, 3, 8, 6, generator=generator())
    assert add_pyramid(noise, 0.3, generator=generator("pyramid")).shape == noise.shape


def test_noise_is_a_function_of_its_key_and_its_options_do_not_move_the_other_draws():
    def noise(**settings):
        return draw_noise(SHAPE, ObjectiveConfig(**settings), partial(rng.generator, 0, 3))

    assert torch.equal(noise(noise_offset=0.1), noise(noise_offset=0.1))
    base = noise()
    assert (noise(noise_offset=0.1) - base).flatten(2).std(2).max() < 1e-6


# The whole


@pytest.mark.parametrize(
    "settings",
    [{"loss": name} for name in LOSSES]
    + [{"weighting": name, "space": space} for name in WEIGHTINGS for space in SPACES]
    + [{"noise_offset": 0.1, "pyramid_noise": 0.3, "input_perturbation": 0.1, "differential_guidance": 3.0}],
    ids=str,
)
def test_every_objective_gives_a_finite_repeatable_loss(settings):
    denoiser, batch, config = (
        TinyDenoiser(),
        TinyDataset().batch(2, seed=0, index=0),
        ObjectiveConfig(**settings),
    )
    with torch.no_grad(), denoiser.hold(torch.float32):
        one, two = (draw_loss(denoiser, batch, config, seed=0, index=5)[0] for _ in range(2))
    assert torch.isfinite(one) and torch.equal(one, two)


NEEDED = {
    "mode_scale": {"sigmas": "mode"},
    "huber_delta": {"loss": "huber"},
    "min_snr_gamma": {"weighting": "min-snr"},
    "noise_range": {"max_noise": 0.7},
}
"""Setting -> the choice that it belongs to."""

CHANGED = {
    "sigmas": "uniform",
    "resolution_shift": "sd3",
    "mode_scale": 0.5,
    "min_noise": 0.3,
    "max_noise": 0.7,
    "noise_range": "cut",
    "stratified": False,
    "loss": "l1",
    "space": "x0",
    "weighting": "cosmap",
    "min_snr_gamma": 0.1,
}
"""Setting -> another value than its default; for the others twice it, or 0.5 for 0."""


ELSEWHERE = ("guidance", "preservation", "preservation_share")
"""An input of the network, which the tiny one lacks, and a part of its own: in comfy/test_settings.py."""


@pytest.mark.parametrize(
    "field",
    [field for field in dataclasses.fields(ObjectiveConfig) if field.name not in ELSEWHERE],
    ids=lambda field: field.name,
)
def test_every_setting_reaches_the_loss(field):
    batch, needed = TinyDataset().batch(2, seed=0, index=0), NEEDED.get(field.name, {})
    value = CHANGED[field.name] if field.name in CHANGED else 2 * field.default or 0.5
    losses = set()
    for settings in (needed, {**needed, field.name: value}):
        denoiser = TinyDenoiser()
        with torch.no_grad(), denoiser.hold(torch.float32):
            losses.add(draw_loss(denoiser, batch, ObjectiveConfig(**settings), seed=0, index=5)[0].item())
    assert len(losses) == 2


@pytest.mark.parametrize("setting", ["loss", "space", "weighting"])
def test_an_unknown_name_is_refused_with_the_known_ones(setting):
    with pytest.raises(ValueError, match=f"{setting}: 'best' is unknown; choose one of "):
        at_half(ObjectiveConfig(**{setting: "best"}))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"shift": -1.0}, "shift must be positive"),
        ({"std": 0.0}, "std must be above 0"),
        ({"mode_scale": 2.0}, "mode_scale must be between -1 and 1.75"),
        ({"min_noise": 0.7, "max_noise": 0.6}, "noise levels must be 0 <= min < max <= 1, got 0.7 to 0.6"),
        ({"huber_delta": 0.0}, "huber_delta must be above 0"),
        ({"min_snr_gamma": 0.0}, "min_snr_gamma must be above 0"),
        ({"noise_offset": -0.1}, "noise_offset must be 0 to 1"),
        ({"pyramid_noise": 1.0}, "pyramid_noise must be 0 to 1"),
        ({"input_perturbation": 2.0}, "input_perturbation must be 0 to 1"),
        ({"differential_guidance": 0.0}, "differential_guidance must be above 0"),
        ({"guidance": -2.0}, "guidance must be 0 or more, or -1"),
        ({"bias": math.nan}, "bias must be a number"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_can(settings, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**settings)


def test_an_unknown_rule_for_the_resolution_is_refused_by_its_path():
    with pytest.raises(ValueError, match="objective.resolution_shift: 'sdxl' is not one of 'auto', 'none'"):
        from_dict(TrainConfig, {"objective": {"resolution_shift": "sdxl"}})


def test_guidance_goes_to_models_that_take_it_and_is_refused_by_others():
    batch = Batch(torch.zeros(2, 4, 8, 8), [{}, {}], extras=[{"width": 64.0}, {"width": 32.0}])
    family = dataclasses.replace(FAMILY, guidance=1.0)
    assert with_guidance(batch, CONFIG, family).extras == [
        {"guidance": 1.0, "width": 64.0},
        {"guidance": 1.0, "width": 32.0},
    ]
    for value in (0.0, 3.5):
        extras = with_guidance(batch, ObjectiveConfig(guidance=value), family).extras
        assert [each["guidance"] for each in extras] == [value, value]
    assert with_guidance(batch, CONFIG, FAMILY) is batch
    for value in (0.0, 3.5):
        with pytest.raises(ValueError, match="guidance: tiny has no such input"):
            with_guidance(batch, ObjectiveConfig(guidance=value), FAMILY)


def test_the_tiny_denoisers_sampling_can_be_trained():
    check_sampling(Flow(), "tiny")
    check_sampling(Eps(), "tiny")


@pytest.mark.parametrize(("given", "taken"), [(-1.0, 1.0), (0.0, 0.0), (0.5, 0.5), (3.5, 3.5)])
def test_a_guidance_that_is_set_is_kept_and_otherwise_the_models(given, taken):
    family = dataclasses.replace(FAMILY, guidance=1.0)
    assert settled(ObjectiveConfig(guidance=given), family).guidance == taken
