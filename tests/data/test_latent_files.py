"""Latents that sd-scripts cached, in place of pictures: which are taken, what comes out, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from graft.tests.support.datasets import SMALL, FakeEncoder, add, picture
from graft.training.data import (
    AugmentConfig,
    CaptionConfig,
    MaskConfig,
    encode,
    join,
    latent_file,
    preview,
    report,
    scan,
    summary,
)

EXACT = replace(SMALL, dtype="fp32")
NUMBERS = np.random.default_rng(0).standard_normal((3, 8, 8), np.float32)


def write(folder, name, caption="a picture", latents=NUMBERS, original=(64, 64), ending="", **more):
    """Write a latent file as sd-scripts does and, unless it is None, its caption; return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"latents": latents, "original_size": np.array(original), "crop_ltrb": np.array([0, 0, 64, 64])}
    np.savez(folder / name, **{key + ending: value for key, value in {**arrays, **more}.items()})
    if caption is not None:
        (folder / name).with_name(f"{latent_file.stem_of(name)}.txt").write_text(caption)
    return folder / name


def encoded(folder, config=EXACT, encoder=None, cache="cache"):
    return encode(scan(folder, config), encoder or FakeEncoder(), folder.parent / cache)


def names(images):
    return [sample.name for sample in images.samples]


