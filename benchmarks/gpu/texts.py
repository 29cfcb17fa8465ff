"""Compare the texts that captured steps write on a GPU with those of the CPU, which are made beforehand.

Run, on any machine: python -m benchmarks.gpu.texts --write FILE
Then, on the GPU:    python -m benchmarks.gpu.texts --expected FILE --out DIR

FILE holds the weights of the tiny models, so that another version of transformers compares the same ones, and the texts
of every growth at temperatures 0 and 0.8, and of the bundled pair.  The GPU needs no numba.  Every text is made three
times there: operations launched one by one, captured, and replayed.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from helpers.draft_steps import GROWTHS
from helpers.tiny_models import random_texts, tiny_model

import stree
from benchmarks.gpu.run import Run, begin, command_line
from stree.bench.records import Record
from stree.drafters import ModelDrafter
from stree.files import replacing
from stree.growth import Calibrated, Chain
from stree.sampling import Sampling

Texts = list[list[int]]
TEMPERATURES = (0.0, 0.8)
WAYS = ("launched", "captured", "replayed")
ASSETS = Path(stree.__file__).parent / "assets"
PAIR = {"target": ("bamba", 0), "drafter": ("mamba2", 1)}  # families and seeds of the tiny models
PROMPTS = [[7 + 3 * row, 100 + row, 2000 + 11 * row, 30 + row] for row in range(4)]  # of the bundled pair


def cases(is_small: bool) -> dict[str, Record]:
    """Options of `stree.generate` of every text, by name; ``pair`` names the models."""
    found: dict[str, Record] = {}
    for name, growth in GROWTHS.items():
        for temperature in TEMPERATURES:
            # Trees that the CPU may cut draw as others only where no draw decides what is in a tree: verifier "match".
            found[f"tiny, {name}, T {temperature:g}"] = {
                "pair": "tiny", "growth": growth, "budget": 1 if growth is None else 12, "verifier": "match",
                "sampling": Sampling(temperature), "prompts": random_texts(random.Random(0), [6, 9]),
                "max_new_tokens": 24,
            }  # fmt: skip
    for growth in (None, Chain(4), Calibrated(6)):
        found[f"bundled, {'plain' if growth is None else type(growth).__name__}"] = {
            "pair": "bundled", "growth": growth, "budget": 16, "prompts": PROMPTS, "max_new_tokens": 64,
        }  # fmt: skip
    small = ("tiny, none, T 0", "tiny, chain, T 0.8")
    return {name: found[name] for name in small} if is_small else found


def models(pair: str, device: torch.device, weights: dict[str, str]) -> tuple[stree.TreeLM, stree.TreeLM]:
    """Load target and drafter in float32; tiny ones get their weights from the file."""
    if pair == "bundled":
        target, draft = (stree.TreeLM.from_pretrained(ASSETS / name, device, "float32") for name in PAIR)
        return target, draft
    found = []
    for name, (family, seed) in PAIR.items():
        model = tiny_model(family, seed=seed)
        model.load_state_dict(torch.load(io.BytesIO(base64.b64decode(weights[name])), weights_only=True))
        found.append(stree.TreeLM(model.to(device)))
    return found[0], found[1]


def write_texts(file: Path, is_small: bool) -> None:
    """Write weights and texts of the CPU."""
    weights = {}
    for name, (family, seed) in PAIR.items():
        buffer = io.BytesIO()
        torch.save(tiny_model(family, seed=seed).state_dict(), buffer)
        weights[name] = base64.b64encode(buffer.getvalue()).decode()
    texts: dict[str, Texts] = {}
    for name, options in cases(is_small).items():
        target, draft = models(options["pair"], torch.device("cpu"), weights)
        texts[name] = generated(target, ModelDrafter(draft), options).sequences
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as beside:
        beside.write_text(json.dumps({"weights": weights, "texts": texts}), encoding="utf-8")


def generated(target: stree.TreeLM, drafter: ModelDrafter, options: Record) -> stree.Generation:
    """Generate the texts of a case."""
    more: dict[str, Any] = {name: value for name, value in options.items() if name not in ("pair", "prompts")}
    return stree.generate(target, options["prompts"], drafter, **more)


def compare(run: Run, expected: Record, is_small: bool) -> None:
    """Add a record of every text: whether launched, captured and replayed steps give the expected one."""
    found = cases(is_small)
    for name in run.cases(found):
        with run.part(bench="text", text=name, outcome="failed") as record:
            target, draft = models(found[name]["pair"], run.device, expected["weights"])
            drafter = ModelDrafter(draft)
            for way in WAYS:
                target.captures_steps = False if way == "launched" else None
                result = generated(target, drafter, found[name])
                record[way] = _difference(result.sequences, expected["texts"][name])
                record["graphs"] = {key: str(value) for key, value in result.stats.get("graphs", {}).items()}
            is_right = all(record[way] is None for way in WAYS)
            is_captured = run.device.type != "cuda" or not result.stats["graphs"]["not_captured"]
            record["outcome"] = "passed" if is_right and is_captured else "failed"


def _difference(texts: Texts, expected: Texts) -> list[int] | None:
    """Place of the first differing token as [text, token]; None if there is none."""
    for number, (text, other) in enumerate(zip(texts, expected, strict=True)):
        if text != other:
            equal = [a == b for a, b in zip(text, other, strict=False)]
            return [number, equal.index(False) if False in equal else len(equal)]
    return None


def main() -> int:
    """Write the texts, or compare."""
    parser = command_line(__doc__, "gpu_texts.jsonl")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write texts and weights of the CPU, and end")
    parser.add_argument("--expected", type=Path, metavar="FILE", help="what --write has written")
    options = parser.parse_args()
    if options.write is not None:
        write_texts(options.write, options.smoke)
        return 0
    if options.expected is None or not options.expected.is_file():
        parser.error(f"--expected must be a file that --write has written, got {options.expected}")
    _, run = begin(parser)
    compare(run, json.loads(options.expected.read_text(encoding="utf-8")), options.smoke)
    rows = [[record.get("text", record["bench"]), record.get("outcome", "failed")] for record in run.records]
    return run.report(["text", "as on the CPU"], rows)


if __name__ == "__main__":
    sys.exit(main())
