"""``stree distill``: train a drafter for a target."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from stree.cli.options import add_command, add_target
from stree.inputs import documents, load_tokenizer, locate

__all__ = ["add_distill"]


def add_distill(commands: Any) -> None:
    """Register the command with an argparse subparsers object."""
    text = "train a drafter for a target, a small model or a head; 'stree generate --drafter OUT' takes it"
    command = add_command(commands, "distill", _distill, text)
    add_target(command)
    command.add_argument(
        "--text", nargs="+", type=Path, required=True, metavar="FILES",
        help="text files, JSON lines with a text or prompt, or folders of them; best of the kind to be generated",
    )  # fmt: skip
    command.add_argument("--out", type=Path, required=True, help="a new or empty folder")
    command.add_argument("--resume", action="store_true", help="go on with the unfinished run in --out")
    command.add_argument("--force", action="store_true", help="begin anew where --out holds another run or drafter")
    _add_recipe(command)
    command.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    command.add_argument(
        "--target-dtype", default="auto", help="of the target's weights: auto (its own on a GPU, float32 on a CPU), ..."
    )
    command.add_argument("--trust-remote-code", action="store_true", help="execute the checkpoint's own code")


def _add_recipe(command: argparse.ArgumentParser) -> None:
    """Add the options of the recipe; ``Settings`` checks them."""
    command.add_argument(
        "--kind",
        default="model",
        help="model (a small Mamba-2), diffusion (masked diffusion), or a head: mtp, eagle3, dflash, specblock",
    )
    command.add_argument(
        "--recipe", default="plain", help="of training mtp and eagle3: plain, or a paper's: hass, griffin, fspad"
    )
    budget = command.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=20.0, help="of training; measuring comes on top")
    budget.add_argument("--steps", type=int, default=None, help="optimiser steps instead of minutes; reproducible")
    command.add_argument("--hidden", type=int, default=None, help="width, a multiple of 16; half the target's if None")
    command.add_argument("--layers", type=int, default=2, help="Mamba-2 layers")
    command.add_argument("--batch-size", type=int, default=4, help="windows a step")
    command.add_argument("--length", type=int, default=512, help="tokens of a window, a multiple of 64 or less")
    command.add_argument("--text-share", type=float, default=0.45, help="of the training, on text alone, goes first")
    command.add_argument(
        "--generated", type=float, default=0.5, help="share of the windows behind it that the target wrote; 0 for none"
    )
    command.add_argument("--temperature", type=float, default=1.0, help="at which the target writes")
    command.add_argument("--muon-lr", type=float, default=8e-3, help="peak learning rate of matrices")
    command.add_argument("--adam-lr", type=float, default=6e-3, help="peak learning rate of embeddings and vectors")
    command.add_argument(
        "--dtype", default="auto", help="of matmuls in training: auto (bfloat16 on a GPU), float32, ..."
    )
    command.add_argument("--compile", action="store_true", help="use torch.compile; needs a C++ compiler on a CPU")
    command.add_argument("--seed", type=int, default=0, help="of weights, windows and generated text")


RECIPE = (
    "kind", "recipe", "minutes", "steps", "hidden", "layers", "batch_size", "length", "text_share", "generated",
    "temperature", "muon_lr", "adam_lr", "compile", "seed",
)  # fmt: skip


def _distill(arguments: argparse.Namespace) -> int:
    """Run ``stree distill``."""
    from transformers.utils import logging

    from stree.distill.folder import RunFolder
    from stree.distill.run import distill_drafter
    from stree.distill.settings import Settings
    from stree.distill.text import check_length, distinct
    from stree.models.loading import torch_dtype
    from stree.models.tree_lm import TreeLM

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    recipe = {name: getattr(arguments, name) for name in RECIPE}
    settings = Settings(dtype=None if arguments.dtype == "auto" else torch_dtype(arguments.dtype), **recipe)
    RunFolder(arguments.out, resume=arguments.resume, force=arguments.force)  # refuses before anything is loaded
    given = list(documents(arguments.text, without=arguments.out))
    texts = distinct(given)
    if len(texts) < len(given):
        sys.stderr.write(f"stree: {len(given) - len(texts)} of {len(given)} texts are given twice and left out\n")
    name = locate(arguments.target, "target")
    tokenizer = load_tokenizer(arguments.tokenizer or name, trust_remote_code=arguments.trust_remote_code)
    check_length(texts, tokenizer, settings.length)
    target = TreeLM.from_pretrained(
        name, arguments.device, arguments.target_dtype, trust_remote_code=arguments.trust_remote_code
    )
    try:
        metrics = distill_drafter(
            target, tokenizer, texts, arguments.out, settings, name=arguments.target, resume=arguments.resume,
            force=arguments.force,
        )  # fmt: skip
    except KeyboardInterrupt:
        sys.stderr.write(f"\nstree: interrupted; --resume goes on from the last checkpoint in {arguments.out}\n")
        return 130
    tau = metrics["tau"]
    sys.stdout.write(
        f"{arguments.out}: {metrics['num_parameters']:,} parameters; tau of chain:4 on held-out text {tau['0']:.2f} "
        f"greedy and {tau['0.8']:.2f} at temperature 0.8\n"
    )
    return 0
