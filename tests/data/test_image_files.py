"""Image files of every kind, made by Pillow: what is read, and why the others are refused."""

import io
import logging
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile

from graft.tests.support.datasets import HEIC, add, picture
from graft.training.data.augment import Jitter, recolor
from graft.training.data.bucket import crop_box
from graft.training.data.image import crop_mask, read_image, read_mask
from graft.training.data.image_file import BadImage, read_header


def pixels(path, size=(16, 16), **options):
    image = read_image(path, **options)
    return image.crop((0, 0, *image.size), size)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_comes_out_upright_whatever_its_exif_orientation(tmp_path, orientation):
    upright = picture(48, 32)
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transpose that undoes each orientation
    stored = upright.transpose(Image.Transpose(back[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = add(tmp_path, "photo.png", image=stored, exif=exif)
    header = read_header(path)
    assert (header.width, header.height) == (48, 32) == read_image(path).size
    assert np.array_equal(np.asarray(read_image(path).planes[0]), np.asarray(upright))


@pytest.mark.parametrize("extension", ["jpg", "jpeg", "png", "webp", "avif", "bmp", "tiff", "tif", "gif"])
def test_every_listed_format_is_read(tmp_path, extension):
    path = add(tmp_path, f"a.{extension}", image=picture(32, 32))
    assert (read_header(path).width, read_header(path).height) == (32, 32)
    assert np.abs(pixels(path) - np.asarray(picture(32, 32).resize((16, 16))) / 255).mean() < 0.06


def test_sixteen_bit_gray_keeps_its_range_and_precision(tmp_path):
    ramp = np.linspace(0, 65535, 32 * 32).astype(np.uint16).reshape(32, 32)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    found = pixels(tmp_path / "deep.png", (32, 32))
    assert found.shape == (32, 32, 3) and np.abs(found[:, :, 0] - ramp / 65535).max() < 1e-6


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_every_color_mode_becomes_the_same_picture(tmp_path, mode):
    image = Image.new("RGB", (32, 32), (255, 255, 255)).convert(mode)
    image.save(tmp_path / "a.tiff", compression="tiff_lzw")  # Pillow 12 cannot read its own plain YCbCr
    assert np.abs(pixels(tmp_path / "a.tiff") - 1).max() < 0.02


def test_values_that_no_image_can_mean_are_refused(tmp_path):
    Image.fromarray(np.full((16, 16), 5.0, np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(BadImage, match="neither 16 bits nor between 0 and 1"):
        read_image(tmp_path / "a.tiff")


def linear_profile():
    """Return an ICC profile (v2, ICC.1:2001-04) with sRGB's primaries and no gamma."""
    xyz = {
        b"rXYZ": (0.4360, 0.2225, 0.0139),
        b"gXYZ": (0.3851, 0.7169, 0.0971),
        b"bXYZ": (0.1431, 0.0606, 0.7141),
    }
    tags = {
        name: b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(v * 65536) for v in row))
        for name, row in xyz.items()
    }
    tags |= {name: b"curv" + bytes(8) for name in (b"rTRC", b"gTRC", b"bTRC")}
    table, body, place = struct.pack(">I", len(tags)), b"", 132 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">2I", place + len(body), len(data))
        body += data
    head = struct.pack(
        ">I4sI4s4s4s", 132 + 12 * 6 + len(body), b"\0" * 4, 0x02400000, b"mntr", b"RGB ", b"XYZ "
    )
    white = struct.pack(">3i", 63190, 65536, 54061)
    return head + bytes(12) + b"acsp" + bytes(28) + white + bytes(48) + table + body


def test_a_color_profile_is_converted_to_srgb(tmp_path):
    path = add(tmp_path, "a.png", image=Image.new("RGB", (16, 16), (128,) * 3), icc_profile=linear_profile())
    assert np.abs(pixels(path) - 0.737).max() < 0.01  # 0.5 of the light is 0.735 in sRGB (IEC 61966-2-1)


def test_a_useless_color_profile_is_ignored_with_a_warning(tmp_path, caplog):
    path = add(tmp_path, "a.png", image=picture(16, 16), icc_profile=b"no profile at all")
    with caplog.at_level(logging.WARNING):
        assert pixels(path).shape == (16, 16, 3)
    assert "color profile ignored" in caplog.text


def test_transparency_is_laid_on_the_chosen_color(tmp_path):
    path = add(tmp_path, "a.png", image=Image.new("RGBA", (16, 16), (255, 0, 0, 0)))
    assert read_header(path).has_alpha
    assert np.allclose(pixels(path, background="#00ff00"), [0, 1, 0])


def test_a_transparent_palette_color_is_transparency(tmp_path):
    image = Image.new("P", (16, 16))
    image.putpalette([9, 9, 9])
    path = add(tmp_path, "a.png", image=image, transparency=0)
    assert read_header(path).has_alpha and np.allclose(pixels(path), 1)


@pytest.mark.parametrize("extension", ["gif", "webp", "png"])
def test_the_first_frame_of_an_animation_is_read(tmp_path, extension):
    red, blue = Image.new("RGB", (16, 16), (255, 0, 0)), Image.new("RGB", (16, 16), (0, 0, 255))
    red.save(tmp_path / f"a.{extension}", save_all=True, append_images=[blue])
    assert np.abs(pixels(tmp_path / f"a.{extension}") - [1, 0, 0]).max() < 0.05


def test_a_picture_20000_pixels_wide_is_cropped_without_being_enlarged_whole(tmp_path):
    path = add(tmp_path, "wide.png", image=Image.new("RGB", (20_000, 20), (10, 20, 30)))
    header = read_header(path)
    box = crop_box(header.width, header.height, (128, 32))
    assert read_image(path).crop(box, (128, 32)).shape == (32, 128, 3)


@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "bmp", "tiff", "gif", "avif"])
def test_a_truncated_image_is_found_by_the_scan(tmp_path, extension):
    path = add(tmp_path, f"a.{extension}", image=picture(64, 64))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(BadImage, match="truncated or damaged|damaged or not readable"):
        read_header(path)


