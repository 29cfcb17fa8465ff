"""What a run consists of: settings, suites with their held-out prompts, and batches of prompts in order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stree.bench.prompts import Prompt, read_categories
from stree.bench.records import Record
from stree.sampling import Sampling

__all__ = ["Block", "Key", "Settings", "Suite", "plan_blocks", "read_suites"]

HELD_OUT = 2  # prompts of each suite behind the measured ones, on which the depth of a chain is tuned


class Key(NamedTuple):
    """Names the unit that is interleaved, written and resumed."""

    suite: str
    batch: int
    turn: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Settings:
    """How prompts are run.

    Attributes:
        max_new_tokens: tokens of every run; no stop token is used.
        temperatures: 0 is greedy.
        batch_size: prompts that run together.
        seeds: of the random numbers; every prompt is sampled with each, and is greedy with the first alone.
        test_texts: texts a checked prompt for the statistical test of sampled text; 0 leaves it out.
        chat: whether prompts go through the tokenizer's chat template.
        return_steps: whether records also hold what happened in every step, of one more run that is not timed.
        top_k: tokens that sampling keeps, or None for all.
        top_p: probability of the smallest set of tokens that sampling keeps, or None for all.
        repeats: times that every method runs a batch of prompts; records hold the median speed.

    Raises:
        ValueError: a value outside its range.
    """

    max_new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0,)
    batch_size: int = 1
    seeds: tuple[int, ...] = (0,)
    test_texts: int = 0
    chat: bool = False
    return_steps: bool = False
    top_k: int | None = None
    top_p: float | None = None
    repeats: int = 1

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 2), ("batch_size", 1), ("test_texts", 0), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.seeds or min(self.seeds) < 0:
            raise ValueError(f"seeds must be whole numbers of at least 0, got {list(self.seeds)}")
        if not self.temperatures or any(not 0 <= t < 100 for t in self.temperatures):
            raise ValueError(f"temperatures must be in [0, 100), got {list(self.temperatures)}")
        for temperature in self.temperatures:
            self.sampling(temperature)

    def sampling(self, temperature: float) -> Sampling:
        """Make the parameters of one temperature.

        Raises:
            ValueError: ``top_k`` or ``top_p`` outside its range.
        """
        return Sampling(temperature, self.top_k, self.top_p)


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
    """A batch of prompts at one temperature and one turn of their conversations.

    Attributes:
        key: suite, number of the batch, turn, temperature and seed.
        prompts: of the batch; all have this turn.
    """

    key: Key
    prompts: tuple[Prompt, ...]

    @property
    def params(self) -> Record:
        """The ``params`` by which a record names this block."""
        return {**self.key._asdict(), "prompts": [prompt.index for prompt in self.prompts]}


def read_suites(files: Mapping[str, Path], limit: int | None) -> list[Suite]:
    """Read prompt files, ``limit`` prompts to measure and ``HELD_OUT`` to tune on from each.

    Raises:
        ValueError: a bad file; the message names the suite and the line.
    """
    suites = []
    for file_name, path in files.items():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for name, prompts in read_categories(file_name, path, None if limit is None else limit + HELD_OUT).items():
            known = tuple(prompts)
            measured, behind = (known, ()) if limit is None else (known[:limit], known[limit:])
            suites.append(Suite(name, measured, behind or measured[:HELD_OUT], bool(behind), digest))
    return suites


def plan_blocks(suites: Sequence[Suite], settings: Settings) -> list[Block]:
    """List all blocks: by suite, temperature, seed, batch, turn."""
    blocks = []
    size = settings.batch_size
    for suite in suites:
        kinds = [(t, seed) for t in settings.temperatures for seed in (settings.seeds if t else settings.seeds[:1])]
        for temperature, seed in kinds:
            for batch, start in enumerate(range(0, len(suite.prompts), size)):
                prompts = suite.prompts[start : start + size]
                for turn in range(max(len(prompt.turns) for prompt in prompts)):
                    of_turn = tuple(prompt for prompt in prompts if turn < len(prompt.turns))
                    blocks.append(Block(Key(suite.name, batch, turn, temperature, seed), of_turn))
    return blocks
