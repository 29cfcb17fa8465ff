"""Copy the bundled target with more positions, and measure whether it predicts as well there.

    python -m benchmarks.studies.positions copy --out runs/bundled-positions
    python -m benchmarks.studies.positions loss --target runs/bundled-positions --corpus CORPUS --out FILE

The bundled target was trained on windows of 1,024 tokens and has 4,096 positions.  The copy has the same weights and
rotary frequencies and a larger ``max_position_embeddings``, so that it is the same function of a text.  The record, a
JSON line, holds its mean cross entropy in nats on the held-out books by position, and that of the same tokens from a
short context.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.report import command_line, finish
from benchmarks.studies.long_prompts import held_out_tokens, passages
from stree.bench.records import Record
from stree.inputs import ASSETS
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree

__all__ = ["losses", "measure", "with_positions"]

NODES = 128  # tokens that are scored together
SHORT = 512  # half of the tokens of a short context's window


def with_positions(source: Path, positions: int, folder: Path) -> None:
    """Copy a checkpoint, with another ``max_position_embeddings``."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = positions
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def losses(lm: TreeLM, tokens: Sequence[int]) -> torch.Tensor:
    """Cross entropy in nats of every token but the first, from the tokens before it: float32[len(tokens) - 1]."""
    ids = torch.tensor([list(tokens)])
    state = lm.new_state(1, len(tokens), NODES)
    logits = [lm.prefill(state, ids[:, :1])[:, None]]
    for start in range(1, len(tokens), NODES):
        tree = TokenTree.chain(ids[:, start : start + NODES])
        count = tree.tokens.shape[1]
        logits.append(lm.verify(state, tree))
        lm.commit(state, torch.arange(count)[None], torch.tensor([count]))
    return torch.nn.functional.cross_entropy(torch.cat(logits, 1)[0, :-1], ids[0, 1:], reduction="none")


def short_losses(lm: TreeLM, tokens: Sequence[int]) -> torch.Tensor:
    """Like ``losses``, but from only ``SHORT`` to ``2 * SHORT`` tokens before each one; NaN for the first ones."""
    found = torch.full((len(tokens) - 1,), torch.nan)
    for start in range(0, len(tokens) - SHORT, SHORT):
        later = losses(lm, tokens[start : start + 2 * SHORT])[SHORT - 1 :]
        found[start + SHORT - 1 : start + SHORT - 1 + len(later)] = later
    return found


def measure(target: Path, corpus: Path, tokens: int, count: int) -> Record:
    """Measure the cross entropy on ``count`` passages of the held-out books, by ranges of positions.

    ``nats_short`` is that of the same tokens from a short context, which the target was trained on.
    """
    lm = TreeLM.from_pretrained(target, "cpu")
    (windows,) = passages(held_out_tokens(str(target), corpus, "english"), [tokens], count)
    bounds = [0, *(1 << power for power in range(9, 30) if 1 << power < tokens), tokens - 1]
    record: Record = {"bench": "positions", "metric": "cross_entropy", "unit": "nats"}
    record["params"] = {"target": "bundled", "positions": lm.max_length, "tokens": tokens, "passages": count}
    for name, loss in (("nats", losses), ("nats_short", short_losses)):
        by_position = torch.stack([loss(lm, window) for window in windows]).mean(0)
        means = [by_position[low:high].mean() for low, high in pairwise(bounds)]
        names = [f"{low}-{high}" for low, high in pairwise(bounds)]
        record[name] = {n: round(float(mean), 4) for n, mean in zip(names, means, strict=True) if mean.isfinite()}
    return record


def main() -> None:
    """Make the copy, or measure and append the record."""
    parser = command_line(__doc__, "folder of the copy, or file of JSON lines", required=True)
    parser.add_argument("what", choices=("copy", "loss"))
    parser.add_argument("--positions", type=int, default=1 << 16, help="of the copy")
    parser.add_argument("--target", type=Path, default=ASSETS / "target")
    parser.add_argument("--corpus", type=Path, help="folder of english.jsonl.zst")
    parser.add_argument("--tokens", type=int, default=1 << 15, help="of a passage")
    parser.add_argument("--passages", type=int, default=2)
    options = parser.parse_args()
    if options.what == "copy":
        with_positions(options.target, options.positions, options.out)
    elif options.corpus is None:
        parser.error("loss needs --corpus")
    else:
        finish([measure(options.target, options.corpus, options.tokens, options.passages)], options.out)


if __name__ == "__main__":
    main()
