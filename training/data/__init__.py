"""From a folder of captioned images to batches: folder -> bucket -> cache -> batch."""
