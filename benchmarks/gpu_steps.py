"""Times whole forward passes over trees at the shapes of published models, with random weights.

Each verify is captured in a CUDA graph of its own and replayed; the same calls without a graph, and transformers' own
forward of one token, show what launching costs.  Without a GPU tiny models are run once, without graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_clock import time_graph
from shapes import binary_tree
from transformers import AutoModelForCausalLM, BambaConfig, Mamba2Config

import stree
from stree.bench.records import Record, quantiles

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
NODES = (1, 4, 8, 16, 32, 64)
SIZES = ((1, 256), (8, 256), (1, 4096), (8, 4096))  # batch, tokens of context


def configurations(smoke: bool) -> dict[str, Any]:
    """Give the models' configurations: published ones, or tiny ones of the same kinds."""
    if smoke:
        small = Mamba2Config(num_hidden_layers=2, hidden_size=32, state_size=16, head_dim=16, num_heads=4, n_groups=1,
                             vocab_size=64, chunk_size=16)  # fmt: skip
        hybrid = BambaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_attention_heads=2,
                             num_key_value_heads=1, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16,
                             mamba_d_state=16, vocab_size=64, mamba_chunk_size=16)  # fmt: skip
        return {"tiny-mamba2": small, "tiny-bamba": hybrid}
    return {
        "mamba2-2.7b": Mamba2Config(num_hidden_layers=64, hidden_size=2560, state_size=128, head_dim=64, num_heads=80,
                                    n_groups=1, vocab_size=50288, tie_word_embeddings=True),
        "Bamba-9B": BambaConfig(attn_layer_indices=[9, 18, 27]),  # else the defaults, which are Bamba-9B's
    }  # fmt: skip


def measure(device: torch.device, smoke: bool, deadline: float) -> Iterator[Record]:
    """Give a record for every model, size and number of nodes until the time is up."""
    for name, config in configurations(smoke).items():
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[device.type])
        for batch, context in ((1, 8),) if smoke else SIZES:
            base = {
                "bench": "step", "params": {"model": name, "batch": batch, "context": context}, "metric": "latency",
                "unit": "us", "dtype": str(model.dtype)[6:],
                "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
            }  # fmt: skip
            if time.monotonic() > deadline:
                yield base | {"bench": "unfinished"}
                return
            for record in _sizes(stree.TreeLM(model), batch, context):
                yield base | record | {"params": {**base["params"], **record["params"]}}
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _sizes(lm: stree.TreeLM, batch: int, context: int) -> Iterator[Record]:
    """Time trees of every size on one state, which verification leaves as it is."""
    state = _state(lm, batch, context)
    for n in NODES:
        tokens = torch.randint(lm.vocab_size, (batch, n)).to(lm.device)  # a failed capture may spoil the device's draws
        verify = partial(lm.verify, state, stree.TokenTree.unchecked(tokens, binary_tree(batch, n, lm.device)))
        record = {"params": {"n": n}, "state_bytes": state.num_bytes}
        yield record | {"provider": "eager"} | _eager(verify)
        if lm.device.type == "cuda":
            yield record | {"provider": "graph"} | _graph(verify)
    yield {"params": {}, "provider": "transformers"} | _eager(_one_token(lm, batch))


def _state(lm: stree.TreeLM, batch: int, context: int) -> Any:
    """Make a state that claims ``context`` tokens; what it holds is random, since only time is measured."""
    state = lm.new_state(batch, context + 64, max(NODES))
    lm.prefill(state, torch.randint(lm.vocab_size, (batch, 4), device=lm.device))
    for stack in state.stacks.values():
        for _, tensor in stack._tensors():
            if tensor.shape[2:3] and not bool(tensor.any()):
                tensor.normal_(std=0.02)
    state.lengths.fill_(context)
    state.length_bound = context
    return state


def _one_token(lm: stree.TreeLM, batch: int) -> Any:
    """Give a call of transformers' own forward for one token after a short prompt."""
    options: Record = {"use_cache": True, lm.family.cache_argument: lm.family.new_cache(lm.model.config)}
    lm.model(torch.ones(batch, 8, dtype=torch.long, device=lm.device), **options)
    if lm.family.takes_positions:
        options["position_ids"] = torch.full((batch, 1), 8, device=lm.device)
    return partial(lm.model, torch.ones(batch, 1, dtype=torch.long, device=lm.device), **options)


def _eager(call: Callable[[], Any], runs: int = 10) -> Record:
    """Time plain calls, each waited for."""
    times = []
    for _ in range(2 + runs):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return quantiles(times[2:])


def _graph(call: Callable[[], Any]) -> Record:
    """Time replays of a captured call; a call that cannot be captured is reported with its reason."""
    try:
        return time_graph(call, torch.device("cuda"), 1)
    except Exception as problem:  # a finding for the table
        torch.cuda.synchronize()
        return {"problem": f"{type(problem).__name__}: {problem}"[:500]}
