"""Tiny random models of architectures that have no row of their own: what the generic row must train.

`OTHERS[name]()` is a ModelPatcher as in `tiny_models.py`, where `OTHERS[name].missing` is false.
"""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import torch
from comfy.ldm.chroma_radiance.model import ChromaRadianceParams
from comfy.ldm.flux.model import FluxParams
from comfy.ldm.hunyuan_video.model import HunyuanVideoParams

from .tiny_models import Tiny, fields


def known(params, config):
    """Leave out what an older version does not know."""
    return {name: value for name, value in config.items() if name == "image_model" or name in fields(params)}


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _mask():
    return {"attention_mask": torch.ones(1, 8, dtype=torch.long)}


def _two_texts():
    second = {"conditioning_mt5xl": noise(1, 8, 64), "attention_mask_mt5xl": torch.ones(1, 8)}
    return {"attention_mask": torch.ones(1, 8), **second}


def _lyrics():
    return {"conditioning_lyrics": torch.arange(5).reshape(1, 5)}


def _encoded_lyrics():
    return {"conditioning_lyrics": noise(1, 5, 64)}


def _ids():
    return {"t5xxl_ids": torch.arange(6), "t5xxl_weights": torch.ones(6)}


def _small_encoder():
    """ACE-Step's encoder of lyrics has one size."""
    from comfy.ldm.ace.model import LyricEncoder

    sizes = {"output_size": 64, "attention_heads": 2, "linear_units": 64, "num_blocks": 1}
    return patch("comfy.ldm.ace.model.LyricEncoder", partial(LyricEncoder, **sizes))


def _small_adapter():
    """Anima's second text encoder has one size."""
    from comfy.ldm.anima.model import LLMAdapter

    sizes = {"source_dim": 64, "target_dim": 64, "model_dim": 64, "num_layers": 1, "num_heads": 2}
    return patch("comfy.ldm.anima.model.LLMAdapter", partial(LLMAdapter, **sizes))


def _seconds():
    """Weights that StableAudio's model has beside its network."""
    from comfy.ldm.audio.embedders import NumberConditioner

    weights = NumberConditioner(768, min_val=0, max_val=512).state_dict()
    return {
        f"conditioner.conditioners.{name}.{key}": torch.zeros_like(tensor)
        for name in ("seconds_start", "seconds_total")
        for key, tensor in weights.items()
    }


