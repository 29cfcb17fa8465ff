"""What drafting costs besides the draft model's forwards: growing a tree, and laying one out from retrieved text.

Run: python -m benchmarks.studies.growth [--out benchmarks/results/growth] [--repeats 40] [--vocab 50000] [--nodes 64]

The draft model is a stub whose logits are rows of a table, seen and not copied; what its calls take is subtracted.  The
floor beside each growth is softmax and top-k of as many rows as it ran, timed in turn with it, so the ratio of the two
hardly depends on the machine or on what else it does.  Times are of the process on one thread, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numba
import numpy as np
import torch
from torch import Tensor

from stree.bench.records import environment
from stree.drafters import ModelDrafter
from stree.growth import RSDC, Calibrated, Chain, DySpec, Growth, Sequoia, Static
from stree.models.tree_lm import TreeLM
from stree.retrieval import Datastore, SuffixAutomaton
from stree.sampling import Random, Sampling
from stree.tree import TokenTree

GROWTHS: dict[str, Growth] = {
    "calibrated": Calibrated(),
    "dyspec": DySpec(),
    "sequoia": Sequoia(),
    "static:3,3,2,2": Static([3, 3, 2, 1]),
    "rsdc:4,2,2,2": RSDC([4, 2, 2, 2]),
    "chain:8": Chain(8),
}
RANKS = 6  # of the floor's top-k: the most children that a default growth asks for
SHARPNESS = 3.0  # standard deviation of the table's logits
TEXT_TOKENS = 1_000_000
TREE_NODES = 32


@dataclass(slots=True)
class StubState:
    """How long the texts are: nothing is stored."""

    lengths: Tensor
    max_length: int
    max_nodes: int
    length_bound: int = 0
    fixed_shapes: bool = False

    def resized(self, max_length: int, max_nodes: int) -> StubState:
        """Give room for more."""
        return replace(self, max_length=max_length, max_nodes=max_nodes)


@dataclass(slots=True)
class StubLM:
    """A ``TreeLM`` without a model: the logits of node i are row i of a table, whatever its token.

    Attributes:
        table: float32[1, rows, vocab].
        seconds: spent in it so far.
        rows: scored so far.
    """

    table: Tensor
    seconds: float = 0.0
    rows: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    max_length: None = None

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.table.shape[-1]

    def new_state(self, batch_size: int, max_length: int, max_nodes: int) -> StubState:
        """Begin."""
        return StubState(torch.zeros(batch_size, dtype=torch.int32), max_length, max_nodes)

    def prefill(self, state: StubState, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Note the lengths."""
        state.lengths, state.length_bound = lengths.to(torch.int32), int(lengths.max())
        return self.table[:, 0]

    def verify(self, state: StubState, tree: TokenTree, first: int = 0) -> Tensor:
        """Look up the logits of the nodes first.. of a tree."""
        begin = time.process_time()
        size = tree.tokens.shape[1]
        self.rows += size - first if first else 1  # of the two lead columns one is used
        logits = self.table[:, first:size]
        self.seconds += time.process_time() - begin
        return logits

    def commit(self, state: StubState, path: Tensor, path_lengths: Tensor) -> None:
        """Do nothing: the same tree is grown again."""


def in_turn(calls: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call all in turn, so that they share what else the machine does; the first two rounds are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 2):
        for name, call in calls.items():
            taken = call()
            if number > 1:
                seconds[name].append(taken)
    return seconds


def measure_growth(
    name: str, growth: Growth, temperature: float, table: Tensor, nodes: int, repeats: int
) -> dict[str, Any]:
    """Grow a tree again and again, in turn with the floor: softmax and top-k of as many rows."""
    lm, bound = StubLM(table), growth.bind(Sampling(temperature))
    zero = torch.zeros(1, dtype=torch.long)
    run = ModelDrafter(cast(TreeLM, lm)).start(lm.vocab_size, [[1, 2, 3]], Random(0, zero, zero))
    pending = torch.tensor([4])
    draft = run.propose(pending, bound, nodes + 1)
    rows = lm.rows

    def grow() -> float:
        inside, begin = lm.seconds, time.process_time()
        run.propose(pending, bound, nodes + 1)
        return time.process_time() - begin - (lm.seconds - inside)

    def floor() -> float:
        logits, begin = table[:, :rows], time.process_time()
        logits.softmax(-1).topk(RANKS, -1)
        return time.process_time() - begin

    seconds = in_turn({"grow": grow, "floor": floor}, repeats)
    ratios = [grown / least for grown, least in zip(seconds["grow"], seconds["floor"], strict=True)]
    return {
        "growth": name, "temperature": temperature, "vocab": lm.vocab_size, "nodes": draft.tree.tokens.shape[1] - 1,
        "rows": rows, "grow_ms": 1e3 * statistics.median(seconds["grow"]),
        "floor_ms": 1e3 * statistics.median(seconds["floor"]), "ratio": statistics.median(ratios),
    }  # fmt: skip


