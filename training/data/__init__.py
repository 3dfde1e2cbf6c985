"""From captioned images to batches: folder -> samples -> bucket, augment -> cache -> batch. No ComfyUI here.

    folder = resolve_dataset(name, roots)           # a name in a graph -> a folder that may be read
    images = scan(folder, DatasetConfig(...))       # ImageSet; or from_images(IMAGE, captions, masks, config)
    images = join([images, others])                 # several folders, each with its own settings
    dataset = encode(images, encoder, cache_dir)    # EncodedDataset: what the training loop reads
    dataset = from_latents(samples, cache_dir)      # the same of what the graph encoded
    train_set, held_out = dataset.split(SplitConfig(fraction=0.1))
    batch = dataset.batch(4, seed=0, index=17)

Beside them: `fingerprint(folder, config)` notices edits without opening a file, `list_datasets(roots)` fills
a menu, `summary(images)`, `report(dataset)` and `preview(images, step=...)` tell what is trained, and
`Store(cache_dir)` measures and cleans the cache. Read in the first line's order; settings are in `config.py`.
"""

from .bad_files import Skipped
from .batch import EncodedDataset
from .cache import encode
from .config import AugmentConfig, BucketConfig, CaptionConfig, DatasetConfig, MaskConfig, SplitConfig
from .folder import fingerprint, scan
from .given_latents import GivenSample, from_latents
from .image_batch import from_images, from_videos
from .join import join
from .preview import preview
from .report import report, summary
from .roots import list_datasets, resolve_dataset
from .samples import ImageSet, Sample
from .store import CacheReport, Store

__all__ = [
    "AugmentConfig",
    "BucketConfig",
    "CacheReport",
    "CaptionConfig",
    "DatasetConfig",
    "EncodedDataset",
    "GivenSample",
    "ImageSet",
    "MaskConfig",
    "Sample",
    "Skipped",
    "SplitConfig",
    "Store",
    "encode",
    "fingerprint",
    "from_images",
    "from_latents",
    "from_videos",
    "join",
    "list_datasets",
    "preview",
    "report",
    "resolve_dataset",
    "scan",
    "summary",
]
