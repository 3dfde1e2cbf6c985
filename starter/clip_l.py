"""A CLIP-L made from a seed: the demo's text encoder, written when the demo is set up and never committed.

It is not trained. Random layers still give every caption its own vectors, and captions that share a word
share part of them, which is all the starter base needs; it learned (dev/starter_v1/pretrain.py) to read
exactly these weights. Its one rule: the same seed gives the same bytes on every machine, so numbers come
from integers of a counter (numpy's Philox) by exact arithmetic alone, with no platform's exp, log or sin in
between. Shapes and names are those of openai/clip-vit-large-patch14's text half (transformers CLIPTextModel).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

VOCABULARY, POSITIONS, WIDTH, LAYERS = 49408, 77, 768, 12
BEGIN, END = 49406, 49407
SEED = 2
TOKEN_STD, POSITION_STD, MATRIX_STD = 1.0, 0.05, 0.02
VALUE_STD = 0.03  # attention passes on 0.7 of what it reads, so that the words reach the end token


def write_clip_l(path: Path) -> Path:
    """Write the text encoder to `path` (248 MB of float16 safetensors, a few seconds) and return `path`.

    The file appears under its name only when it is complete.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(clip_l_weights(SEED), part, metadata={"graft_clip_l_seed": str(SEED)})
        part.chmod(0o644)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def clip_l_weights(seed: int = SEED) -> dict[str, torch.Tensor]:
    """Every weight by its transformers name, float16."""
    token = approximate_normal(seed, 0, (VOCABULARY, WIDTH), TOKEN_STD)
    token[[BEGIN, END]] = 0  # in every caption: all they could add is what captions have in common
    position = approximate_normal(seed, 1, (POSITIONS, WIDTH), POSITION_STD)
    position[0] = 0
    weights = {
        "text_model.embeddings.token_embedding.weight": token,
        "text_model.embeddings.position_embedding.weight": position,
        "text_model.final_layer_norm.weight": torch.ones(WIDTH, dtype=torch.float16),
        "text_model.final_layer_norm.bias": torch.zeros(WIDTH, dtype=torch.float16),
        "text_projection.weight": torch.eye(WIDTH, dtype=torch.float16),
    }
    stream = 2
    for layer in range(LAYERS):
        prefix = f"text_model.encoder.layers.{layer}."
        for name, (rows, columns, std) in MATRICES.items():
            weights[f"{prefix}{name}.weight"] = approximate_normal(seed, stream, (rows, columns), std)
            weights[f"{prefix}{name}.bias"] = torch.zeros(rows, dtype=torch.float16)
            stream += 1
        for name in ("layer_norm1", "layer_norm2"):
            weights[f"{prefix}{name}.weight"] = torch.ones(WIDTH, dtype=torch.float16)
            weights[f"{prefix}{name}.bias"] = torch.zeros(WIDTH, dtype=torch.float16)
    return weights


def approximate_normal(seed: int, stream: int, shape: tuple[int, int], std: float) -> torch.Tensor:
    """Bell-shaped float16 numbers of mean 0 and deviation `std`: the sum of a random uint64's eight bytes.

    A sum of eight uniform integers is exact in any arithmetic; its variance is 8 * (256**2 - 1) / 12.
    """
    bits = np.random.Philox(key=[seed, stream]).random_raw(shape[0] * shape[1])
    pairs = (bits & np.uint64(0x00FF00FF00FF00FF)) + ((bits >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF))
    low = np.uint64(0x0000FFFF0000FFFF)
    quads = (pairs & low) + ((pairs >> np.uint64(16)) & low)
    total = (quads & np.uint64(0xFFFFFFFF)) + (quads >> np.uint64(32))
    scale = np.float32(std / (8 * (256**2 - 1) / 12) ** 0.5)
    values = (total.astype(np.float32) - np.float32(8 * 127.5)) * scale
    return torch.from_numpy(values.astype(np.float16).reshape(shape))


MATRICES = {
    "self_attn.q_proj": (WIDTH, WIDTH, MATRIX_STD),
    "self_attn.k_proj": (WIDTH, WIDTH, MATRIX_STD),
    "self_attn.v_proj": (WIDTH, WIDTH, VALUE_STD),
    "self_attn.out_proj": (WIDTH, WIDTH, VALUE_STD),
    "mlp.fc1": (4 * WIDTH, WIDTH, MATRIX_STD),
    "mlp.fc2": (WIDTH, 4 * WIDTH, MATRIX_STD),
}
