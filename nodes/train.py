"""Train Steps: state in, new state out."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from ..training import distributed
from ..training.checkpoint import StateHandle
from ..training.comfy import output, paths, workers
from ..training.comfy.denoiser import ComfyDenoiser
from ..training.comfy.notes import family_in, model_file, run_notes
from ..training.comfy.samples import SamplePrompts, SampleWriter
from ..training.comfy.session import session
from ..training.comfy.starting import first_state
from ..training.config import (
    AdapterConfig,
    MemoryConfig,
    ObjectiveConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
)
from ..training.earlier import earlier_notes
from ..training.metadata import run_metadata
from ..training.run import Run, execute, handed_on, ignore_start, run_key
from .sockets import (
    Checkpoints,
    Dataset,
    HeldOut,
    Memory,
    Objective,
    Optimizer,
    Samples,
    Saving,
    State,
    Validation,
    encoded,
    schema,
    start_input,
    trained_clip,
)
from .widgets import seed_input

log = logging.getLogger(__name__)


class TrainSteps(io.ComfyNode):
    """Add optimizer steps to a run. Pure: equal inputs give equal states; a finished run costs nothing."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftTrainSteps",
            display_name="Train Steps",
            description="Train the LoRA for some steps. Cancel keeps what was trained: queue again to go on.",
            search_aliases=["graft", "train", "lora", "finetune"],
            inputs=[
                io.Model.Input("model", tooltip="The base. It is not changed."),
                Dataset.Input("dataset", tooltip="From Encode Dataset."),
                start_input(),
                io.Int.Input("steps", default=1000, min=1, max=1000000, tooltip="Optimizer steps to add."),
                io.Int.Input(
                    "total_steps",
                    default=0,
                    min=0,
                    max=1000000,
                    tooltip="Length of the whole run over which the learning rate decays, when several Train "
                    "Steps follow one another. 0: the run ends with this node.",
                ),
                io.Float.Input(
                    "learning_rate",
                    default=1e-4,
                    min=0.0,
                    max=10.0,
                    step=1e-6,
                    round=False,
                    tooltip="1e-4 suits most LoRAs; halve it when pictures break up, double it when nothing "
                    "happens.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=256,
                    tooltip="Images in one step; more needs more memory.",
                ),
                seed_input("The same seed and settings give the same LoRA, on a GPU but for rounding."),
                io.String.Input(
                    "name", default="my_lora", tooltip="Name of the run's folder under output/graft."
                ),
                Optimizer.Input("optimizer_settings", optional=True),
                Objective.Input("objective_settings", optional=True),
                Memory.Input("memory_settings", optional=True),
                Validation.Input("validation_settings", optional=True),
                Checkpoints.Input("checkpoint_settings", optional=True),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="Comes out again with the LoRA's text encoder part, if any.",
                ),
                Samples.Input("sample_prompts", optional=True, tooltip="Pictures to draw while training."),
                io.Int.Input(
                    "gpus",
                    default=1,
                    min=1,
                    max=64,
                    optional=True,
                    tooltip="Graphics cards of this machine to train on. Each takes batches of its own, so a "
                    "step sees this many times as many images. Not on Windows.",
                ),
            ],
            outputs=[
                io.Model.Output("MODEL", tooltip="The base with the trained LoRA, ready for KSampler."),
                io.Clip.Output("CLIP"),
                State.Output("state", tooltip="To go on training, or to save."),
                io.LoraModel.Output("LORA_MODEL"),
                io.LossMap.Output("LOSS_MAP"),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo, io.Hidden.prompt],
            not_idempotent=False,
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        dataset: Any,
        start: AdapterConfig | StateHandle,
        steps: int,
        total_steps: int,
        learning_rate: float,
        batch_size: int,
        seed: int,
        name: str,
        optimizer_settings: TrainConfig | None = None,
        objective_settings: ObjectiveConfig | None = None,
        memory_settings: MemoryConfig | None = None,
        validation_settings: HeldOut | None = None,
        checkpoint_settings: Saving | None = None,
        clip: Any = None,
        sample_prompts: SamplePrompts | None = None,
        gpus: int = 1,
    ) -> io.NodeOutput:
        adapter = start.adapter if isinstance(start, StateHandle) else start
        denoiser = ComfyDenoiser(model, trained_clip(adapter, clip))
        dataset = encoded(dataset)
        resumed, left_out = (
            (start, []) if isinstance(start, StateHandle) else first_state(denoiser, adapter, seed)
        )
        first = resumed.step if resumed else 0
        chosen = optimizer_settings or TrainConfig()
        held_out = validation_settings or HeldOut(ValidationConfig(), None)
        saving = checkpoint_settings or Saving()
        trained_before = workers.trained_before(cls.hidden.unique_id)
        processes = gpus if trained_before else max(gpus, distributed.world())
        config = replace(
            chosen,
            batch_size=batch_size,
            gradient_accumulation=chosen.gradient_accumulation * processes,
            seed=seed,
            adapter=resumed.adapter if resumed else adapter,
            optimizer=replace(chosen.optimizer, lr=learning_rate),
            schedule=_over(chosen.schedule, total_steps or first + steps),
            objective=objective_settings or ObjectiveConfig(),
            memory=memory_settings or MemoryConfig(),
            validation=held_out.config,
        )
        family = family_in(model_file(cls.hidden.prompt, cls.hidden.unique_id), model)
        warnings = run_notes(denoiser, config, family, max(total_steps, first + steps), dataset.index.buckets)
        warnings += sample_prompts.notes(family) if sample_prompts else []
        folder = paths.run_folder(name, run_key(denoiser, dataset, config, resumed, held_out.samples))
        warnings += earlier_notes(Run(folder), config, resumed, first + steps)
        for warning in warnings:
            log.warning("Graft: %s", warning)
        notes = run_metadata(config, dataset, denoiser.family, denoiser.sampling, name=name)
        samples = sample_prompts and SampleWriter(
            sample_prompts,
            model,
            family,
            folder / "samples",
            first=first,
            last=first + steps,
            trigger=dataset.trigger,
            node_id=cls.hidden.unique_id,
            metadata={"prompt": cls.hidden.prompt, **(cls.hidden.extra_pnginfo or {})},
        )
        if trained_before:
            handle = handed_on(Run(folder), resumed, first + steps, config)
        else:
            with session(
                paths.run_name(folder),
                first=first,
                last=first + steps,
                node_id=cls.hidden.unique_id,
                workflow=_workflow_id(cls.hidden.extra_pnginfo),
            ) as on_step:
                if gpus > 1 and distributed.world() == 1:
                    run = Run(folder)
                    steps = workers.train(
                        run, cls.hidden.prompt, cls.hidden.unique_id, gpus, first, first + steps, on_step
                    )
                handle = execute(
                    Run(paths.own_folder(folder), saving.config, saving.tensorboard),
                    denoiser,
                    dataset,
                    config,
                    resumed,
                    steps=steps,
                    on_start=samples.on_start if samples else ignore_start,
                    on_step=samples.following(on_step) if samples else on_step,
                    notes=notes,
                    validation=held_out.samples,
                )
        state = handle.load()
        patched, patched_clip = output.with_lora(model, clip, state, denoiser.family)
        lora, losses = output.lora_model(state, denoiser.family), output.loss_map(state)
        loss = sum(state.losses[-20:]) / len(state.losses[-20:])
        text = "\n".join([f"step {state.step}, loss {loss:.4f}", folder.name, *warnings, *left_out])
        return io.NodeOutput(patched, patched_clip, handle, lora, losses, ui={"text": [text]})


def _workflow_id(extra: Any) -> str | None:
    """Return the id of the workflow that came with the prompt, whatever a client sent as one."""
    workflow = extra.get("workflow") if isinstance(extra, dict) else None
    found = workflow.get("id") if isinstance(workflow, dict) else None
    return found if isinstance(found, str) else None


def _over(schedule: ScheduleConfig, total: int) -> ScheduleConfig:
    """Fix the schedule's length; a constant one has none, so a longer run shares a shorter one's steps."""
    return schedule if schedule.name == "constant" else replace(schedule, total_steps=total)
