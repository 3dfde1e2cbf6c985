"""The parts of `graft bench gpu`, and how each is measured. Every part runs in a process of its own.

- a model by a plan: seconds a step, the allocator's peak beside the estimate, share of the device's speed
- a model by another trainer of `graft bench step`, or its bound
- "plans": every plan of a model ends in the same bits
- "small": the rest of the device is taken, and the plan is "auto": which one does a run end up with?
- "dynamic": a run with ComfyUI's dynamic VRAM on and off ends in the same bits
- "tests": the GPU's own tests, and those against ComfyUI on the GPU, with dynamic VRAM and without
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from ..headless.import_comfyui import import_comfyui, start_comfyui
from ..headless.server import find_comfyui

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[2]

PLANS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"base": "resident", "checkpointing": "none"},
    "bf16-selective": {"base": "resident", "checkpointing": "selective"},
    "bf16-block": {"base": "resident", "checkpointing": "block"},
    "int8": {"base": "int8", "checkpointing": "block"},
    "int8-compute": {"base": "int8", "checkpointing": "block", "compute": "int8"},
    "fp8": {"base": "fp8", "checkpointing": "block"},
    "fp8-compute": {"base": "fp8", "checkpointing": "block", "compute": "fp8"},
    "nf4": {"base": "nf4", "checkpointing": "block"},
    "offload": {"base": "offload", "checkpointing": "block-offload"},
    "stream": {"base": "stream", "checkpointing": "block-offload"},
}
"""Name -> Memory Settings; those that this Graft does not have are skipped."""

OTHERS = ("bound", "train_lora_node", "train_lora_node_as_shipped", "peft", "wrappers")
"""Contenders of `graft bench step` that are not Graft's own."""
MODELS = ("sdxl", "sd35m", "sd35l", "flux")
STEPS = 5


@dataclass(frozen=True)
class Part:
    """One entry of the list."""

    name: str
    kind: str
    """Key of KINDS."""
    model: str = ""
    memory: Mapping[str, Any] = field(default_factory=dict)
    contender: str = ""
    """One of OTHERS."""
    rank: int = 16
    batch: int = 1
    free_gib: float = 0.0
    """Of the device, for "small"."""
    dynamic: bool = False
    file: str = "test_gpu.py"
    """Of tests/, for "tests"."""
    test_device: str = ""
    """GRAFT_TEST_DEVICE for them."""
    seconds: float = 120.0
    """The most that it should take; it is not begun with less left."""


def _parts() -> Sequence[Part]:
    slow = {"flux": 300.0, "sd35l": 200.0}
    found = [
        Part(f"{model} {plan}", "step", model, memory, seconds=slow.get(model, 120.0))
        for model in MODELS
        for plan, memory in PLANS.items()
    ]
    found += [
        Part(f"{model} {other}", "others", model, contender=other, seconds=slow.get(model, 120.0))
        for model in MODELS
        for other in OTHERS
    ]
    for mode in ("selective", "block", "block-offload"):
        memory = {"base": "resident", "checkpointing": mode}
        found.append(Part(f"sd35m batch 3 rank 128 {mode}", "step", "sd35m", memory, rank=128, batch=3))
    found += [Part(f"{model} plans", "plans", model, seconds=300) for model in ("sdxl", "sd35m")]
    found += [
        Part(f"{model} in {free:g} GiB", "small", model, free_gib=free, seconds=slow.get(model, 120.0))
        for model, free in (("sdxl", 7), ("sdxl", 11), ("flux", 11), ("flux", 22.5))
    ]
    found += [Part(f"dynamic {state}", "dynamic", dynamic=state == "on") for state in ("off", "on")]
    found.append(Part("tests", "tests", seconds=300))
    files = sorted(path.name for path in (ROOT / "tests" / "comfy").glob("test_*.py"))
    for where in ("cuda", "cuda-dynamic"):
        for name in files:
            part = f"tests {where} {name.removeprefix('test_').removesuffix('.py')}"
            found.append(Part(part, "tests", file=f"comfy/{name}", test_device=where, seconds=240))
    return found


PARTS = _parts()
"""In the order in which they are done."""


def run_part(part: Part, device: str, size: str, folder: Path | None) -> dict[str, Any]:
    """Measure one part in this process."""
    missing = {*part.memory} - _settings()
    if missing:
        return {"skipped": f"this Graft has no {', '.join(missing)} in Memory Settings"}
    return KINDS[part.kind](part, device, size, folder)


def _settings() -> set[str]:
    from ...training.config import MemoryConfig

    return {each.name for each in fields(MemoryConfig)}


