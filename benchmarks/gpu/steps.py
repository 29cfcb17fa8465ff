"""Times whole steps of a target at the shapes of published models, with random weights: verify of a tree, and commit.

A step starts as in the middle of a text: verify applies the deferred commit of the path of the step before, and commit
defers its own.  Steps are timed as replays of a CUDA graph and as plain calls, beside the same graph without fused
layers, transformers' own forward of one token, and mamba-ssm's one-token decode with its CUDA graph where it is
installed.  Every record has the bytes that the step must move, their time at the bandwidth of a copy in the same run,
and the ratio to one node.  Without a GPU tiny models are run, without graphs.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BambaConfig, Mamba2Config, PreTrainedConfig

import stree
from benchmarks.gpu.clock import time_graph
from benchmarks.gpu.peer_steps import mamba_ssm_step, why_not
from benchmarks.report import failure
from benchmarks.shapes import binary_tree
from benchmarks.studies.memory import published
from stree.bench.profile import bytes_moved, copy_bandwidth
from stree.bench.records import Record, quantiles
from stree.decode.cuda_graphs import recovering
from stree.models.native import config_of_native

__all__ = ["DRAFTERS", "NODES", "bytes_of", "configurations", "measure", "model_of", "state_for", "step_of", "timed"]

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
NODES = (1, 4, 8, 16, 32, 64)
PLAIN_NODES = (1, 16)  # that are timed without fused layers, too
SIZES = ((1, 256), (8, 256), (1, 4096), (8, 4096))  # batch, tokens of context
PATH = 3  # most nodes of a committed path
ROOM = 512  # tokens that repeated steps may commit
KEPT_LAYERS = {"Qwen3-Next-80B": 12}  # a quarter of the model, 40 GB, fits
# A drafter a twentieth of the target's size, for composite figures (`end_to_end.py`).
DRAFTERS = {"mamba2-2.7b": "mamba2-130m", "Nemotron-H-8B": "mamba2-400m", "tiny-mamba2": "tiny-drafter"}


def configurations(smoke: bool) -> dict[str, PreTrainedConfig]:
    """Configurations of the models: published ones, or tiny ones of the same kinds."""
    if smoke:
        small = Mamba2Config(num_hidden_layers=2, hidden_size=32, state_size=16, head_dim=16, num_heads=4, n_groups=1,
                             vocab_size=64, chunk_size=16)  # fmt: skip
        hybrid = BambaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_attention_heads=2,
                             num_key_value_heads=1, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16,
                             mamba_d_state=16, vocab_size=64, mamba_chunk_size=16)  # fmt: skip
        drafter = Mamba2Config(num_hidden_layers=1, hidden_size=16, state_size=8, head_dim=16, num_heads=2, n_groups=1,
                               vocab_size=64, chunk_size=16)  # fmt: skip
        return {"tiny-mamba2": small, "tiny-drafter": drafter, "tiny-bamba": hybrid}
    whole = published()
    shapes = {"mamba2-2.7b": whole.pop("mamba2-2.7b"), "mamba2-130m": _mamba2(768, 24, 50277)}
    shapes |= {"Nemotron-H-8B": whole.pop("Nemotron-H-8B"), "mamba2-400m": _mamba2(1024, 40, 131072)}
    shapes |= {_name(name): _kept(config, KEPT_LAYERS.get(name)) for name, config in whole.items()}
    shapes["Bamba-9B"] = BambaConfig(attn_layer_indices=[9, 18, 27])  # else the defaults, which are Bamba-9B's
    return shapes


def _mamba2(width: int, layers: int, vocab: int) -> PreTrainedConfig:
    """Make a Mamba-2 as mamba-ssm's published ones are."""
    return config_of_native(
        {
            "d_model": width, "n_layer": layers, "vocab_size": vocab, "ssm_cfg": {"layer": "Mamba2"}, "rms_norm": True,
            "pad_vocab_size_multiple": 16, "tie_embeddings": True,
        }
    )  # fmt: skip


def _name(model: str) -> str:
    """Name of a model, with the number of layers where only a part of it is run."""
    return f"{model}, {KEPT_LAYERS[model]} layers" if model in KEPT_LAYERS else model