@pytest.mark.parametrize("name", ["cat.npz", "cat_0640x0480_sd.npz", "cat_1024x12000_sdxl.npz", "cat.NPZ"])
@pytest.mark.parametrize("ending", ["", "_8x8"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_batch_has_the_stored_latents_and_the_vae_is_not_run(tmp_path, name, ending, dtype):
    written = write(tmp_path / "set", "x.npz", "a cat", NUMBERS.astype(dtype), ending=ending)
    written.rename(written.with_name(name)), (tmp_path / "set/x.txt").rename(tmp_path / "set/cat.txt")
    encoder = FakeEncoder()
    batch = encoded(tmp_path / "set", encoder=encoder).batch(1, seed=0, index=0)
    assert torch.equal(batch.latents[0], torch.from_numpy(NUMBERS.astype(dtype)).float())
    assert batch.names == (name,) and batch.captions == ["a cat"] and encoder.calls == (0, 2)


@pytest.mark.parametrize("architecture", ["flux", "lumina"])
def test_latents_of_flux_are_brought_back_to_what_the_vae_makes(tmp_path, architecture):
    raw = torch.from_numpy(NUMBERS)
    stored = ((raw - 0.1159) * 0.3611).numpy()
    write(tmp_path / "set", f"cat_0064x0064_{architecture}.npz", latents=stored, ending="_8x8")
    assert torch.allclose(encoded(tmp_path / "set").batch(1, seed=0, index=0).latents[0], raw, atol=1e-6)


def test_the_same_numbers_under_another_architecture_are_other_latents(tmp_path):
    path = write(tmp_path / "set", "cat_0064x0064_flux.npz")
    flux = encoded(tmp_path / "set").batch(1, seed=0, index=0).latents
    path.rename(path.with_name("cat_0064x0064_sd3.npz"))
    assert not torch.equal(encoded(tmp_path / "set").batch(1, seed=0, index=0).latents, flux)


@pytest.mark.parametrize("size", [(100, 64), (64, 100), (64, 64), (30, 20)])
def test_size_and_offset_are_those_of_the_same_picture_cropped(tmp_path, size):
    add(tmp_path / "pictures", "a.png", image=picture(*size))
    whole = encoded(tmp_path / "pictures").batch(1, seed=0, index=0)
    write(tmp_path / "set", "a.npz", latents=whole.latents[0].numpy(), original=size)
    config = replace(EXACT, augment=AugmentConfig(flip=True, crop="random", brightness=0.2))
    dataset = encoded(tmp_path / "set", config)
    batch = dataset.batch(1, seed=0, index=0)
    assert len(dataset.index.latent_keys) == 1 and torch.equal(batch.latents, whole.latents)
    assert batch.extras == whole.extras
    shown = report(encoded(tmp_path / "pictures")).replace("a.png", "a.npz")  # cut off and enlarged alike
    assert report(dataset).splitlines()[2:] == shown.splitlines()[2:]


def test_captions_are_found_as_for_a_picture_of_that_name(tmp_path):
    write(tmp_path, "my_cat_0064x0064_sdxl.npz", None)
    for source, found in (("file name", "my cat"), ("auto", "written")):
        (tmp_path / "my_cat.caption").write_text("written")
        images = scan(tmp_path, replace(SMALL, caption=CaptionConfig(source=source)))
        assert images.samples[0].captions == (found,)
    (tmp_path / "my_cat.caption").unlink()
    with pytest.raises(ValueError, match=r"my_cat_0064x0064_sdxl\.npz: no caption; add my_cat\.txt, or"):
        scan(tmp_path)


def test_a_picture_beside_goes_first_and_text_encodings_are_no_pictures(tmp_path):
    add(tmp_path, "a.png"), add(tmp_path, "b_1024x1024_final.png"), write(tmp_path, "c_0064x0064_sdxl.npz")
    for name in ("a.npz", "a_0064x0064_flux.npz", "b_1024x1024_final.npz"):
        write(tmp_path, name, None)
    for name in ("a_te_outputs.npz", "c_flux_te.npz", "d_sd3_te.npz"):
        (tmp_path / name).touch()
    images = scan(tmp_path)
    assert names(images) == ["a.png", "b_1024x1024_final.png", "c_0064x0064_sdxl.npz"]
    assert summary(images).splitlines() == [
        f"Folder {tmp_path.name}: 3 images, each 1 times, loss weight 1",
        "Latents (.npz) in place of the image: 1",
        "Not images: 6 .npz",
    ]


def test_a_file_that_holds_several_sizes_is_trained_at_each(tmp_path):
    wide = np.ones((3, 4, 16), np.float32)
    more = {"latents_4x16": wide, "original_size_4x16": np.array([64, 64]), "latents_flipped_8x8": NUMBERS}
    write(tmp_path / "set", "x.npz", None)
    np.savez(
        tmp_path / "set/x.npz", **more, **{"latents_8x8": NUMBERS, "original_size_8x8": np.array([64, 64])}
    )
    dataset = encoded(tmp_path / "set", replace(EXACT, caption=CaptionConfig(missing="empty")))
    shapes = {tuple(dataset.sample(index).latents.shape[1:]) for index in range(len(dataset))}
    assert shapes == {(3, 8, 8), (3, 4, 16)}


def test_two_latent_files_of_one_caption_are_refused(tmp_path):
    write(tmp_path, "a_0064x0064_sd.npz"), write(tmp_path, "a_0064x0064_flux.npz")
    with pytest.raises(
        ValueError, match=r"a_0064x0064_sd\.npz: shares its caption or mask with a_0064x0064_f"
    ):
        scan(tmp_path)


def test_a_scan_reads_no_latents(tmp_path, monkeypatch):
    write(tmp_path, "a.npz", latents=np.zeros((4, 128, 128), np.float32), original=(3000, 2000))
    read, keys = latent_file._read, []
    monkeypatch.setattr(latent_file, "_read", lambda file, key: keys.append(key) or read(file, key))
    (sample,) = scan(tmp_path).samples
    assert (sample.width, sample.height, sample.encoded) == (3000, 2000, ((1024, 1024),))
    assert keys == ["original_size"]


def test_a_folder_of_pictures_and_latents_is_encoded_once(tmp_path, monkeypatch):
    add(tmp_path / "set", "a.png", "one"), write(tmp_path / "set", "b.npz", "two")
    one, two = FakeEncoder(), FakeEncoder()
    batch = encoded(tmp_path / "set", encoder=one).batch(2, seed=0, index=0)
    assert set(batch.names) == {"a.png", "b.npz"} and one.calls == (1, 3)
    monkeypatch.setattr("graft.training.data.load_views.open_latents", None)
    again = encoded(tmp_path / "set", encoder=two).batch(2, seed=0, index=0)
    assert two.calls == (0, 0) and torch.equal(batch.latents, again.latents)
    with pytest.raises(TypeError):  # another VAE may not fit them
        encoded(tmp_path / "set", encoder=FakeEncoder("another"))


def test_joined_sets_keep_their_latents(tmp_path):
    write(tmp_path / "set", "a.npz"), add(tmp_path / "more", "b.png")
    both = join([scan(tmp_path / "more", EXACT), scan(tmp_path / "set", EXACT)])
    assert [sample.encoded for sample in both.samples] == [(), ((64, 64),)]
    assert len(encode(both, FakeEncoder(), tmp_path / "cache")) == 2


@pytest.mark.parametrize("scale", [1, 8])
def test_the_transparency_in_the_file_is_a_mask_where_the_settings_take_it(tmp_path, scale):
    opacity = np.tile(np.float32([0, 0, 1, 1]), (8, 2))
    write(tmp_path / "set", "a.npz", alpha_mask=np.kron(opacity, np.ones((scale, scale), np.float32)))
    masks = {}
    for source in ("file", "auto", "alpha"):
        dataset = encoded(tmp_path / "set", replace(EXACT, mask=MaskConfig(source=source)))
        masks[source] = dataset.batch(1, seed=0, index=0).masks
    assert masks["file"] is None
    assert masks["auto"].tolist() == masks["alpha"].tolist() == [[opacity.tolist()]]


def test_a_mask_beside_is_that_of_the_whole_picture(tmp_path):
    write(tmp_path / "set", "a_0128x0064_sd.npz", original=(128, 64))
    mask = Image.new("L", (128, 64))
    mask.paste(255, (64, 0, 128, 64))
    add(tmp_path / "set", "a-mask.png", None, mask)
    batch = encoded(tmp_path / "set").batch(1, seed=0, index=0)
    assert batch.masks[0, 0].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]] * 8