def test_a_truncated_image_is_found_although_pillow_was_told_to_be_lenient(tmp_path, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    path = add(tmp_path, "a.jpg", image=picture(256, 256))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(BadImage, match="truncated"):
        read_header(path)
    assert ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize("extension", ["jpg", "png", "gif", "webp"])
def test_bytes_that_software_appended_do_no_harm(tmp_path, extension):
    path = add(tmp_path, f"a.{extension}", image=picture(64, 64))
    path.write_bytes(path.read_bytes() + b"trailer" * 50)
    assert read_header(path).width == 64


def test_a_whole_image_is_not_decoded_by_the_scan(tmp_path, monkeypatch):
    paths = [
        add(tmp_path, f"a.{e}", image=picture(32, 32)) for e in ("jpg", "png", "tiff", "webp", "bmp", "avif")
    ]
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    assert [read_header(path).width for path in paths] == [32] * 6


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("empty.png", b"", r"empty \(0 bytes\)"),
        ("text.jpg", b"this is no image at all", "not an image, whatever its extension .jpg says"),
        ("iphone.jpg", HEIC, "HEIC photo"),
        ("IMG_1.HEIC", HEIC, "HEIC photo, which is not supported; convert it to JPEG or PNG"),
        ("script.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    ],
)
def test_what_is_no_image_is_refused_with_its_reason(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadImage, match=reason):
        read_header(tmp_path / name)


def test_an_image_with_a_wrong_extension_is_read_by_its_content(tmp_path):
    buffer = io.BytesIO()
    picture(24, 16).save(buffer, "PNG")
    (tmp_path / "a.jpg").write_bytes(buffer.getvalue())
    assert read_header(tmp_path / "a.jpg").width == 24


def test_a_single_pixel_is_too_small(tmp_path):
    with pytest.raises(BadImage, match="1 x 1 px is too small; at least 8 px"):
        read_header(add(tmp_path, "dot.png", image=picture(1, 1)))


def test_a_decompression_bomb_is_refused_even_if_pillow_was_told_to_take_it(tmp_path, monkeypatch):
    path = add(tmp_path, "bomb.png", image=Image.new("1", (16, 16)))
    data = path.read_bytes()
    header = b"IHDR" + struct.pack(">2I", 20_000, 20_000) + data[24:29]
    path.write_bytes(data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:])
    with pytest.raises(BadImage, match="more than 178 million pixels"):
        read_header(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(BadImage, match="20000 x 20000 px is more than 178 million pixels"):
        read_header(path)


def test_a_mask_is_averaged_under_the_crop(tmp_path):
    mask = Image.new("L", (32, 32), 0)
    mask.paste(255, (16, 0, 32, 32))  # the right half counts
    path = add(tmp_path, "a-mask.png", None, image=mask)
    values = crop_mask(read_mask(path), (64, 64), (0, 0, 64, 64), (4, 4))
    assert values.tolist() == [[0, 0, 255, 255]] * 4


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(BadImage, match="mask is 32 x 16 px and the image 64 x 64"):
        crop_mask(Image.new("L", (32, 16)), (64, 64), (0, 0, 64, 64), (8, 8))


def test_color_jitter_does_what_its_names_say():
    pixels = np.random.default_rng(0).random((8, 8, 3), np.float32) * 0.4 + 0.3
    luma = pixels @ np.array([0.299, 0.587, 0.114], np.float32)
    assert np.allclose(recolor(pixels, Jitter(1, 1, 1, 0)), pixels, atol=1e-6)
    assert np.allclose(recolor(pixels, Jitter(0.5, 1, 1, 0)), pixels / 2, atol=1e-6)
    assert np.allclose(recolor(pixels, Jitter(1, 0, 1, 0)), luma.mean(), atol=1e-5)
    assert np.allclose(recolor(pixels, Jitter(1, 1, 0, 0)), luma[..., None], atol=1e-5)
    turned = recolor(pixels, Jitter(1, 1, 0.5, 0.25))
    assert np.allclose(turned @ np.array([0.299, 0.587, 0.114]), luma, atol=1e-3)  # a hue has no brightness
