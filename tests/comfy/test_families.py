"""Every family on a tiny random model of ComfyUI's own classes: recognized, trained whole, left as it was,
saved right."""

import contextlib
import dataclasses
import logging
from functools import cache

import comfy.model_detection
import comfy.sd
import pytest
import torch

from graft.tests.support.tiny_models import FILES, SIBLINGS, TINY, state_dict
from graft.tests.support.two_steps import CONFIG, Samples, two_steps, unmoved
from graft.training import rng
from graft.training.adapters.build import ADAPTERS, attach, matches, restore_adapters, select
from graft.training.comfy.model.denoiser import ComfyDenoiser, sdpa
from graft.training.comfy.model.differentiable import make_differentiable
from graft.training.comfy.versions import training_mode
from graft.training.config import AdapterConfig, ObjectiveConfig, ScheduleConfig
from graft.training.family import CONVOLUTIONS
from graft.training.files.lora.write import lora_tensors
from graft.training.loop import initial_state, train
from graft.training.objective.loss import add_noise, draw_loss

FAMILIES = TINY | SIBLINGS
METHODS_ON = ("sdxl", "sd35m", "flux", "chroma", "qwen")
"""Families that every method is trained on: a UNet, and transformers of each kind."""
every_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def trained():
    """name -> (patcher, denoiser, state after 2 steps, weights before), each family trained once a method."""

    @cache
    def of(name, algorithm="lora"):
        patcher = FAMILIES[name]()
        before = snapshot(patcher)
        denoiser = ComfyDenoiser(patcher)
        return patcher, denoiser, two_steps(denoiser, FAMILIES[name], algorithm=algorithm), before

    return of


def snapshot(patcher):
    """The model's weights, and every name on every module: what a run may not change."""
    modules = {path: sorted(vars(module)) for path, module in patcher.model.named_modules()}
    return {name: tensor.clone() for name, tensor in patcher.model.state_dict().items()}, modules


# Detection


@pytest.fixture
def any_size(monkeypatch):
    """Let the loader take Flux files of any width: ComfyUI 0.3.75 knows only 24 heads of 128."""
    detect = comfy.model_detection.detect_unet_config

    def detected(sd, prefix, *args, **kwargs):
        found = detect(sd, prefix, *args, **kwargs)
        if found and found.get("image_model") == "flux":
            found["num_heads"] = found["hidden_size"] // 128
        return found

    monkeypatch.setattr(comfy.model_detection, "detect_unet_config", detected)


@pytest.mark.feature(1)
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_recognized_with_nothing_missing(name, any_size, caplog):
    network, family = FILES[name]
    with caplog.at_level(logging.WARNING):
        patcher = comfy.sd.load_diffusion_model_state_dict(state_dict(network()))
    assert ComfyDenoiser(patcher).family.name == family
    assert not [record.message for record in caplog.records if "missing" in record.message.lower()]


@pytest.mark.feature(36, 37)
@every_family
def test_every_family_is_recognized_and_its_presets_grow(name):
    denoiser = ComfyDenoiser(FAMILIES[name]())
    assert denoiser.family.name == FAMILIES[name].family
    chosen = [
        set(select(denoiser.specs, denoiser.family, AdapterConfig(targets=preset)))
        for preset in ("attn", "attn-mlp", "linear", "all")
    ]
    assert chosen[0] < chosen[1] < chosen[2] <= chosen[3]
    assert all(denoiser.specs[path].kind == "linear" for path in chosen[2])


def test_unets_and_only_networks_with_convolutions_train_them_under_all():
    for name, extra in (("sdxl", True), ("sd15", True), ("sd35m", True), ("flux", False)):
        specs = ComfyDenoiser(TINY[name]()).specs
        kinds = {spec.kind for spec in specs.values()}
        assert ("conv2d" in kinds) == extra


@pytest.mark.parametrize("name", ["flux", "sd3", "sd35m", "sdxl", "sd15", "chroma"])
def test_the_patterns_of_convolutions_match_all_that_are_larger_than_1x1_and_nothing_else(name):
    specs = ComfyDenoiser(TINY[name]()).specs
    larger = {path for path, spec in specs.items() if len(spec.shape) > 2 and max(spec.shape[2:]) > 1}
    assert {path for path in specs if matches(path, CONVOLUTIONS)} == larger


# Training


@pytest.mark.feature(2, 3, 4, 5, 6, 101)
@every_family
def test_every_adapter_parameter_has_a_gradient_by_step_two(name, trained):
    """Both factors have moved after two steps: `up` starts at zero, `down` gets its first gradient at step
    2."""
    _, denoiser, state, _ = trained(name)
    assert not unmoved(denoiser, state)
    assert all(torch.isfinite(tensor).all() for tensor in state.weights.values())


