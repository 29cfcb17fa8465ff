"""Program of test_tensor_parallel.py under torchrun: writes the texts that every rank generates with sharded models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.scaling_texts import texts
from torch.distributed.tensor import DTensor

from stree import TreeLM


def main(folder: Path) -> None:
    """Generate with each model under a folder."""
    torch.set_num_threads(1)
    found = {}
    for path in sorted(folder.glob("*/config.json")):
        lm = TreeLM.from_pretrained(path.parent, tp_plan="auto")
        num_sharded = sum(isinstance(weight, DTensor) for weight in lm.model.parameters())
        lm.self_check()
        found[path.parent.name] = {"sharded": num_sharded, "texts": texts(lm, str(path.parent))}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main(Path(sys.argv[1]))
