"""``stree datastore build``: index text files to draft from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stree.cli.options import add_command, add_target
from stree.files import check_file
from stree.inputs import load_tokenizer, locate, nonempty_documents, tokenizer_fingerprint

__all__ = ["add_datastore"]


def add_datastore(commands: Any) -> None:
    """Register the command with an argparse subparsers object."""
    store = commands.add_parser("datastore", help="texts to draft from", description="Texts to draft from.")
    actions = store.add_subparsers(required=True, metavar="COMMAND")
    text = "index text files, so that 'stree generate --datastore' drafts from them"
    build = add_command(actions, "build", _build, text)
    build.add_argument(
        "files", nargs="+", type=Path, metavar="FILES", help="text files, JSON lines, or folders of them"
    )
    add_target(build)
    build.add_argument("--max-tokens", type=int, default=1 << 26, help="bound of the store; 8 bytes a token")
    build.add_argument("--out", type=Path, required=True, help="file to write")


def _build(arguments: argparse.Namespace) -> int:
    """Run ``stree datastore build``."""
    from rich.console import Console
    from rich.progress import track

    from stree.retrieval import Datastore

    out = check_file(arguments.out)
    texts = nonempty_documents(arguments.files, out)
    tokenizer = load_tokenizer(arguments.tokenizer or locate(arguments.target, "target"))
    shown = track(texts, "tokenizing", console=Console(stderr=True), transient=True)
    vocab_size = max(tokenizer.get_vocab().values()) + 1  # not the number of tokens: ids may have gaps
    store = Datastore.build(
        (tokenizer(text, verbose=False)["input_ids"] for text in shown), vocab_size,
        tokenizer=tokenizer_fingerprint(tokenizer), max_tokens=arguments.max_tokens,
    )  # fmt: skip
    store.save(out)
    print(f"{out}: {len(texts)} texts, {store.num_tokens} tokens, {out.stat().st_size} bytes")
    return 0


def load_datastore(arguments: argparse.Namespace, tokenizer: Any) -> Any:
    """Load the datastore that the options name, or None."""
    if arguments.datastore is None:
        return None
    from stree.retrieval import Datastore

    store = Datastore.load(arguments.datastore)
    if store.tokenizer != tokenizer_fingerprint(tokenizer):
        raise ValueError(
            f"datastore {arguments.datastore!r} was built with another tokenizer than that of target "
            f"{arguments.target!r}; build it anew with 'stree datastore build --target'"
        )
    return store
