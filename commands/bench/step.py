"""Time and memory of a training step, against other trainers on the same base: `graft bench step`.

All train a LoRA of one rank on one random base, in one dtype and process, in turns, so a noisy machine is
noisy for all; reported are medians. The bound is what no trainer can beat: the frozen network's forward pass
and the backward pass to its input. Memory is that of all tensors at the worst moment of a step, the base
included (tensors_mb; on a graphics card the allocator's peak), and with --rss also the peak of a process that
does nothing else (peak_mb). of_peak is what is computed in a second as a share of what the device reaches in
one large product. With --profile also where the time goes, and added_up: the bound if its products were int8
ones, at the speeds measured for their shapes, and nothing else changed.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...training.config import AdapterConfig, Compute, MemoryConfig, TrainConfig
from ...training.log import log
from ...training.memory.device_memory import bytes_in_use, peak_bytes, reset_peak, synchronize
from ...training.memory.estimate import restore_attributes
from ...training.memory.tensor_counter import LiveTensors
from ...training.user_error import UserError
from ..headless.import_comfyui import start_comfyui
from . import base_models
from .base_models import FULL, HOST, NARROW, SMALL, BaseModel, batch_of
from .process import peak_rss, run_alone
from .step_profile import int8_share, profile_step

DTYPE = torch.bfloat16
NOISE = 0.5


Steps = Callable[[int], list[float]]
"""Train this many steps and return the seconds of each."""


@dataclass
class Bench:
    """One base model and the inputs of all contenders."""

    model: BaseModel
    patcher: Any
    rank: int
    device: torch.device
    size: int = 1
    """Images in a batch."""
    clock: Callable[[], float] = time.perf_counter
    targets: list[str] = field(default_factory=list)
    """Paths of the linear layers that are trained."""

    @property
    def batch(self) -> Any:
        return batch_of(self.model, self.size)

    def network_copy(self) -> Any:
        """Return the patcher's model with a network of its own, on the device."""
        model = copy.copy(self.patcher.model)
        model._modules = dict(model._modules)
        model.diffusion_model = copy.deepcopy(self.patcher.model.diffusion_model).to(self.device)
        return model

    def loss(self, model: Any, x: Tensor) -> Tensor:
        """Return a loss of what `model` makes of x, as its own node would call it.

        Flux's blocks, which stop gradients, are made differentiable as Graft does it, for all alike.
        """
        from ...training.comfy.model.differentiable import make_differentiable
        from ...training.comfy.versions import training_mode

        sigma = torch.full((len(x),), NOISE, device=x.device)
        conditioning = self.batch.conditioning[0]
        extra = model.extra_conds(
            noise=x, device=x.device, width=8 * x.shape[-1], height=8 * x.shape[-2], **conditioning
        )
        conds = {name: c.process_cond(len(x), device=x.device, area=None).cond for name, c in extra.items()}
        with training_mode(), make_differentiable(model.diffusion_model):
            denoised: Tensor = model.apply_model(x, sigma, transformer_options={}, **conds)
        return denoised.float().pow(2).mean()


def bound(bench: Bench) -> Steps:
    """The frozen network: forward, and backward to the input."""
    model = bench.patcher.model if bench.device == HOST else bench.network_copy()
    model.requires_grad_(False)

    def step() -> None:
        x = bench.batch.latents.to(bench.device).requires_grad_()
        bench.loss(model, x).backward()  # type: ignore[no-untyped-call]

    return timed(step, bench)


def graft(
    checkpointing: str, base: str = "resident", *, compile: bool = False, compute: Compute = "full"
) -> Callable[[Bench], Steps]:
    """This trainer, by one plan."""

    def make(bench: Bench) -> Steps:
        from ...training.comfy.model.denoiser import ComfyDenoiser
        from ...training.loop import train

        denoiser = ComfyDenoiser(bench.patcher)
        memory = MemoryConfig(
            dtype="bf16", checkpointing=checkpointing, base=base, compile=compile, compute=compute
        )
        config = TrainConfig(batch_size=bench.size, adapter=AdapterConfig(rank=bench.rank), memory=memory)

        def steps(count: int) -> list[float]:
            moments: list[float] = []

            def note(progress: Any, handles: Any) -> None:
                synchronize(bench.device)
                moments.append(bench.clock())

            train(denoiser, OneBatch(bench.batch), config, None, steps=count + 1, on_step=note)
            return between(moments)

        return steps

    return make


