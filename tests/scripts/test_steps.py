"""Step times on a GPU: what they are set beside, and the peer that is called as its own decode calls it."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny_family_models import family_model

from benchmarks.gpu import steps
from benchmarks.gpu.run import Run
from stree import TreeLM
from stree.bench.profile import bytes_moved
from stree.models.state_size import weight_bytes

CPU = torch.device("cpu")


@pytest.mark.slow
def test_records_set_a_step_beside_its_bytes() -> None:
    run = Run(CPU, 10.0, None)
    steps.measure(run, True)
    records = run.records
    ours = [r for r in records if r["provider"] == "eager"]
    assert {r["params"]["model"] for r in ours} == {"tiny-mamba2", "tiny-drafter", "tiny-bamba"}
    for model in ("tiny-mamba2", "tiny-bamba"):
        of_model = {r["params"]["n"]: r for r in ours if r["params"]["model"] == model}
        assert list(of_model) == list(steps.NODES)
        for record in of_model.values():
            assert record["bound_us"] == pytest.approx(1e6 * sum(record["bytes"].values()) / record["bytes_per_s"])
            assert record["of_bound"] == pytest.approx(record["bound_us"] / record["p50"])
            assert record["state_dtype"] == "float32" and record["state_bytes"] > 0
    peers = [r for r in records if r["provider"] == "mamba_ssm"]
    assert {r["unavailable"] for r in peers} == {"mamba-ssm needs a CUDA device", "mamba-ssm has no such model"}
    assert not any("problem" in r for r in records)


def test_a_timed_step_goes_on_from_the_path_of_the_one_before() -> None:
    lm = TreeLM(family_model("bamba"))
    lm.defers_commit = True
    state = steps.state_for(lm, 2, 16)
    step = steps.step_of(lm, state, 4, 16)
    for number in range(1, 4):
        assert step().shape == (2, 4, lm.vocab_size)
        assert state.lengths.tolist() == [16 + 3 * number] * 2  # root, its child, and that one's
        assert state.deferred is not None and state.deferred.lengths.tolist() == [3, 3]


def test_of_experts_those_are_counted_that_uniform_routing_reaches() -> None:
    lm = TreeLM(family_model("qwen3_next"))
    experts = sum(p.nbytes for name, p in lm.model.named_parameters() if ".experts." in name)
    assert experts > 0
    for batch, n in ((1, 1), (2, 8)):
        missed = (1 - 2 / 4) ** (batch * n)  # two of four a token
        whole = bytes_moved(lm, batch=batch, length=9, nodes=n)
        moved = steps.bytes_of(lm, batch, 9, n)
        assert moved["weights"] == pytest.approx(weight_bytes(lm) - missed * experts, abs=1)
        assert {k: v for k, v in moved.items() if k != "weights"} == {k: v for k, v in whole.items() if k != "weights"}