def _step(part: Part, device: str, size: str, folder: Path | None) -> dict[str, Any]:
    """Train a few steps by one plan."""
    start_comfyui(device)
    with ExitStack() as stack:
        patcher = _base(part, size, folder, stack)
        return {"rows": [_train(patcher, part, size, part.memory)]}


def _others(part: Part, device: str, size: str, folder: Path | None) -> dict[str, Any]:
    """Train by another trainer; one of them, as each keeps a copy of the network on the device."""
    from argparse import Namespace

    from .step import measure

    start_comfyui(device)
    numbers = {"rank": part.rank, "batch": part.batch, "repeats": 1, "steps": STEPS - 1}
    args = Namespace(**numbers, clock="wall", only=[part.contender], rss=False, profile=False)
    found = measure(part.model, _model(part, size), args)
    if part.contender in found["missing"]:
        return {"skipped": found["missing"][part.contender]}
    name, peak = part.contender, found["tensors_mb"][part.contender] * 1e6 / GIB
    row = {
        "plan": name,
        "seconds": found[name],
        "peak_gib": round(peak, 4),
        "of_peak": found["of_peak"][name],
    }
    return {"rows": [row]}


def _plans(part: Part, device: str, size: str, folder: Path | None) -> dict[str, Any]:
    """Train by every plan that only moves data or computes it twice, the first one twice."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    start_comfyui(device)
    import torch

    from ...training.memory.activation_checkpointing import MODES

    with ExitStack() as stack:
        patcher = _base(part, size, folder, stack)
        torch.use_deterministic_algorithms(True, warn_only=True)  # as ComfyUI's --deterministic
        stack.callback(torch.use_deterministic_algorithms, False)
        plans = [{"base": base, "checkpointing": mode} for base in ("resident", "offload") for mode in MODES]
        rows = [_train(patcher, part, size, plan, steps=3) for plan in (plans[0], *plans)]
    same = len({row["weights"] for row in rows}) == 1
    again = rows[0]["weights"] == rows[1]["weights"]
    verdict = "all plans end in the same bits" if same else "plans end in DIFFERENT bits"
    return {"rows": rows, "note": verdict if again else "the same plan twice ends in different bits"}


def _small(part: Part, device: str, size: str, folder: Path | None) -> dict[str, Any]:
    """Train by "auto" on a device with little memory left: the limit is real, not a setting."""
    start_comfyui(device)
    import torch

    taken = []
    if device == "cuda":
        more = torch.cuda.mem_get_info()[0] - int(part.free_gib * GIB)
        taken = [
            torch.empty(min(GIB, more - at), dtype=torch.uint8, device=device) for at in range(0, more, GIB)
        ]
    with ExitStack() as stack:
        patcher = _base(part, size, folder, stack)
        rows = [_train(patcher, part, size, {})]
    return {"rows": rows, "note": f"ends with {rows[0]['plan']}; {len(taken)} GiB were taken"}


def _dynamic(part: Part, device: str, size: str, folder: Path | None) -> dict[str, Any]:
    """Train the starter base with dynamic VRAM as ComfyUI's main.py switches it on, or without."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if importlib.util.find_spec("comfy_aimdo") is None or device != "cuda":
        if part.dynamic:
            return {"skipped": "dynamic VRAM needs an NVIDIA GPU and comfy-aimdo, which newer ComfyUIs bring"}
        start_comfyui(device)
    else:
        _start_on_cuda(dynamic=part.dynamic)
    import comfy.sd

    from .base_models import BaseModel

    path = ROOT / "starter" / "base" / "graft_tiny_sd3.safetensors"
    patcher = comfy.sd.load_checkpoint_guess_config(str(path), output_vae=False, output_clip=False)[0]
    width = patcher.model.diffusion_model.context_embedder.in_features
    model = BaseModel("SD3", {}, (16, 16, 16), 77, width, 2048)
    rows = [_train(patcher, part, size, plan, model=model, steps=3) for plan in ({}, dict(PLANS["offload"]))]
    same = rows[0]["weights"] == rows[1]["weights"]
    return {
        "rows": rows,
        "note": f"{type(patcher).__name__}: resident and offload are {'' if same else 'NOT '}equal",
    }


def _start_on_cuda(*, dynamic: bool) -> None:
    """Import ComfyUI as its main.py does, strictly deterministic, with dynamic VRAM or without."""
    options = ["--deterministic", "--use-pytorch-cross-attention"]
    import_comfyui(find_comfyui(), options)
    control = importlib.import_module("comfy_aimdo.control")
    if dynamic:
        assert control.init(), "comfy-aimdo finds no driver"
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    if dynamic:
        index = comfy.model_management.get_torch_device().index or 0
        assert control.init_devices([index]), "comfy-aimdo does not work on this GPU"
        patcher: Any = comfy.model_patcher
        patcher.CoreModelPatcher = patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True


