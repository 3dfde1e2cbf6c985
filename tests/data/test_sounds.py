"""Sounds: which part of them is trained, with which words, and what is refused before anything is encoded."""

from __future__ import annotations

import wave as wav
from dataclasses import replace

import pytest
import torch

from graft.training.data import encode, preview, report, scan, summary
from graft.training.data.caption import LYRICS

from ..support.clips import moving, write_clip
from ..support.datasets import SMALL, FakeEncoder, add
from ..support.sounds import RATE, wave, write_sound

SOUNDS = replace(SMALL, seconds=0.5)


def encoded(folder, cache, config=SOUNDS):
    encoder = FakeEncoder()
    return encode(scan(folder, config), encoder, cache), encoder


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3"])
def test_a_sound_is_its_first_seconds_in_stereo(kind, tmp_path):
    samples = wave(1.2)
    folder = write_sound(tmp_path / "sounds" / f"a.{kind}", samples).parent
    data, encoder = encoded(folder, tmp_path / "cache")
    [heard] = encoder.images
    assert heard.shape == (2, RATE // 2)
    error = (heard - torch.from_numpy(samples[:, : RATE // 2])).abs()
    assert error.max() < (0.05 if kind != "mp3" else 1) and error.mean() < (1e-4 if kind != "mp3" else 0.5)
    batch = data.batch(1, seed=0, index=0)
    assert batch.latents.shape == (1, 2, 5) and batch.names == (f"a.{kind}",)
    assert batch.extras[0]["seconds_start"] == 0 and batch.extras[0]["seconds_total"] == pytest.approx(
        1.2, abs=0.2
    )


def test_a_longer_sound_can_give_all_of_it_in_pieces_and_one_channel_becomes_two(tmp_path):
    samples = wave(1.2, channels=1)
    folder = write_sound(tmp_path / "sounds" / "a.wav", samples).parent
    data, encoder = encoded(folder, tmp_path / "cache", replace(SOUNDS, clips="chunks"))
    first, second = encoder.images
    for heard, start in ((first, 0), (second, RATE // 2)):
        assert torch.equal(heard[0], heard[1]) and heard.std() > 0.1
        part = torch.from_numpy(samples[0, start : start + RATE // 2])
        assert torch.corrcoef(torch.stack([heard[0], part]))[0, 1] > 0.999
    starts = {data.batch(1, seed=0, index=index).extras[0]["seconds_start"] for index in range(2)}
    assert starts == {0.0, 0.5}


def test_what_is_cached_is_encoded_once_and_again_for_another_length(tmp_path):
    folder = write_sound(tmp_path / "sounds" / "a.wav", wave(1.2)).parent
    first, _ = encoded(folder, tmp_path / "cache")
    second, encoder = encoded(folder, tmp_path / "cache")
    assert encoder.calls == (0, 0) and second.fingerprint == first.fingerprint
    longer, encoder = encoded(folder, tmp_path / "cache", replace(SOUNDS, seconds=0.7))
    assert len(encoder.images) == 1 and longer.fingerprint != first.fingerprint


def test_lyrics_beside_a_sound_go_with_its_tags_and_are_not_shuffled(tmp_path):
    folder = write_sound(tmp_path / "sounds" / "a.wav", wave(1.0), "pop, female voice").parent
    (folder / "a_lyrics.txt").write_text("[verse]\none, two, (three)\n")
    caption = replace(SOUNDS.caption, shuffle=True, trigger="sks", variations=8)
    _, encoder = encoded(folder, tmp_path / "cache", replace(SOUNDS, caption=caption))
    tags, lyrics = zip(*(text.split(LYRICS) for text in filter(None, encoder.texts)))
    assert set(tags) == {"sks, pop, female voice", "sks, female voice, pop"}
    assert set(lyrics) == {"[verse]\none, two, (three)"}


def test_the_texts_of_nodes_and_the_preview_say_what_is_trained(tmp_path):
    folder = write_sound(tmp_path / "sounds" / "a.wav", wave(1.2)).parent
    images = scan(folder, SOUNDS)
    data, _ = encoded(folder, tmp_path / "cache")
    assert "1 sounds" in summary(images) and "Bucket 0.5 seconds: 1 sounds" in report(data)
    assert preview(images, step=16).shape[0] == 1


def test_one_error_names_every_sound_that_cannot_be_trained(tmp_path):
    folder = tmp_path / "sounds"
    write_sound(folder / "good.wav", wave(1.0))
    write_sound(folder / "short.flac", wave(0.2))
    write_clip(folder / "silent.mp4", moving(9))
    (folder / "silent.mp4").rename(folder / "silent.ogg")
    with wav.open(str(folder / "none.wav"), "wb") as file:
        file.setparams((2, 2, RATE, 0, "NONE", ""))
    (folder / "text.mp3").write_text("not a sound")
    (folder / "empty.wav").write_bytes(b"")
    for name in ("silent", "text", "empty", "none"):
        (folder / f"{name}.txt").write_text("a tone")
    with pytest.raises(ValueError, match="5 file") as error:
        scan(folder, SOUNDS)
    short = "short.flac: has 0.2 seconds, but 0.5 are asked for; lower 'seconds' in Load Dataset"
    assert short in str(error.value) and "none.wav: has no sound in its track" in str(error.value)
    damaged = "\n".join(line for line in str(error.value).splitlines() if "damaged or not readable" in line)
    assert all(name in damaged for name in ("silent.ogg", "text.mp3", "empty.wav"))
    with pytest.raises(ValueError, match="'clips' uniform takes nothing; choose head or chunks"):
        scan(folder, replace(SOUNDS, clips="uniform"))


def test_a_folder_of_sounds_alone_says_what_trains_them_and_images_stay_as_they_were(tmp_path):
    folder = write_sound(tmp_path / "sounds" / "a.wav", wave(1.0)).parent
    with pytest.raises(ValueError, match="There are 1 sounds: set 'seconds' in Load Dataset"):
        scan(folder, SMALL)
    add(folder, "b.png")
    assert [sample.name for sample in scan(folder, SMALL).samples] == ["b.png"]