@pytest.mark.feature(9)
@every_family
def test_the_base_is_byte_identical_after_training(name, trained):
    patcher, _, _, (weights, modules) = trained(name)
    after, modules_after = snapshot(patcher)
    assert all(torch.equal(weights[key], after[key]) for key in weights)
    assert modules == modules_after


@every_family
def test_checkpointing_leaves_the_training_unchanged(name, trained):
    _, denoiser, state, _ = trained(name)
    again = two_steps(denoiser, FAMILIES[name], "block")
    assert again.losses == state.losses
    assert all(torch.equal(again.weights[key], tensor) for key, tensor in state.weights.items())


@pytest.mark.feature(26, 27, 29, 41, 114, 155)
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [*((name, "lora") for name in FAMILIES), *((n, a) for a in ADAPTERS if a != "lora" for n in METHODS_ON)],
)
def test_the_saved_file_through_the_stock_loader_is_the_attached_adapter(name, algorithm, trained, caplog):
    patcher, denoiser, state, _ = trained(name, algorithm)
    batch = FAMILIES[name].batch()
    sigma = torch.tensor([0.4, 0.7], device=denoiser.device)
    x = denoiser.scale_latents(batch.latents).to(denoiser.device)
    with torch.no_grad(), denoiser.hold(torch.float32) as base:
        plain = denoiser.denoise(x, sigma, batch)
        adapters = restore_adapters(denoiser.specs, state.adapter, state.weights, denoiser.device)
        for adapter in adapters.values():
            adapter.eval()
        with attach(base.layers, adapters):
            attached = denoiser.denoise(x, sigma, batch)
    with caplog.at_level(logging.WARNING):
        loaded, _ = comfy.sd.load_lora_for_models(
            patcher, None, lora_tensors(state, denoiser.family), 1.0, 0.0
        )
    assert not [record.message for record in caplog.records if "not loaded" in record.message.lower()]
    stock = sampled(loaded, x, sigma, batch)
    difference = (stock - plain) - (attached - plain)
    assert difference.norm() <= 1e-4 * (attached - plain).norm()


