"""Clips: which of their frames are trained, at which size, and what is refused before anything is encoded."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from fractions import Fraction

import av
import pytest
import torch
from PIL import Image

from graft import __main__ as launch
from graft.training.data import encode, from_videos, join, preview, report, scan, summary
from graft.training.data.clip import ClipHeader

from ..support.clips import decoded, moving, write_clip
from ..support.datasets import SMALL, FakeEncoder, add
from ..support.sounds import wave, write_sound

CLIPS = replace(SMALL, frames=9)


def encoded(folder, cache, config=CLIPS, encoder=None):
    encoder = encoder or FakeEncoder()
    return encode(scan(folder, config), encoder, cache), encoder


def seen(folder, tmp_path, **settings):
    """The frames that the VAE is given, clip by clip."""
    data, encoder = encoded(
        folder, tmp_path / f"cache{len(list(tmp_path.iterdir()))}", replace(CLIPS, **settings)
    )
    return encoder.images


@pytest.mark.parametrize("kind", ["mp4", "webm", "gif", "mov", "mkv", "avi"])
def test_a_clip_is_its_frames_in_their_order(kind, tmp_path):
    path = write_clip(tmp_path / "clips" / f"a.{kind}", moving(9))
    [frames] = seen(path.parent, tmp_path)
    assert torch.equal(frames, decoded(path)) and frames.mean((1, 2, 3)).diff().min() > 0


def test_the_latents_of_a_clip_and_of_its_batch_are_those_that_its_frames_give(tmp_path):
    path = write_clip(tmp_path / "clips" / "a.mp4", moving(9))
    data, encoder = encoded(path.parent, tmp_path / "cache", replace(CLIPS, dtype="fp32"))
    batch = data.batch(2, seed=0, index=0)
    assert batch.latents.shape == (1, 3, 3, 8, 8)
    assert torch.equal(batch.latents[0], FakeEncoder().encode_clip(decoded(path))[0])
    assert data.largest_batch(2).latents.shape == (2, 3, 3, 8, 8)


def test_frames_are_those_on_screen_at_the_moments_that_fps_asks_for(tmp_path):
    """Every second one of a clip of 16 per second, and of one that shows them at odd times the nearest."""
    steady = write_clip(tmp_path / "one" / "a.mp4", moving(18), fps=16)
    [frames] = seen(steady.parent, tmp_path, fps=8.0)
    assert torch.equal(frames, decoded(steady)[::2])
    times = [0, 40, 100, 260, 300, 500, 640, 700, 760, 1100]
    odd = write_clip(tmp_path / "two" / "a.mp4", moving(10), times=times)
    [frames] = seen(odd.parent, tmp_path, fps=8.0)
    nearest = [min(range(10), key=lambda i: abs(times[i] - 125 * k)) for k in range(9)]
    assert torch.equal(frames, decoded(odd)[nearest])


def test_a_longer_clip_gives_its_first_frames_or_some_all_through_it_or_all_in_pieces(tmp_path):
    path = write_clip(tmp_path / "clips" / "a.mp4", moving(21))
    whole = decoded(path)
    assert torch.equal(seen(path.parent, tmp_path)[0], whole[:9])
    [spread] = seen(path.parent, tmp_path, clips="uniform", frames=5)
    assert torch.equal(spread, whole[[0, 5, 10, 15, 20]])
    first, second = seen(path.parent, tmp_path, clips="chunks")
    assert torch.equal(first, whole[:9]) and torch.equal(second, whole[9:18])


def test_the_vae_takes_as_many_frames_as_its_own_step_allows_and_the_report_says_so(tmp_path):
    path = write_clip(tmp_path / "clips" / "a.mp4", moving(12))
    data, encoder = encoded(path.parent, tmp_path / "cache", replace(CLIPS, frames=12))
    assert len(encoder.images[0]) == 9
    assert "frames 12: the VAE takes 9 of them at once" in report(data)
    assert "Bucket 64 x 64 x 9 frames: 1 clips" in report(data)


def test_clips_are_cropped_and_mirrored_as_images_are_and_every_frame_alike(tmp_path):
    path = write_clip(tmp_path / "clips" / "a.mp4", moving(9, width=96, height=64))
    settings = {"bucket": replace(SMALL.bucket, square=True), "augment": replace(SMALL.augment, flip=True)}
    plain, mirrored = seen(path.parent, tmp_path, **settings)
    assert torch.equal(plain, decoded(path)[:, :, 16:80]) and torch.equal(mirrored, plain.flip(2))
    jitter = replace(SMALL.augment, brightness=0.5, variations=1)
    [changed] = seen(path.parent, tmp_path, bucket=settings["bucket"], augment=jitter)
    ratio = (changed / plain.clamp_min(1e-3))[(plain > 0.1) & (changed < 0.9)]
    assert ratio.std() < 1e-3 and not torch.equal(changed, plain)


def test_a_folder_of_frames_with_a_caption_beside_it_is_a_clip(tmp_path):
    pictures, folder = moving(9), tmp_path / "clips"
    for index, pixels in enumerate(pictures):  # frame_2 is before frame_10
        add(folder / "walk", f"frame_{index + 2}.png", None, Image.fromarray(pixels))
        add(folder / "run.frames", f"{index:03}.png", None, Image.fromarray(pixels))
    (folder / "walk.txt").write_text("a walk")
    (folder / "run.txt").write_text("a run")
    images = scan(folder, CLIPS)
    assert [(sample.name, sample.captions) for sample in images.samples] == [
        ("run.frames", ("a run",)),
        ("walk", ("a walk",)),
    ]
    frames = seen(folder, tmp_path)
    assert len(frames) == 1, "equal frames are one cache entry, whatever their names"
    assert torch.equal(frames[0], torch.from_numpy(pictures) / 255.0)


def test_images_ride_along_as_they_are_without_clips(tmp_path):
    folder = tmp_path / "clips"
    write_clip(folder / "a.mp4", moving(9))
    add(folder, "b.png")
    alone = scan(folder, SMALL)
    assert [sample.name for sample in alone.samples] == ["b.png"] and alone.ignored == ((".mp4", 1),)
    data, encoder = encoded(folder, tmp_path / "cache")
    assert data.index.buckets == ((64, 64, 9), (64, 64)) and "1 images and 1 clips" in summary(data.images)
    shapes = {tuple(data.batch(4, seed=0, index=i).latents.shape) for i in range(2)}
    assert shapes == {(1, 3, 3, 8, 8), (1, 3, 8, 8)}
    again, second = encoded(folder, tmp_path / "cache", SMALL)
    assert second.calls == (0, 0) and again.index.buckets == ((64, 64),)


def test_what_is_cached_is_encoded_once_and_again_after_a_change(tmp_path):
    folder = tmp_path / "clips"
    write_clip(folder / "a.mp4", moving(18))
    first, _ = encoded(folder, tmp_path / "cache")
    second, encoder = encoded(folder, tmp_path / "cache")
    assert encoder.calls == (0, 0) and second.fingerprint == first.fingerprint
    for settings in ({"frames": 5}, {"fps": 8.0}, {"clips": "uniform"}):
        changed, encoder = encoded(folder, tmp_path / "cache", replace(CLIPS, **settings))
        assert len(encoder.images) == 1 and changed.fingerprint != first.fingerprint
    _, encoder = encoded(folder, tmp_path / "cache", replace(CLIPS, clips="chunks"))
    assert len(encoder.images) == 2
    write_clip(folder / "a.mp4", moving(18, seed=1))
    _, encoder = encoded(folder, tmp_path / "cache")
    assert len(encoder.images) == 1


KILLED = """
import os, runpy, sys
runpy.run_path(sys.argv[1])["import_graft"]()
from graft.tests.support.datasets import FakeEncoder
from graft.tests.data.test_clips import CLIPS
from graft import __main__ as launch
from graft.training.data import encode, scan

