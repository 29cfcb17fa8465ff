"""Training SpecBlock heads: the loss beside plain blocks run one by one, and its gradient.

Run: python -m pytest tests/distill/test_specblock.py
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plain_heads import PlainBlocks
from safetensors.torch import load_file
from torch import Tensor

import stree
from stree.distill.heads import new_head
from stree.distill.heads.network import head_loss, outputs_of

BLOCKS, SLOTS = 3, 4


def rounded(target: stree.TreeLM, folder: Path) -> Any:
    """Make a head in training whose weights bfloat16 can hold, larger than at the beginning."""
    network = new_head(target, "specblock", 0)
    torch.manual_seed(1)
    weights = {name: value + 0.2 * torch.randn_like(value) for name, value in network.state_dict().items()}
    network.load_state_dict({name: value.bfloat16().float() for name, value in weights.items()})
    network.save(folder)
    return network


def plain_rank_loss(rows: list[tuple[Tensor, int]]) -> tuple[float, float]:
    """The loss of a slot's rank head by the paper's words, row by row: sum and weights."""
    total = weights = 0.0
    for logits, label in rows:
        count = sum(other == label for _, other in rows)
        soft = [1 / (1 + abs(c - label) + max(label - c, 0)) ** 2 for c in range(4)]
        logprobs, likeliest = logits.log_softmax(0).tolist(), int(logits.argmax())
        entropy = -sum(part / sum(soft) * logprob for part, logprob in zip(soft, logprobs, strict=True))
        weight = min(1.0, 10 / count)
        total += weight * entropy * (1 + abs(label - likeliest) + max(label - likeliest, 0))
        weights += weight
    return total, weights


def plain_loss(plain: PlainBlocks, tokens: Tensor, logits: Tensor, hidden: Tensor) -> float:
    """The loss of a window: blocks hang below random slots behind every token, each run alone."""
    count, chooser, text = len(tokens) - BLOCKS * SLOTS, random.Random(int(tokens.sum())), list[int]()
    features, first = plain.project(hidden), list[Any]()
    for pair in range(count):
        outputs, columns = plain.block(int(tokens[pair + 1]), features[pair], pair, text)
        first.append((outputs, columns, [*text]))
        text += columns
    total, offset, blocks = 0.0, 1, first
    for number in range(BLOCKS):
        slots = 0.0
        valid, ranked = [True] * count, [True] * count
        rank_total = rank_weights = 0.0
        for slot in range(SLOTS):
            kept, of_rank = list[float](), list[tuple[Tensor, int]]()
            was_valid, was_ranked = list(valid), list(ranked)
            for pair, (outputs, _, _) in enumerate(blocks):
                wanted, found = logits[pair + offset + slot].double(), plain.logits(outputs[slot])
                rank = int((found > found[int(wanted.argmax())]).sum())
                label = 0 if rank == 0 else 1 if rank < 4 else 2 if rank < 10 else 3
                if was_valid[pair]:
                    p, q = wanted.log_softmax(0), found.log_softmax(0)
                    kept.append(float((p.exp() * (p - q)).sum()))
                    valid[pair] = label == 0
                if was_ranked[pair]:
                    of_rank.append((plain.rank_logits(outputs[slot]), label))
                    ranked[pair] = int(of_rank[-1][0].argmax()) == label
            slots += 0.8**slot * (sum(kept) / len(kept) if kept else 0.0)
            found_total, found_weights = plain_rank_loss(of_rank)
            rank_total, rank_weights = rank_total + found_total, rank_weights + found_weights
        total += slots / sum(0.8**slot for slot in range(SLOTS)) + rank_total / max(rank_weights, 1.0)
        end = chooser.randint(1, SLOTS)
        offset += end
        if number < BLOCKS - 1:
            below = list[Any]()
            for pair, (outputs, columns, visible) in enumerate(blocks):
                seen = [*visible, *columns[:end]]
                more = plain.block(int(tokens[pair + offset]), outputs[end - 1], pair, seen)
                below.append((*more, seen))
            blocks = below
    return total / BLOCKS


def test_the_loss_is_that_of_blocks_beside_the_target(target: stree.TreeLM, tmp_path: Path) -> None:
    network = rounded(target, tmp_path)
    config = network.config()
    heads = config.get("num_attention_heads", 32), config.get("num_key_value_heads", 32)
    windows = torch.randint(1, 30, (1, 21), generator=torch.Generator().manual_seed(0))
    outputs = outputs_of(target, network.hidden_layers)
    logits, hidden = outputs(windows[:, :-1])
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = target.model.get_output_embeddings().weight  # not rounded in training
    embedding = target.model.get_input_embeddings().weight
    plain = PlainBlocks(weights, embedding, SLOTS, heads, 10_000.0, 1e-6)
    with torch.no_grad():
        expected = plain_loss(plain, windows[0, :-1], logits[0], hidden[0])
    loss = head_loss(outputs)
    assert float(loss(network, windows).detach()) == pytest.approx(expected, rel=2e-5)
    parameters = [*network.parameters()]
    gradients = torch.autograd.grad(loss(network, windows), parameters)
    parameter, gradient = max(zip(parameters, gradients, strict=True), key=lambda pair: float(pair[1].abs().max()))
    place, sides = int(gradient.abs().argmax()), list[float]()
    with torch.no_grad():
        for change in (2e-4, -4e-4):
            parameter.view(-1)[place] += change
            sides.append(float(loss(network, windows)))
    assert (sides[0] - sides[1]) / 4e-4 == pytest.approx(float(gradient.flatten()[place]), rel=2e-2)