_WAN = {
    "image_model": "wan2.1",
    "model_type": "t2v",
    "dim": 64,
    "ffn_dim": 128,
    "freq_dim": 32,
    "text_dim": 64,
    "num_heads": 2,
    "num_layers": 2,
}
_LTXV = {
    "image_model": "ltxv",
    "cross_attention_dim": 64,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "caption_channels": 64,
    "num_layers": 2,
}
_LTXAV = {
    **_LTXV,
    "image_model": "ltxav",
    "audio_cross_attention_dim": 64,
    "audio_attention_head_dim": 32,
    "audio_num_attention_heads": 2,
    "connector_attention_head_dim": 32,
    "connector_num_attention_heads": 2,
}
_HUNYUAN = {
    "image_model": "hunyuan_video",
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "vec_in_dim": 32,
    "context_in_dim": 64,
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [8, 12, 12],
    "theta": 256,
    "qkv_bias": True,
    "guidance_embed": True,
    "byt5": False,
    "meanflow": False,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
    "meanflow_sum": False,
}
_HUNYUAN_IMAGE = {
    **_HUNYUAN,
    "patch_size": [2, 2],
    "axes_dim": [16, 16],
    "vec_in_dim": None,
    "in_channels": 64,
    "out_channels": 64,
    "guidance_embed": False,
}
_HUNYUAN_15 = {
    **_HUNYUAN,
    "patch_size": [1, 1, 1],
    "vec_in_dim": None,
    "in_channels": 65,
    "out_channels": 32,
    "guidance_embed": False,
    "use_cond_type_embedding": True,
    "vision_in_dim": 64,
    "meanflow_sum": True,
}
_COSMOS = {
    "image_model": "cosmos",
    "max_img_h": 24,
    "max_img_w": 24,
    "max_frames": 8,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "model_channels": 64,
    "num_blocks": 2,
    "num_heads": 2,
    "crossattn_emb_channels": 64,
    "pos_emb_cls": "rope3d",
    "use_adaln_lora": True,
    "adaln_lora_dim": 16,
    "block_x_format": "THWBD",
    "affline_emb_norm": True,
    "extra_per_block_abs_pos_emb": True,
    "extra_per_block_abs_pos_emb_type": "learnable",
}
_PREDICT2 = {
    **{name: value for name, value in _COSMOS.items() if not name.startswith(("block_", "affline", "extra"))},
    "image_model": "cosmos_predict2",
    "rope_enable_fps_modulation": False,
}
_MOCHI = {
    "image_model": "mochi_preview",
    "depth": 2,
    "num_heads": 2,
    "hidden_size_x": 64,
    "hidden_size_y": 32,
    "mlp_ratio_x": 192.0,  # it insists on the width of its MLPs
    "mlp_ratio_y": 192.0,
    "learn_sigma": False,
    "in_channels": 12,
    "qk_norm": True,
    "qkv_bias": False,
    "out_bias": True,
    "attn_drop": 0.0,
    "posenc_preserve_area": True,
    "use_t5": True,
    "t5_feat_dim": 64,
    "t5_token_length": 8,
}
_OMNIGEN2 = {
    "image_model": "omnigen2",
    "hidden_size": 96,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 32,
    "axes_dim_rope": [16, 16, 16],
    "text_feat_dim": 64,
    "timestep_scale": 1000.0,
}
_BOOGU = {
    **{name: value for name, value in _OMNIGEN2.items() if name != "text_feat_dim"},
    "image_model": "boogu",
    "num_layers": 1,
    "num_double_stream_layers": 1,
    "instruction_feat_dim": 64,
}
_ACE = {
    "audio_model": "ace",
    "num_layers": 2,
    "inner_dim": 64,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "mlp_ratio": 2.5,
    "text_embedding_dim": 64,
    "lyric_encoder_vocab_size": 100,
    "lyric_hidden_size": 64,
    "ssl_latent_dims": [64, 64],
    "ssl_encoder_depths": [1, 1],
    "max_position": 256,
    "max_width": 256,
}
_ACE_15 = {
    "audio_model": "ace1.5",
    "hidden_size": 64,
    "text_hidden_dim": 64,
    "num_dit_layers": 2,
    "num_lyric_layers": 1,
    "num_timbre_layers": 1,
    "num_tokenizer_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
    "encoder_hidden_size": 64,
    "encoder_intermediate_size": 128,
    "encoder_num_heads": 2,
    "fsq_dim": 64,
}
_STABLE_AUDIO = {
    "audio_model": "dit1.0",
    "embed_dim": 64,
    "cond_token_dim": 768,
    "project_cond_tokens": True,
    "depth": 2,
    "num_heads": 2,
}
_PIXART = {
    "image_model": "pixart_sigma",
    "hidden_size": 64,
    "depth": 2,
    "num_heads": 2,
    "caption_channels": 64,
    "pe_interpolation": 1,
    "micro_condition": False,
    "model_max_length": 8,
}
_HYDIT = {
    "image_model": "hydit1",
    "hidden_size": 64,
    "depth": 4,
    "num_heads": 2,
    "text_states_dim": 64,
    "text_states_dim_t5": 64,
    "text_len": 8,
    "text_len_t5": 8,
    "mlp_ratio": 2.0,
    "size_cond": True,
    "use_style_cond": True,
}
_CASCADE = {
    "stable_cascade_stage": "c",
    "c_cond": 64,
    "c_hidden": [64, 64],
    "nhead": [2, 2],
    "blocks": [[1, 1], [1, 1]],
    "c_clip_text": 64,
    "c_clip_text_pooled": 32,
}
_HUNYUAN_3D = {
    "image_model": "hunyuan3d2",
    "context_in_dim": 64,
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
}
_HUNYUAN_3D_21 = {
    "image_model": "hunyuan3d2_1",
    "context_dim": 64,
    "hidden_size": 64,
    "num_heads": 2,
    "depth": 3,
    "num_moe_layers": 1,
    "guidance_cond_proj_dim": None,
}
_RADIANCE = {
    "image_model": "chroma_radiance",
    "in_channels": 3,
    "out_channels": 3,
    "context_in_dim": 64,
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [8, 12, 12],
    "theta": 10000,
    "patch_size": 4,
    "qkv_bias": True,
    "in_dim": 64,
    "out_dim": 64,
    "hidden_dim": 64,
    "n_layers": 2,
    "nerf_hidden_size": 16,
    "nerf_mlp_ratio": 2,
    "nerf_depth": 1,
    "nerf_max_freqs": 4,
    "nerf_tile_size": 512,
    "nerf_final_head_type": "conv",
    "nerf_embedder_dtype": torch.float32,
    "use_x0": False,
    "use_sequential_txt_ids": False,
    "txt_ids_dims": [],
    "vec_in_dim": None,
}
_LONGCAT = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": None,
    "context_in_dim": 64,
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [8, 12, 12],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": False,
    "txt_ids_dims": [1, 2],
}
_LENS = {
    "image_model": "lens",
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "enc_hidden_dim": 64,
    "axes_dims_rope": (8, 12, 12),
    "multi_layer_encoder_feature": False,
    "selected_layer_index": (0,),
}
_ERNIE = {
    "image_model": "ernie",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_layers": 2,
    "ffn_hidden_size": 128,
    "text_in_dim": 64,
    "rope_axes_dim": (8, 12, 12),
}
_KANDINSKY5 = {
    "image_model": "kandinsky5",
    "in_text_dim": 64,
    "in_text_dim2": 32,
    "time_dim": 32,
    "model_dim": 64,
    "ff_dim": 128,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (8, 12, 12),
}
_IDEOGRAM4 = {
    "image_model": "ideogram4",
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "intermediate_size": 128,
    "adaln_dim": 32,
    "llm_features_dim": 64,
    "mrope_section": (4, 6, 6),
}
_KREA2 = {
    "image_model": "krea2",
    "features": 64,
    "tdim": 32,
    "txtdim": 64,
    "heads": 2,
    "kvheads": 1,
    "multiplier": 2,
    "layers": 2,
    "txtlayers": 2,
    "txtheads": 2,
    "txtkvheads": 2,
}
_MAGE_FLOW = {
    "image_model": "mage_flow",
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "axes_dims_rope": (8, 12, 12),
}
_JOYIMAGE = {
    "image_model": "joyimage",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "text_dim": 64,
    "num_layers": 2,
    "rope_dim_list": [8, 12, 12],
}
_COGVIDEOX = {
    "image_model": "cogvideox",
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "time_embed_dim": 32,
    "num_layers": 2,
    "text_embed_dim": 64,
    "use_rotary_positional_embeddings": True,
}
_PIXELDIT = {
    "image_model": "pixeldit_t2i",
    "num_groups": 2,
    "hidden_size": 64,
    "pixel_hidden_size": 8,
    "pixel_attn_hidden_size": 64,
    "pixel_num_groups": 2,
    "patch_depth": 2,
    "pixel_depth": 1,
    "patch_size": 4,
    "txt_embed_dim": 64,
    "txt_max_length": 8,
}