class Killed(FakeEncoder):
    def encode_clip(self, pixels):
        return os.kill(os.getpid(), 9) if len(self.images) == 2 else super().encode_clip(pixels)

encode(scan(sys.argv[2], CLIPS), Killed(), sys.argv[3])
"""


@pytest.mark.skipif(os.name == "nt", reason="no such signal there")
def test_a_process_killed_while_it_encodes_clips_goes_on_where_it_was_to_the_same_batches(tmp_path):
    folder = tmp_path / "clips"
    for index in range(4):
        write_clip(folder / f"{index}.mp4", moving(9, seed=index))
    command = [sys.executable, "-c", KILLED, launch.__file__, str(folder), str(tmp_path / "cache")]
    assert subprocess.run(command, timeout=600).returncode == -9
    data, encoder = encoded(folder, tmp_path / "cache")
    whole, _ = encoded(folder, tmp_path / "other")
    assert len(encoder.images) == 2 and data.fingerprint == whole.fingerprint
    for index in range(4):
        one, other = (each.batch(1, seed=0, index=index) for each in (data, whole))
        assert torch.equal(one.latents, other.latents) and one.names == other.names


def test_a_dataset_without_clips_has_the_digest_that_it_had_with_any_setting_of_clips(tmp_path):
    add(tmp_path / "images", "a.png")
    plain, _ = encoded(tmp_path / "images", tmp_path / "cache", SMALL)
    other, encoder = encoded(tmp_path / "images", tmp_path / "cache", replace(CLIPS, fps=8.0, clips="chunks"))
    assert other.fingerprint == plain.fingerprint and encoder.calls == (0, 0)


@dataclass
class Parts:
    images: torch.Tensor
    frame_rate: Fraction


class Video:
    """What a node gives as VIDEO."""

    def __init__(self, images, rate=16):
        self.images, self.rate = images, rate

    def get_components(self):
        return Parts(self.images, Fraction(self.rate))


def test_videos_of_the_graph_are_trained_as_files_are(tmp_path):
    path = write_clip(tmp_path / "clips" / "a.mp4", moving(18))
    given = from_videos([Video(decoded(path))], ["a clip"], replace(CLIPS, fps=8.0, dtype="fp32"))
    encoder = FakeEncoder()
    data = encode(given, encoder, tmp_path / "cache")
    assert torch.equal(encoder.images[0], decoded(path)[::2])
    joined = join([given, scan(path.parent, CLIPS)])
    assert len(encode(joined, encoder, tmp_path / "cache")) == 2 and data.names == ["video-0"]
    assert preview(joined, step=16).shape[0] == 1


def damaged(folder):
    """A folder of clips of which only good.mp4 can be trained."""
    write_clip(folder / "good.mp4", moving(9))
    write_clip(folder / "short.mp4", moving(5))
    write_clip(folder / "odd.mp4", moving(10), times=[0, 40, 100, 260, 300, 500, 640, 700, 760, 1100])
    for name in ("empty.mp4", "torn.mp4", "text.webm", "sound.mkv", "list.mp4", "none.frames", "zero.mkv"):
        (folder / name).with_suffix(".txt").write_text("a clip")
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "torn.mp4").write_bytes((folder / "good.mp4").read_bytes()[:700])
    (folder / "text.webm").write_text("not a video")
    (folder / "list.mp4").write_text("#EXTM3U\n#EXTINF:1,\ngood.mp4\n")  # would open other files
    (folder / "none.frames").mkdir()
    write_sound(folder / "sound.mka", wave(1.0), caption=None).rename(folder / "sound.mkv")
    with av.open(str(folder / "zero.mkv"), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        container.start_encoding()
    return folder


def test_one_error_names_every_clip_that_cannot_be_trained_before_any_is_encoded(tmp_path):
    folder = damaged(tmp_path / "clips")
    with pytest.raises(ValueError, match="9 file") as error:
        scan(folder, CLIPS)
    for name, reason in {
        "short.mp4": "has 5 frames, but 9 are asked for; lower 'frames' in Load Dataset",
        "odd.mp4": r"its frame rate varies (2.94 to 25 per second); set fps in Dataset Settings",
        "none.frames": "has no frames",
        "zero.mkv": "damaged or not readable (End of file)",
        "sound.mkv": "has no video stream",
    }.items():
        assert f"{name}: {reason}" in str(error.value)
    damaged_files = "damaged or not readable (Invalid data found when processing input)"
    assert f"4 files: {damaged_files}: empty.mp4, list.mp4, text.webm, torn.mp4" in str(error.value)
    images = scan(folder, replace(CLIPS, skip_bad=True))
    assert [sample.name for sample in images.samples] == ["good.mp4"] and len(images.skipped) == 9


def test_clips_that_only_decoding_shows_as_damaged_are_all_named_and_the_others_stay_encoded(tmp_path):
    folder = tmp_path / "clips"
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        write_clip(folder / name, moving(9, seed=ord(name[0])))
    for name in ("b.mp4", "c.mp4"):
        destroy_end(folder / name)
    with pytest.raises(ValueError, match="2 file") as error:
        encoded(folder, tmp_path / "cache")
    [damaged_files] = (line for line in str(error.value).splitlines() if "damaged or not readable" in line)
    assert "b.mp4" in damaged_files and "c.mp4" in damaged_files
    data, encoder = encoded(folder, tmp_path / "cache", replace(CLIPS, skip_bad=True))
    assert not encoder.images and data.names == ["a.mp4"] and len(data.skipped) == 2


def destroy_end(path):
    """Overwrite the last frames of a clip, not its header."""
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    content = bytearray(path.read_bytes())
    for start, size in packets[6:]:
        content[start : start + size] = b"\xff" * size
    path.write_bytes(content)


def test_settings_of_clips_are_refused_by_name():
    for settings, message in (({"frames": -1}, "frames must be"), ({"fps": float("nan")}, "fps must be")):
        with pytest.raises(ValueError, match=message):
            replace(SMALL, **settings)


def test_a_folder_of_clips_alone_says_what_trains_them(tmp_path):
    write_clip(tmp_path / "a.mp4", moving(9))
    with pytest.raises(ValueError, match="There are 1 video clips: set 'frames' in Load Dataset"):
        scan(tmp_path, SMALL)


def test_rounded_times_of_a_steady_clip_are_no_varying_rate():
    times = tuple(round(index / 24, 3) for index in range(9))
    assert ClipHeader((64, 64), times, 9).length(0.0) == 9
