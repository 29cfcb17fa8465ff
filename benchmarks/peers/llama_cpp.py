"""A Mamba-2 model of random weights in this library beside llama.cpp: a plain step, and the prefill of a prompt.

Run with ``python -m benchmarks.peers.llama_cpp --node-modules FOLDER [--dtype bfloat16] [--out FILE]``, where FOLDER is
one in which ``npm install node-llama-cpp`` was run (llama.cpp built for this processor), and the package ``gguf`` is
installed.  Both get the same weights, the same tokens and one thread; each round measures one after the other, by
processor time, and ratios are of one round.  A plain step here is ``verify`` of one node, the choice of its token, and
``commit``.  The greedy tokens of both after the prompt are compared: in float32 they must be the same.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Literal

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from benchmarks.peers.gguf_file import write_mamba2
from benchmarks.report import study
from stree import TokenTree, TreeLM
from stree.bench.records import Record

PROMPT, SCRIPT = 512, Path(__file__).with_suffix(".mjs")
TITLES = ("dtype", "what", "here, ms", "llama.cpp, ms", "here / llama.cpp", "least", "greatest")


class Peer:
    """llama.cpp in a process of its own, which answers one line for each line.

    Args:
        file: the model as GGUF.
        folder: where node-llama-cpp is installed.
    """

    def __init__(self, file: Path, folder: Path) -> None:
        self._process = subprocess.Popen(
            ["node", str(SCRIPT), str(file), "1"], cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.build = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"node {SCRIPT.name} ended with status {self._process.wait()}")
        return line.strip()

    def ask(self, line: str) -> tuple[float, int]:
        """Return the milliseconds of processor time that a line took, and the next token."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        spent, _, token = self._read().split()
        return float(spent), int(token)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Ours:
    """The same model, compiled."""

    def __init__(self, model: Mamba2ForCausalLM) -> None:
        self._lm = TreeLM(model)
        self._lm.compile()
        self._state = self._lm.new_state(1, 4096, 1)
        self._tokens = torch.arange(5, 5 + PROMPT)[None]
        self._parents, self._path = torch.tensor([[-1]], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
        self._token = 0

    def prefill(self) -> int:
        """Run the prompt."""
        self._state.reset()
        self._token = int(self._lm.prefill(self._state, self._tokens).argmax())
        return self._token

    def step(self) -> int:
        """Run one plain step."""
        logits = self._lm.verify(self._state, TokenTree(torch.tensor([[self._token]]), self._parents))
        self._token = int(logits.argmax())
        self._lm.commit(self._state, self._path, torch.ones(1, dtype=torch.int32))
        return self._token


def timed(call: Callable[[], int]) -> tuple[float, int]:
    """Return milliseconds of processor time, and the token."""
    began = time.process_time()
    token = call()
    return 1e3 * (time.process_time() - began), token


def measure(ours: Ours, peer: Peer, dtype: str, rounds: int) -> list[Record]:
    """Measure both in turns."""
    times: dict[str, list[tuple[float, float]]] = {"prefill": [], "step": []}
    pairs = []
    for _ in range(rounds + 1):
        for what, line, call in [("prefill", f"prefill {PROMPT}", ours.prefill), *[("step", "token", ours.step)] * 8]:
            (here, token), (there, other) = timed(call), peer.ask(line)
            times[what].append((here, there))
            pairs.append((token, other))
    same = sum(token == other for token, other in pairs)
    if dtype == "float32" and same < len(pairs):
        raise SystemExit(f"only {same} of {len(pairs)} greedy tokens are the same: {pairs[:9]}")
    records: list[Record] = []
    for what, both in times.items():
        kept = both[len(both) // (rounds + 1) :]  # the first round compiles
        ratios = sorted(here / there for here, there in kept)
        records.append({
            "bench": "llama_cpp", "dtype": dtype, "what": what, "here_ms": statistics.median(h for h, _ in kept),
            "llama_cpp_ms": statistics.median(t for _, t in kept), "ratio": statistics.median(ratios),
            "ratio_range": [ratios[0], ratios[-1]], "pairs": len(kept), "same_tokens": same / len(pairs),
            "llama_cpp": peer.build,
        })  # fmt: skip
    return records


def cells(record: Record) -> tuple[object, ...]:
    """Return the cells of a record's row."""
    times = [f"{record[name]:.1f}" for name in ("here_ms", "llama_cpp_ms")]
    ratios = [f"{ratio:.2f}" for ratio in (record["ratio"], *record["ratio_range"])]
    return record["dtype"], record["what"], *times, *ratios


def records(node_modules: Path, dtype: Literal["float32", "bfloat16"] = "float32", rounds: int = 10) -> list[Record]:
    """Write the model, and run both.

    Args:
        node_modules: the folder where node-llama-cpp is.
        dtype: of the weights.
        rounds: of one prefill and eight steps.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=50288, hidden_size=768, num_hidden_layers=24, num_heads=24, head_dim=64, state_size=128, n_groups=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Mamba2ForCausalLM(config).to(getattr(torch, dtype)).eval()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_mamba2(model, file)
        with closing(Peer(file, node_modules)) as peer:
            return measure(Ours(model), peer, dtype, rounds)


if __name__ == "__main__":
    study(records, TITLES, cells)
