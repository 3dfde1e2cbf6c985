"""What a model is told of a sample beside its caption: size and crop, frames a second, seconds of sound."""

from __future__ import annotations

from collections.abc import Mapping

from .index import Index
from .samples import ImageSet


def size_and_crop(index: Index, images: ImageSet, entry: int, view: int) -> Mapping[str, float]:
    """Return SDXL's conditioning on size and crop (Podell et al. 2023, arXiv:2307.01952, sec. 2.2).

    It is empty for latents from the graph: as in sampling, their conditioning says it or the model.
    """
    sample = index.sample[entry]
    source = images.sources[index.source[sample]]
    if source.is_encoded:
        return {}
    width, height = index.sizes[sample].tolist()
    if not height:  # a sound, as Conditioning Stable Audio describes it
        return {"seconds_start": images.samples[sample].start / 1000, "seconds_total": width / 1000}
    left, top = index.offsets[view].tolist()
    target_width, target_height, *frames = index.buckets[index.bucket[entry]]
    return {
        "width": width,
        "height": height,
        "crop_w": left,
        "crop_h": top,
        "target_width": target_width,
        "target_height": target_height,
        **({"frame_rate": source.config.fps} if frames and source.config.fps else {}),
    }
