"""Train a draft head for the bundled target, with the target's fast training forward.

Run with ``python -m benchmarks.training.heads --out FOLDER``; ``--minutes`` of training, writing included.  The text is
that of `benchmarks.training.bundled`, which encodes it to ``--runs`` once.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from benchmarks.training import bundled, data
from benchmarks.training import model as nets
from stree.distill.heads import HEADS, RECIPES, new_head
from stree.distill.run import fit_head
from stree.distill.settings import Settings
from stree.distill.text import Corpus
from stree.distill.training import compiler
from stree.inputs import ASSETS
from stree.models.hidden_states import patch_for_recording, recording, stacked
from stree.models.tree_lm import TreeLM


def main() -> None:
    """Train and save a head."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", default="mtp", choices=HEADS)
    parser.add_argument("--recipe", default="plain", choices=RECIPES)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--muon-lr", type=float, default=Settings().muon_lr)
    parser.add_argument("--generated", type=float, default=0.5)
    parser.add_argument("--runs", type=Path, default=Path("runs/bundled"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    args.runs.mkdir(parents=True, exist_ok=True)
    prepared = bundled.parse_arguments(["--runs", str(args.runs), "--resume"])
    streams, tokenizer, _ = bundled.prepare_text(prepared, args.runs, ASSETS)
    text = Corpus(streams, data.MIXTURE, data.MAX_PASSES, int(tokenizer.eos_token_id))
    settings = Settings(
        kind=args.kind, recipe=args.recipe, minutes=args.minutes, length=args.length, muon_lr=args.muon_lr,
        generated=args.generated, dtype=torch.bfloat16, compile=True,
    )  # fmt: skip
    target = TreeLM.from_pretrained(ASSETS / "target", "cpu")
    fast = TreeLM.from_pretrained(ASSETS / "target", "cpu").release().eval()
    nets.swap(fast, torch.bfloat16, compiler(settings))
    patch_for_recording(fast)
    head = new_head(target, settings.kind, settings.seed, settings.recipe)

    @torch.no_grad()
    def outputs(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with recording(head.hidden_layers) as recorded:
            hidden = fast.base_model(tokens, use_cache=False).last_hidden_state
        return cast(Tensor, fast.get_output_embeddings()(hidden)), stacked(
            recorded, head.hidden_layers, torch.float32, target.device
        ).flatten(2)

    stages, written = fit_head(target, outputs, head, text, settings, args.out, resume=args.resume)
    head.save(args.out)
    about = {"stages": stages, "sampled_tokens": written, "settings": {k: str(v) for k, v in asdict(settings).items()}}
    print(json.dumps(about))


if __name__ == "__main__":
    main()
