"""RULES: the nodes' inputs that several keys of a job file decide together.

A rule reads `may`, what the keys left open, and sets inputs in `done`; UserError where keys clash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..adapters.build import ADAPTERS
from ..family import CONVOLUTIONS, Family, architectures
from ..optimizer.rows import OPTIMIZERS
from ..user_error import UserError
from .graph import NODES
from .keys import DIFFUSERS, FOUR_BITS, QUANTIZED, SLIDER, TIMESTEPS, TYPES, Settings, one_of

May = Mapping[str, Any]
Rule = Callable[[Settings, May], None]


def ema(done: Settings, may: May) -> None:
    """Turn on the moving average, also if only its decay is given."""
    if may.get("use_ema", "ema_decay" in may):
        done["optimizer.ema_decay"] = may.get("ema_decay", 0.999)


def offloading(done: Settings, may: May) -> None:
    """Offload or quantize the base."""
    ways = {"train.use_layer_streaming": "streaming", "model.layer_offloading": "layer_offloading"}
    offload = [key for key, name in ways.items() if may.get(name)]
    if "limit" in may:
        if not offload:
            raise UserError("train.streaming_memory_limit_gb: needs train.use_layer_streaming: true.")
        done["memory.budget_gb"] = may["limit"]
    if offload or may.get("low_vram"):
        done["memory.base"] = "offload"
    _require_switch(may, "qtype", "quantize", "model.qtype: needs model.quantize: true.")
    if may.get("quantize"):
        done["memory.base"] = one_of(QUANTIZED, FOUR_BITS)(may.get("qtype", "qfloat8"), "model.qtype")
        if offload:
            raise UserError(
                f"model.quantize and {offload[0]} are both true: the base is either quantized or "
                "offloaded; remove one."
            )


def full_matrix(done: Settings, may: May) -> None:
    """LoKr alone has a full matrix; ai-toolkit writes the switch beside every type."""
    if may.get("full_matrix") and done.get("lora.algorithm") == "lokr":
        done["lora_settings.full_matrix"] = True


def convolutions(done: Settings, may: May) -> None:
    """Train convolutions too, where the file gives them a rank; their alpha is by default the same where the
    file gives linear layers one, else the method's own too.

    1x1 convolutions count as linear layers (ai-toolkit, toolkit/lora_special.py). Transformers have no others
    in their blocks: a rank for them changes nothing.
    """
    if not may.get("conv"):
        if "conv_alpha" in may and "conv" not in may:
            raise UserError("network.conv_alpha: needs network.conv, the rank of convolutions.")
        return
    if _scheduler(may) == "flowmatch":
        return
    rank = done.get("lora.rank", NODES["lora"].inputs["rank"])
    conv, alpha = may["conv"], done.get("lora.alpha", 0.0)
    conv_alpha = may.get("conv_alpha") or (conv if alpha else 0.0)
    done["lora.targets"] = "all"
    for name, value, linear in (("ranks", conv, rank), ("alphas", conv_alpha, alpha)):
        if value != linear:
            done[f"lora_settings.{name}"] = "\n".join(f"{part} = {value:g}" for part in CONVOLUTIONS)


def scheduler(done: Settings, may: May) -> None:
    """Check the noise scheduler against the architecture."""
    family, name = _family(may), may.get("noise_scheduler")
    if family and name and name != _trained_by(family):
        raise UserError(
            f"train.noise_scheduler: {name!r} does not go with model.arch {may['arch']!r}, which is trained "
            f"by {_trained_by(family)!r}; leave it out: the model decides."
        )


def noise_levels(done: Settings, may: May) -> None:
    """Draw ai-toolkit's levels: a name means nothing to it unless the model is a flow; default: sigmoid."""
    scheduler, family = _scheduler(may), _family(may)
    if scheduler == "ddpm" or (scheduler is None and "timesteps" not in may):
        return
    sigmas, shift = may.get("timesteps", TIMESTEPS["sigmoid"])
    if (sigmas, shift) == TIMESTEPS["shift"] and family and family.own_shift:
        raise UserError(
            f"train.timestep_type: Graft shifts {may['arch']} otherwise than ai-toolkit; write sigmoid or "
            "linear, which are not shifted."
        )
    done |= {"objective.sigmas": sigmas, "objective.shift": shift}


def guidance_embedding(done: Settings, may: May) -> None:
    """Refuse to bypass the guidance input; in other models the key has no effect, in ai-toolkit too."""
    family = _family(may)
    if may.get("bypass") and (family is None or family.bypasses_guidance):
        raise UserError(
            "train.bypass_guidance_embedding: True is not possible: Flux Dev is trained with the guidance it "
            "was made with. Set it to false."
        )


def differential_guidance(done: Settings, may: May) -> None:
    """Move the target away from the prediction; 3 times is ai-toolkit's default."""
    _require_switch(may, "differential_guidance_scale", "differential_guidance", DIFFERENTIAL_GUIDANCE)
    if may.get("differential_guidance"):
        done["objective.differential_guidance"] = may.get("differential_guidance_scale", 3.0)


