"""A base that trains where its weights would not fit: a program of its own, as the limit is the process's.

`python streamed.py FILE` loads a base without copying it, trains two steps, and notes the most memory that it
took and that is no file's. Then, with threads and kernels in place, it does the same again while the system
lets it map no more than LIMIT bytes more that it could write to. It prints all as JSON.
"""

import json
import runpy
import sys
from pathlib import Path

LIMIT = 120_000_000
GRAFT = Path(__file__).resolve().parents[2] / "__main__.py"


def kilobytes(name):
    """Return a line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def train_two_steps(patcher, store):
    """Return losses and a digest of the trained weights."""
    import torch

    from graft.commands.bench.base_models import BaseModel, batch_of
    from graft.commands.bench.step import OneBatch
    from graft.training.comfy.model.denoiser import ComfyDenoiser
    from graft.training.config import AdapterConfig, MemoryConfig, TrainConfig, digest
    from graft.training.loop import train

    batch = batch_of(BaseModel("SD3", {}, (16, 16, 16), 8, 4096, 2048))
    memory = MemoryConfig(dtype="bf16", base=store, checkpointing="block")
    config = TrainConfig(adapter=AdapterConfig(rank=4), memory=memory)
    state = train(ComfyDenoiser(patcher), OneBatch(batch), config, None, steps=2)
    names = sorted(state.weights)
    total = [state.weights[name].view(torch.int32).sum().item() for name in names]
    return {"losses": list(state.losses), "weights": digest(names, total)}


def main(path):
    """Measure and print."""
    import resource

    runpy.run_path(str(GRAFT))["import_graft"]()
    from graft.commands.bench.load import peak_anonymous
    from graft.commands.headless.import_comfyui import start_comfyui

    start_comfyui()
    import folder_paths
    import torch

    from graft.training.comfy.model.loading import load_base
    from graft.training.job.graph import FROM_CHECKPOINT

    torch.set_num_threads(1)
    folder_paths.add_model_folder_path("diffusion_models", str(path.parent))
    folder_paths.set_output_directory(str(path.parent / "output"))

    def load(*, stay_in_file):
        return load_base(path.name, (), FROM_CHECKPOINT, "bf16", stay_in_file=stay_in_file)[0]

    mapped = kilobytes("RssFile")
    with peak_anonymous() as peak:
        patcher = load(stay_in_file=True)
        report = train_two_steps(patcher, "stream")
    report |= {"anonymous": peak[0] * 1_000_000, "mapped": kilobytes("RssFile") - mapped}
    limit = kilobytes("VmData") + LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    report["limited"] = train_two_steps(patcher, "stream")
    try:
        load(stay_in_file=False)
        report["copied"] = "loaded"
    except Exception as error:
        report["copied"] = str(error)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
