"""A step waits for the device nowhere: what a GPU would run is run on the CPU under a watch over host reads.

Run: python -m pytest tests/test_waits.py
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch
from host_reads import NoHostReads
from tiny_models import grafted, random_texts, tiny_model

from stree.drafters import ModelDrafter
from stree.growth import Calibrated, Chain, DySpec, Growth, Static
from stree.kernels import topology
from stree.sampling import Random, Sampling
from stree.verify import accept

STEPS = 10
GROWTHS: dict[str, Growth] = {
    "chain": Chain(3),
    "static": Static([2, 2]),
    "dyspec": DySpec(depth=3),
    "heap": DySpec(form="heap"),
    "calibrated": Calibrated(depth=3),
}


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(topology, "waits_always", True)
    yield


def run_steps(growth: Growth, temperature: float, watch: bool) -> tuple[list[list[int]], set[int]]:
    """Run the loop's steps without the loop, as ``Session`` does; return texts and the numbers of nodes."""
    target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))
    texts = random_texts(random.Random(0), [6, 6])
    sampling, lengths = Sampling(temperature), torch.tensor([6, 6])
    state = target.new_state(2, 512, 16)
    logits = target.prefill(state, torch.tensor(texts))
    rng = Random(0, torch.arange(2), lengths)
    run = ModelDrafter(draft).start(target.vocab_size, texts, rng)
    pending = logits.argmax(-1)
    bound = growth.bind(sampling)
    emitted, sizes = [pending], set()
    for _ in range(STEPS):
        with NoHostReads() if watch else torch.no_grad():
            proposal = run.propose(pending, bound, 12)
            logits = target.verify(state, proposal.tree)
            acceptance = accept(
                proposal.tree, logits, sampling, rng.at(state.lengths.long()), proposal.laws, "auto", proposal.max_depth
            )
            target.commit(state, acceptance.path, acceptance.path_lengths)
            run.observe(acceptance)
            path = acceptance.path.clamp(min=0).long()
            tokens = proposal.tree.tokens.gather(1, path).masked_fill(acceptance.path < 0, -1)
            pending = acceptance.next_token
        emitted += [*tokens[:, 1:].T, pending]
        sizes.add(proposal.tree.tokens.shape[1])
    rows = torch.stack(emitted, 1).tolist()
    return [[token for token in row if token >= 0] for row in rows], sizes


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", GROWTHS)
def test_ten_steps_read_nothing_and_have_one_shape(name: str, temperature: float, as_on_a_device: None) -> None:
    _, sizes = run_steps(GROWTHS[name], temperature, watch=True)
    assert len(sizes) == 1, f"trees of {sizes} nodes: a graph could not be replayed"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", GROWTHS)
def test_what_a_device_would_run_emits_what_the_cpu_emits(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = copy.deepcopy(GROWTHS[name])
    on_host, _ = run_steps(growth, temperature, watch=False)
    monkeypatch.setattr(topology, "waits_always", True)
    assert run_steps(growth, temperature, watch=False)[0] == on_host


def test_the_watch_sees_what_the_cpu_reads() -> None:
    with pytest.raises(AssertionError, match="reads the device"):
        run_steps(GROWTHS["dyspec"], 0.8, watch=True)