def sampled(patcher, x, sigma, batch):
    """What the stock sampler's call gives: the patched model, loaded by ComfyUI."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher])
    denoiser = ComfyDenoiser(patcher)
    with torch.no_grad():
        found = denoiser.denoise(x, sigma, batch).clone()
    comfy.model_management.unload_all_models()
    return found


# Flux


@pytest.mark.parametrize("name", ["flux", "schnell", "flux2", "chroma"])
def test_a_flux_forward_is_bit_identical_with_gradients_let_through(name):
    denoiser = ComfyDenoiser(TINY[name]())
    batch = TINY[name].batch()
    network, sigma = denoiser.network, torch.tensor([0.3, 0.8])
    with training_mode():  # ComfyUI 0.33's rotary kernel for sampling has no backward and rounds otherwise
        plain = denoiser.denoise(batch.latents, sigma, batch).detach()
    forwards = {path: module.__dict__.get("forward") for path, module in network.named_modules()}
    with training_mode(), make_differentiable(network):
        x = batch.latents.clone().requires_grad_()
        patched = denoiser.denoise(x, sigma, batch)
        patched.square().mean().backward()
    assert torch.equal(plain, patched.detach()) and x.grad.abs().min() > 0
    assert forwards == {path: module.__dict__.get("forward") for path, module in network.named_modules()}


@pytest.mark.feature(109)
def test_a_flux_gradient_is_the_finite_difference():
    denoiser = ComfyDenoiser(TINY["flux"]())
    batch, sigma = TINY["flux"].batch(), torch.tensor([0.3, 0.8])
    denoiser.network.double(), setattr(denoiser.model, "manual_cast_dtype", torch.float64)
    direction = torch.randn(batch.latents.shape, generator=rng.generator(0)).double()

    def value(step):
        return (
            denoiser.model.diffusion_model(
                batch.latents.double() + step * direction,
                sigma.double(),
                torch.cat([c["cross_attn"] for c in batch.conditioning]).double(),
                torch.cat([c["pooled_output"] for c in batch.conditioning]).double(),
                torch.ones(2).double(),
                transformer_options={"optimized_attention_override": sdpa},
            )
            .square()
            .mean()
        )

    with training_mode(), make_differentiable(denoiser.network):
        step = torch.zeros((), dtype=torch.float64, requires_grad=True)
        value(step).backward()
        with torch.no_grad():
            expected = (value(1e-3) - value(-1e-3)) / 2e-3
    assert step.grad.item() == pytest.approx(expected.item(), rel=1e-4)


def test_flux_blocks_are_restored_after_an_error():
    network = ComfyDenoiser(TINY["flux"]()).network
    before = {path: sorted(vars(module)) for path, module in network.named_modules()}
    with contextlib.suppress(KeyError), make_differentiable(network):
        raise KeyError
    assert before == {path: sorted(vars(module)) for path, module in network.named_modules()}


# Conditioning


def prediction(name, batch, config=ObjectiveConfig()):  # noqa: B008 - frozen
    denoiser = ComfyDenoiser(TINY[name]())
    with torch.no_grad(), denoiser.hold(torch.float32):
        return draw_loss(denoiser, batch, config, seed=0, index=0)[0]


@pytest.mark.feature(4, 78)
def test_guidance_reaches_flux_and_defaults_to_one():
    batch = TINY["flux"].batch()
    assert torch.equal(prediction("flux", batch), prediction("flux", batch, ObjectiveConfig(guidance=1.0)))
    assert not torch.equal(
        prediction("flux", batch), prediction("flux", batch, ObjectiveConfig(guidance=3.5))
    )


@pytest.mark.feature(4)
def test_schnell_has_no_guidance_input():
    with pytest.raises(ValueError, match=r"guidance: Flux.1 Schnell has no such input"):
        prediction("schnell", TINY["schnell"].batch(), ObjectiveConfig(guidance=3.5))


@pytest.mark.feature(65)
def test_sdxl_is_told_each_images_own_size_in_the_order_of_encode_adm():
    denoiser = ComfyDenoiser(TINY["sdxl"]())
    sizes = [
        {
            "height": 600.0,
            "width": 800.0,
            "crop_h": 5.0,
            "crop_w": 7.0,
            "target_height": 512.0,
            "target_width": 640.0,
        },
        {"height": 1024.0, "width": 1024.0},
    ]
    batch = dataclasses.replace(TINY["sdxl"].batch(), extras=sizes)
    adm = torch.cat([c["y"].cond for c in denoiser.conditions(batch.latents, batch)])[:, 1280:]
    embed = denoiser.model.embedder
    first = torch.cat([embed(torch.tensor([v])) for v in (600.0, 800.0, 5.0, 7.0, 512.0, 640.0)], 1)
    second = torch.cat([embed(torch.tensor([v])) for v in (1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0)], 1)
    torch.testing.assert_close(adm, torch.cat((first.reshape(1, -1), second.reshape(1, -1))))


def test_without_sizes_sdxl_is_told_the_images_own_as_ksampler_does():
    denoiser = ComfyDenoiser(TINY["sdxl"]())
    plain = TINY["sdxl"].batch(size=(8, 16))
    told = dataclasses.replace(plain, extras=[{"height": 64.0, "width": 128.0}] * 2)
    one, two = (denoiser.conditions(plain.latents, batch)[0]["y"].cond for batch in (plain, told))
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["flux", "sd35m", "sdxl", "lumina2"])
def test_captions_of_different_lengths_share_a_batch(name):
    """Each sample's prediction is the one it has alone, whatever lengths are beside it."""
    denoiser, batch = ComfyDenoiser(TINY[name]()), TINY[name].batch((0, 1, 2))
    long = [dict(c) for c in batch.conditioning]
    long[1]["cross_attn"] = torch.cat((long[1]["cross_attn"], long[2]["cross_attn"][:, :5]), 1)
    if "attention_mask" in long[1]:
        long[1]["attention_mask"] = torch.ones(1, 13)
    batch = dataclasses.replace(batch, conditioning=long)
    x, sigma = batch.latents.to(denoiser.device), torch.tensor([0.3, 0.5, 0.7], device=denoiser.device)
    with torch.no_grad(), denoiser.hold(torch.float32):
        together = denoiser.denoise(x, sigma, batch)
        for i in range(3):
            one = dataclasses.replace(batch, conditioning=long[i : i + 1])
            alone = denoiser.denoise(x[i : i + 1], sigma[i : i + 1], one)
            torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.feature(53, 115)