def _tests(part: Part, device: str, size: str, folder: Path | None) -> dict[str, Any]:
    """Run the GPU's own tests, where they and pytest are."""
    file = ROOT / "tests" / part.file
    if not file.exists() or importlib.util.find_spec("pytest") is None:
        return {"skipped": "needs a clone of Graft, and pytest"}
    if device != "cuda":
        return {"skipped": "these tests are for a GPU"}
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--tb=line", str(file)]
    environment = {**os.environ, **({"GRAFT_TEST_DEVICE": part.test_device} if part.test_device else {})}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    lines = done.stdout.strip().splitlines()
    return {"note": lines[-1] if lines else f"exit code {done.returncode}", "output": lines[-40:]}


KINDS = {
    "step": _step,
    "others": _others,
    "plans": _plans,
    "small": _small,
    "dynamic": _dynamic,
    "tests": _tests,
}


def _model(part: Part, size: str) -> Any:
    from .base_models import DRY, FULL

    return {"full": FULL, "dry": DRY}[size][part.model]


def _base(part: Part, size: str, folder: Path | None, stack: ExitStack) -> Any:
    """Return the random base; for "stream", in a file."""
    import torch

    from .base_models import build

    patcher = build(_model(part, size), torch.bfloat16)
    if part.memory.get("base") != "stream":
        return patcher
    from safetensors.torch import save_file

    from ...training.comfy.model.file_weights import remember_file

    network = patcher.model.diffusion_model
    file = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) / "base.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, file)
    remember_file(network, file)  # the weights move there when they are streamed
    return patcher


def _train(
    patcher: Any, part: Part, size: str, memory: Mapping[str, Any], *, steps: int = STEPS, model: Any = None
) -> dict[str, Any]:
    """Train a few steps; return seconds, peak and estimate, share of the device's speed, and a digest."""
    from ...training.adapters.select import select
    from ...training.comfy.model.denoiser import ComfyDenoiser
    from ...training.config import AdapterConfig, MemoryConfig, TrainConfig
    from ...training.loop import train
    from ...training.memory.device_memory import bytes_in_use, peak_bytes
    from ...training.memory.plan import MemoryPlan, make_estimator
    from ...training.memory.tensor_counter import LiveTensors
    from .base_models import batch_of
    from .step import OneBatch

    class Data(OneBatch):
        def largest_batch(self, size: int) -> Any:
            return self.only

    model = model or _model(part, size)
    denoiser = ComfyDenoiser(patcher)
    config = TrainConfig(
        batch_size=part.batch,
        adapter=AdapterConfig(rank=part.rank),
        memory=MemoryConfig(dtype="bf16", **memory),
    )
    batch, device = batch_of(model, part.batch), denoiser.device
    seconds: list[float] = []
    plans: list[str] = []

    def note(progress: Any, handles: Any) -> None:
        seconds.append(progress.seconds)
        plans.append(progress.plan)

    before = bytes_in_use(device)
    with LiveTensors() if device.type == "cpu" else ExitStack() as live:
        state = train(denoiser, Data(batch), config, None, steps=steps, on_step=note)
    base, mode = plans[-1].split(", ")
    estimate = make_estimator(
        denoiser, select(denoiser.specs, denoiser.family, config.adapter), config, batch
    )(MemoryPlan(base, mode))
    weights = sum(tensor.nbytes for tensor in denoiser.network.state_dict().values())
    peak = weights + live.peak if isinstance(live, LiveTensors) else peak_bytes(device) - before
    step = statistics.median(seconds[1:])
    return {
        "plan": plans[-1],
        "seconds": round(step, 4),
        "first_s": round(seconds[0], 3),
        "peak_gib": round(peak / GIB, 4),
        "estimate_gib": round(estimate.peak / GIB, 4),
        "ratio": round(peak / estimate.peak, 3),
        "of_peak": float(f"{estimate.step.flops / step / _speed(str(device)):.3g}"),
        "weights": _digest(state.weights),
        "loss": state.losses[-1],
    }


@cache
def _speed(device: str) -> float:
    """Return the floating-point operations a second of one large product in bf16."""
    import torch

    from .base_models import SMALL
    from .step import Bench, product_flops

    return product_flops(Bench(SMALL["flux"], None, 0, torch.device(device)))


def _digest(weights: Mapping[str, Any]) -> str:
    """Return eight hex digits of the trained numbers."""
    import hashlib

    state = hashlib.blake2b(digest_size=4)
    for name in sorted(weights):
        state.update(weights[name].contiguous().numpy().tobytes())
    return state.hexdigest()
