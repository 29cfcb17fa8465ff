"""``stree trim-vocab``: list the tokens that a drafter's head keeps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stree.cli.options import add_command, add_target
from stree.files import check_file
from stree.inputs import encode_turn, load_tokenizer, locate, nonempty_documents

__all__ = ["add_trim_vocab"]


def add_trim_vocab(commands: Any) -> None:
    """Register the command with an argparse subparsers object."""
    text = "list the tokens that a drafter's head keeps: the most frequent ones"
    trim = add_command(commands, "trim-vocab", _trim, text)
    add_target(trim)
    source = trim.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", type=Path, help="count in text files, JSON lines, or folders of them")
    source.add_argument("--prompts", nargs="+", type=Path, help="count in what the target generates from these")
    trim.add_argument("--chat", action="store_true", help="put --prompts through the tokenizer's chat template")
    trim.add_argument("--keep", type=int, required=True, help="tokens to keep, stop tokens included")
    trim.add_argument("--max-new-tokens", type=int, default=128, help="tokens generated for a prompt")
    trim.add_argument("--temperature", type=float, default=1.0, help="of what is generated")
    trim.add_argument("--seed", type=int, default=0, help="of what is generated")
    trim.add_argument("--out", type=Path, required=True, help="file to write")


def _trim(arguments: argparse.Namespace) -> int:
    """Run ``stree trim-vocab``."""
    from stree.checks import check_counts
    from stree.models.families import config_of_text_model, family_of
    from stree.models.loading import load_config
    from stree.sampling import Sampling
    from stree.vocabulary import check_keep, most_frequent, save_vocabulary

    out = check_file(arguments.out)
    Sampling(arguments.temperature)
    check_counts(max_new_tokens=arguments.max_new_tokens)
    if arguments.chat and not arguments.prompts:
        raise ValueError("--chat puts prompts into a conversation; give it with --prompts")
    texts = nonempty_documents(arguments.text or arguments.prompts, out)
    name = locate(arguments.target, "target")
    config = config_of_text_model(load_config(name))
    family_of(config)
    tokenizer = load_tokenizer(arguments.tokenizer or name)
    always = _stop_tokens(name, config, tokenizer)
    check_keep(arguments.keep, config.vocab_size, always)
    counted = [encode_turn(tokenizer, text, chat=arguments.chat) for text in texts]
    if arguments.prompts:
        counted = _generated(arguments, name, counted, always)
    kept = most_frequent(counted, config.vocab_size, arguments.keep, always)
    known, total = set(kept), sum(map(len, counted))
    share = sum(token in known for text in counted for token in text) / max(total, 1)
    save_vocabulary(out, kept, config.vocab_size)
    print(f"{out}: {len(kept)} of {config.vocab_size} tokens, {share:.1%} of the {total} tokens counted")
    return 0


def _stop_tokens(name: str, config: Any, tokenizer: Any) -> list[int]:
    """List every token that may end a text of the target: its configs may name more than one."""
    from transformers import GenerationConfig

    try:
        stop = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:  # a checkpoint need not have one
        stop = None
    found: set[int] = set()
    for part in (stop, config.eos_token_id, tokenizer.eos_token_id):
        found |= set(part) if isinstance(part, list) else set() if part is None else {part}
    if not all(isinstance(token, int) for token in found):
        raise ValueError(f"eos_token_id of {name!r} must be token ids, got {sorted(map(str, found))}")
    return sorted(token for token in found if token < config.vocab_size)


def _generated(
    arguments: argparse.Namespace, name: str, prompts: list[list[int]], stop: Sequence[int]
) -> list[list[int]]:
    """Tokens by which the target continues prompts."""
    from rich.console import Console
    from rich.progress import track

    from stree.generation import generate
    from stree.models.tree_lm import TreeLM
    from stree.sampling import Sampling

    lm = TreeLM.from_pretrained(name)
    texts = []
    for number, prompt in enumerate(track(prompts, "generating", console=Console(stderr=True), transient=True)):
        out = generate(
            lm, [prompt], sampling=Sampling(arguments.temperature), max_new_tokens=arguments.max_new_tokens,
            stop_token_ids=stop, seed=arguments.seed + number,
        )  # fmt: skip
        texts.append(out.new_tokens[0])
    return texts
