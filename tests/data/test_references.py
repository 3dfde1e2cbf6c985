"""Images in pairs: references in folders of their own or beside the image, cached with the caption."""

from __future__ import annotations

import pytest
import torch

from graft.tests.support.datasets import FakeEncoder, add, picture
from graft.training.data import (
    AugmentConfig,
    BucketConfig,
    CaptionConfig,
    DatasetConfig,
    encode,
    from_images,
    scan,
)
from graft.training.data.preview import preview
from graft.training.data.report import summary
from graft.training.user_error import UserError


def config(*references, **changes):
    return DatasetConfig(
        bucket=BucketConfig(resolutions=(64,)), references=references or ("sources",), dtype="fp32", **changes
    )


class EditEncoder(FakeEncoder):
    """Gives the model each reference's mean color."""

    def encode_edit(self, caption, references):
        means = [reference.mean((1, 2))[:, :, None, None] for reference in references]
        return {**self.encode_text(caption), "reference_latents": means}


@pytest.fixture
def pairs(tmp_path):
    """Three images with a source each, in another file format, of another size, in a folder below."""
    for name, size in (("a", 64), ("b", 80), ("deep/c", 64)):
        add(tmp_path / "targets", f"{name}.png", f"caption {name}")
        add(tmp_path / "sources", f"{name}.jpg", None, picture(size, 64, seed=ord(name[-1])))
    return tmp_path


def load(root, **changes):
    settings = config(recursive=True, **changes)
    return scan(root / "targets", settings, references=[root / "sources"])


def encoded(root, encoder=None, **changes):
    return encode(load(root, **changes), encoder or EditEncoder(), root / "cache")


def references_of(batch):
    return {
        name: tuple(conditioning["reference_latents"][0].flatten().tolist())
        for name, conditioning in zip(batch.names, batch.conditioning, strict=True)
        if "reference_latents" in conditioning
    }


def test_an_image_has_the_reference_of_its_name(pairs):
    images = load(pairs)
    assert [[r.name for r in sample.references] for sample in images.samples] == [
        ["a.jpg"],
        ["b.jpg"],
        ["deep/c.jpg"],
    ]
    data = encode(images, EditEncoder(), pairs / "cache")
    found = {}
    for index in range(3):
        found |= references_of(data.sample(index))
    assert len(set(found.values())) == 3
    assert "With reference images: 3" in summary(images)


def test_a_second_run_encodes_nothing_and_an_edited_reference_its_captions_only(pairs):
    first = encoded(pairs)
    again = EditEncoder()
    assert encoded(pairs, again).fingerprint == first.fingerprint and again.calls == (0, 0)
    add(pairs / "sources", "b.jpg", None, picture(80, 64, seed=99))
    changed = EditEncoder()
    assert encoded(pairs, changed).fingerprint != first.fingerprint
    assert changed.texts == ["caption b"] and not changed.images


def test_references_may_be_beside_their_image(tmp_path):
    for name in ("a", "b"):
        add(tmp_path / "in", f"{name}.png", name)
        for number in (1, 2):
            add(tmp_path / "in", f"{name}_ref{number}.png", None)
    images = scan(tmp_path / "in", config("beside"))
    assert list(images.samples.names) == ["a.png", "b.png"]
    assert [[r.name for r in s.references] for s in images.samples][1] == ["b_ref1.png", "b_ref2.png"]
    data = encode(images, EditEncoder(), tmp_path / "cache")
    assert len(data.sample(0).conditioning[0]["reference_latents"]) == 2


def test_every_image_without_a_partner_and_every_partner_without_an_image_is_named(pairs):
    add(pairs / "targets", "lonely.png")
    add(pairs / "targets", "twin.png")
    for name in ("twin.png", "twin.webp", "nobody.png"):
        add(pairs / "sources", name, None)
    with pytest.raises(UserError) as caught:
        load(pairs)
    assert "lonely.png: has no reference; add lonely.png in sources" in str(caught.value)
    assert "sources/nobody.png: is a reference without an image" in str(caught.value)
    assert "twin.png: has 2 references named twin.png and twin.webp" in str(caught.value)
    skipping = load(pairs, skip_bad=True)
    assert [bad.name for bad in skipping.skipped] == ["sources/nobody.png", "lonely.png", "twin.png"]
    assert len(skipping) == 3


def test_references_of_another_count_are_named(tmp_path):
    for name in ("a", "b"):
        add(tmp_path / "in", f"{name}.png", name)
        add(tmp_path / "in", f"{name}_ref1.png", None)
    add(tmp_path / "in", "b_ref2.png", None)
    add(tmp_path / "in", "c_ref1.png", None)
    with pytest.raises(UserError) as caught:
        scan(tmp_path / "in", config("beside"))
    assert "a.png: has no reference; add a_ref2.png beside it" in str(caught.value)
    assert "c_ref1.png: is a reference without an image" in str(caught.value)
    assert "b.png" not in str(caught.value)


