"""``stree info``: sizes from a config alone equal those of tensors in memory, and the published models' arithmetic."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from helpers.tiny_family_models import family_model, matrix
from transformers import GPT2Config

import stree
from benchmarks.studies import memory as bench_memory
from stree.cli import main
from stree.cli.info import describe_model


def allocated(lm: stree.TreeLM, max_length: int, max_nodes: int) -> int:
    return lm.new_state(1, max_length, max_nodes).num_bytes


@pytest.mark.parametrize("family", matrix())
def test_sizes_without_weights_are_those_of_the_tensors_in_memory(family: str) -> None:
    model = family_model(family, torch.bfloat16)
    lm, report = stree.TreeLM(model), describe_model(model.config, torch.bfloat16)
    stash = report["stash_bytes_per_node"] + report["kv_stash_bytes_per_node"]
    assert allocated(lm, 5, 9) - allocated(lm, 5, 6) == 3 * stash
    assert allocated(lm, 9, 6) - allocated(lm, 5, 6) == 4 * report["kv_bytes_per_token"]
    sequence = lm.new_state(2, 1, 1).num_bytes - allocated(lm, 1, 1)  # without what all sequences share
    assert sequence - stash - report["kv_bytes_per_token"] == report["state_bytes"] + report["window_bytes"]
    assert report["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert report["is_supported"] and report["num_layers"] == model.config.num_hidden_layers
    assert (report["nodes_per_state"] is None) == (report["state_bytes"] == 0)


# Layers x heads x headdim x dstate x 4 bytes, and a node's convolution inputs and outputs at 2 bytes and step sizes at
# 4; of the gated delta rule: 16 key and 32 value heads of 128, inputs of q, k, v, keys at 2, writes and decays at 4.
PUBLISHED = {
    "mamba2-2.7b": (64 * 80 * 64 * 128 * 4, 64 * (2 * 2 * (5120 + 256) + 4 * 80)),
    "Nemotron-H-8B": (24 * 128 * 64 * 128 * 4, 24 * (2 * 2 * (8192 + 2048) + 4 * 128)),
    "Granite-4.0-H-tiny": (36 * 48 * 64 * 128 * 4, 36 * (2 * 2 * (3072 + 256) + 4 * 48)),
    "Qwen3-Next-80B": (36 * 32 * 128 * 128 * 4, 36 * (2 * 8192 + 2 * 2048 + 4 * 4096 + 4 * 32)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_meet_the_bars(name: str) -> None:
    record = bench_memory.record_of(name)
    assert (record["state_bytes"], record["value"]) == PUBLISHED[name]
    assert record["nodes_per_state"] >= record["bar"]


def test_the_page_tells_what_the_document_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    page = capsys.readouterr().out
    assert main(["info", "bundled", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    lines = dict(line.split(maxsplit=1) for line in page.splitlines() if line.count(" ") and "," not in line[:14])
    assert (lines["family"], lines["supported"]) == (report["family"], "yes")
    assert lines["layers"] == "8: 6 Mamba-2, 2 attention"
    assert lines["parameters"] == f"{report['num_parameters']:,} (bfloat16)"
    assert lines["state"] == f"{report['state_bytes'] / 1024:.1f} KiB a sequence"
    assert lines["stash"] == (
        f"{report['stash_bytes_per_node'] / 1024:.1f} KiB a node, 1/{report['nodes_per_state']:.0f} of a state"
    )
    assert main(["info", "--json", "--dtype", "float32"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_bytes_per_token"] == 2 * report["kv_bytes_per_token"]


def test_a_config_alone_is_enough_and_says_why_it_is_not_supported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family_model("llama").config.save_pretrained(tmp_path / "llama")
    assert main(["info", str(tmp_path / "llama")]) == 0
    assert re.search(r"stash +0 B a node\n", capsys.readouterr().out), "no recurrent state, no ratio"
    GPT2Config(n_layer=1).save_pretrained(tmp_path / "gpt2")
    assert main(["info", str(tmp_path / "gpt2")]) == 0
    assert "no: model family 'gpt2' is not supported; supported: " in capsys.readouterr().out
    assert main(["info", str(tmp_path / "gpt2"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_supported"] is False and "state_bytes" not in report
    config = family_model("bamba").config
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert "the checkpoint is quantised" in describe_model(config, torch.bfloat16)["reason"]
