"""What a grammar costs and gains: seconds of its masks, and steps with and without forced nodes.

    python -m benchmarks.studies.grammars [--target smollm2 --drafter smollm2:6 --schemas person --seeds 2]

measures, by default with the bundled pair, appends to benchmarks/results/grammars/results.jsonl and prints a table.
Seconds are process time of one thread, the best of the seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

import stree
from benchmarks.report import study
from stree.bench.pair import Pair
from stree.bench.records import ROOT, Record
from stree.decode.batch_grammars import BatchGrammars
from stree.decode.grammar import GrammarEnd
from stree.decode.step import DecodeStep
from stree.drafters import Drafter, ModelDrafter, SuffixDrafter

BUDGET, PROMPT = 16, "import json\n\nx = json.loads('"
WORD = {"type": "string", "maxLength": 10}


def record_schema(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object of these properties."""
    return {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
    }  # fmt: skip


POINT = record_schema(
    latitude={"type": "integer", "minimum": -90, "maximum": 90},
    longitude={"type": "integer", "minimum": -180, "maximum": 180},
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": record_schema(
        first_name=WORD, last_name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120},
        email_verified={"type": "boolean"}, favourite_colour={"enum": ["red", "green", "blue"]},
    ),
    "points": {"type": "array", "items": POINT, "minItems": 3, "maxItems": 3},
}  # fmt: skip
GRAMMARS = {BatchGrammars: ("advance", "first", "forced", "drafted", "lay_out", "verified"), GrammarEnd: ("observe",)}


@contextmanager
def timed(parts: dict[type, tuple[str, ...]], spent: dict[str, float], name: str) -> Iterator[None]:
    """Add the process time of methods to ``spent[name]``."""

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return method(*arguments, **options)
            finally:
                spent[name] = spent.get(name, 0.0) + time.process_time() - began

        return call

    patches = [
        patch.object(owner, one, wrapped(getattr(owner, one))) for owner, names in parts.items() for one in names
    ]
    for one in patches:
        one.start()
    yield
    for one in patches:
        one.stop()


def measured(pair: Pair, drafter: Drafter, name: str, temperature: float, seeds: int, *, is_forced: bool) -> Record:
    """Write a document with each seed: steps and tokens a document, and the masks' share of a step's seconds."""
    tokenizer, grammar = pair.tokenizer, stree.Grammar.json_schema(SCHEMAS[name], whitespace=False)
    ids, steps, tokens, best = tokenizer(PROMPT)["input_ids"], 0, 0, {"step": 1e9, "grammar": 1e9}
    unforced: Any = patch.object(BatchGrammars, "forced", lambda self: [[] for _ in self._rows])
    if not is_forced:
        unforced.start()
    for seed in range(seeds):
        spent: dict[str, float] = {}
        with timed({DecodeStep: ("__call__",)}, spent, "step"), timed(GRAMMARS, spent, "grammar"):
            out = stree.generate(
                pair.target, [ids], drafter, budget=BUDGET, sampling=stree.Sampling(temperature), seed=seed,
                max_new_tokens=200, grammar=grammar, tokenizer=tokenizer,
            )  # fmt: skip
        assert out.stats["finish_reasons"] == ["stop"]
        steps, tokens = steps + out.stats["steps"], tokens + len(out.new_tokens[0])
        best = {part: min(least, spent[part] / out.stats["steps"]) for part, least in best.items()}
    if not is_forced:
        unforced.stop()
    return {
        "bench": "grammars", "provider": "stree", "dtype": "float32",
        "params": {
            "schema": name, "drafter": type(drafter).__name__, "budget": BUDGET, "temperature": temperature,
            "forced": is_forced, "seeds": seeds,
        },
        "metric": "steps", "unit": "steps/document", "value": round(steps / seeds, 2),
        "tokens": round(tokens / seeds, 2), "grammar_ms": round(best["grammar"] * 1e3, 2),
        "step_ms": round(best["step"] * 1e3, 2),
    }  # fmt: skip


def cells(record: Record) -> list[str]:
    """Return the line of the printed table."""
    params = record["params"]
    return [
        params["schema"], params["drafter"], str(params["temperature"]), str(params["forced"]),
        f"{record['value']:.1f} of {record['tokens']:.1f} tokens", f"{record['grammar_ms']} of {record['step_ms']}",
    ]  # fmt: skip


def records(
    target: str = "bundled", drafter: str = "bundled", schemas: str = ",".join(SCHEMAS), seeds: int = 6
) -> Iterator[Record]:
    """Measure schemas with both drafters, at both temperatures, with and without forced nodes.

    Args:
        target: as of stree bench run.
        drafter: as of stree bench run.
        schemas: their names, separated by commas.
        seeds: documents of each.
    """
    torch.set_num_threads(1)
    pair = Pair.load(target, drafter, device="cpu")
    assert pair.drafter is not None, "a draft model was named"
    drafters: list[Drafter] = [SuffixDrafter(), ModelDrafter(pair.drafter)]
    for name, one, temperature, is_forced in product(schemas.split(","), drafters, (0.0, 0.8), (False, True)):
        record = measured(pair, one, name, temperature, seeds, is_forced=is_forced)
        record["params"]["target"] = target
        yield record


if __name__ == "__main__":
    file = ROOT / "benchmarks" / "results" / "grammars" / "results.jsonl"
    study(records, ["schema", "drafter", "T", "forced", "steps", "ms of grammar a step"], cells, default=file)