class OneBatch:
    """A dataset of one batch."""

    fingerprint = "one"

    def __init__(self, batch: Any) -> None:
        self.only = batch

    def batch(self, size: int, *, seed: int, index: int) -> Any:
        return self.only


def train_lora_node(**settings: Any) -> Callable[[Bench], Steps]:
    """ComfyUI's own node, by settings that its version knows."""

    def make(bench: Bench) -> Steps:
        from comfy_extras.nodes_train import TrainLoraNode

        schema = TrainLoraNode.define_schema()
        defaults = {i.id: i.default for i in schema.inputs if getattr(i, "default", None) is not None}
        known = inspect.signature(TrainLoraNode.execute).parameters
        chosen = {name: value for name, value in {**defaults, **settings}.items() if name in known}
        batch, in_lists = bench.batch, schema.is_input_list
        text, samples = batch.conditioning[0], [{"samples": sample} for sample in batch.latents.split(1)]
        fixed = {
            "model": bench.patcher,
            "latents": 2 * samples,  # 0.3.75 takes no single one
            "positive": [[text["cross_attn"], {"pooled_output": text["pooled_output"]}]],
            **chosen,
            "rank": bench.rank,
            "batch_size": bench.size,
        }
        TrainLoraNode.hidden = None

        def steps(count: int) -> list[float]:
            arguments = {**fixed, "steps": count + 1}
            if in_lists:
                arguments = {n: value if n == "latents" else [value] for n, value in arguments.items()}
            moments: list[float] = []
            before = torch.optim.AdamW.step

            def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = before(self, *args, **kwargs)
                synchronize(bench.device)
                moments.append(bench.clock())
                return result

            torch.optim.AdamW.step = noting  # type: ignore[method-assign]
            try:
                with restore_attributes(bench.patcher.model):  # when it fails, its forwards stay
                    TrainLoraNode.execute(**arguments)
            finally:
                torch.optim.AdamW.step = before  # type: ignore[method-assign]
                bench.patcher.model.requires_grad_(False)
            return between(moments)

        return steps

    return make


def peft(bench: Bench) -> Steps:
    """PEFT's modules in the network, under autocast, as its users train."""
    from peft import LoraConfig, inject_adapter_in_model

    model = bench.network_copy()
    model.requires_grad_(False)
    pattern = "|".join(re.escape(path) for path in bench.targets)
    config = LoraConfig(r=bench.rank, lora_alpha=bench.rank, target_modules=f"({pattern})")
    inject_adapter_in_model(config, model.diffusion_model)
    trained = [p for name, p in model.diffusion_model.named_parameters() if "lora_" in name]
    for parameter in trained:
        parameter.data = parameter.data.float()
        parameter.requires_grad_()
    return autocast_steps(bench, model, trained)


class Wrapper(nn.Module):
    """Down and up beside a layer whose forward they replace: the module that most trainers have."""

    def __init__(self, layer: Any, rank: int, device: torch.device) -> None:
        super().__init__()
        self.down = nn.Linear(layer.in_features, rank, bias=False, device=device)
        self.up = nn.Linear(rank, layer.out_features, bias=False, device=device)
        nn.init.zeros_(self.up.weight)
        self.before = layer.forward
        layer.forward = self.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.before(x) + self.up(self.down(x)) * 1.0  # type: ignore[no-any-return]


def wrappers(bench: Bench) -> Steps:
    """Modules in the style of sd-scripts, under autocast."""
    model = bench.network_copy()
    model.requires_grad_(False)
    layers = [model.diffusion_model.get_submodule(path) for path in bench.targets]
    made = nn.ModuleList(Wrapper(layer, bench.rank, bench.device) for layer in layers)
    return autocast_steps(bench, model, list(made.parameters()))


def autocast_steps(bench: Bench, model: Any, trained: list[Any]) -> Steps:
    """Return steps that train `trained` inside `model` with AdamW under autocast."""
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step() -> None:
        x = bench.batch.latents.to(bench.device)
        with torch.autocast(bench.device.type, DTYPE):
            loss = bench.loss(model, x)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, bench)