def make_text(tokens: int, vocab: int, seed: int) -> list[int]:
    """Make a text that repeats itself: tokens by Zipf's law, half of it copies of what came before."""
    generator = np.random.default_rng(seed)
    text = np.minimum(generator.zipf(1.3, tokens), vocab) - 1
    place = 1000
    while place < tokens - 100:
        if generator.random() < 0.5:
            length, source = int(generator.integers(5, 40)), int(generator.integers(0, place - 50))
            text[place : place + length] = text[source : source + length]
            place += length
        place += int(generator.integers(5, 40))
    return cast(list[int], text.tolist())


def retrieval_calls(
    text: list[int], folder: Path, vocab: int
) -> Iterator[tuple[str, Callable[[int], Callable[[], object]]]]:
    """Give what lays out a tree of 32 nodes, by the number of the call; each begins where the text was before."""
    generator = np.random.default_rng(1)
    places = generator.integers(100, len(text) - 100, 4096)
    automaton = SuffixAutomaton(text)

    def own(number: int) -> Callable[[], object]:
        automaton.extend(text[places[number] : places[number] + 5])
        return lambda: automaton.tree(TREE_NODES)

    yield "own text", own
    Datastore.build([text], vocab).save(folder / "text.store")
    store = Datastore.load(folder / "text.store")

    def stored(number: int) -> Callable[[], object]:
        context = text[places[number] - 40 : places[number]]
        return lambda: store.tree(context, TREE_NODES)

    yield "store", stored


def measure_retrieval(vocab: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Time reading a text and laying out trees from it."""
    text = make_text(TEXT_TOKENS, vocab, 0)
    SuffixAutomaton(text[:100]).tree(4)  # compiles
    begin = time.process_time()
    SuffixAutomaton(text)
    yield {"retrieval": "extend", "tokens": len(text), "tokens_per_s": len(text) / (time.process_time() - begin)}
    with tempfile.TemporaryDirectory() as folder:
        for name, prepare in retrieval_calls(text, Path(folder), vocab):
            seconds = []
            for number in range(repeats + 2):
                call = prepare(number)
                begin = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - begin)
            times = sorted(seconds[2:])
            yield {
                "retrieval": name, "tokens": len(text), "nodes": TREE_NODES, "tree_ms": 1e3 * statistics.median(times),
                "tree_ms_90": 1e3 * times[9 * len(times) // 10],
            }  # fmt: skip


def main() -> None:
    """Measure, print a table and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for results.jsonl and run.json")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--nodes", type=int, default=64, help="most drafted nodes, the root not counted")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = SHARPNESS * torch.randn(
        1, 2 * arguments.nodes + 256, arguments.vocab, generator=torch.Generator().manual_seed(0)
    )
    records: list[dict[str, Any]] = []
    print(f"{'growth':16} {'T':>4} {'nodes':>5} {'rows':>4} {'ms':>7} {'softmax + top-k':>15} {'ratio':>6}")
    for temperature in (0.0, 0.8):
        for name, growth in GROWTHS.items():
            found = measure_growth(name, growth, temperature, table, arguments.nodes, arguments.repeats)
            records.append(found)
            print(
                f"{name:16} {temperature:4} {found['nodes']:5} {found['rows']:4} {found['grow_ms']:7.2f} "
                f"{found['floor_ms']:15.2f} {found['ratio']:6.2f}"
            )
    for found in measure_retrieval(arguments.vocab, 10 * arguments.repeats):
        records.append(found)
        print(
            ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in found.items())
        )
    if arguments.out:
        write(
            arguments.out, records, {"vocab": arguments.vocab, "nodes": arguments.nodes, "repeats": arguments.repeats}
        )


def write(out: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """Write the records and what they were measured with."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    about = {"config": config, "environment": {**environment(), "numba": numba.__version__}}
    (out / "run.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