def test_a_preview_shows_gray_with_the_crop(tmp_path):
    write(tmp_path, "a.npz", original=(128, 64))
    sheet = preview(scan(tmp_path, SMALL), step=16)[0]
    inside, outside = sheet[168, 168], sheet[168, 18]
    assert (inside * 255).tolist() == [127] * 3 and (outside * 255).round().tolist() == [42] * 3


def saved(path, **arrays):
    np.savez(path, **arrays)
    return path.read_bytes()


SIZE = np.array([64, 64])


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("a.npz", b"", r"damaged, or no \.npz file"),
        ("a.npz", b"PK\3\4 no more", r"damaged, or no \.npz file"),
        ("a.npz", {"arr_0": NUMBERS}, "has no 'latents', but arr_0; put the image itself beside it"),
        ("a.npz", {}, "has no 'latents', but nothing"),
        ("a.npz", {"latents": NUMBERS}, r"the size of its image \('original_size' is missing\)"),
        ("a.npz", {"latents_8x8": NUMBERS, "original_size": SIZE}, r"\('original_size_8x8' is missing\)"),
        (
            "a.npz",
            {"latents": NUMBERS[0], "original_size": SIZE},
            r"are \(8, 8\) of float32, not \(C, h, w\)",
        ),
        ("a.npz", {"latents": NUMBERS.astype(object), "original_size": SIZE}, "of object, not"),
        ("a.npz", {"latents": NUMBERS.astype(int), "original_size": SIZE}, "of int64, not"),
        (
            "a.npz",
            {"latents": NUMBERS, "original_size": SIZE.astype(object)},
            "of object, not width and height",
        ),
        ("a.npz", {"latents": NUMBERS, "original_size": NUMBERS}, r"\(3, 8, 8\) of float32, not width and"),
        (
            "a.npz",
            {"latents": NUMBERS, "original_size": SIZE * np.nan},
            "NaN or infinite values in its original_size",
        ),
        ("a.npz", {"latents": NUMBERS, "original_size": SIZE * 0}, "0 x 0 px is too small"),
        ("a.npz", {"latents": NUMBERS[:, :0], "original_size": SIZE}, "64 x 0 px is too small"),
        (
            "a_0064x0064_anima.npz",
            {"latents": NUMBERS, "original_size": SIZE},
            "the scale of latents for 'anima' is unknown",
        ),
    ],
)
def test_a_scan_refuses_what_cannot_be_trained_with_its_reason(tmp_path, name, content, reason):
    content = content if isinstance(content, bytes) else saved(tmp_path / name, **content)
    (tmp_path / name).write_bytes(content), (tmp_path / "a.txt").write_text("caption")
    with pytest.raises(ValueError, match=rf"{name}: .*{reason}"):
        scan(tmp_path)


@pytest.mark.parametrize(
    "latents, more, reason",
    [
        (np.zeros((4, 8, 8), np.float32), {}, r"latents are \(4, 8, 8\), but this VAE makes \(3, 8, 8\)"),
        (NUMBERS[:, None], {}, r"latents are \(3, 1, 8, 8\), but this VAE makes \(3, 8, 8\)"),
        (NUMBERS[:, :7], {}, "for 64 x 56 px, but this model needs multiples of 16 on both sides"),
        (NUMBERS * np.nan, {}, "NaN or infinite values in its latents"),
        (NUMBERS, {"alpha_mask": np.ones((8, 8), int)}, r"alpha_mask is \(8, 8\) of int64"),
        (NUMBERS, {"alpha_mask": np.ones((8, 99), np.float32)}, "make the mask the image's shape"),
        (NUMBERS, {"alpha_mask": np.zeros((8, 8), np.float32)}, "its mask is black over the whole crop"),
    ],
)
def test_encoding_refuses_what_the_model_cannot_take(tmp_path, latents, more, reason):
    write(tmp_path / "set", "a.npz", latents=latents, **more)
    config = replace(EXACT, mask=MaskConfig(source="alpha"))
    with pytest.raises(ValueError, match=rf"a\.npz: .*{reason}"):
        encoded(tmp_path / "set", config)
    add(tmp_path / "set", "b.png")
    dataset = encoded(tmp_path / "set", replace(config, skip_bad=True))
    assert dataset.names == ["b.png"] and [bad.name for bad in dataset.skipped] == ["a.npz"]


def test_damage_among_the_numbers_is_found_by_encoding(tmp_path):
    path = write(tmp_path / "set", "a.npz")
    content = bytearray(path.read_bytes())
    content[content.index(NUMBERS.tobytes()[:64])] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.npz: damaged, or no \.npz file \(Bad CRC"):
        encoded(tmp_path / "set")


def test_a_file_that_changed_after_the_scan_is_named(tmp_path):
    write(tmp_path / "set", "a.npz")
    images = scan(tmp_path / "set", EXACT)
    write(tmp_path / "set", "a.npz", latents=NUMBERS[:, :4])
    with pytest.raises(ValueError, match=r"a\.npz: changed after the folder was read; queue again"):
        encode(images, FakeEncoder(), tmp_path / "cache")
