"""Program of test_tensor_parallel.py under torchrun: writes the texts that every rank generates with sharded models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from stree import Sampling, TreeLM, generate
from stree.drafters import ModelDrafter, SuffixDrafter

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3, 4, 2, 9]]
SAMPLED = Sampling(temperature=1.0)
WAYS: list[dict[str, Any]] = [
    {"drafter": "model", "budget": 6},
    {"drafter": "model", "budget": 6, "sampling": SAMPLED, "verifier": "rejection"},
    {"drafter": "suffix", "budget": 5, "sampling": SAMPLED},
    {"drafter": "suffix", "budget": "auto"},
]


def texts(lm: TreeLM, folder: str) -> list[list[list[int]]]:
    """Generate from both prompts in every way; the draft model is the checkpoint in a folder, perturbed."""
    torch.manual_seed(0)
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape))
    drafters = {"model": ModelDrafter(TreeLM(draft)), "suffix": SuffixDrafter()}
    found = []
    for way in WAYS:
        arguments = {**way, "drafter": drafters[way["drafter"]]}
        found.append(
            [generate(lm, [prompt], **arguments, max_new_tokens=16, seed=3).sequences[0] for prompt in PROMPTS]
        )
    return found


def main(folder: Path) -> None:
    """Generate with each model under a folder."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*/config.json")):
        try:
            lm = TreeLM.from_pretrained(path.parent, tp_plan="auto")
        except NotImplementedError as refusal:
            found[path.parent.name] = {"refused": str(refusal)}
            continue
        num_sharded = sum(isinstance(weight, DTensor) for weight in lm.model.parameters())
        lm.self_check()
        found[path.parent.name] = {"sharded": num_sharded, "texts": texts(lm, str(path.parent))}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
