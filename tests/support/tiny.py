"""A denoiser of 20k parameters with every layer kind, and a dataset to overfit: the engine's protocols in
full.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graft.training.family import Family
from graft.training.frozen_base.frozen_layer import FrozenLayer, LayerSpec
from graft.training.memory import device_memory
from graft.training.memory.quantize import plain
from graft.training.memory.weight_store import Store
from graft.training.model import OFFLOAD_ALL, Batch, Captions, HeldBase, OffloadOptions

FAMILY = Family(
    name="tiny",
    architecture="tiny",
    base_model="tiny",
    targets={
        "attn": ("blocks.*.attn*",),
        "attn-mlp": ("blocks.*.attn*", "blocks.*.mlp*"),
        "linear": ("*",),
        "all": ("*",),
        "everything": ("*",),
    },
    blocks=("blocks.*",),
    sigmas="logit-normal",
)


class Flow:
    """Rectified flow, as ComfyUI's CONST."""

    sigma_min, sigma_max = torch.tensor(0.001), torch.tensor(1.0)

    def noise_scaling(self, sigma: Tensor, noise: Tensor, latent_image: Tensor) -> Tensor:
        return sigma * noise + (1 - sigma) * latent_image

    def calculate_denoised(self, sigma: Tensor, model_output: Tensor, model_input: Tensor) -> Tensor:
        return model_input - model_output * sigma.reshape(-1, *(1,) * (model_output.ndim - 1))

    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 - percent


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn_qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Linear(width, width)
        self.conv1d = nn.Conv1d(width, width, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        x = x + self.mlp(F.silu(x))
        return x + self.conv1d(x.transpose(1, 2)).transpose(1, 2)

    def attention(self, x: Tensor) -> Tensor:
        """In (batch, heads, tokens, width), as fused kernels want it: others are computed step by step."""
        heads = max(2, x.shape[-1] // 64)
        q, k, v = self.attn_qkv(self.norm(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Network(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, width, 3, stride=2, padding=1)
        self.words = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.conv_out = nn.Conv2d(width, 16, 1)

    def forward(self, x: Tensor, sigma: Tensor, words: Tensor) -> Tensor:
        h = self.conv_in(x)
        tokens = h.flatten(2).transpose(1, 2) + self.words(words).mean(1, keepdim=True)
        tokens = (tokens + sigma[:, None, None]).to(x.dtype)
        for block in self.blocks:
            tokens = block(tokens)
        return F.pixel_shuffle(self.conv_out(tokens.transpose(1, 2).reshape_as(h)), 2)


class TinyDenoiser:
    """A frozen Network behind the Denoiser protocol. `overwrite` simulates one weight buffer shared by all
    layers.
    """

    family, sampling, device = FAMILY, Flow(), torch.device("cpu")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    dtype = torch.float32

    def __init__(self, seed: int = 0, *, overwrite: bool = False) -> None:
        torch.manual_seed(seed)
        self.module = Network().requires_grad_(False)
        self.fingerprint = f"tiny-{seed}"
        self.structure, self.cache_folder, self.is_mapped = "tiny", None, False
        self.overwrite = overwrite
        self.buffer = torch.zeros(32 * 32 * 9)

    def is_base(self, known_as: str) -> bool:
        return known_as == self.fingerprint

    def is_faster(self, format: str) -> bool:
        return False

    def free_bytes(self) -> int | None:
        return device_memory.free_bytes(self.device)

    @property
    def specs(self) -> dict[str, LayerSpec]:
        return {name: _spec(m) for name, m in self.module.named_modules() if _spec(m) is not None}

    @contextmanager
    def hold(
        self,
        dtype: torch.dtype,
        store: str = "resident",
        offload: OffloadOptions = OFFLOAD_ALL,
        compute: str = "full",
    ) -> Iterator[HeldBase]:
        modules = dict(self.module.named_modules())
        kept = Store(store, FAMILY.blocks, dtype, self.device, offload=offload, compute=compute)
        fetch = {name: self._fetch(name, spec, modules[name], kept) for name, spec in self.specs.items()}
        layers = {n: FrozenLayer(n, spec, modules[n], *fetch[n]) for n, spec in self.specs.items()}
        for name, products in kept.products.items():
            layers[name].products = products
        norms = {m: m._parameters for m in modules.values() if isinstance(m, nn.LayerNorm)}
        for layer in layers.values():
            layer.module.forward = layer.forward
        for norm, own in norms.items():
            placed = {n: nn.Parameter(p.to(self.device, dtype), requires_grad=False) for n, p in own.items()}
            norm._parameters = placed
        before, self.dtype = self.dtype, dtype
        try:
            yield HeldBase(self.module, layers)
        finally:
            self.dtype = before
            for norm, own in norms.items():
                norm._parameters = own
            for layer in layers.values():
                del layer.module.forward
            kept.release()

    def _fetch(self, path: str, spec: LayerSpec, module: nn.Module, kept: Store) -> tuple:
        whole = kept.make_fetch(path, spec, plain(module.weight.detach()))

        def overwritten(dtype: torch.dtype, device: torch.device) -> Tensor:
            tensor = module.weight
            self.buffer.fill_(float("nan"))
            shared = self.buffer[: tensor.numel()].view(tensor.shape)
            return shared.copy_(tensor.detach())

        bias = getattr(module, "bias", None)
        small = None if bias is None else (lambda dtype, device: bias.detach().to(device, dtype))
        return overwritten if self.overwrite else whole, small

    def scale_latents(self, latents: Tensor) -> Tensor:
        return latents

    def denoise(self, x_t: Tensor, sigma: Tensor, batch: Batch) -> Tensor:
        words = torch.cat([c["words"] for c in batch.conditioning]).to(self.device)
        output = self.module(x_t.to(self.dtype), sigma, words).float()  # as ComfyUI's apply_model
        return self.sampling.calculate_denoised(sigma, output, x_t)


class TinyDataset:
    """Four images of 8x8 latents, each with its word."""

    fingerprint = "four"

    def batch(self, size: int, *, seed: int, index: int) -> Batch:
        chosen = [(index * size + i) % 4 for i in range(size)]
        latents = torch.stack(
            [torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(c)) for c in chosen]
        )
        return Batch(latents, [{"words": torch.tensor([[c]])} for c in chosen], [f"{c}.png" for c in chosen])

    def preserved_captions(self, size: int, *, seed: int, index: int) -> Captions:
        """Each with the word 9 in place of its own."""
        return Captions([{"words": torch.tensor([[9]])}] * size)


class TinySamples:
    """Held-out images, which TinyDataset never shows."""

    fingerprint = "held-out"

    def __init__(self, count: int = 3) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int) -> Batch:
        batch = TinyDataset().batch(1, seed=0, index=index)
        latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(100 + index))
        return replace(batch, latents=latents, weights=torch.full((1,), 7.0))


def _spec(module: nn.Module) -> LayerSpec | None:
    shape = tuple(module.weight.shape) if isinstance(getattr(module, "weight", None), Tensor) else ()
    has_bias = getattr(module, "bias", None) is not None
    if isinstance(module, nn.Linear):
        return LayerSpec("linear", shape, has_bias=has_bias)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        options = {k: getattr(module, k) for k in ("stride", "padding", "dilation", "groups")}
        kind = "conv1d" if isinstance(module, nn.Conv1d) else "conv2d"
        return LayerSpec(kind, shape, options, has_bias=has_bias)
    return LayerSpec("embedding", shape, {"padding_idx": None}) if isinstance(module, nn.Embedding) else None
