"""Decode documents of 600 schemas of JSONSchemaBench with the bundled pair, and check them; an hour on a busy core.

    git clone https://github.com/guidance-ai/jsonschemabench
    python -m benchmarks.studies.schemas jsonschemabench/data

takes as many schemas from each of the collection's folders, in an order drawn by a fixed seed, leaves out those that
llguidance or the package jsonschema refuses, and decodes a document of each at temperatures 0 and 0.8: with trees,
under MATCH, and plainly under the same masks.  It counts texts that are the same, token for token; texts that end
within ``--tokens``; and of these the ones that are JSON of their schema by the package jsonschema, which shares no code
with llguidance.  As this small model fills strings and lists without end, tokens that begin by closing one have a logit
bias.  Controls, for the first 50 schemas: plain texts with other seeds, which must differ at temperature 0.8, and texts
without a grammar, which must not be valid.  It appends a record for each temperature to
benchmarks/results/grammars/schemas.jsonl.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import torch

import stree
from benchmarks.report import study
from stree.bench.pair import Pair
from stree.bench.records import ROOT, Record

ROWS, BUDGET, SEED = 10, 16, 1  # texts of a batch, nodes of a tree
CONTROLS = 50  # schemas
CLOSING, BIAS = ('"', "]", "}"), 6.0
PROMPT = 'import json\n\nx = json.loads(\'{"name": "Tom", "age": 3}\')\ny = json.loads(\''
Schemas = list[tuple[str, dict[str, Any], stree.Grammar]]
COUNTS = ("same", "ended", "valid", "other_seed_same", "without_grammar_valid")


def readable(file: Path, pair: Pair) -> tuple[dict[str, Any], stree.Grammar] | str:
    """Return the schema of a file and its grammar, or which package refuses it."""
    schema = json.loads(file.read_text(encoding="utf-8"))
    try:
        checker = jsonschema.validators.validator_for(schema)
        checker.check_schema(schema)
        checker(schema).is_valid({})
    except Exception:
        return "jsonschema"
    try:
        grammar = stree.Grammar.json_schema(schema, whitespace=False)
        grammar.compile(pair.tokenizer, pair.target.vocab_size, frozenset({0}), frozenset({0}))
    except (ValueError, TypeError):
        return "llguidance"
    return schema, grammar


def chosen(folder: Path, count: int, pair: Pair) -> tuple[Schemas, Counter[str]]:
    """Return so many schemas, as evenly from all folders as these allow, and how many were refused by which package."""
    draw, refused = random.Random(SEED), Counter[str]()
    queues = [sorted(one.glob("*.json")) for one in sorted(folder.iterdir()) if one.is_dir()]
    for queue in queues:
        draw.shuffle(queue)
    taken: Schemas = []
    while len(taken) < count and any(queues):
        for queue in filter(None, queues):
            while queue and len(taken) < count:
                file = queue.pop()
                if isinstance(found := readable(file, pair), str):
                    refused[found] += 1
                    continue
                taken.append((f"{file.parent.name}/{file.name}", *found))
                break
    return taken, refused


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Return whether a text is JSON of a schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def documents(pair: Pair, schemas: Schemas, temperature: float, most: int, seed: int, **options: Any) -> Any:
    """Return what ``stree.generate`` does for the prompt, once for each schema."""
    ids, size = pair.tokenizer(PROMPT)["input_ids"], len(pair.tokenizer)
    closing = [token for token in range(size) if pair.tokenizer.decode([token]).startswith(CLOSING)]
    return stree.generate(
        pair.target, [ids] * len(schemas), verifier="match", sampling=stree.Sampling(temperature), max_new_tokens=most,
        seed=[seed + place for place in range(len(schemas))], tokenizer=pair.tokenizer,
        logit_bias=dict.fromkeys(closing, BIAS), **options,
    )  # fmt: skip


def checked(
    pair: Pair, schemas: Schemas, temperature: float, most: int, *, has_controls: bool
) -> tuple[Counter[str], list[str]]:
    """Count what becomes of the documents of some schemas; the names of those that are wrong."""
    counts, wrong = Counter[str](), list[str]()
    document, grammars = partial(documents, pair, schemas, temperature, most), [grammar for _, _, grammar in schemas]
    tree = document(SEED, drafter=pair.drafter, budget=BUDGET, grammar=grammars)
    plain = document(SEED, drafter="none", grammar=grammars)
    counts["steps"], counts["plain_steps"] = tree.stats["steps"], plain.stats["steps"]
    for row, (name, schema, _) in enumerate(schemas):
        tokens, is_ended = tree.new_tokens[row], tree.stats["finish_reasons"][row] == "stop"
        text = pair.tokenizer.decode(tokens, skip_special_tokens=True)
        is_same, is_good = tokens == plain.new_tokens[row], is_ended and is_valid(text, schema)
        counts.update({"same": is_same, "ended": is_ended, "valid": is_good, "tokens": len(tokens)})
        if not is_same or is_ended != is_good:
            wrong.append(f"{name}: {text[:200]}")
    if has_controls:
        other = document(SEED + CONTROLS, drafter="none", grammar=grammars)
        free = document(SEED, drafter=pair.drafter, budget=BUDGET)
        pairs = zip(other.new_tokens, plain.new_tokens, strict=True)
        counts["controls"] = len(schemas)
        counts["other_seed_same"] = sum(one == another for one, another in pairs)
        texts = zip(free.new_tokens, schemas, strict=True)
        counts["without_grammar_valid"] = sum(is_valid(pair.tokenizer.decode(one), own[1]) for one, own in texts)
    return counts, wrong


def cells(record: Record) -> list[object]:
    """Return the line of a temperature."""
    return [record["params"]["temperature"], record["schemas"], *(record[name] for name in COUNTS)]


def study_of(folder: Path, schemas: int = 600, tokens: int = 160) -> Iterator[Record]:
    """Yield a record for each temperature.

    Args:
        folder: of JSONSchemaBench, with a folder for each source.
        schemas: their number.
        tokens: most of a document.
    """
    torch.set_num_threads(1)
    pair = Pair.load(device="cpu")
    taken, refused = chosen(folder, schemas, pair)
    for temperature in (0.0, 0.8):
        counts, wrong = Counter[str](dict.fromkeys(COUNTS, 0)), list[str]()
        for place in range(0, len(taken), ROWS):
            part = taken[place : place + ROWS]
            found, bad = checked(pair, part, temperature, tokens, has_controls=place < CONTROLS)
            counts.update(found)
            wrong += bad
            print(temperature, dict(counts), *bad, sep="\n", flush=True)
        yield {
            "bench": "schemas", "provider": "stree", "dtype": "float32",
            "params": {"temperature": temperature, "budget": BUDGET, "verifier": "match", "most_tokens": tokens},
            "metric": "valid", "unit": "texts", "value": counts["valid"], "schemas": len(taken),
            "refused": dict(refused), **counts, "wrong": wrong,
        }  # fmt: skip


if __name__ == "__main__":
    file = ROOT / "benchmarks" / "results" / "grammars" / "schemas.jsonl"
    titles = ["T", "schemas", "same", "ended", "valid", "same with another seed", "valid without grammar"]
    study(study_of, titles, cells, default=file, by_place="folder")