def preservation(done: Settings, may: May) -> None:
    """Hold the LoRA to the base at captions with the class word for the trigger, or at empty ones.

    "run.class_word" is for the datasets. ai-toolkit's multiplier is 1 by default, its class empty.
    """
    for name, key, switch in (
        ("class_multiplier", f"{DOP}_multiplier", "preserve_class"),
        ("class_word", f"{DOP}_class", "preserve_class"),
        ("blank_multiplier", f"{BLANK}_multiplier", "preserve_blank"),
    ):
        _require_switch(may, name, switch, f"{key}: needs {key.rpartition('_')[0]}: true.")
    if may.get("preserve_class") and may.get("preserve_blank"):
        raise UserError(f"{DOP} and {BLANK} are both true; keep one.")
    if may.get("preserve_class"):
        if not may.get("class_word"):
            raise UserError(
                f"{DOP}_class: missing; it is the word for what the trigger word is an instance of, such as "
                f"person. Without one, set {BLANK}: true instead."
            )
        done["objective.preservation"] = may.get("class_multiplier", 1.0)
        done["run.class_word"] = may["class_word"]
    elif may.get("preserve_blank"):
        done["objective.preservation"] = may.get("blank_multiplier", 1.0)


def slider(done: Settings, may: May) -> None:
    """Train a slider from words; an anchor is preserved, at ai-toolkit's default strength of 1."""
    asked = any(name.startswith("slider.") for name in done) or "anchor_strength" in may
    if done.get("run.type") != TYPES[SLIDER]:
        if asked:
            raise UserError(f"slider: has no effect without type: {SLIDER}. Set it, or remove slider.")
        return
    if done.get("slider.positive", "") == done.get("slider.negative", ""):
        raise UserError(
            "slider.positive_prompt, slider.negative_prompt: missing or equal; they are what the LoRA brings "
            "at strength 1 and at -1."
        )
    if "slider.anchor" in done:
        if "objective.preservation" in done:
            raise UserError("slider.anchor_class: other captions are preserved already; keep one of them.")
        done["objective.preservation"] = may.get("anchor_strength", 1.0)
    elif "anchor_strength" in may:
        raise UserError("slider.anchor_strength: needs slider.anchor_class.")


def sampling(done: Settings, may: May) -> None:
    """Draw the prompts; guidance-distilled models have their guidance scale as an input."""
    family = _family(may)
    distilled = family is not None and family.guidance is not None
    asked = any(name.startswith("sample.") for name in done)
    if asked and distilled:
        done["sample.cfg"] = 1.0
    if "guidance_scale" in may:
        done["sample.guidance" if distilled else "sample.cfg"] = may["guidance_scale"]
        asked = True
    if may.get("disable_sampling"):
        for name in [name for name in done if name.startswith("sample.")]:
            del done[name]
    elif "own" in may:
        raise UserError(
            f"{', '.join(may['own'])}: all prompts are drawn with the same settings. Set them under "
            "sample and remove them here."
        )
    elif asked and not done.get("sample.prompts"):
        raise UserError("sample.prompts: nothing to draw; list some, or set train.disable_sampling: true.")


def prodigy(done: Settings, may: May) -> None:
    """Set the learning rate for prodigy, which finds its own, to 1 if it is below 0.1: ai-toolkit's rule."""
    row = OPTIMIZERS.get(done.get("optimizer.optimizer", ""))
    if row and row.finds_lr and done.get("train.learning_rate", 0.0) < 0.1:
        done["train.learning_rate"] = 1.0


def warm_up(done: Settings, may: May) -> None:
    """Warm up to a constant rate, unless a schedule is given."""
    if "optimizer.warmup_steps" in done:
        done.setdefault("optimizer.schedule", "constant")


def log_lines(done: Settings, may: May) -> None:
    """Print a line every so many steps; Graft's log files have every step, as with log_every: 1."""
    every = may.get("log_every", 0)
    lines = done["run.log_every"] = done.get("run.log_every") or every
    if every > 1 and lines != every:
        raise UserError(
            f"logging.log_every: {every} and performance_log_every: {lines} ask for different things; keep "
            "one. The log files have every step."
        )


def file_format(done: Settings, may: May) -> None:
    """Refuse diffusers' names before training where Save LoRA would refuse them after it."""
    family, method = _family(may), done.get("lora.algorithm", NODES["lora"].inputs["algorithm"])
    reason = ""
    if not ADAPTERS[method].is_plain:
        reason = f"diffusers knows plain LoRA only, and network.type is {method}"
    elif family and not family.export:
        reason = f"Graft has no diffusers names for {family.name}"
    if done.get("save.format") == DIFFUSERS and reason:
        raise UserError(f"save.save_format: 'diffusers' is not possible: {reason}. Set it to safetensors.")


def _require_switch(may: May, name: str, switch: str, message: str) -> None:
    if name in may and switch not in may:
        raise UserError(message)


def _scheduler(may: May) -> str | None:
    """Return the noise scheduler that the file names, or that its architecture has."""
    family = _family(may)
    return may.get("noise_scheduler") or (_trained_by(family) if family else None)


def _family(may: May) -> Family | None:
    return architectures()[may["arch"]] if "arch" in may else None


def _trained_by(family: Family) -> str:
    return "ddpm" if family.sigmas == "schedule" else "flowmatch"


DOP, BLANK = "train.diff_output_preservation", "train.blank_prompt_preservation"
DIFFERENTIAL_GUIDANCE = "train.differential_guidance_scale: needs train.do_differential_guidance: true."

RULES: tuple[Rule, ...] = (
    ema,
    offloading,
    full_matrix,
    convolutions,
    scheduler,
    noise_levels,
    guidance_embedding,
    differential_guidance,
    preservation,
    slider,
    sampling,
    prodigy,
    warm_up,
    log_lines,
    file_format,
)
