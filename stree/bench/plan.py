"""What a run consists of: settings, suites with their held-out prompts, and batches of prompts in order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stree.bench.directory import Key
from stree.bench.methods import Method
from stree.bench.prompts import Prompt, read_suite
from stree.bench.records import Record

__all__ = ["Block", "Settings", "Suite", "finished_keys", "plan_blocks", "read_suites"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How prompts are run.

    Attributes:
        max_new_tokens: tokens of every run; no stop token is used.
        temperatures: 0 is greedy.
        batch_size: prompts that run together.
        repeats: runs of each prompt and method, with seeds ``seed``, ``seed + 1``, ...
        seed: of the random numbers.
        check: prompts of each suite whose output is compared before timing.
        law_texts: texts a checked prompt for the statistical test of sampled text; 0 leaves it out.
        held_out: prompts of each suite behind the measured ones, on which chains are tuned.
        chat: whether prompts go through the tokenizer's chat template.

    Raises:
        ValueError: a value outside its range.
    """

    max_new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0,)
    batch_size: int = 1
    repeats: int = 1
    seed: int = 0
    check: int = 1
    law_texts: int = 0
    held_out: int = 2
    chat: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size", "repeats", "check", "held_out"):
            least = 2 if name == "max_new_tokens" else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.law_texts < 0 or self.seed < 0:
            raise ValueError(f"seed and law_texts must not be negative, got {self.seed} and {self.law_texts}")
        if not self.temperatures or any(not 0 <= t < 100 for t in self.temperatures):
            raise ValueError(f"temperatures must be in [0, 100), got {list(self.temperatures)}")


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite's prompts.

    Attributes:
        name: of the suite.
        prompts: that are measured.
        held_out: on which chains are tuned.
        is_held_out: False where the file has no prompt behind the measured ones, and these are taken instead.
        digest: of the file.
    """

    name: str
    prompts: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    is_held_out: bool
    digest: str


@dataclass(frozen=True, slots=True)
class Block:
    """A batch of prompts at one temperature and turn of their conversations.

    Attributes:
        key: names it.
        prompts: of the batch; all have this turn.
    """

    key: Key
    prompts: tuple[Prompt, ...]

    @property
    def params(self) -> Record:
        """Name the block in a record."""
        suite, batch, turn, temperature = self.key
        indices = [prompt.index for prompt in self.prompts]
        return {"suite": suite, "batch": batch, "turn": turn, "temperature": temperature, "prompts": indices}


def read_suites(files: Mapping[str, Path], limit: int | None, settings: Settings) -> list[Suite]:
    """Read prompt files.

    Raises:
        ValueError: a bad file; the message names the suite and the line.
    """
    suites = []
    for name, path in files.items():
        known = tuple(read_suite(name, path, None if limit is None else limit + settings.held_out))
        measured, behind = (known, ()) if limit is None else (known[:limit], known[limit:])
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        suites.append(Suite(name, measured, behind or measured[: settings.held_out], bool(behind), digest))
    return suites


def plan_blocks(suites: Sequence[Suite], settings: Settings) -> list[Block]:
    """List all blocks: by suite, temperature, batch, turn."""
    blocks = []
    size = settings.batch_size
    for suite in suites:
        for temperature in settings.temperatures:
            for batch, start in enumerate(range(0, len(suite.prompts), size)):
                prompts = suite.prompts[start : start + size]
                for turn in range(max(len(prompt.turns) for prompt in prompts)):
                    of_turn = tuple(prompt for prompt in prompts if turn < len(prompt.turns))
                    blocks.append(Block((suite.name, batch, turn, temperature), of_turn))
    return blocks


def finished_keys(blocks: Sequence[Block], methods: Sequence[Method], records: Sequence[Record]) -> set[Key]:
    """Name the blocks that need no run: every method has one, or cannot have one."""
    done: set[tuple[Any, ...]] = set()
    without: set[tuple[Any, ...]] = set()
    skipped: set[tuple[Any, ...]] = set()
    for record in records:
        params, provider = record["params"], record["provider"]
        if record["metric"] == "check" and record["status"] != "ok":
            without.add((params["suite"], params["temperature"], provider))
        elif record["metric"] in ("tokens_per_s", "skipped"):
            key = (params["suite"], params["batch"], params["turn"], params["temperature"])
            (done if record["metric"] == "tokens_per_s" else skipped).add(
                (*key, provider) if record["metric"] == "tokens_per_s" else key
            )
    return {
        block.key
        for block in blocks
        if block.key in skipped
        or all((*block.key, m.name) in done or (block.key[0], block.key[3], m.name) in without for m in methods)
    }
