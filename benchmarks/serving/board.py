"""Draw the board of docs/grafana.json from Prometheus' answers to its queries, under a load of some minutes.

Run: python -m benchmarks.serving.board [--minutes 4] [--out docs/board.png]

Needs ``prometheus`` (``apt-get install prometheus``), which scrapes ``stree serve`` every second.  Clients come and go:
one, then eight, then sixteen.  The picture has the board's panels, places, titles and names; it is not Grafana's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import time
from contextlib import contextmanager
from functools import reduce
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks.serving.load import chunks, requests, served

BOARD = Path("docs/grafana.json")
VARIABLES = {"$__rate_interval": "15s", "$model": ".*", "$engine": ".*", "$job": ".*"}
CLIENTS = (1, 8, 16)  # one number after the other
STEP_S = 2  # between points of a curve
COLUMNS, ROW_H = 24, 7  # of the board's grid; rows of a panel


@contextmanager
def prometheus(url: str, folder: Path) -> Any:
    """Run Prometheus, which scrapes a server every second; give its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    targets = [{"targets": [url.removeprefix("http://")]}]
    jobs = [{"job_name": "stree", "scrape_interval": "1s", "static_configs": targets}]
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": jobs}))
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


async def load(url: str, seconds: float) -> None:
    """Run each number of clients for its share of the time."""
    bodies = requests(0)

    async def one(client: httpx.AsyncClient, end: float) -> None:
        while time.monotonic() < end:
            async for _ in chunks(client, url, random.choice(bodies)):
                pass

    async with httpx.AsyncClient(timeout=300) as client:
        for count in CLIENTS:
            end = time.monotonic() + seconds / len(CLIENTS)
            await asyncio.gather(*(one(client, end) for _ in range(count)))


def curves(
    address: str, target: dict[str, Any], began: float, end: float
) -> dict[str, tuple[list[float], list[float]]]:
    """Ask Prometheus one query; return seconds and values by the name of each curve."""
    query = reduce(lambda text, name: text.replace(name, VARIABLES[name]), VARIABLES, str(target["expr"]))
    options: dict[str, Any] = {"query": query, "start": began, "end": end, "step": STEP_S}
    found = httpx.get(f"{address}/api/v1/query_range", params=options).raise_for_status().json()["data"]["result"]
    named = {}
    for series in found:
        name = str(target["legendFormat"])
        for label, value in series["metric"].items():
            name = name.replace(f"{{{{{label}}}}}", value)
        named[name] = [at - began for at, _ in series["values"]], [float(value) for _, value in series["values"]]
    return named


def draw(address: str, began: float, end: float, out: Path) -> None:
    """Draw all panels."""
    from matplotlib.figure import Figure
    from PIL import Image

    panels = json.loads(BOARD.read_text())["panels"]
    rows = 1 + max(panel["gridPos"]["y"] for panel in panels) // ROW_H
    figure = Figure(figsize=(15, 2.6 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, COLUMNS)
    for panel in panels:
        place = panel["gridPos"]
        axes = figure.add_subplot(grid[place["y"] // ROW_H, place["x"] : place["x"] + place["w"]])
        axes.set_title(panel["title"], fontsize=10, loc="left")
        for target in panel["targets"]:
            for name, (seconds, values) in curves(address, target, began, end).items():
                if any(value == value for value in values) and (len(panel["targets"]) > 1 or any(values)):
                    axes.plot(seconds, values, label=name, linewidth=1.2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=7, ncols=2, loc="best")
    figure.supxlabel("seconds", fontsize=9)
    with BytesIO() as picture:
        figure.savefig(picture, dpi=70)
        Image.open(picture).convert("RGB").quantize(64).save(out, optimize=True)


def main() -> None:
    """Load a server, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--out", type=Path, default=Path("docs/board.png"))
    options = parser.parse_args()
    with (
        TemporaryDirectory() as folder,
        served("--max-batch", "8", "--cache-mb", "64", "--budget", "12") as (url, _),
        prometheus(url, Path(folder)) as address,
    ):
        began = time.time()
        asyncio.run(load(url, 60 * options.minutes))
        draw(address, began, time.time(), options.out)


if __name__ == "__main__":
    main()