def test_an_unreadable_reference_is_named(pairs):
    (pairs / "sources" / "b.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"b.png: its reference sources/b.jpg: the file is empty"):
        load(pairs)


def test_a_reference_that_changes_after_the_scan_is_not_trained(pairs):
    images = load(pairs)
    add(pairs / "sources", "b.jpg", None, picture(96, 64, seed=5))
    with pytest.raises(UserError, match=r"b.png: its reference b.jpg: changed after the folder was read"):
        encode(images, EditEncoder(), pairs / "cache")


def test_a_dropped_caption_keeps_its_references(pairs):
    data = encoded(pairs, caption=CaptionConfig(dropout=1.0))
    batch = data.batch(3, seed=0, index=0)
    assert set(batch.captions) == {""}
    assert len(references_of(batch)) == len(batch.names) and not any(
        c["cross_attn"].any() for c in batch.conditioning
    )


def test_a_share_of_the_references_is_dropped_and_drawn_anew_each_time(pairs):
    assert not references_of(encoded(pairs, reference_dropout=1.0).batch(3, seed=0, index=0))
    data = encoded(pairs, reference_dropout=0.5)
    drawn = [bool(references_of(data.batch(1, seed=0, index=index))) for index in range(200)]
    assert 70 < sum(drawn) < 130
    assert drawn == [bool(references_of(data.batch(1, seed=0, index=index))) for index in range(200)]
    assert all(references_of(data.sample(index)) for index in range(3))


def test_what_changes_an_image_and_not_its_references_is_refused():
    for change in ({"crop": "random"}, {"hue": 0.1}):
        with pytest.raises(UserError, match="changes an image and not its references"):
            config(augment=AugmentConfig(**change))
    with pytest.raises(UserError, match="references: 4 folders; at most 3"):
        config("a", "b", "c", "d")


class Doubles(EditEncoder):
    """Gives the model each reference's own latents."""

    def encode_edit(self, caption, references):
        return {**self.encode_text(caption), "reference_latents": [*map(self.encode_image, references)]}


def test_a_mirrored_image_has_its_references_mirrored(tmp_path):
    for name in ("targets", "sources"):
        add(tmp_path / name, "a.png", "a", picture(64, 64, seed=3))
    changes = {"augment": AugmentConfig(flip=True), "caption": CaptionConfig(dropout=0.5)}
    data, again = encoded(tmp_path, Doubles(), **changes), Doubles()
    seen = set()
    for index in range(40):
        batch = data.batch(1, seed=0, index=index)
        [reference] = batch.conditioning[0]["reference_latents"]
        assert torch.equal(reference, batch.latents)
        seen.add((*batch.captions, *batch.latents.flatten().tolist()))
    assert len(seen) == 4  # with its caption and without, mirrored and not
    assert encoded(tmp_path, again, **changes).fingerprint == data.fingerprint and again.calls == (0, 0)
    bare = encoded(tmp_path, Doubles(), reference_dropout=1.0, **changes).batch(1, seed=0, index=0)
    assert not references_of(bare)


def test_images_of_the_graph_have_lists_of_references(tmp_path):
    images = [torch.rand(1, 64, 64, 3), torch.rand(1, 64, 96, 3)]
    own, shared = [torch.rand(1, 64, 64, 3), torch.rand(1, 64, 64, 4)], [torch.rand(1, 64, 64, 3)]
    found = from_images(images, ["a"], None, config(), [own, shared])
    assert [len(sample.references) for sample in found.samples] == [2, 2]
    data = encode(found, EditEncoder(), tmp_path / "cache")
    first, second = (data.sample(index).conditioning[0]["reference_latents"] for index in (0, 1))
    torch.testing.assert_close(first[0].flatten(), own[0].mean((0, 1, 2)), rtol=0, atol=1e-3)
    assert torch.equal(first[1], second[1]) and not torch.equal(first[0], second[0])
    with pytest.raises(UserError, match="reference2: 3 for 2 images"):
        from_images(images, ["a"], None, config(), [own, [torch.rand(3, 64, 64, 3)]])


def test_a_reference_of_its_images_size_has_its_pixels(tmp_path):
    image = picture(100, 130, seed=3)
    add(tmp_path / "targets", "a.png", "a", image)
    add(tmp_path / "sources", "a.png", None, image)
    seen = []

    class Keeps(EditEncoder):
        def encode_edit(self, caption, references):
            seen.extend(references)
            return super().encode_edit(caption, references)

    encoder = Keeps()
    encode(load(tmp_path), encoder, tmp_path / "cache")
    assert torch.equal(encoder.images[0], seen[0])


def test_the_preview_shows_references_beside_their_image(pairs):
    with_pairs = preview(load(pairs), step=16, count=1, cell=96)
    alone = preview(
        scan(pairs / "targets", DatasetConfig(bucket=BucketConfig(resolutions=(64,)))),
        step=16,
        count=1,
        cell=96,
    )
    left = with_pairs[0, :100, 8:50] != alone[0, :100, 8:50]
    assert with_pairs.shape == alone.shape and left.any()
