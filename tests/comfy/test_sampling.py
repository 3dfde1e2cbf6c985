"""The affine law over every ModelType of the ComfyUI at hand: the target denoises x_t to x0, or the type is
refused."""

import comfy.model_base
import comfy.supported_models
import pytest
import torch

from graft.training.objective.loss import add_noise, check_sampling, network_output
from graft.training.objective.weighting import Level

TYPES = list(comfy.model_base.ModelType)
REFUSED = {"IMG_TO_IMG_FLOW"}


def sampling_of(kind):
    return comfy.model_base.model_sampling(comfy.supported_models.SD3({}), kind)


def sigmas_of(sampling):
    """From the lowest to the highest level that training draws."""
    low, high = float(sampling.sigma_min), float(sampling.sigma_max)
    levels = [float(sampling.percent_to_sigma(percent)) for percent in (0.001, 0.25, 0.5, 0.75, 0.999)]
    return torch.tensor([min(max(level, low), high) for level in levels])


@pytest.mark.parametrize("shape", [(5, 4, 8, 6), (5, 4, 3, 8, 6)], ids=["image", "video"])
@pytest.mark.parametrize("kind", [t for t in TYPES if t.name not in REFUSED], ids=lambda kind: kind.name)
def test_the_target_denoises_to_the_image(kind, shape):
    sampling = sampling_of(kind)
    x0, noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    sigma = sigmas_of(sampling)
    x_t, target = add_noise(sampling, sigma, noise, x0)
    denoised = sampling.calculate_denoised(sigma, target, x_t)
    assert (denoised - x0).norm() <= 1e-5 * x0.norm()
    check_sampling(sampling, kind.name)


@pytest.mark.feature(68, 69)
@pytest.mark.parametrize("kind", [t for t in TYPES if t.name not in REFUSED], ids=lambda kind: kind.name)
def test_the_output_is_recovered_from_the_denoised_image(kind):
    sampling = sampling_of(kind)
    x0, noise, output = torch.randn(3, 5, 4, 8, 6, generator=torch.Generator().manual_seed(0))
    sigma = sigmas_of(sampling)
    x_t, _ = add_noise(sampling, sigma, noise, x0)
    found = network_output(sampling, sigma, x_t, sampling.calculate_denoised(sigma, output, x_t))
    assert (found - output).norm() <= 1e-3 * output.norm()


def test_a_type_that_ignores_the_noise_is_refused_by_name():
    ignoring = sampling_of(comfy.model_base.ModelType.FLOW)
    ignoring.noise_scaling = lambda sigma, noise, latent_image: latent_image
    for sampling in [ignoring, *(sampling_of(kind) for kind in TYPES if kind.name in REFUSED)]:
        with pytest.raises(ValueError, match="Lotus cannot be trained: its ModelSampling ignores the noise"):
            check_sampling(sampling, "Lotus")


def test_a_type_whose_output_does_not_decide_the_image_is_refused_by_name():
    sampling = sampling_of(comfy.model_base.ModelType.FLOW)
    sampling.calculate_denoised = lambda sigma, output, x: x
    with pytest.raises(ValueError, match="odd cannot be trained: .* output does not decide the image"):
        check_sampling(sampling, "odd")


@pytest.mark.feature(74)
@pytest.mark.parametrize(
    "kind, snr",
    [("EPS", lambda s: s**-2), ("V_PREDICTION", lambda s: s**-2), ("FLOW", lambda s: ((1 - s) / s) ** 2)],
)
def test_the_signal_to_noise_ratio_is_the_model_types_own(kind, snr):
    sigma = torch.tensor([0.1, 0.5, 0.9])
    level = Level.of(sampling_of(comfy.model_base.ModelType[kind]), sigma, 4)
    torch.testing.assert_close(level.snr.flatten(), snr(sigma))


@pytest.mark.feature(70)
def test_zero_terminal_snr_trains_through_the_models_own_sampling():
    class Rescaled(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION):
        pass

    sampling = Rescaled(zsnr=True)
    x0, noise = torch.randn(2, 1, 4, 8, 8)
    sigma = sampling.sigma_max.reshape(1)
    x_t, target = add_noise(sampling, sigma, noise, x0)
    assert float(sigma) > 4000
    torch.testing.assert_close(
        target, -x0, rtol=0, atol=2e-3
    )  # v = sqrt(abar) eps - sqrt(1 - abar) x0, abar -> 0
    assert (sampling.calculate_denoised(sigma, target, x_t) - x0).norm() <= 1e-3 * x0.norm()
