"""Encoding: what is encoded again after an edit, what a killed run leaves, and that nothing is half done."""

import logging
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from graft import __main__ as launch
from graft.commands.cli import main
from graft.tests.support.datasets import SMALL, FakeEncoder, add, picture
from graft.training.data import (
    AugmentConfig,
    BucketConfig,
    CaptionConfig,
    MaskConfig,
    Store,
    encode,
    join,
    scan,
)
from graft.training.data.augment import render
from graft.training.data.caption import variations
from graft.training.data.hashes import file_digest

NAMES = "abcd"


@pytest.fixture
def folder(tmp_path):
    """Four images, two of them with the same caption."""
    for number, name in enumerate(NAMES):
        add(tmp_path / "set", f"{name}.png", f"caption {min(number, 2)}", picture(seed=number))
    return tmp_path / "set"


@pytest.fixture
def calls(folder, tmp_path):
    """Return a function that encodes the folder and says how many (images, texts) were encoded."""

    def run(config=SMALL, encoder=None, **options):
        encoder = encoder or FakeEncoder()
        encode(scan(folder, config), encoder, tmp_path / "cache", **options)
        return encoder.calls

    run()
    return run


@pytest.mark.feature(62)
def test_equal_captions_are_encoded_once_and_the_empty_one_always(folder, tmp_path):
    encoder = FakeEncoder()
    encode(scan(folder, SMALL), encoder, tmp_path / "cache")
    assert encoder.calls == (4, 4) and encoder.texts.count("") == 1


@pytest.mark.feature(61)
def test_a_second_run_encodes_nothing_and_does_not_open_the_images(calls, folder, monkeypatch):
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))  # not so recent that another edit could have the same date
    calls()
    monkeypatch.setattr("graft.training.data.hashes.file_digest", None)
    monkeypatch.setattr("graft.training.data.load_views.open_sample", None)
    assert calls() == (0, 0)


@pytest.mark.parametrize(
    "edit, expected",
    [
        (lambda folder: (folder / "a.txt").write_text("another caption"), (0, 1)),
        (lambda folder: (folder / "a.txt").write_text("caption 1"), (0, 0)),
        (lambda folder: picture(seed=99).save(folder / "a.png"), (1, 0)),
        (
            lambda folder: (
                (folder / "a.png").rename(folder / "z.png") and (folder / "a.txt").rename(folder / "z.txt")
            ),
            (0, 0),
        ),
        (lambda folder: add(folder, "new.png", "caption 0", picture(seed=50)), (1, 0)),
        (lambda folder: os.utime(folder / "a.png"), (0, 0)),
    ],
    ids=["caption", "to a known caption", "image", "renamed", "added", "touched"],
)
def test_an_edit_encodes_again_exactly_what_it_must(calls, folder, edit, expected):
    edit(folder)
    assert calls() == expected and calls() == (0, 0)


@pytest.mark.parametrize(
    "config, expected",
    [
        (replace(SMALL, caption=CaptionConfig(trigger="sks")), (0, 3)),
        (replace(SMALL, caption=CaptionConfig(dropout=0.1)), (0, 0)),
        (replace(SMALL, caption=CaptionConfig(trigger="caption", class_word="dog")), (0, 3)),
        (replace(SMALL, bucket=BucketConfig(resolutions=(32,))), (4, 0)),
        (replace(SMALL, bucket=BucketConfig(resolutions=(64, 32))), (4, 0)),
        (replace(SMALL, augment=AugmentConfig(flip=True)), (4, 0)),
        (replace(SMALL, augment=AugmentConfig(brightness=0.2, variations=3)), (12, 0)),
        (replace(SMALL, repeats=5, weight=0.5, background="#000000", mask=MaskConfig(outside=0.3)), (0, 0)),
        (replace(SMALL, dtype="fp32"), (4, 4)),
    ],
    ids=[
        "trigger",
        "dropout",
        "class word",
        "resolution",
        "one more",
        "flip",
        "jitter",
        "irrelevant",
        "dtype",
    ],
)
def test_a_setting_encodes_again_exactly_what_it_must(calls, config, expected):
    assert calls(config) == expected and calls(config) == (0, 0) and calls() == (0, 0)


def test_another_vae_or_text_encoder_encodes_its_own_half(calls):
    assert calls(encoder=FakeEncoder(image_fingerprint="other")) == (4, 0)
    assert calls(encoder=FakeEncoder(text_fingerprint="other")) == (0, 4)


def test_the_background_matters_to_transparent_images_only(calls, folder):
    add(folder, "t.png", "caption 0", Image.new("RGBA", (64, 64), (200, 10, 10, 128)))
    assert calls() == (1, 0) and calls(replace(SMALL, background="#000000")) == (1, 0)


@pytest.mark.feature(64)
def test_encoding_can_be_forced(calls):
    assert calls(recache=True) == (4, 4) and calls() == (0, 0)


def test_another_folder_with_the_same_pictures_shares_the_cache(calls, folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    encoder = FakeEncoder()
    encode(scan(tmp_path / "copy", SMALL), encoder, tmp_path / "cache")
    assert encoder.calls == (0, 0)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-10], lambda data: b"\xff" * 50])
