"""The starter's text encoder: a CLIP-L made from a seed and words.txt, written when first needed.

It is not trained. A word's vector is half its own and half its meanings' (words.py), so that related words
are near each other and a word that no caption had still means something. The layers pass every word on as it
is, and the last one gathers them for the pooled output; so the context is one vector a word and its place,
which a denoiser reads most easily. Layers that do nothing yet can learn: only their last matrices are zero.

Its one rule: the same seed gives the same bytes on every machine, so numbers come from integers of a counter
(numpy's Philox) by exact arithmetic alone, with no platform's exp, log or sin in between. Shapes and names
are those of openai/clip-vit-large-patch14's text half (transformers CLIPTextModel).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY, POSITIONS, WIDTH, LAYERS = 49408, 77, 768, 12
BEGIN, END = 49406, 49407
SEED = 3
SEED_KEY = "graft_clip_l_seed"  # in the file's metadata
PLACES = 24  # tokens that know their place; those behind, padding almost always, are all alike
POSITION_STD = 0.5
MATRIX_STD = 0.02
GATHER = 8.0  # weight of the words in the pooled output, beside the end token's own place
MEANINGS = (40, 36, 30, 25, 19, 13, 8)  # weights of a word's meanings, narrowest first
TOTAL = 100**2  # sum of the squares of a word's weights, its own included
EVEN_BYTES, EVEN_PAIRS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
CACHED = 1 << 16  # numbers drawn at once: half a megabyte, which a processor's cache holds
BYTES_STD = (8 * (256**2 - 1) / 12) ** 0.5  # of a sum of eight uniform bytes


def write_clip_l(path: Path) -> Path:
    """Write the text encoder to `path` (248 MB of float16 safetensors, a few seconds) and return `path`.

    The file appears under its name only when it is complete.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(clip_l_weights(SEED), part, metadata={SEED_KEY: str(SEED)})
        part.chmod(0o644)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def is_current(path: Path) -> bool:
    """Return whether the file at `path` holds these weights, by the seed in its metadata."""
    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get(SEED_KEY) == str(SEED)


def clip_l_weights(seed: int = SEED) -> dict[str, Tensor]:
    """Every weight by its transformers name, float16."""
    weights = {
        "text_model.embeddings.token_embedding.weight": token_vectors(seed),
        "text_model.embeddings.position_embedding.weight": position_vectors(seed),
        "text_model.final_layer_norm.weight": torch.ones(WIDTH, dtype=torch.float16),
        "text_model.final_layer_norm.bias": torch.zeros(WIDTH, dtype=torch.float16),
        "text_projection.weight": torch.eye(WIDTH, dtype=torch.float16),
    }
    stream = 3
    for layer in range(LAYERS):
        prefix = f"text_model.encoder.layers.{layer}."
        for name, (rows, columns) in MATRICES.items():
            if name in ZERO:
                matrix = torch.zeros(rows, columns, dtype=torch.float16)
            else:
                matrix = scaled(random_integers(seed, stream, (rows, columns)), MATRIX_STD / BYTES_STD)
            weights[f"{prefix}{name}.weight"] = matrix
            weights[f"{prefix}{name}.bias"] = torch.zeros(rows, dtype=torch.float16)
            stream += 1
        for name in ("layer_norm1", "layer_norm2"):
            weights[f"{prefix}{name}.weight"] = torch.ones(WIDTH, dtype=torch.float16)
            weights[f"{prefix}{name}.bias"] = torch.zeros(WIDTH, dtype=torch.float16)
    last = f"text_model.encoder.layers.{LAYERS - 1}.self_attn."
    weights[f"{last}k_proj.weight"].zero_()  # every query finds all keys alike: attention is the mean
    weights[f"{last}v_proj.weight"] = GATHER * torch.eye(WIDTH, dtype=torch.float16)
    weights[f"{last}out_proj.weight"] = torch.eye(WIDTH, dtype=torch.float16)
    return weights


def token_vectors(seed: int = SEED) -> Tensor:
    """(49408, 768) of deviation 1; the begin and the end token are 0: every caption has them."""
    own = random_integers(seed, 0, (VOCABULARY, WIDTH))
    chains = [[int(n) for n in line.split()] for line in WORDS.read_text(encoding="utf-8").splitlines()]
    meanings = random_integers(seed, 1, (1 + max(n for _, *chain in chains for n in chain), WIDTH))
    vectors = own * math.isqrt(TOTAL)
    for token, *chain in chains:
        weights = MEANINGS[: len(chain)]
        vectors[token] = own[token] * math.isqrt(TOTAL - sum(w * w for w in weights))
        for weight, meaning in zip(weights, chain):
            vectors[token] += weight * meanings[meaning]
    vectors[[BEGIN, END]] = 0
    return scaled(vectors, 1 / (math.isqrt(TOTAL) * BYTES_STD))


def position_vectors(seed: int = SEED) -> Tensor:
    position = scaled(random_integers(seed, 2, (POSITIONS, WIDTH)), POSITION_STD / BYTES_STD)
    position[0] = 0
    position[PLACES:] = 0
    return position


def random_integers(seed: int, stream: int, shape: tuple[int, int]) -> np.ndarray:
    """Bell-shaped int32 of mean 0: the sum of a random uint64's eight bytes, less 8 * 127.5."""
    draw = np.random.Philox(key=[seed, stream])
    integers: np.ndarray = np.empty(shape[0] * shape[1], np.int32)
    for part in np.split(integers, range(CACHED, len(integers), CACHED)):
        bits = draw.random_raw(len(part))
        pairs = (bits & EVEN_BYTES) + ((bits >> np.uint64(8)) & EVEN_BYTES)
        quads = (pairs & EVEN_PAIRS) + ((pairs >> np.uint64(16)) & EVEN_PAIRS)
        part[:] = (quads & np.uint64(0xFFFFFFFF)) + (quads >> np.uint64(32))
    integers -= np.int32(8 * 127.5)
    return integers.reshape(shape)


def scaled(integers: np.ndarray, scale: float) -> Tensor:
    """Integers below 2**24, times `scale`, in float16: two roundings, the same everywhere."""
    return torch.from_numpy((integers.astype(np.float32) * np.float32(scale)).astype(np.float16))


WORDS = Path(__file__).with_name("words.txt")
MATRICES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH, WIDTH),
    "self_attn.v_proj": (WIDTH, WIDTH),
    "self_attn.out_proj": (WIDTH, WIDTH),
    "mlp.fc1": (4 * WIDTH, WIDTH),
    "mlp.fc2": (WIDTH, 4 * WIDTH),
}
ZERO = {"self_attn.out_proj", "mlp.fc2"}