def _kept(config: PreTrainedConfig, layers: int | None) -> PreTrainedConfig:
    """Keep the first layers of a model; None keeps all."""
    if layers is not None:
        config.num_hidden_layers = layers
        config.layer_types = config.layer_types[:layers]
    return config


def measure(
    device: torch.device, smoke: bool, deadline: float, names: Collection[str] | None = None,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> Iterator[Record]:  # fmt: skip
    """Yield a record for every model (or those of ``names``), size and number of nodes until the time is up.

    A model or a size that fails gives a record with its problem, and the others are measured.
    """
    bandwidth = copy_bandwidth(device)
    for name, config in configurations(smoke).items():
        if names is not None and name not in names:
            continue
        base = {
            "bench": "step", "params": {"model": name}, "metric": "latency", "unit": "us",
            "dtype": str(DTYPES[device.type])[6:], "bytes_per_s": bandwidth,
        }  # fmt: skip
        if time.monotonic() > deadline:
            yield base | {"bench": "unfinished"}
            return
        for record in _of_model(config, device, ((1, 8),) if smoke else sizes, deadline):
            record |= {"params": {"model": name, **record["params"]}}
            yield base | record | _over_bound(record, bandwidth)
            if record.get("bench") == "unfinished":
                return
        if device.type == "cuda":
            gc.collect()  # what a failure left in cycles
            torch.cuda.empty_cache()


def _of_model(
    config: PreTrainedConfig, device: torch.device, sizes: Sequence[tuple[int, int]], deadline: float
) -> Iterator[Record]:
    """Yield the records of one model; a failure is a record."""
    try:
        lm = model_of(config, device)
    except Exception as problem:  # too large for this device, say
        yield {"params": {}} | failure(problem)
        return
    for batch, context in sizes:
        params, ones = {"batch": batch, "context": context}, dict[str, float]()
        try:
            with recovering(device):
                for record in _records(lm, config, batch, context, deadline):
                    yield record | {"params": params | record["params"]} | _over_one_node(record, ones)
        except Exception as problem:  # one size's failure is a finding, not the end of the others
            yield {"params": params} | failure(problem)


def model_of(config: PreTrainedConfig, device: torch.device) -> stree.TreeLM:
    """Make a model with random weights."""
    with torch.device(device):
        return stree.TreeLM(AutoModelForCausalLM.from_config(config, dtype=DTYPES[device.type]))


def _over_one_node(record: Record, ones: dict[str, float]) -> Record:
    """Set a latency beside that of one node of the same provider, which is kept."""
    if "p50" not in record:
        return {}
    if record["params"]["n"] == 1:
        ones[record["provider"]] = record["p50"]
    one = ones.get(record["provider"])
    return {} if one is None else {"over_one_node": record["p50"] / one}


def _over_bound(record: Record, bandwidth: float) -> Record:
    """Set a latency beside the bound of its bytes."""
    if "p50" not in record or "bytes" not in record:
        return {}
    bound = 1e6 * sum(record["bytes"].values()) / bandwidth
    return {"bound_us": bound, "of_bound": bound / record["p50"]}


def _records(lm: stree.TreeLM, config: PreTrainedConfig, batch: int, context: int, deadline: float) -> Iterator[Record]:
    """Time trees of every size on one state, then the other providers of a one-token step."""
    state = state_for(lm, batch, context)
    for n in NODES:
        record: Record = {"params": {"n": n}}
        for provider in _providers(n, lm.device):
            if time.monotonic() > deadline:
                yield record | {"bench": "unfinished"}
                return
            if state.is_inconsistent:  # by a step that failed half way
                state = state_for(lm, batch, context)
            step = step_of(lm, state, n, context)
            record |= {
                "state_dtype": "float32",
                "state_bytes": state.num_bytes,
                "bytes": bytes_of(lm, batch, context, n),
            }
            lm.fused_layers = provider != "graph, unfused"
            found = _tried(_eager, step) if provider == "eager" else _graph(step)
            lm.fused_layers = True
            yield record | {"provider": provider} | found
    del state, step
    yield {"params": {"n": 1}, "provider": "transformers"} | _tried(lambda: _eager(_one_token(lm, batch)))
    reason = why_not(config, lm.device)
    if reason is None:
        yield from mamba_ssm_step(config, batch, context, lm.dtype)
    else:
        yield {"params": {"n": 1}, "provider": "mamba_ssm", "unavailable": reason}


def _providers(n: int, device: torch.device) -> tuple[str, ...]:
    """Name the ways to run a step of so many nodes."""
    if device.type != "cuda":
        return ("eager",)
    return ("eager", "graph", "graph, unfused") if n in PLAIN_NODES else ("eager", "graph")


def step_of(lm: stree.TreeLM, state: Any, n: int, context: int) -> Callable[[], Any]:
    """A call that verifies a binary tree and commits its leftmost path; the text may not outgrow the state."""
    batch = state.batch_size
    tokens = torch.randint(lm.vocab_size, (batch, n)).to(lm.device)  # a failed capture may spoil the device's draws
    tree = stree.TokenTree.unchecked(tokens, binary_tree(batch, n, lm.device))
    tree = stree.TokenTree.unchecked(tokens, tree.parents, tree.depths, tree.ancestor_mask)  # as a growth leaves it
    length = min(PATH, n.bit_length())
    path = torch.tensor([[2**depth - 1 for depth in range(length)]] * batch, dtype=torch.int32, device=lm.device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=lm.device)
    state.lengths.fill_(context)
    state.length_bound = context

    def step() -> Any:
        logits = lm.verify(state, tree)
        lm.commit(state, path, lengths)
        return logits

    return step


def state_for(lm: stree.TreeLM, batch: int, context: int) -> Any:
    """Make a state that claims ``context`` tokens; what it holds is random, since only time is measured."""
    state = lm.new_state(batch, context + ROOM, max(NODES), fixed_shapes=True)
    lm.prefill(state, torch.randint(lm.vocab_size, (batch, 4)).to(lm.device))
    generator = torch.Generator(lm.device).manual_seed(0)  # not the device's own, as above
    for stack in state.stacks.values():
        for _, tensor in stack.tensors():
            if tensor.shape[2:3] and not bool(tensor.any()):
                tensor.normal_(std=0.02, generator=generator)
    return state


def bytes_of(lm: stree.TreeLM, batch: int, context: int, n: int) -> dict[str, int]:
    """Bytes that a step must move; of experts, as many as uniform routing is expected to reach."""
    moved = bytes_moved(lm, batch=batch, length=context, nodes=n)
    experts = {id(p): p for module in lm.model.modules() if type(module).__name__.endswith("Experts")
               for p in module.parameters()}  # fmt: skip
    if experts:
        chosen = lm.model.config.num_experts_per_tok
        held = sum(p.nbytes for p in experts.values())
        reached = sum(p.nbytes * (1 - (1 - chosen / p.shape[0]) ** (batch * n)) for p in experts.values())
        moved["weights"] += math.ceil(reached) - held
    return moved


def timed(step: Callable[[], Any], device: torch.device) -> Record:
    """Time a step in the way that counts on a device: replays of its graph; plain calls on a CPU."""
    return _graph(step) if device.type == "cuda" else _eager(step)


def _one_token(lm: stree.TreeLM, batch: int) -> Any:
    """A call of transformers' own forward for one token after a short prompt."""
    options: Record = {"use_cache": True, lm.family.cache_argument: lm.family.new_cache(lm.model.config)}
    with torch.no_grad():
        lm.model(torch.ones(batch, 8, dtype=torch.long, device=lm.device), **options)
    if lm.family.takes_positions:
        options["position_ids"] = torch.full((batch, 1), 8, device=lm.device)
    return torch.no_grad()(partial(lm.model, torch.ones(batch, 1, dtype=torch.long, device=lm.device), **options))


def _eager(call: Callable[[], Any], runs: int = 10) -> Record:
    """Time plain calls, with a synchronisation after each."""
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
    return _tried(time_graph, call, torch.device("cuda"), 1)


def _tried(measure: Callable[..., Record], *args: Any) -> Record:
    """Measure, or say why that failed: a finding for the table."""
    try:
        return measure(*args)
    except Exception as problem:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return failure(problem)
