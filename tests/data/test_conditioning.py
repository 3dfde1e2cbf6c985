"""What a conditioning is stored as."""

import torch
from safetensors.torch import load, save

from graft.tests.support.datasets import FakeEncoder, add
from graft.training.data import BucketConfig, DatasetConfig, encode, scan
from graft.training.data.conditioning import pack, unpack
from graft.training.model import count_positions, tensors_in

WHOLE = {
    "cross_attn": torch.randn(1, 3, 4),
    "attention_mask": torch.tensor([[1, 0, 1]]),
    "reference_latents": [torch.randn(1, 4, 2, 3), torch.randn(1, 4, 5, 2)],
    "reference_latents_method": "index",
    "frame_rate": 0.1,
    "width": 640,
    "is_video": True,
    "nothing": [],
    "unclip_conditioning": [{"strength": 0.5, "clip_vision_output": {"image_embeds": torch.randn(1, 2)}}],
}
EXACT = DatasetConfig(bucket=BucketConfig(resolutions=(64,)), dtype="fp32")


def is_same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return type(one) is type(other) and one == other


def test_whatever_comfyui_conditions_on_comes_back_from_a_file_as_it_was():
    assert is_same(WHOLE, unpack(load(save(pack(WHOLE, torch.float32)))))


def test_plain_tensors_are_stored_as_earlier_versions_did_and_their_numbers_are_read():
    plain = {name: WHOLE[name] for name in ("cross_attn", "attention_mask")}
    assert pack(plain, torch.float32).keys() == plain.keys()
    assert unpack({**plain, "flag": torch.tensor(True)})["flag"] is True


def test_the_numbers_of_nested_tensors_are_rounded_and_whole_numbers_are_not():
    packed = unpack(pack(WHOLE, torch.bfloat16))
    assert torch.equal(packed["reference_latents"][1], WHOLE["reference_latents"][1].bfloat16().float())
    assert packed["attention_mask"].dtype == torch.int64 and packed["frame_rate"] == 0.1


class PairEncoder(FakeEncoder):
    """Gives each caption as many references as it has letters, of 100 cells each."""

    def encode_text(self, caption):
        references = [torch.full((1, 3, 10, 10), float(index)) for index in range(len(caption))]
        return {**super().encode_text(caption), "reference_latents": references, "rate": 24}


def test_a_dataset_has_lists_and_numbers_with_every_sample(tmp_path):
    for name in ("a", "bb"):
        add(tmp_path / "in", f"{name}.png", name)
    data = encode(scan(tmp_path / "in", EXACT), PairEncoder(), tmp_path / "cache")
    batch = data.batch(2, seed=0, index=0)
    for caption, conditioning in zip(batch.captions, batch.conditioning, strict=True):
        assert is_same(PairEncoder().encode_text(caption), dict(conditioning))


def test_the_largest_batch_has_the_conditioning_with_the_most_cells(tmp_path):
    for name, caption in (("a", "bbb"), ("b", "b"), ("c", "bb")):
        add(tmp_path / "in", f"{name}.png", caption)
    data = encode(scan(tmp_path / "in", EXACT), PairEncoder(), tmp_path / "cache")
    assert [len(c["reference_latents"]) for c in data.largest_batch(2).conditioning] == [3, 3]


def test_a_length_counts_texts_once_and_every_image():
    assert count_positions(tensor.shape for tensor in tensors_in(WHOLE)) == 3 + 6 + 10
