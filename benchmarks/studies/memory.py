"""Bytes of a pending node against bytes of one full state, for published sizes, on meta tensors.

Run with ``python -m benchmarks.studies.memory``; it appends to benchmarks/results/memory/results.jsonl and prints a
table.  Sizes are written down here, so that nothing is fetched; the tensors are those that decoding would allocate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from benchmarks.report import table
from stree.bench.records import ROOT, append, environment
from stree.cli.info import describe_model
from stree.models.native import config_of_native

# Bars of docs/gpu.md: nodes whose stash takes as much memory as one full state.
BARS = {"mamba2": 100, "nemotron_h": 100, "granitemoehybrid": 100, "qwen3_next": 55}
NEMOTRON_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}


def published() -> dict[str, Any]:
    """Write down the configs, by the models' names."""
    nemotron = [NEMOTRON_KINDS[kind] for kind in NEMOTRON_PATTERN]
    granite = ["full_attention" if layer in (5, 15, 25, 35) else "linear_attention" for layer in range(40)]
    return {
        "mamba2-2.7b": config_of_native(
            {
                "d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}, "rms_norm": True,
                "pad_vocab_size_multiple": 16, "tie_embeddings": True,
            }
        ),
        "Nemotron-H-8B": _config(
            "nemotron_h", hidden_size=4096, vocab_size=131072, layers_block_type=nemotron, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, intermediate_size=21504, mamba_num_heads=128, mamba_head_dim=64,
            ssm_state_size=128, n_groups=8, conv_kernel=4,
        ),
        "Granite-4.0-H-tiny": _config(
            "granitemoehybrid", hidden_size=1536, vocab_size=100352, num_hidden_layers=40, layer_types=granite,
            num_attention_heads=12, num_key_value_heads=4, intermediate_size=512, shared_intermediate_size=1024,
            num_local_experts=64, num_experts_per_tok=6, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128,
            mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, tie_word_embeddings=True,
        ),
        "Qwen3-Next-80B": _config(
            "qwen3_next", hidden_size=2048, vocab_size=151936, num_hidden_layers=48, num_attention_heads=16,
            num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
            linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=512,
            num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        ),
    }  # fmt: skip


def record_of(name: str, report: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, Any]:
    """Make a record: bytes of a node's factors, and of a full state."""
    return {
        "bench": "memory",
        "provider": "stree",
        "params": {"model": name, "family": report["family"], "layers": report["layers"]},
        "dtype": report["dtype"],
        "metric": "stash",
        "unit": "bytes/node",
        "value": report["stash_bytes_per_node"],
        "state_bytes": report["state_bytes"],
        "nodes_per_state": round(report["nodes_per_state"], 1),
        "bar": BARS[report["family"]],
        "kv_stash_bytes": report["kv_stash_bytes_per_node"],
        "num_parameters": report["num_parameters"],
        "env": env,
    }


def rows(records: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the lines of the table that docs/results.md shows."""
    for record in records:
        state, node = record["state_bytes"] / 2**20, record["value"] / 2**10
        ratios = (f"1/{record[name]:.0f}" for name in ("nodes_per_state", "bar"))
        yield [record["params"]["model"], f"{state:.0f} MiB", f"{node:.0f} KiB", *ratios]


def _config(model_type: str, **sizes: Any) -> Any:
    """Make a transformers config."""
    return CONFIG_MAPPING[model_type](**sizes)


def main() -> None:
    """Measure all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "memory" / "results.jsonl")
    arguments = parser.parse_args()
    env = environment()
    records = [record_of(name, describe_model(config, torch.bfloat16), env) for name, config in published().items()]
    append(arguments.out, records)
    print(table(["model", "one full state", "a node", "ratio", "bar"], rows(records)))
    print(json.dumps(records))


if __name__ == "__main__":
    main()
