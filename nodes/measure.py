"""Measure and compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comfy_api.latest import io, ui

from ..training.adapters.select import select
from ..training.comfy.dataset.folders import key_of
from ..training.comfy.model.denoiser import ComfyDenoiser
from ..training.comfy.progress import progress_bar
from ..training.config import AdapterConfig, MemoryConfig, ObjectiveConfig, TrainConfig
from ..training.data.picture_report import (
    LEARNED,
    MISFIT,
    NOT_LEARNED,
    OVERFITTED,
    Judgment,
    compare,
    draw,
    judge,
    tabulate,
    to_json,
)
from ..training.data.samples import ImageSet
from ..training.files.text import readable
from ..training.memory.plan import every_plan
from ..training.memory.plan_table import tabulate_plans
from ..training.memory.precision import compute_format
from ..training.objective.parts import with_largest_parts
from ..training.run.saved_state import StateHandle
from ..training.validation import sample_losses, validation_loss
from .node import Node
from .sockets import (
    Dataset,
    Memory,
    Objective,
    Optimizer,
    OptimizerSettings,
    require_encoded,
    schema,
    start_input,
    trained_clip,
)
from .widgets import widget


class ValidationLoss(Node):
    """How well a model denoises held-out images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftValidationLoss",
            display_name="Validation Loss",
            description="Measure the loss of MODEL on held-out images at fixed noise. Compare the base with "
            "the LoRA: lower is better.",
            search_aliases=["graft", "evaluate", "held-out"],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="Base model, or a MODEL with a LoRA from Train Steps or Load LoRA."
                ),
                Dataset.Input("dataset", tooltip="Encoded held-out images, from Split Dataset."),
            ],
            outputs=[io.Float.Output("loss")],
        )

    @classmethod
    def execute(cls, model: Any, dataset: Any) -> io.NodeOutput:
        with progress_bar() as on_progress:
            loss = validation_loss(ComfyDenoiser(model), require_encoded(dataset), on_progress=on_progress)
        return io.NodeOutput(loss, ui={"text": [f"validation loss {loss:.5f}"]})


class DatasetReport(Node):
    """Which images teach, and which are in the way."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftDatasetReport",
            display_name="Dataset Report",
            description="Measure every image with the base and with the LoRA, with its caption and without: "
            "learned, overfitted, not learned, or a caption that does not fit. The worst come first.",
            search_aliases=["graft", "outliers", "bad images", "captions", "overfit"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="Base model, as for Train Steps."),
                io.Model.Input("trained", tooltip="MODEL with the LoRA, from Train Steps or Load LoRA."),
                Dataset.Input("dataset", tooltip="From Encode Dataset: the images that were trained."),
                io.Int.Input("count", default=16, min=1, max=64, tooltip="Number of images to show."),
            ],
            outputs=[io.String.Output("report"), io.String.Output("json"), io.Image.Output("image")],
        )

    @classmethod
    def execute(cls, model: Any, trained: Any, dataset: Any, count: int) -> io.NodeOutput:
        dataset = require_encoded(dataset)
        with progress_bar() as on_progress:
            base, lora = (
                sample_losses(ComfyDenoiser(each), dataset, on_progress=on_progress)
                for each in (model, trained)
            )
            judgments = judge(compare(dataset.images, dataset.positions, base, lora))
            sheet = draw(dataset.images, judgments[:count], on_progress=on_progress)
        text = tabulate(judgments)
        shown = {"text": [text], "graft_report": _rows(dataset.images, judgments)}
        shown |= ui.PreviewImage(sheet, cls=cls).as_dict()
        return io.NodeOutput(text, to_json(judgments), sheet, ui=shown)


VERDICTS = {MISFIT: "misfit", NOT_LEARNED: "notLearned", OVERFITTED: "overfitted", LEARNED: "learned"}


def _rows(images: ImageSet, judgments: Sequence[Judgment]) -> list[dict[str, Any]]:
    """Return what the editor's gallery shows of each image: the worst first."""
    rows = []
    for each in judgments:
        sample, picture = images.samples[each.picture.position], each.picture
        note = f"learned {picture.learned:.0%}, caption helps {picture.caption_helps:.0%}"
        row = {"key": key_of(sample.name), "name": readable(sample.name), "source": sample.source}
        stamp = f"{sample.bytes:x}-{sample.mtime_ns:x}"
        rows.append({**row, "stamp": stamp, "verdict": VERDICTS[each.verdict], "note": note})
    return rows


class MemoryPlan(Node):
    """Memory and time of a training step, by memory plan."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftMemoryPlan",
            display_name="Memory Plan",
            description="Estimate the peak memory and time of a training step for every memory plan, "
            "corrected by one measured step. Nothing is trained.",
            search_aliases=["graft", "vram", "out of memory", "fits"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="Base model, as for Train Steps."),
                Dataset.Input("dataset", tooltip="From Encode Dataset; its largest bucket counts."),
                start_input(),
                widget(TrainConfig, "batch_size"),
                Optimizer.Input(
                    "optimizer_settings",
                    optional=True,
                    tooltip="Optimizers differ in the size of their state.",
                ),
                Memory.Input("memory_settings", optional=True, tooltip="Precision and budget count here."),
                io.Clip.Input("clip", optional=True, tooltip="CLIP, if the LoRA trains the text encoders."),
                Objective.Input(
                    "objective_settings", optional=True, tooltip="Preservation takes passes of its own."
                ),
            ],
            outputs=[io.String.Output("plan")],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        dataset: Any,
        start: AdapterConfig | StateHandle,
        batch_size: int,
        optimizer_settings: OptimizerSettings | None = None,
        memory_settings: MemoryConfig | None = None,
        clip: Any = None,
        objective_settings: ObjectiveConfig | None = None,
    ) -> io.NodeOutput:
        adapter = start.adapter if isinstance(start, StateHandle) else start
        chosen = optimizer_settings or OptimizerSettings()
        config = TrainConfig(
            batch_size=batch_size,
            gradient_accumulation=chosen.gradient_accumulation,
            adapter=adapter,
            optimizer=chosen.optimizer,
            schedule=chosen.schedule,
            objective=objective_settings or ObjectiveConfig(),
            memory=memory_settings or MemoryConfig(),
            ema=chosen.ema,
        )
        dataset = require_encoded(dataset)
        denoiser = ComfyDenoiser(model, trained_clip(adapter, clip, dataset))
        adapted = select(denoiser.specs, denoiser.family, adapter)
        batch = with_largest_parts(dataset.largest_batch(batch_size), config.objective)
        plans = every_plan(compute_format(config.memory, denoiser))
        text = tabulate_plans(denoiser, adapted, config, batch, plans)
        return io.NodeOutput(text, ui={"text": [text]})
