"""Cost of data: memory and time to choose a batch at a million images; encoding against a plain loop.

`python dev/bench.py data --json` prints {"10000": {"index_mb", "batch_ms", "worst_ms", "build_s"},
"100000": ..., "1000000": ..., "encode_ratio": r, "encode_ratio_vae_only": v}.
index_mb is how much the resident memory of a process of its own grows by samples and index together;
batch_ms is the mean over the first 2,000 batches of four, including the shuffling of the epoch (worst_ms).
encode_ratio is the throughput of `encode`, which also hashes and writes, over that of a plain loop that
opens, resizes and encodes the same images. In encode_ratio_vae_only the loop does not even open them: there,
1 means that everything but the VAE is hidden behind it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from ...commands.bench.process import run_alone
from ...training.data import (
    BucketConfig,
    DatasetConfig,
    EncodedDataset,
    ImageSet,
    Sample,
    Store,
    encode,
    scan,
)
from ...training.data.bucket import buckets_for
from ...training.data.index import IndexBuilder, SourceRules
from ...training.data.samples import SampleTable, Source

COUNTS = (10_000, 100_000, 1_000_000)
CAPTION = (
    "a photo of {}, soft light, shallow depth of field, with a long caption of the usual length, number {}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Measure everything, print it, and return 0."""
    if args.count:
        print(json.dumps(measure_index(args.count)))
        return 0
    results: dict[str, Any] = {}
    for count in COUNTS:  # each in a process that has done nothing else: only there memory is counted right
        results[str(count)] = run_alone(args.program, "--count", str(count))
        if not args.json:
            print(f"{count:>9,} images: {results[str(count)]}", flush=True)
    ratios = encode_ratios()
    print(json.dumps(results | ratios) if args.json else ratios)
    return 0


def measure_index(count: int) -> dict[str, float]:
    """Return memory and times for a dataset of `count` images in many shapes."""
    build_index(100).choose(4, seed=0, index=0)  # load and compile everything that is not the data
    gc.collect()
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    dataset = build_index(count)
    built = time.perf_counter() - start
    times = []
    for index in range(2000):
        start = time.perf_counter()
        dataset.choose(4, seed=0, index=index)
        times.append(1000 * (time.perf_counter() - start))
    gc.collect()
    grown = (psutil.Process().memory_info().rss - before) / 1e6
    figures = {
        "index_mb": grown,
        "batch_ms": statistics.mean(times),
        "worst_ms": max(times),
        "build_s": built,
    }
    return {name: round(value, 4) for name, value in figures.items()}


def build_index(count: int) -> EncodedDataset:
    """Return the index of `count` images of 97 shapes that exist nowhere, with their names and captions."""
    config = DatasetConfig(bucket=BucketConfig(resolutions=(1024,)))
    table, builder = SampleTable(), IndexBuilder([SourceRules(1.0, 0.0, 0.1, bytes(16))])
    draws = np.random.default_rng(0)
    for index in range(count):
        size = (900 + 10 * (index % 97), 1400)
        caption = CAPTION.format(index % 1000, index)
        name = f"folder_{index // 1000:05d}/image_{index:08d}.jpg"
        table.append(Sample(name, *size, (caption,), repeats=1 + index % 2, bytes=1_000_000, mtime_ns=index))
        keys = draws.bytes(48)
        builder.add_sample(size, 0, keys[:16], [keys[16:32]])
        (bucket,) = buckets_for(*size, config.bucket, step=64)
        builder.add_entry(index, bucket, 1 + index % 2, [keys[32:]], [bytes(16)], [(0, index % 64)])
    return EncodedDataset(
        builder.build(), Store("nowhere"), ImageSet(table, (Source(config, Path("images")),))
    )


class Vae(nn.Module):
    """An encoder of the usual build (three halvings, SiLU, group norm), cheaper than any that people use."""

    bucket_step, reduction, inpaints, edit_node = 16, 8, False, ""
    image_fingerprint = text_fingerprint = "benchmark"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [3, 128, 256, 512] if DEVICE.type == "cuda" else [3, 64, 128, 128]
        layers: list[nn.Module] = []
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(8, after), nn.SiLU()]
            layers += [nn.Conv2d(after, after, 3, 1, 1), nn.SiLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 4, 1)).to(DEVICE)

    def encode_image(self, pixels: Tensor) -> Tensor:
        latents: Tensor = self.layers(pixels.to(DEVICE).movedim(-1, 1))
        return latents.cpu()

    def encode_text(self, caption: str) -> dict[str, Tensor]:
        return {"cross_attn": torch.zeros(1, 1, 8)}


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def encode_ratios(images: int = 16, rounds: int = 3) -> dict[str, float]:
    """Return the medians of (seconds of a plain loop) / (seconds of `encode`), the loops taking turns."""
    vae, config = Vae(), DatasetConfig(bucket=BucketConfig(resolutions=(512,)))
    ratios: dict[str, list[float]] = {"encode_ratio": [], "encode_ratio_vae_only": []}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        paths = [Path(folder) / "images" / f"{index}.jpg" for index in range(images)]
        paths[0].parent.mkdir()
        for index, path in enumerate(paths):
            noise = np.random.default_rng(index).integers(0, 256, (24, 32, 3), np.uint8)
            Image.fromarray(noise).resize((1024, 768), Image.Resampling.BICUBIC).save(path)
            path.with_suffix(".txt").write_text("a caption")
        scanned = scan(paths[0].parent, config)
        (bucket,) = buckets_for(1024, 768, config.bucket, step=vae.bucket_step)
        images_read = [plain_read(path, bucket) for path in paths]
        vae.encode_image(images_read[0])
        for index in range(rounds):
            encoding = seconds(lambda: [vae.encode_image(image) for image in images_read])
            plain = seconds(lambda: [vae.encode_image(plain_read(path, bucket)) for path in paths])
            cache = Path(folder) / f"cache{index}"
            ours = seconds(lambda cache=cache: encode(scanned, vae, cache))  # type: ignore[misc]
            ratios["encode_ratio"].append(plain / ours)
            ratios["encode_ratio_vae_only"].append(encoding / ours)
    return {name: round(statistics.median(values), 4) for name, values in ratios.items()}


def plain_read(path: Path, bucket: tuple[int, int]) -> Tensor:
    """Return an image as a plain script would read it, (1, H, W, 3)."""
    with Image.open(path) as image:
        resized = ImageOps.fit(image.convert("RGB"), bucket, Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(resized).astype(np.float32) / 255)[None]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
