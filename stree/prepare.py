"""Commands that prepare what drafters use: ``stree datastore build`` and ``stree trim-vocab``.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stree.inputs import documents, load_tokenizer, locate, output_file, tokenizer_fingerprint

__all__ = ["add_prepare"]


def add_prepare(commands: Any) -> None:
    """Register the commands with an argparse subparsers object."""
    store = commands.add_parser("datastore", help="texts to draft from", description="Texts to draft from.")
    actions = store.add_subparsers(required=True, metavar="COMMAND")
    build = _command(actions, "build", "index text files, so that 'stree generate --datastore' drafts from them")
    build.set_defaults(run=_build)
    build.add_argument(
        "files", nargs="+", type=Path, metavar="FILES", help="text files, JSON lines, or folders of them"
    )
    build.add_argument("--target", default="bundled", help="whose tokenizer: 'bundled', a folder, or a hub id")
    build.add_argument("--tokenizer", default=None, help="a folder or hub id, where the target's own has none")
    build.add_argument("--max-tokens", type=int, default=1 << 26, help="bound of the store; 8 bytes a token")
    build.add_argument("--out", type=Path, required=True, help="file to write")

    trim = _command(commands, "trim-vocab", "list the tokens that a drafter's head keeps: the most frequent ones")
    trim.set_defaults(run=_trim)
    trim.add_argument("--target", default="bundled", help="'bundled', a folder, or a hub id")
    trim.add_argument("--tokenizer", default=None, help="a folder or hub id, where the target's own has none")
    source = trim.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", type=Path, help="count in text files, JSON lines, or folders of them")
    source.add_argument("--prompts", nargs="+", type=Path, help="count in what the target generates from these")
    trim.add_argument("--keep", type=int, required=True, help="tokens to keep, stop tokens included")
    trim.add_argument("--max-new-tokens", type=int, default=128, help="tokens generated for a prompt")
    trim.add_argument("--temperature", type=float, default=1.0, help="of what is generated")
    trim.add_argument("--seed", type=int, default=0, help="of what is generated")
    trim.add_argument("--out", type=Path, required=True, help="file to write")


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add one command."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    return command


def _build(arguments: argparse.Namespace) -> int:
    """Run ``stree datastore build``."""
    from rich.console import Console
    from rich.progress import track

    from stree.retrieval import Datastore

    out = output_file(arguments.out)
    texts = _texts(arguments.files)
    tokenizer = load_tokenizer(arguments.tokenizer or locate(arguments.target, "target"))
    shown = track(texts, "tokenizing", console=Console(stderr=True), transient=True)
    vocab_size = max(tokenizer.get_vocab().values()) + 1  # more than it has tokens where some numbers are nobody's
    store = Datastore.build(
        (tokenizer(text, verbose=False)["input_ids"] for text in shown), vocab_size,
        tokenizer=tokenizer_fingerprint(tokenizer), max_tokens=arguments.max_tokens,
    )  # fmt: skip
    store.save(out)
    print(f"{out}: {len(texts)} texts, {store.num_tokens} tokens, {out.stat().st_size} bytes")
    return 0


def _texts(paths: Sequence[Path]) -> list[str]:
    """Read texts; refuse to find none."""
    texts = list(documents(paths))
    if not any(text.strip() for text in texts):
        raise ValueError(f"there is no text in {', '.join(map(str, paths))}")
    return texts


def _trim(arguments: argparse.Namespace) -> int:
    """Run ``stree trim-vocab``."""
    from stree.models.families import config_of_text_model
    from stree.models.loading import load_config
    from stree.vocabulary import check_keep, most_frequent, save_vocabulary

    out = output_file(arguments.out)
    source = arguments.text or arguments.prompts
    texts = _texts(source)
    name = locate(arguments.target, "target")
    config = config_of_text_model(load_config(name))
    tokenizer = load_tokenizer(arguments.tokenizer or name)
    always = _stop_tokens(name, config, tokenizer)
    check_keep(arguments.keep, config.vocab_size, always)
    counted = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
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
    return sorted(token for token in found if token < config.vocab_size)


def _generated(
    arguments: argparse.Namespace, name: str, prompts: list[list[int]], stop: Sequence[int]
) -> list[list[int]]:
    """Let the target continue prompts; return what it wrote."""
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
        texts.append(out.sequences[0][len(prompt) :])
    return texts