def between(moments: list[float]) -> list[float]:
    """Return the seconds from each moment to the next one."""
    return [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)]


def timed(step: Callable[[], object], bench: Bench) -> Steps:
    """Return `step` as a function of how often, giving the seconds of each."""

    def steps(count: int) -> list[float]:
        moments = []
        for _ in range(count + 1):  # one to warm up, as the trainers have
            step()
            synchronize(bench.device)
            moments.append(bench.clock())
        return between(moments)

    return steps


CONTENDERS: Mapping[str, Callable[[Bench], Steps]] = {
    "bound": bound,
    "graft": graft("none"),
    "graft_int8": graft("none", compute="int8"),
    "graft_selective": graft("selective"),
    "graft_block": graft("block"),
    "graft_compiled": graft("none", compile=True),
    "graft_int8_compiled": graft("none", compile=True, compute="int8"),
    "graft_fp8": graft("block", "fp8"),
    "graft_nf4": graft("block", "nf4"),
    "graft_offload": graft("block-offload", "offload"),
    "train_lora_node": train_lora_node(
        gradient_checkpointing=False, bypass_mode=True, training_dtype="bf16", lora_dtype="bf16"
    ),
    "train_lora_node_as_shipped": train_lora_node(),
    "peft": peft,
    "wrappers": wrappers,
}
"""What is compared; the node's first row is its best setting."""
UNLESS_ASKED = ("graft_compiled", "graft_int8_compiled", "graft_fp8", "graft_nf4", "graft_offload")
"""Left out by default: every round compiles (use --repeats 1 --steps 5) or quantizes again; the last one has
nothing to copy on the CPU."""
FAILURES = (ImportError, RuntimeError, UnboundLocalError, ValueError)
"""What becomes of a contender that is not installed, cannot train a model, or has too little memory."""

