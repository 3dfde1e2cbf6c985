"""A ComfyUI MODEL as the engine's Denoiser: the same classes and the same call that sample also train."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import comfy.conds
import comfy.ldm.modules.attention
import comfy.model_management
import comfy.utils
import torch
from torch import Tensor, nn

from ...config import digest
from ...family import Family, family_of
from ...memory.activation_checkpointing import repeated_blocks
from ...memory.weight_store import Store
from ...model import OFFLOAD_ALL, Batch, Conditioning, HeldBase, OffloadOptions, Sampling
from ...network.frozen_layer import LayerSpec
from ...user_error import UserError
from ..versions import training_mode
from . import weights
from .device import free_bytes, supported_dtypes
from .differentiable import make_differentiable
from .fingerprint import earlier_fingerprint, fingerprint, sampling_settings, settings
from .text_encoders import TextEncoders
from .unload import unload

NETWORK = "diffusion_model"
ATTENTION = "optimized_attention_override"
LATENTS = {
    1: ("batch", "channels", "length"),
    2: ("batch", "channels", "height", "width"),
    3: ("batch", "channels", "frames", "height", "width"),
}
"""By the `latent_dimensions` of ComfyUI's latent format: of sound and shapes, of images, of video."""


class ComfyDenoiser:
    """Trains what a ModelPatcher holds; the patcher and its model are as before after every `hold`."""

    def __init__(self, patcher: Any, clip: Any = None) -> None:
        """Take a MODEL, and a CLIP where its text encoders are trained too."""
        require_plain(patcher, "MODEL")
        self.patcher = patcher
        self.model = patcher.model
        self.sampling: Sampling = patcher.get_model_object("model_sampling")
        self.device: torch.device = patcher.load_device
        self.text = TextEncoders(clip, self.family) if clip is not None else None

    @cached_property
    def family(self) -> Family:
        config = self.model.model_config
        return family_of(type(config).__name__, config.unet_config)

    @cached_property
    def network(self) -> torch.nn.Module:
        return uncompiled(self.patcher.get_model_object(NETWORK))  # type: ignore[no-any-return]

    @cached_property
    def specs(self) -> Mapping[str, LayerSpec]:
        own = weights.layer_specs(self.network, self.patcher.patches, NETWORK)
        return {**own, **(self.text.specs if self.text else {})}

    @cached_property
    def dtypes(self) -> Sequence[torch.dtype]:
        return supported_dtypes(self.model.model_config, self.device)

    def free_bytes(self) -> int | None:
        unload(*self._patchers)
        return free_bytes(self.device)

    @cached_property
    def fingerprint(self) -> str:
        parts = self._parts(self.sampling, sampling_settings(self.sampling))
        return self._with_options(fingerprint(*parts, patchers=self._patchers))

    def is_base(self, known_as: str) -> bool:
        parts = self._parts(self.sampling)
        return known_as == self.fingerprint or known_as == self._with_options(
            earlier_fingerprint(*parts, patchers=self._patchers)
        )

    def _parts(self, *sampling: Any) -> tuple[Any, ...]:
        """Return what decides what the model computes: its weights, their patches, and its `sampling`."""
        text = (self.text.model, self.text.clip.patcher.patches) if self.text else ()
        return (self.network, self.patcher.patches, *sampling, *text)

    def _with_options(self, found: str) -> str:
        options = {name: value for name, value in self._options.items() if name != ATTENTION}
        return digest(found, *settings(options)) if options else found

    @property
    def _options(self) -> Mapping[str, Any]:
        """What nodes have patched into the network, as FreeU does."""
        return self.patcher.model_options.get("transformer_options", {})  # type: ignore[no-any-return]

    @property
    def _patchers(self) -> tuple[Any, ...]:
        return (self.patcher, self.text.clip.patcher) if self.text else (self.patcher,)

    @contextmanager
    def hold(
        self, dtype: torch.dtype, store: str = "resident", offload: OffloadOptions = OFFLOAD_ALL
    ) -> Iterator[HeldBase]:
        """Own the weights, with the MODEL's own patches applied; see `weights.hold_weights`.

        Everything ComfyUI has on the device is unloaded first.
        """
        unload(*self._patchers)
        with ExitStack() as stack:
            stack.enter_context(training_mode())
            objects = {name: uncompiled(value) for name, value in self.patcher.object_patches.items()}
            for name, value in {**objects, "manual_cast_dtype": dtype}.items():
                stack.callback(_set_attribute(self.model, name, value))
            try:
                kept = Store(store, self.family.blocks, dtype, self.device, offload=offload)
                stack.callback(kept.release)
                base = stack.enter_context(weights.hold_weights(self.patcher, self.network, NETWORK, kept))
                stack.enter_context(make_differentiable(self.network))
                stack.enter_context(cancellable(repeated_blocks(self.network, self.family.checkpointed)))
                if self.text is not None:
                    text = stack.enter_context(self.text.hold(self.device))
                    base = HeldBase(base.module, {**base.layers, **text})
                yield base
            finally:
                stack.close()
                comfy.model_management.soft_empty_cache()

    def scale_latents(self, latents: Tensor) -> Tensor:
        """Return them as the model's own latent format scales them.

        Raises UserError for those of another kind of VAE: without the frames that this model takes, say.
        """
        kind = LATENTS[self.model.latent_format.latent_dimensions]
        if latents.ndim != len(kind):
            raise UserError(
                f"{self.family.name} takes latents of ({', '.join(kind)}), but these have the shape "
                f"{tuple(latents.shape)}: encode the dataset with the VAE that belongs to the model."
            )
        return self.model.process_latent_in(latents)  # type: ignore[no-any-return]

    def denoise(self, x_t: Tensor, sigma: Tensor, batch: Batch) -> Tensor:
        comfy.model_management.throw_exception_if_processing_interrupted()
        options = {**self._options, **ONE_PROMPT, ATTENTION: sdpa}
        samples = self.conditions(x_t, batch)
        groups = group_compatible(samples)
        parts = [
            self.model.apply_model(
                take_rows(x_t, members),
                take_rows(sigma, members),
                transformer_options={**options, "sigmas": take_rows(sigma, members)},
                **join_conditions([samples[i] for i in members]),
            )
            for members in groups
        ]
        order = [i for members in groups for i in members]
        return take_rows(torch.cat(parts), sorted(range(len(order)), key=order.__getitem__))

    def conditions(self, x_t: Tensor, batch: Batch) -> list[dict[str, Any]]:
        """Return what the model's own `extra_conds` makes of each sample, as comfy.conds objects by name."""
        extras = batch.extras or ({},) * len(x_t)
        texts = self._conditioning(batch)
        samples = [self._extra_conds(x_t[i : i + 1], c, extras[i]) for i, c in enumerate(texts)]
        return [
            {name: cond.process_cond(1, device=self.device, area=None) for name, cond in sample.items()}
            for sample in samples
        ]

    def _conditioning(self, batch: Batch) -> Sequence[Conditioning]:
        """Return the cached conditioning, or what text encoders in training make of the captions now."""
        if self.text is None or not batch.captions:
            return batch.conditioning
        made: dict[str, Conditioning] = {}
        for caption, cached in zip(batch.captions, batch.conditioning, strict=True):
            made[caption] = made.get(caption) or self.text.encode(caption, cached)
        return [made[caption] for caption in batch.captions]

    def _extra_conds(
        self, x_t: Tensor, conditioning: Conditioning, extras: Mapping[str, float]
    ) -> dict[str, Any]:
        height, width = (side * self.pixels_per_cell for side in x_t.shape[-2:])
        known = {"width": width, "height": height, "prompt_type": "positive", "pooled_output": None}
        return self.model.extra_conds(  # type: ignore[no-any-return]
            noise=x_t,
            device=self.device,
            latent_image=torch.zeros_like(x_t),
            latent_shapes=[x_t.shape],
            **{**known, **extras, **conditioning},
        )

    @property
    def pixels_per_cell(self) -> int:
        return int(getattr(self.model.latent_format, "spacial_downscale_ratio", 8))


