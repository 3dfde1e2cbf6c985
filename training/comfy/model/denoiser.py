"""A ComfyUI MODEL as the engine's Denoiser: training runs the same classes and the same call as sampling."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import comfy.conds
import comfy.ldm.modules.attention
import comfy.model_management
import comfy.sampler_helpers
import comfy.utils
import torch
from torch import Tensor, nn

from ...config import digest
from ...family import Family, family_of
from ...frozen_base.frozen_layer import LayerSpec
from ...memory.activation_checkpointing import repeated_blocks
from ...memory.weight_store import Store
from ...model import OFFLOAD_ALL, Batch, Conditioning, HeldBase, OffloadOptions, Sampling, tensors_in
from ...user_error import UserError
from ..paths import cache_folder
from ..versions import training_mode
from . import weights
from .conditioning import PACKED, as_sampled
from .device import free_bytes, supported_dtypes
from .differentiable import make_differentiable
from .file_weights import mapped_file, move_to_file
from .fingerprint import earlier_fingerprint, fingerprint, sampling_settings, settings
from .product_speed import is_faster
from .structure import structure
from .text_encoders import TextEncoders
from .unload import unload

NETWORK = "diffusion_model"
ATTENTION = "optimized_attention_override"
LATENTS = {
    1: ("batch", "channels", "length"),
    2: ("batch", "channels", "height", "width"),
    3: ("batch", "channels", "frames", "height", "width"),
}
"""`latent_dimensions` of ComfyUI's latent format -> axes of a batch: sound and shapes, images, video."""


class ComfyDenoiser:
    """The model in a ModelPatcher, ready for training. Every `hold` leaves patcher and model as they were."""

    def __init__(self, patcher: Any, clip: Any = None) -> None:
        """Take a MODEL, and a CLIP if its text encoders are trained too."""
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

    @cached_property
    def structure(self) -> str:
        text = {"text": self.text.model} if self.text else {}
        return structure({"network": self.network, **text}, map(str, self.patcher.patches), self._options)

    @property
    def cache_folder(self) -> Path:
        return cache_folder()

    @property
    def is_mapped(self) -> bool:
        return mapped_file(self.network) is not None

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
        """Return everything that decides the model's output: weights, their patches, and its `sampling`."""
        text = (self.text.model, self.text.clip.patcher.patches) if self.text else ()
        return (self.network, self.patcher.patches, *sampling, *text)

    def _with_options(self, base: str) -> str:
        options = {name: value for name, value in self._options.items() if name != ATTENTION}
        return digest(base, *settings(options)) if options else base

    @property
    def _options(self) -> Mapping[str, Any]:
        """Patches that nodes such as FreeU have put into the network."""
        return self.patcher.model_options.get("transformer_options", {})  # type: ignore[no-any-return]

    @property
    def _patchers(self) -> tuple[Any, ...]:
        return (self.patcher, self.text.clip.patcher) if self.text else (self.patcher,)

    def _rest(self) -> None:
        """Bring the weights to rest, in host memory; a loaded model may have LoRAs merged into them."""
        unload(*self._patchers)

    def is_faster(self, format: str) -> bool:
        return is_faster(format, self.device)

    @contextmanager
    def hold(
        self,
        dtype: torch.dtype,
        store: str = "resident",
        offload: OffloadOptions = OFFLOAD_ALL,
        compute: str = "full",
    ) -> Iterator[HeldBase]:
        """Own the weights, with the MODEL's own patches applied; see `weights.hold_weights`.

        Everything ComfyUI has on the device is unloaded first.
        """
        self._rest()
        with ExitStack() as stack:
            stack.enter_context(training_mode())
            # ComfyUI applies object patches only while a model is loaded. Compiled ones rename their weights.
            objects = {name: uncompiled(value) for name, value in self.patcher.object_patches.items()}
            for name, value in {**objects, "manual_cast_dtype": dtype}.items():
                stack.callback(_set_attribute(self.model, name, value))
            try:
                file = move_to_file(self.network) if store == "stream" else None
                blocks = self.family.blocks
                weight_store = Store(
                    store, blocks, dtype, self.device, offload=offload, compute=compute, file=file
                )
                stack.callback(weight_store.release)
                base = stack.enter_context(
                    weights.hold_weights(self.patcher, self.network, NETWORK, weight_store)
                )
                if store == "stream":
                    weight_store.source.warn_of_memory()
                stack.enter_context(make_differentiable(self.network))
                stack.enter_context(cancellable(repeated_blocks(self.network, self.family.checkpointed)))
                # Adapters see one mapping of layers; the text encoders' paths begin with `family.TEXT`.
                if self.text is not None:
                    text = stack.enter_context(self.text.hold(self.device))
                    base = HeldBase(base.module, {**base.layers, **text})
                yield base
            finally:
                # Restore everything first: only then is the run's memory free to give back.
                stack.close()
                comfy.model_management.soft_empty_cache()

    def scale_latents(self, latents: Tensor) -> Tensor:
        """Return the latents as the model's own latent format scales them.

        Raises UserError for latents of another kind of VAE, such as images for a video model.
        """
        axes = LATENTS[self.model.latent_format.latent_dimensions]
        channels = self.model.latent_format.latent_channels
        packed = latents.ndim == 3 and latents.shape[1] == 1 and self.unpacks
        if not packed and (latents.ndim != len(axes) or latents.shape[1] != channels):
            raise UserError(
                f"{self.family.name} takes latents of ({', '.join(axes)}), but these have the shape "
                f"{tuple(latents.shape)}, and it has {channels} channels: encode the dataset with the VAE "
                "that belongs to the model."
            )
        return self.model.process_latent_in(latents)  # type: ignore[no-any-return]

    def denoise(self, x_t: Tensor, sigma: Tensor, batch: Batch) -> Tensor:
        comfy.model_management.throw_exception_if_processing_interrupted()
        options = {**self._options, **ONE_PROMPT, ATTENTION: sdpa}
        samples = self.conditions(x_t, batch)
        # One call for each group that ComfyUI could batch as well: captions of one length, say.
        groups = group_compatible(samples)
        try:
            parts = [
                self.model.apply_model(
                    take_rows(x_t, members),
                    take_rows(sigma, members),
                    transformer_options={**options, "sigmas": take_rows(sigma, members)},
                    **join_conditions([samples[i] for i in members]),
                )
                for members in groups
            ]
        except RuntimeError as error:
            if not MISMATCH.search(str(error)):
                raise
            raise UserError(
                f"{self.family.name} cannot take this conditioning ({_described(batch.conditioning[0])}): "
                f"{error}. Encode the dataset with the text encoders and the VAE that belong to the model."
            ) from error
        # Results come in the order of the groups: put them back into the batch's own order.
        order = [i for members in groups for i in members]
        return take_rows(torch.cat(parts), sorted(range(len(order)), key=order.__getitem__))

    def conditions(self, x_t: Tensor, batch: Batch) -> list[dict[str, Any]]:
        """Return each sample's conditions from the model's own `extra_conds`: name -> comfy.conds object."""
        extras = batch.extras or ({},) * len(x_t)
        texts = self._conditioning(batch)
        samples = [self._extra_conds(x_t[i : i + 1], c, extras[i]) for i, c in enumerate(texts)]
        return [
            {name: cond.process_cond(1, device=self.device, area=None) for name, cond in sample.items()}
            for sample in samples
        ]

    def _conditioning(self, batch: Batch) -> Sequence[Conditioning]:
        """Return the cached conditioning, or new ones while text encoders are trained, each caption once."""
        if self.text is None or not batch.captions:
            return batch.conditioning
        encoded: dict[str, Conditioning] = {}
        for caption, cached in zip(batch.captions, batch.conditioning, strict=True):
            encoded[caption] = encoded.get(caption) or self.text.encode(caption, cached)
        pairs = zip(batch.captions, batch.conditioning, strict=True)
        return [{**cached, **encoded[caption]} for caption, cached in pairs]

    def _extra_conds(
        self, x_t: Tensor, conditioning: Conditioning, extras: Mapping[str, float]
    ) -> dict[str, Any]:
        packed: Any = conditioning.get(PACKED) or [x_t.shape]
        shapes = [torch.Size(shape) for shape in packed]
        height, width = (side * self.pixels_per_cell for side in shapes[0][-2:])
        known = {"width": width, "height": height, "prompt_type": "positive", "pooled_output": None}
        if "denoise_mask" in conditioning:
            mask = comfy.sampler_helpers.prepare_mask(conditioning["denoise_mask"], x_t.shape, self.device)
            conditioning = {**conditioning, "denoise_mask": mask}
        known |= {"noise": x_t, "device": self.device, "latent_image": torch.zeros_like(x_t)}
        return self.model.extra_conds(  # type: ignore[no-any-return]
            **{**known, **extras, **as_sampled(conditioning), PACKED: shapes}
        )

    @property
    def unpacks(self) -> bool:
        """Whether the model takes several tensors as one, video and sound; ComfyUI has no flag that says
        so."""
        return PACKED in type(self.model).extra_conds.__code__.co_consts

    @property
    def inpaints(self) -> bool:
        """Whether the network is given a masked image and its mask."""
        return self.family.inpaints or "masked_image" in self.model.concat_keys

    @property
    def pixels_per_cell(self) -> int:
        return int(getattr(self.model.latent_format, "spacial_downscale_ratio", 8))


