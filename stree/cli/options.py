"""Options that several commands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stree.growth_names import GROWTHS

__all__ = [
    "add_command", "add_device", "add_drafter_vocab", "add_drafting", "add_generation", "add_grammar", "add_import",
    "add_launching", "add_rules", "add_target", "grammar_of", "token_rules_of",
]  # fmt: skip


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a command that ``run`` runs; ``text`` is its line of help."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    command.set_defaults(run=run)
    return command


def add_target(command: argparse.ArgumentParser) -> None:
    """Add the options that choose the target and its tokenizer."""
    command.add_argument("--target", default="bundled", help="'bundled', a folder, or a hub id")
    command.add_argument("--tokenizer", default=None, help="a folder or hub id, where the target's own has none")


def add_device(command: argparse.ArgumentParser) -> None:
    """Add the options that choose device and dtype."""
    command.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")


def add_import(command: argparse.ArgumentParser) -> None:
    """Add the option that imports modules of the user; ``stree.cli.main`` does so before a command runs."""
    command.add_argument(
        "--import", default=None, metavar="MODULE,...",
        help="modules on the path or .py files that enter drafters, growths, stop rules and verifiers of your own under"
        " names (stree.drafters.DRAFTERS, stree.growth.GROWTHS, stree.growth.STOPS, stree.verify.VERIFIERS)",
    )  # fmt: skip


def add_launching(command: argparse.ArgumentParser) -> None:
    """Add the options that choose how steps are launched."""
    command.add_argument("--eager", action="store_true", help="do without CUDA graphs")
    command.add_argument("--compile", action="store_true", help="compile the scoring of trees on a CPU; needs g++")


def add_generation(command: argparse.ArgumentParser, *, default_budget: str | None = None) -> None:
    """Add the options of every command that generates: models, drafting, sampling, limits."""
    add_target(command)
    add_drafting(command, default_budget=default_budget)
    add_import(command)
    command.add_argument("--chat", action="store_true", help="put a prompt into the tokenizer's chat template")
    command.add_argument(
        "--prefill-chunk", type=int, default=None, help="most prompt tokens run at once; bounds memory"
    )
    command.add_argument("--trust-remote-code", action="store_true", help="execute the checkpoints' own code")
    command.add_argument("--max-new-tokens", type=int, default=128, help="most new tokens")
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    command.add_argument("--top-k", type=int, default=None, help="keep the k most probable tokens")
    command.add_argument("--top-p", type=float, default=None, help="keep the smallest set of this probability")
    command.add_argument("--min-p", type=float, default=None, help="keep tokens of this share of the best probability")
    command.add_argument("--seed", type=int, default=0, help="of the random numbers")
    add_device(command)
    add_launching(command)


def add_drafter_vocab(command: argparse.ArgumentParser) -> None:
    """Add the option that trims the output layer of a draft model or head."""
    command.add_argument("--drafter-vocab", default=None, help="tokens a draft model keeps, made by 'stree trim-vocab'")


def add_drafting(command: argparse.ArgumentParser, *, files: bool = True, default_budget: str | None = None) -> None:
    """Add the options of the drafter, its trees and their verification.

    Args:
        command: of the command line.
        files: whether to add what a drafter reads beside models.
        default_budget: where neither ``--budget`` nor the growth's name says one; None for that of ``stree.generate``.
    """
    command.add_argument(
        "--drafter",
        default=None,
        help="'bundled' or 'bundled-mtp' (a model and a head for the bundled target), 'suffix' (repetitions of the "
        "text), 'fused' (both; 'fused:FOLDER' for another model), 'none' (plain decoding), 'mtp' (the target's own MTP "
        "layers), a folder or hub id of a model or head; by default 'bundled' for the bundled target, 'mtp' where the "
        "target's checkpoint has MTP layers, else 'suffix'",
    )
    if files:
        command.add_argument("--datastore", default=None, help="texts to draft from, made by 'stree datastore build'")
        add_drafter_vocab(command)
    command.add_argument(
        "--growth",
        default=None,
        help=f"a draft model's trees (docs/choosing.md): {GROWTHS}",
    )
    command.add_argument(
        "--budget",
        default=None,
        help="most nodes a step, root included; 1 is plain decoding, auto by goodput; by default what --growth names, "
        f"else {default_budget or '16 for one text with a draft model, auto for others'}",
    )
    command.set_defaults(default_budget=default_budget)
    command.add_argument("--verifier", default="auto", help="auto, match, rejection, traversal or block")


def add_grammar(command: argparse.ArgumentParser) -> None:
    """Add the options of a grammar."""
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--json-schema", metavar="FILE", help="continue with a JSON document of the schema in a file")
    kind.add_argument("--regex", metavar="PATTERN", help="continue with a text that a regular expression matches whole")


def add_rules(command: argparse.ArgumentParser) -> None:
    """Add the token rules of ``stree.generate``."""
    command.add_argument("--logit-bias", metavar="JSON", help='added to logits: {"TOKEN ID": NUMBER, ...}')
    command.add_argument("--repetition-penalty", type=float, help="above 0, 1 for none: of tokens of prompt and text")
    command.add_argument(
        "--frequency-penalty", type=float, help="in [-2, 2]: for each time that the new text has a token"
    )
    command.add_argument("--presence-penalty", type=float, help="in [-2, 2]: of tokens that the new text has")
    command.add_argument("--allowed-token-ids", metavar="JSON", help="the only tokens: [ID, ...]")
    command.add_argument("--bad-words", action="append", metavar="TEXT", help="never written; may be repeated")
    command.add_argument("--min-new-tokens", type=int, help="no stop token before so many new tokens")


def token_rules_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the token rules that the options name, as ``stree.generate`` takes them; bad words are texts.

    Raises:
        ValueError: one is out of its range, or no JSON.
    """
    from stree.rule_fields import rules_of

    fields = dict(vars(arguments))
    for name in ("logit_bias", "allowed_token_ids"):
        try:
            fields[name] = None if fields[name] is None else json.loads(fields[name])
        except ValueError as error:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be JSON, got {fields[name]!r:.80}: {error}") from error
    return rules_of(fields)


def grammar_of(arguments: argparse.Namespace) -> Any:
    """Return the grammar that the options name, or None.

    Raises:
        ValueError: it cannot be read.
    """
    path, pattern = arguments.json_schema, arguments.regex
    if path is None and pattern is None:
        return None
    from stree.decode.grammar import Grammar

    if path is None:
        return Grammar.regex(pattern)
    try:
        schema = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --json-schema {path}: {error}") from error
    return Grammar.json_schema(schema)