ONE_PROMPT = {"cond_or_uncond": [0], "uuids": [uuid.uuid4()]}
"""What patches are told of a call, as by comfy/samplers.py, calc_cond_batch: it is of one positive prompt."""


def group_compatible(conditions: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Group samples whose conditions ComfyUI would put into one call: captions of one length, say."""
    groups: list[list[int]] = []
    for index, sample in enumerate(conditions):
        for group in groups:
            first = conditions[group[0]]
            if first.keys() == sample.keys() and all(first[name].can_concat(sample[name]) for name in first):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def take_rows(tensor: Tensor, numbers: list[int]) -> Tensor:
    """Return these rows; `tensor` itself where that is all of them, as no device then waits for an index."""
    return tensor if numbers == list(range(len(tensor))) else tensor[torch.tensor(numbers)]


def join_conditions(conditions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the conditions of several samples into the arguments of one call."""
    parts = {name: [sample[name] for sample in conditions] for name in conditions[0]}
    return {name: part[0].concat(part[1:]) if len(part) > 1 else part[0].cond for name, part in parts.items()}


def require_plain(patcher: Any, what: str) -> None:
    """Raise UserError for a MODEL or CLIP that ComfyUI changes only while it samples or encodes."""
    names = [*getattr(patcher, "injections", {})]
    if getattr(patcher, "forced_hooks", None) is not None:
        names.append("hooks")
    if names:
        raise UserError(
            f"the {what} carries {', '.join(map(str, names))}, which ComfyUI applies only while it runs the "
            f"{what} itself: connect it as it is before that node; a LoRA by Load LoRA, not by its bypass or "
            "hook variants."
        )


@contextmanager
def cancellable(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Answer Cancel before each block: compiled ones do not ask, as ComfyUI's own layers do, and the first
    time that they run takes minutes.
    """

    def check(*_: Any) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()

    hooks = [block.register_forward_pre_hook(check) for block in blocks.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def uncompiled(value: Any) -> Any:
    """Return what torch.compile was given, where that is a module: it names its weights otherwise."""
    return getattr(value, "_orig_mod", value)


def sdpa(function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute attention by PyTorch's kernel, whatever ComfyUI was told: sage and flash have no backward."""
    return comfy.ldm.modules.attention.attention_pytorch(*args, **kwargs)  # type: ignore[no-any-return]


def _set_attribute(model: Any, path: str, value: Any) -> Any:
    """Set `model.<path>`; return the function that restores it, leaving no attribute that was new."""
    *parents, name = path.split(".")
    owner = comfy.utils.get_attr(model, ".".join(parents)) if parents else model
    slots = [owner.__dict__, owner._modules, owner._parameters, owner._buffers]
    before = next((slot[name] for slot in slots if name in slot), None)
    existed = any(name in slot for slot in slots)
    setattr(owner, name, value)

    def restore() -> None:
        if existed:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return restore