SIZES: Mapping[str, Mapping[str, BaseModel]] = {"small": SMALL, "full": FULL, "narrow": NARROW}
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""What seconds are; on a machine that others use as well, only those of the CPU mean anything."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    usual = [name for name in CONTENDERS if name not in UNLESS_ASKED]
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--size", choices=list(SIZES), default="small", help="real widths, all of it, or all layers but tiny"
    )
    parser.add_argument("--models", nargs="+", default=[], help="default: all of this size")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=usual)
    parser.add_argument("--repeats", type=int, default=5, help="rounds in which each trains one step")
    parser.add_argument("--steps", type=int, default=1, help="timed steps in each round")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: one thread, and only the time it had"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1, help="images in a step")
    parser.add_argument("--profile", action="store_true", help="also the parts of a step, on the CPU")
    parser.add_argument("--rss", action="store_true", help="each contender also in a process of its own")
    parser.add_argument("--peak", choices=list(CONTENDERS), help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0."""
    start_comfyui(args.device)
    if args.clock == "cpu":
        torch.set_num_threads(1)
    models = SIZES[args.size]
    names = args.models or list(models)
    if unknown := set(names) - set(models):
        raise UserError(f"models: {', '.join(unknown)} unknown; of size {args.size} are {', '.join(models)}.")
    if args.peak:
        print(json.dumps(peak_alone(models[names[0]], args)))
        return 0
    report = {name: measure(name, models[name], args) for name in names}
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    for name, figures in report.items():
        print(f"{name}\n{as_table(figures)}")
    return 0


def bench_of(model: BaseModel, args: argparse.Namespace) -> Bench:
    """Return the base model, built, and what is trained of it."""
    from ...training.adapters.select import select
    from ...training.comfy.model.denoiser import ComfyDenoiser

    patcher = base_models.build(model, DTYPE)
    denoiser = ComfyDenoiser(patcher)
    chosen = select(denoiser.specs, denoiser.family, AdapterConfig(rank=args.rank))
    linear = [path for path, spec in chosen.items() if spec.kind == "linear"]
    return Bench(model, patcher, args.rank, denoiser.device, args.batch, CLOCKS[args.clock], linear)


def measure(name: str, model: BaseModel, args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, ratios to the bound and memory of every contender on one model."""
    bench = bench_of(model, args)
    base = sum(t.nbytes for t in bench.patcher.model.diffusion_model.state_dict().values())
    contenders: dict[str, Steps] = {}
    tensors: dict[str, int] = {}
    operations: dict[str, int] = {}
    missing: dict[str, str] = {}
    for contender in args.only:
        try:
            contenders[contender], peak, operations[contender] = prepared(CONTENDERS[contender], bench, base)
            tensors[contender] = round(peak / 1e6)
        except FAILURES as error:
            missing[contender] = str(error)
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for index in range(args.repeats):
        for contender, steps in list(contenders.items()):
            try:
                seconds[contender] += steps(args.steps)
            except FAILURES as error:
                missing[contender] = str(error)
                del contenders[contender], seconds[contender], tensors[contender]
                continue
            log.info("%s, round %d: %s %s", name, index + 1, contender, seconds[contender])
    most = product_flops(bench)
    medians = {contender: statistics.median(found) for contender, found in seconds.items()}
    report: dict[str, Any] = {c: round(s, 6) for c, s in medians.items()}
    report["to_bound"] = {c: round(s / medians["bound"], 3) for c, s in medians.items() if "bound" in medians}
    report["of_peak"] = {c: float(f"{operations[c] / s / most:.3g}") for c, s in medians.items()}
    report["tensors_mb"] = tensors
    report["base_mb"] = round(base / 1e6)
    report["peak_mb"] = {c: peak_of(name, c, args) for c in contenders} if args.rss else tensors
    report["missing"] = missing
    if args.profile:
        report |= profiles(contenders, medians, bench)
    return report


def profiles(
    contenders: Mapping[str, Steps], medians: Mapping[str, float], bench: Bench
) -> Mapping[str, Any]:
    """Return the parts of each contender's step, and the seconds that an int8 step's parts add up to."""
    report: dict[str, Any] = {"profile": {}}
    for name, steps in contenders.items():
        parts, products = profile_step(steps)
        report["profile"][name] = parts
        if name == "bound":
            saved = parts.get("products", 0.0) * (1 - int8_share(products, bench.clock))
            report["added_up"] = round(medians["bound"] * (1 - saved), 4)
    return report


def prepared(make: Callable[[Bench], Steps], bench: Bench, base: int) -> tuple[Steps, int, int]:
    """Return a contender that is ready to train, the bytes of tensors at its worst moment, the network's
    `base` bytes included, and the floating-point operations of a step."""
    before = bytes_in_use(bench.device)
    reset_peak(bench.device)
    steps = make(bench)
    with LiveTensors() as live:
        steps(1)  # after one to warm up
    peak = base + live.peak if bench.device == HOST else peak_bytes(bench.device) - before
    return steps, peak, live.flops // 2


def product_flops(bench: Bench) -> float:
    """Return the floating-point operations a second that the device reaches in a large product."""
    side = 2048 if bench.device == HOST else 8192
    matrix = torch.randn(side, side, dtype=DTYPE, device=bench.device)
    return 2 * side**3 / min(timed(lambda: matrix @ matrix, bench)(5))


def peak_of(name: str, contender: str, args: argparse.Namespace) -> int:
    """Return the peak memory in MB of a process of its own, which trains two steps."""
    options = ["--device", args.device, "--size", args.size, "--models", name]
    options += ["--rank", str(args.rank), "--batch", str(args.batch)]
    return int(run_alone(args.program, *options, "--peak", contender))


def peak_alone(model: BaseModel, args: argparse.Namespace) -> int:
    """Return this process's peak of host memory in MB after two steps of one contender."""
    CONTENDERS[args.peak](bench_of(model, args))(2)
    return peak_rss()


def as_table(figures: Mapping[str, Any]) -> str:
    """Return one model's figures as text."""
    lines = [f"  {'':28}{'s/step':>8}{'to bound':>10}{'of peak':>9}{'tensors MB':>12}{'peak MB':>9}"]
    for name in figures["of_peak"]:
        ratio = figures["to_bound"].get(name, "")
        share, tensors, peak = (figures[key][name] for key in ("of_peak", "tensors_mb", "peak_mb"))
        lines.append(f"  {name:28}{figures[name]:8.3f}{ratio:>10}{share:9.3f}{tensors:12}{peak:9}")
    lines += [f"  {name}: {why}" for name, why in figures["missing"].items()]
    return "\n".join(lines)