MISMATCH = re.compile("shapes cannot be multiplied|same reduction dim|normalized_shape")
"""In what PyTorch says of tensors that a layer cannot take, computed or estimated."""


def _described(conditioning: Conditioning) -> str:
    shapes = {name: [tuple(t.shape) for t in tensors_in(value)] for name, value in conditioning.items()}
    return ", ".join(f"{name} {' '.join(map(str, each))}" for name, each in shapes.items() if each)


ONE_PROMPT = {"cond_or_uncond": [0], "uuids": [uuid.uuid4()]}
"""Tells patches that a call is for one positive prompt (comfy/samplers.py, calc_cond_batch)."""


def group_compatible(conditions: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Group the indices of samples that ComfyUI could put into one call, such as captions of one length."""
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


def take_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """Return these rows, or `tensor` itself if they are all: copying an index would make the device wait."""
    return tensor if rows == list(range(len(tensor))) else tensor[torch.tensor(rows)]


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
            f"{what} itself. Connect the {what} from before that node, and load LoRAs with Load LoRA, not "
            "with its bypass or hook variants."
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
    """Return the original of a compiled module, whose weights have their own names, or `value` itself."""
    return getattr(value, "_orig_mod", value)


def sdpa(function: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute attention with PyTorch's kernel: ComfyUI's sage and flash have no backward pass."""
    return comfy.ldm.modules.attention.attention_pytorch(*args, **kwargs)  # type: ignore[no-any-return]


def _set_attribute(model: Any, path: str, value: Any) -> Any:
    """Set `model.<path>` and return the function that restores it; an attribute that was new is removed."""
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