def test_a_damaged_entry_is_made_again_with_a_warning(calls, tmp_path, caplog, damage):
    entry = next((tmp_path / "cache/latents").rglob("*.safetensors"))
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert calls() == (1, 0)
    assert f"{entry} is damaged" in caplog.text and entry.read_bytes() == whole


def test_a_killed_run_continues_where_it_was(folder, tmp_path):
    class Killed(FakeEncoder):
        def encode_image(self, pixels):
            if len(self.images) == 2:
                raise SystemExit("killed")
            return super().encode_image(pixels)

    with pytest.raises(SystemExit):
        encode(scan(folder, SMALL), Killed(), tmp_path / "cache")
    encoder = FakeEncoder()
    encode(scan(folder, SMALL), encoder, tmp_path / "cache")
    assert encoder.calls == (2, 4)


KILLED = """
import os, runpy, sys
runpy.run_path(sys.argv[1])["import_graft"]()
from graft.tests.support.datasets import SMALL, FakeEncoder
from graft.training.data import encode, scan

class Killed(FakeEncoder):
    def encode_image(self, pixels):
        return os._exit(9) if len(self.images) == 2 else super().encode_image(pixels)

encode(scan(sys.argv[2], SMALL), Killed(), sys.argv[3])
"""


def test_a_process_that_was_killed_leaves_whole_entries_only(folder, tmp_path):
    command = [sys.executable, "-c", KILLED, launch.__file__, str(folder), str(tmp_path / "cache")]
    assert subprocess.run(command, timeout=600).returncode == 9
    encoder = FakeEncoder()
    encode(scan(folder, SMALL), encoder, tmp_path / "cache")
    assert encoder.calls == (2, 4)


def test_cancelling_stops_before_the_next_image(folder, tmp_path):
    def cancel(done, total, message):
        if (done, message) == (1, "Encoding images"):
            raise KeyboardInterrupt

    encoder = FakeEncoder()
    with pytest.raises(KeyboardInterrupt):
        encode(scan(folder, SMALL), encoder, tmp_path / "cache", on_progress=cancel)
    assert encoder.calls == (1, 0)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders there")
def test_a_mask_that_is_a_pipe_is_named_and_not_waited_for(folder, tmp_path):
    os.mkfifo(folder / "a-mask.png")
    with pytest.raises(ValueError, match=r"a\.png: its mask a-mask\.png: .*it is a pipe"):
        encode(scan(folder, SMALL), FakeEncoder(), tmp_path / "cache")


def test_cancel_is_answered_while_an_image_is_read(folder, tmp_path, monkeypatch):
    images, go_on = scan(folder, SMALL), threading.Event()
    monkeypatch.setattr("graft.training.data.load_views.render", lambda *_: go_on.wait())
    seen = []

    def cancel(done, total, message):
        seen.append((done, message))
        if seen.count((0, "Encoding images")) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(images, FakeEncoder(), tmp_path / "cache", on_progress=cancel)
    assert not go_on.is_set()
    go_on.set()


def test_cancel_is_asked_for_within_a_file_and_at_each_variation_of_a_caption(tmp_path):
    (tmp_path / "large").write_bytes(bytes(5 << 20))
    calls = []
    file_digest(tmp_path / "large", lambda: calls.append(1))
    assert len(calls) == 5
    config = replace(SMALL, caption=CaptionConfig(shuffle=True, variations=100))
    variations(("a, b, c, d",), config, lambda: calls.append(1))
    assert len(calls) == 105


def test_an_entry_is_never_visible_before_it_is_whole(tmp_path, monkeypatch):
    store, key, names = Store(tmp_path), b"0" * 16, []
    replace_file = os.replace
    monkeypatch.setattr(
        os, "replace", lambda a, b: (names.append((load_file(a).keys(), b.exists())), replace_file(a, b))
    )
    store.write("latents", key, {"latents": torch.zeros(3)})
    assert names == [({"latents"}, False)] and [p.name for p in tmp_path.rglob("*") if p.is_file()] == [
        f"{key.hex()}.safetensors"
    ]


def test_a_full_disk_says_so_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match="cannot be written to .No space left on device.; free some space"):
        Store(tmp_path).write("latents", b"0" * 16, {"latents": torch.zeros(3)})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_cache_folder_that_is_a_file_says_so(folder, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ValueError, match="cache folder .* cannot be written to"):
        encode(scan(folder, SMALL), FakeEncoder(), tmp_path / "cache")


def test_training_always_sees_what_the_cache_has_rounded(folder, tmp_path):
    dataset = encode(scan(folder, SMALL), FakeEncoder(), tmp_path / "cache")
    latents = dataset.batch(4, seed=0, index=0).latents
    assert torch.equal(latents, latents.bfloat16().float())
    exact = encode(scan(folder, replace(SMALL, dtype="fp32")), encoder := FakeEncoder(), tmp_path / "cache")
    assert any(
        torch.equal(exact.batch(1, seed=0, index=0).latents, encoder.encode_image(p))
        for p in list(encoder.images)
    )