_LAST_TEXT = ("*_blocks.1.txt_mlp.*", "*_blocks.1.attn.to_add_out", "*_blocks.1.attn.add_q_proj")
_REFERENCE = ("ref_image_*",)
_CODES = ("tokenizer.*", "detokenizer.*")
_SOUND = ("*audio_*", "*_ca_*", "*video_to_audio_attn*", "*embeddings_connector*")
_SPEECH = ("projectors.*", "speaker_embedder", "*.cross_attn.*add_*")

OTHERS = {
    # Images
    "anima": Tiny(
        "Anima", {**_PREDICT2, "image_model": "anima"}, frames=1, extra=_ids, building=_small_adapter
    ),
    "boogu": Tiny("Boogu", _BOOGU, extra=_mask, idle=_REFERENCE),
    "cascade": Tiny("Stable_Cascade_C", _CASCADE, pooled=32, idle=("clip_img_mapper",)),
    "ernie": Tiny("ErnieImage", _ERNIE, channels=128),
    "hunyuan_image": Tiny("HunyuanImage21", known(HunyuanVideoParams, _HUNYUAN_IMAGE), channels=64),
    "hydit": Tiny("HunyuanDiT1", _HYDIT, channels=4, extra=_two_texts),
    "ideogram4": Tiny("Ideogram4", _IDEOGRAM4, channels=128),
    "joyimage": Tiny("JoyImage", _JOYIMAGE, frames=1, idle=(*_LAST_TEXT, "*_blocks.1.attn.txt_attn_proj")),
    "krea2": Tiny("Krea2", _KREA2, width=128, frames=1),
    "lens": Tiny("Lens", _LENS, channels=128, idle=_LAST_TEXT),
    "longcat": Tiny("LongCatImage", known(FluxParams, _LONGCAT)),
    "mage_flow": Tiny("MageFlow", _MAGE_FLOW, channels=128, idle=_LAST_TEXT),
    "omnigen2": Tiny("Omnigen2", _OMNIGEN2, extra=_mask, idle=_REFERENCE),
    "pixart": Tiny("PixArtSigma", _PIXART, channels=4, size=(40, 40)),
    "pixeldit": Tiny(
        "PixelDiTT2I", _PIXELDIT, channels=3, idle=("patch_blocks.1.attn.proj_y", "patch_blocks.1.mlp_y.*")
    ),
    "radiance": Tiny("ChromaRadiance", known(ChromaRadianceParams, _RADIANCE), channels=3),
    # Video
    "cogvideox": Tiny("CogVideoX_T2V", _COGVIDEOX, frames=2),
    "cosmos": Tiny("CosmosT2V", _COSMOS, frames=2),
    "cosmos_predict2": Tiny("CosmosT2IPredict2", _PREDICT2, frames=2),
    "hunyuan_15": Tiny(
        "HunyuanVideo15", known(HunyuanVideoParams, _HUNYUAN_15), channels=32, frames=2, idle=("vision_in.*",)
    ),
    "hunyuan_video": Tiny("HunyuanVideo", known(HunyuanVideoParams, _HUNYUAN), pooled=32, frames=2),
    "kandinsky5": Tiny("Kandinsky5", _KANDINSKY5, pooled=32, frames=2),
    "ltxav": Tiny("LTXAV", _LTXAV, channels=128, frames=2, width=128, idle=_SOUND),
    "ltxv": Tiny("LTXV", _LTXV, channels=128, frames=2, extra=_mask),
    "mochi": Tiny("GenmoMochi", _MOCHI, channels=12, frames=2, extra=_mask),
    "wan": Tiny("WAN21_T2V", _WAN, frames=3),
    "wan_5b": Tiny("WAN22_T2V", {**_WAN, "in_dim": 48, "out_dim": 48}, channels=48, frames=3),
    "wan_i2v": Tiny(
        "WAN21_I2V",
        {**_WAN, "model_type": "i2v", "in_dim": 36},
        frames=3,
        idle=("img_emb.*", "*.cross_attn.*_img"),
    ),
    # Sound
    "ace": Tiny(
        "ACEStep", _ACE, channels=8, size=(16, 8), extra=_lyrics, building=_small_encoder, idle=_SPEECH
    ),
    "ace_15": Tiny("ACEStep15", _ACE_15, channels=64, size=(10,), extra=_encoded_lyrics, idle=_CODES),
    "stable_audio": Tiny(
        "StableAudio",
        _STABLE_AUDIO,
        channels=64,
        size=(16,),
        width=768,
        weights=_seconds,
        idle=("to_global_embed.*",),
    ),
    # Shapes
    "hunyuan_3d": Tiny("Hunyuan3Dv2", _HUNYUAN_3D, channels=64, size=(16,)),
    "hunyuan_3d_21": Tiny(
        "Hunyuan3Dv2_1", _HUNYUAN_3D_21, channels=64, size=(16,), idle=("*.moe.experts.*",)
    ),
}
