"""Steps of ``overlap=True`` (PEARL, arXiv 2408.11850, on trees) beside those without, one core for each model.

Run with ``python -m benchmarks.studies.overlap [--out FILE]``; it prints a table and one JSON line.  Of two targets,
one nearly equals its draft model (12 Mamba-2 layers of random weights, whose first two are the draft model and whose
others hardly change the logits); the other is the bundled one.  Texts are decoded in turns; times are wall times of a
step, medians over texts; every operation has one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from statistics import median

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import stree
from benchmarks.report import study
from stree.bench.pair import Pair
from stree.bench.plan import read_suites
from stree.bench.prompts import parse_suites
from stree.bench.records import Record

__all__ = ["TITLES", "cells", "records"]

TITLES = ("pair", "growth", "T", "reused trees", "drafting, of a step", "ms a step", "with overlap", "ratio")
GROWTHS = "chain:2", "chain:4", "calibrated:16x4"
DRAFT_LAYERS = 2


def agreeing_pair() -> tuple[stree.TreeLM, stree.TreeLM]:
    """Make a target of 12 layers and a draft model, the first of them, that is nearly the same function."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "num_hidden_layers": 12, "num_heads": 16, "head_dim": 64, "state_size": 64}
    target = Mamba2ForCausalLM(Mamba2Config(**sizes, n_groups=1, expand=2, vocab_size=8192)).eval()
    for layer in target.backbone.layers[DRAFT_LAYERS:]:
        layer.mixer.out_proj.weight.data.mul_(0.01)
    draft = deepcopy(target)
    draft.backbone.layers = draft.backbone.layers[:DRAFT_LAYERS]
    draft.config.num_hidden_layers = DRAFT_LAYERS
    return stree.TreeLM(target), stree.TreeLM(draft)


def records(texts: int = 5, tokens: int = 96) -> list[Record]:
    """Measure both pairs, in one record.

    Args:
        texts: of each pair, growth and temperature, after one that is not counted.
        tokens: of a text.
    """
    torch.set_num_threads(1)
    bundled, (suite, *_) = Pair.load(device="cpu"), read_suites(parse_suites("bundled"), texts + 1)
    prompts = [bundled.encode(one.turns[:1]) for one in suite.prompts]
    assert bundled.drafter is not None
    pairs = {"12 layers, agreeing": agreeing_pair(), "bundled": (bundled.target, bundled.drafter)}
    rows = list[Record]()
    for pair, (lm, draft) in pairs.items():
        drafter = stree.drafters.ModelDrafter(draft)
        for growth in GROWTHS:
            for temperature in (0.0, 0.8):
                found: dict[bool, list[Record]] = {False: [], True: []}
                for seed, prompt in enumerate(prompts):
                    for overlap, stats in found.items():
                        out = stree.generate(
                            lm, [prompt], drafter, growth=growth, overlap=overlap, max_new_tokens=tokens, seed=seed,
                            sampling=stree.Sampling(temperature), stop_token_ids=(),
                        )  # fmt: skip
                        stats.append(out.stats)
                rows.append({"pair": pair, "growth": growth, "temperature": temperature, **row(found)})
    return [{"bench": "overlap", "params": {"texts": texts, "tokens": tokens}, "rows": rows}]


def row(found: dict[bool, list[Record]]) -> Record:
    """Return the figures of texts without and with overlap, the first of which are warm-up."""
    alone, over = (stats[1:] for stats in (found[False], found[True]))
    times = [1e3 * median(decoding_seconds(one) / one["steps"] for one in stats) for stats in (alone, over)]
    reused = sum(one["reused_drafts"] for one in over) / sum(one["steps"] for one in over)
    drafting = sum(one["draft_s"] for one in alone) / sum(map(decoding_seconds, alone))
    figures = {"reused": reused, "drafting": drafting, "ms": times[0], "ms_overlap": times[1]}
    return {name: round(value, 4) for name, value in figures.items()}


def decoding_seconds(stats: Record) -> float:
    """Return the seconds of all steps."""
    return float(stats["total_s"] - stats["prefill_s"])


def cells(record: Record) -> Sequence[str]:
    """Return the line of a table."""
    shares = (f"{record[name]:.2f}" for name in ("reused", "drafting"))
    alone, over = record["ms"], record["ms_overlap"]
    times = f"{alone:.1f}", f"{over:.1f}", f"{over / alone:.2f}"
    return [record["pair"], record["growth"], f"{record['temperature']:g}", *shares, *times]


if __name__ == "__main__":
    study(records, TITLES, cells, replaces=True)