def test_images_are_read_just_ahead_of_the_vae_and_not_kept(tmp_path, monkeypatch):
    for number in range(12):
        add(tmp_path / "set", f"{number}.png", image=picture(seed=number))
    encoder, lead = FakeEncoder(), []

    def counted(picture, view):
        lead.append(len(lead) - len(encoder.images))
        return render(picture, view)

    monkeypatch.setattr("graft.training.data.load_views.render", counted)
    encode(scan(tmp_path / "set", SMALL), encoder, tmp_path / "cache")
    assert len(lead) == 12 and max(lead) <= 6


@pytest.mark.parametrize("skip", [False, True])
def test_an_image_that_turns_out_bad_in_encoding_is_named_or_left_out(folder, tmp_path, monkeypatch, skip):
    images = scan(folder, replace(SMALL, skip_bad=skip))
    (folder / "b.png").unlink()
    add(folder, "c.png", None, picture(seed=77))
    if not skip:
        with pytest.raises(
            ValueError, match=r"b\.png: disappeared(.|\n)*c\.png: changed after the folder was read"
        ):
            encode(images, FakeEncoder(), tmp_path / "cache")
        return
    dataset = encode(images, FakeEncoder(), tmp_path / "cache")
    assert dataset.names == ["a.png", "d.png"] and [bad.name for bad in dataset.skipped] == ["b.png", "c.png"]


def test_damage_that_only_decoding_shows_is_named(tmp_path):
    path = add(tmp_path / "set", "a.png", image=picture(256, 256))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255  # the end is where it should be
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.png: truncated or damaged"):
        encode(scan(tmp_path / "set", SMALL), FakeEncoder(), tmp_path / "cache")


def test_nan_from_the_vae_names_the_image_and_a_way_out(folder, tmp_path):
    encoder = FakeEncoder()
    encoder.encode_image = lambda pixels: torch.full((1, 4, 8, 8), torch.nan)
    with pytest.raises(ValueError, match=r"a\.png: the VAE returned NaN .*--bf16-vae"):
        encode(scan(folder, SMALL), encoder, tmp_path / "cache")


def test_an_image_without_a_bucket_is_named(tmp_path):
    add(tmp_path / "set", "tiny.png", image=picture(12, 12))
    config = replace(SMALL, bucket=BucketConfig(resolutions=(64,), upscale=False))
    with pytest.raises(ValueError, match=r"tiny\.png: 12 x 12 px is smaller than one bucket step"):
        encode(scan(tmp_path / "set", config), FakeEncoder(), tmp_path / "cache")


def test_the_cache_says_how_large_it_is_and_is_cleaned_on_request(calls, tmp_path):
    store = Store(tmp_path / "cache")
    assert store.report().files == 8 and store.report().bytes > 0 and "8 files" in str(store.report())
    old = sorted((tmp_path / "cache/text").rglob("*.safetensors"))[0]
    os.utime(old, (1e9, 1e9))
    (old.parent / "half.tmp").touch()
    os.utime(old.parent / "half.tmp", (1e9, 1e9))
    assert store.clean(unused_days=30).files == 2 and calls() == (0, 1)
    assert store.clean(unused_days=0).files == 8 and store.report().files == 0


def test_the_command_cleans_and_says_what_is_left(calls, tmp_path, capsys):
    old = sorted((tmp_path / "cache/text").rglob("*.safetensors"))[0]
    os.utime(old, (1e9, 1e9))
    assert main(["clean", str(tmp_path / "cache")]) == 0 and not old.exists()
    assert re.match(r"removed 1 files, .* MB; 7 files, .* MB are left", capsys.readouterr().out)
    assert main(["clean", str(tmp_path / "nowhere")]) == 2 and "no such folder" in capsys.readouterr().err


def test_using_an_entry_keeps_it_from_being_cleaned(calls, tmp_path):
    for entry in (tmp_path / "cache").rglob("*.safetensors"):
        os.utime(entry, (1e9, 1e9))
    assert calls() == (0, 0) and Store(tmp_path / "cache").clean(unused_days=30).files == 0


def test_a_damaged_list_of_digests_is_made_again(calls, tmp_path):
    (tmp_path / "cache/content.sqlite").write_bytes(b"no database" * 100)
    assert calls() == (0, 0) and (tmp_path / "cache/content.sqlite").read_bytes().startswith(b"SQLite")


def test_all_images_of_several_folders_come_before_all_captions(folder, tmp_path):
    add(tmp_path / "more", "x.png", "more", picture(seed=9))
    encoder, order = FakeEncoder(), []
    encode(
        join([scan(folder, SMALL), scan(tmp_path / "more", SMALL)]),
        encoder,
        tmp_path / "cache",
        on_progress=lambda d, t, m: order.append(m),
    )
    assert order.index("Encoding captions") > max(i for i, m in enumerate(order) if m == "Encoding images")
    assert encoder.calls == (5, 5)
