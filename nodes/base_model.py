"""Load Base Model: the model, text encoders and VAE that a LoRA is trained on."""

from __future__ import annotations

from comfy_api.latest import io

from ..starter import in_comfyui as embedded
from ..training.comfy.model import loading
from ..training.job.graph import FROM_CHECKPOINT
from .node import Files, Node
from .sockets import schema


class LoadBaseModel(Node):
    """A checkpoint, or a diffusion model with its text encoders and VAE in separate files."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        encoders = [FROM_CHECKPOINT, *embedded.text_encoders(loading.text_encoder_files())]
        return schema(
            node_id="GraftLoadBaseModel",
            display_name="Load Base Model",
            description="Load the model to train a LoRA on. ComfyUI's own loaders work too.",
            search_aliases=["graft", "train", "lora", "checkpoint"],
            inputs=[
                Files(
                    "model",
                    options=loading.model_files(),
                    tooltip="Base model: a .safetensors file from models/checkpoints or "
                    "models/diffusion_models.",
                ),
                *(
                    Files(
                        f"text_encoder_{index}",
                        options=encoders,
                        default=FROM_CHECKPOINT,
                        optional=True,
                        tooltip="Text encoder file, if the checkpoint has none: CLIP-L, then CLIP-G or T5.",
                    )
                    for index in (1, 2, 3)
                ),
                Files(
                    "vae",
                    options=[FROM_CHECKPOINT, *loading.vae_files()],
                    default=FROM_CHECKPOINT,
                    optional=True,
                    tooltip="VAE file, if the checkpoint has none.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=["auto", "bf16", "fp16", "fp32"],
                    default="auto",
                    optional=True,
                    tooltip="Number format of the weights in memory; auto is ComfyUI's choice for this file "
                    "and device.",
                ),
            ],
            outputs=[io.Model.Output("MODEL"), io.Clip.Output("CLIP"), io.Vae.Output("VAE")],
        )

    @classmethod
    def execute(
        cls,
        model: str,
        text_encoder_1: str = FROM_CHECKPOINT,
        text_encoder_2: str = FROM_CHECKPOINT,
        text_encoder_3: str = FROM_CHECKPOINT,
        vae: str = FROM_CHECKPOINT,
        dtype: str = "auto",
    ) -> io.NodeOutput:
        chosen = [e for e in (text_encoder_1, text_encoder_2, text_encoder_3) if e != FROM_CHECKPOINT]
        encoders = embedded.with_text_encoder(model, chosen)
        return io.NodeOutput(*loading.load_base(model, encoders, vae, dtype))
