"""Time of a step while pages ask the server: `python dev/bench.py routes`.

The starter trains in a real ComfyUI. For a few seconds 100 requests at once come every second, as those of a
hundred open pages; then for as long none; and so on. Neighbors in time are compared, because a machine is not
equally busy all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image

from graft.commands.headless.server import Server, find_comfyui, server
from graft.training.run.run_log import read_log

WORKFLOW = Path(__file__).resolve().parents[2] / "example_workflows" / "api" / "first_lora.json"
AT_ONCE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument(
        "--rounds", type=int, default=20, help="of requests, each beside a pause; default: 20"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a round; default: 5")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between requests; default: 1")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0 if every request was answered."""
    with (
        tempfile.TemporaryDirectory() as folder,
        server(find_comfyui(), Path(folder), cpu=True) as started,
    ):
        report = asyncio.run(measure(started, args))
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(f"{name:28} {value}" for name, value in report.items()))
    return 0 if not report["refused"] else 1


async def measure(started: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run."""
    prompt = json.loads(WORKFLOW.read_text("utf-8"))
    prompt["5"]["inputs"] |= {"steps": 100_000, "name": "asked"}
    started.post(prompt)
    root = started.base / "output" / "graft"
    log = await _first_steps(root)
    run = log.parent.name
    (log.parent / "samples").mkdir(exist_ok=True)
    Image.new("RGB", (1024, 1024), "red").save(log.parent / "samples" / "step-00000001-0.png")
    asked = [
        *("runs", "runs/all", f"log?run={run}", f"files?run={run}"),
        f"sample?run={run}&name=step-00000001-0.png&small=1",
    ]
    urls = [f"http://{started.address}/graft/{path}" for path in asked * (AT_ONCE // len(asked))]
    windows: list[tuple[bool, int, int]] = []
    waits: list[float] = []
    answers: list[int] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as http:
        await _ask(http, urls)
        for number in range(2 * args.rounds):
            busy, first = number % 2 == 0, len(read_log(log))
            until = time.monotonic() + args.seconds
            while time.monotonic() < until:
                began = time.monotonic()
                if busy:
                    answers += await _ask(http, urls)
                    waits.append(time.monotonic() - began)
                await asyncio.sleep(max(0.0, args.every - (time.monotonic() - began)))
            windows.append((busy, first, len(read_log(log))))
    started.interrupt()
    return summarize(read_log(log), windows) | {
        "requests": len(answers),
        "refused": sum(status != 200 for status in answers),
        "100 answers, median s": round(statistics.median(waits), 3),
        "100 answers, longest s": round(max(waits), 3),
    }


def summarize(entries: list[dict[str, Any]], windows: list[tuple[bool, int, int]]) -> dict[str, Any]:
    """Return the median time of a step in each kind of window (busy, first, end), and the median ratio of
    neighbors. A window's first step is left out: it began before.
    """
    medians = [
        (busy, statistics.median(seconds))
        for busy, first, end in windows
        if (seconds := [entry["seconds"] for entry in entries[first + 1 : end]])
    ]
    ratios = [one / other for (busy, one), (_, other) in zip(medians, medians[1:]) if busy]
    ratios += [other / one for (busy, one), (_, other) in zip(medians, medians[1:]) if not busy]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "s/step asked": round(statistics.median(value for busy, value in medians if busy), 4),
        "s/step in peace": round(statistics.median(value for busy, value in medians if not busy), 4),
        "ratio of neighbors": round(statistics.median(ratios), 3),
        "half of the ratios": [round(quarters[0], 3), round(quarters[2], 3)],
    }


async def _first_steps(root: Path) -> Path:
    """Return the log of the run, once it has some steps."""
    while True:
        for log in root.glob("asked-*/log.jsonl"):
            if len(read_log(log)) > 10:
                return log
        await asyncio.sleep(0.5)


async def _ask(http: aiohttp.ClientSession, urls: list[str]) -> list[int]:
    """Return the status of each answer; all are asked for at once, and read."""

    async def ask(url: str) -> int:
        async with http.get(url) as answer:
            await answer.read()
            return answer.status

    return list(await asyncio.gather(*map(ask, urls)))
