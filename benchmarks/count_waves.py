"""How many waves of tests traversal verification takes on trees that the bundled drafter grows.

Run: python benchmarks/count_waves.py [--tokens 64] [--temperature 0.8]

A node is tested in the wave that counts the elder siblings along its path.  The last line is one JSON document: by
growth and budget, the share of steps that take at most so many waves.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from itertools import accumulate
from pathlib import Path
from unittest import mock

from torch import Tensor
from transformers import AutoTokenizer

import stree
from stree.growth import Calibrated, DySpec, Growth, Sequoia
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import Acceptance, DraftLaws, acceptance
from stree.verify.paths import Siblings
from stree.verify.traversal import traverse

ASSETS = Path(stree.__file__).parent / "assets"
PROMPTS = ("def fibonacci(n):", "Once upon a time", "import torch\nclass Linear(nn.Module):\n    def __init__(self")
GROWTHS: tuple[tuple[Growth, int], ...] = (
    (Calibrated(), 16), (Calibrated(), 32), (Calibrated(), 64), (Sequoia(), 16), (Sequoia(), 64),
    (DySpec(), 32), (DySpec(), 64),
)  # fmt: skip


def waves_of(tree: TokenTree) -> int:
    """Count the waves of the tree that takes most."""
    rank = Siblings.of(tree).rank
    return int((tree.ancestor_mask * rank[:, None]).sum(-1).max()) + 1


def count(growth: Growth, budget: int, tokens: int, temperature: float) -> Counter[int]:
    """Generate from every prompt; count steps by the waves of their trees."""
    target, drafter = (stree.TreeLM.from_pretrained(str(ASSETS / name)) for name in ("target", "drafter"))
    tokenizer = AutoTokenizer.from_pretrained(str(ASSETS / "target"))
    found: Counter[int] = Counter()

    def watched(tree: TokenTree, law: Tensor, rng: Random, draft: DraftLaws | None, max_depth: int) -> Acceptance:
        found[waves_of(tree)] += 1
        return traverse(tree, law, rng, draft, max_depth)

    with mock.patch.object(acceptance, "traverse", watched):
        for prompt in PROMPTS:
            stree.generate(
                target, tokenizer([prompt])["input_ids"], stree.drafters.ModelDrafter(drafter), growth=growth,
                budget=budget, max_new_tokens=tokens, sampling=stree.Sampling(temperature=temperature),
            )  # fmt: skip
    return found


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    options = parser.parse_args()
    shares = {}
    for growth, budget in GROWTHS:
        found = count(growth, budget, options.tokens, options.temperature)
        waves, total = sorted(found), found.total()
        sums = accumulate(found[wave] for wave in waves)
        share = {wave: round(part / total, 3) for wave, part in zip(waves, sums, strict=True)}
        shares[f"{type(growth).__name__} {budget}"] = {"steps": total, "share": share}
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