@every_family
def test_latents_enter_the_model_with_the_same_statistics_in_every_bucket_and_batch_size(name):
    """They are scaled by the model's own latent format, once, whatever the shape: TrainLoraNode's buckets
    are not."""
    denoiser, seen = ComfyDenoiser(FAMILIES[name]()), []
    apply_model = denoiser.model.apply_model

    def watch(x, *args, **kwargs):
        seen.append(x)
        return apply_model(x, *args, **kwargs)

    sigma, raw = torch.tensor(1e-4), []
    for indices, size in (((0,), (8, 8)), ((0, 1, 2), (8, 16)), ((3, 4), (12, 8))):
        batch = FAMILIES[name].batch(indices, size)
        latents = denoiser.scale_latents(batch.latents)
        raw.append(denoiser.model.latent_format.process_in(batch.latents))
        low = torch.full((len(indices),), float(max(sigma, denoiser.sampling.sigma_min)))
        x_t, _ = add_noise(denoiser.sampling, low, torch.zeros_like(latents), latents)
        denoiser.model.apply_model = watch
        with torch.no_grad():
            denoiser.denoise(x_t, low, batch)
        del denoiser.model.apply_model
    for entered, expected in zip(seen, raw, strict=True):
        torch.testing.assert_close(entered.std() / expected.std(), torch.tensor(1.0), rtol=0.05, atol=0)


# An assistant LoRA


@pytest.mark.feature(143)
def test_patches_on_the_model_apply_while_training_and_are_not_in_the_result():
    """What a distilled base is trained with: base and assistant are trained on, the file holds neither."""
    tiny, patcher = TINY["schnell"], TINY["schnell"]()
    base = ComfyDenoiser(patcher)
    key = "diffusion_model.single_blocks.0.linear1.weight"
    assistant = patcher.clone()
    change = torch.randn(patcher.model.state_dict()[key].shape, generator=rng.generator(4))
    assistant.add_patches({key: ("diff", (change,))}, 1.0)
    on, batch = ComfyDenoiser(assistant), tiny.batch()
    x, sigma = batch.latents.to(on.device), torch.tensor([0.4, 0.7], device=on.device)
    with torch.no_grad(), on.hold(torch.float32):
        held = on.denoise(x, sigma, batch)
    torch.testing.assert_close(held, sampled(assistant, x, sigma, batch), rtol=1e-4, atol=1e-4)
    with torch.no_grad(), base.hold(torch.float32):
        assert not torch.allclose(held, base.denoise(x, sigma, batch), atol=1e-2)
    state = train(on, Samples(tiny), CONFIG, None, steps=2)
    tensors = lora_tensors(state, on.family)
    fresh = lora_tensors(initial_state(on, CONFIG), on.family)
    assert tensors.keys() == fresh.keys() and all(tensors[k].shape == fresh[k].shape for k in tensors)
    assert train(base, Samples(tiny), CONFIG, None, steps=2).losses != state.losses


# Learning


def pretrain(denoiser, tiny, steps):
    """Teach the random base its task on other images, so that its loss is that of one who knows nothing of
    these."""
    network = denoiser.network.to(denoiser.device)
    parameters = [p for p in network.parameters() if p.is_floating_point()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(parameters, lr=2e-3, fused=True)
    with training_mode(), make_differentiable(network):
        for step in range(steps):
            batch = tiny.batch((100 + 2 * step, 101 + 2 * step))
            value = draw_loss(denoiser, batch, ObjectiveConfig(), seed=11, index=step)[0]
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (1 - step / steps)
            optimizer.step()
    for parameter in parameters:
        parameter.requires_grad_(False)
    network.to("cpu")


@pytest.mark.feature(68, 69)
@pytest.mark.parametrize("name", ["sdxl", "sd35m", "flux", "qwen"])
def test_four_images_overfit(name, monkeypatch):
    """On a base pretrained for 250 steps, with fixed noise and levels, 100 steps halve the loss."""
    tiny, denoiser = TINY[name], ComfyDenoiser(TINY[name]())
    pretrain(denoiser, tiny, 250)
    draw = rng.generator
    monkeypatch.setattr(rng, "generator", lambda seed, *key: draw(seed, key[-1]))
    batch = tiny.batch(range(4))
    x0 = denoiser.scale_latents(batch.latents)
    sigma = draw_loss(denoiser, batch, CONFIG.objective, seed=CONFIG.seed, index=0)[1]
    noise = torch.randn(x0.shape, generator=draw(CONFIG.seed, "noise"))
    _, target = add_noise(denoiser.sampling, sigma, noise, x0)
    config = dataclasses.replace(CONFIG, batch_size=4, schedule=ScheduleConfig())
    losses = train(denoiser, Samples(tiny, range(4)), config, None, steps=100).losses
    print(f"{name}: loss {losses[0] / target.var():.3f} Var(target) -> {losses[-1] / target.var():.4f}")
    assert losses[0] <= 1.1 * target.var()
    assert losses[-1] <= 0.5 * losses[0]
