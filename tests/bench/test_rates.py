"""Fitted rates of Sequoia's trees: by recursion over all drawn children, and from the command line into a run."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers.tiny_pairs import save_tiny

from stree.bench.rates import rank_rates
from stree.cli import main
from stree.growth import Sequoia
from stree.growth.sequoia import RATES
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

Probs = tuple[float, ...]


def enumerated(target: Probs, draft: Probs, ranks: int, *, replaces: bool = False) -> list[float]:
    """Rates of one context by recursion: draw a token, test it, go on with both residuals."""
    if not ranks or not sum(draft):
        return [0.0] * ranks
    rates = [0.0] * ranks
    share = [weight / sum(draft) for weight in draft]
    left = [max(p - q, 0.0) for p, q in zip(target, share, strict=True)]
    residual = tuple(weight / max(sum(left), 1e-300) for weight in left)
    for token, probability in enumerate(share):
        chance = min(1.0, target[token] / probability) if probability else 0.0
        rest = tuple(0.0 if other == token and not replaces else q for other, q in enumerate(share))
        rates[0] += probability * chance
        for rank, rate in enumerate(enumerated(residual, rest, ranks - 1, replaces=replaces), 1):
            rates[rank] += probability * (1 - chance) * rate
    return rates


def test_rates_are_those_of_every_order_of_drawn_children() -> None:
    target, draft = (0.5, 0.3, 0.15, 0.05), (0.1, 0.2, 0.3, 0.4)
    expected = torch.tensor(enumerated(target, draft, 3), dtype=torch.float64)
    rows = (torch.tensor(probs, dtype=torch.float64).expand(5000, -1) for probs in (target, draft))
    found = rank_rates(next(rows), next(rows), 3, Sampling(1.0), torch.Generator().manual_seed(0))
    assert (found - expected).abs().max() < 0.005, "40,000 draws: a standard error is at most 0.0025"
    wrong = torch.tensor(enumerated(target, draft, 3, replaces=True), dtype=torch.float64)
    assert (found - wrong).abs().max() > 0.02, "drawing with replacement is told apart"


def test_greedy_rates_are_the_ranks_of_the_target_s_tokens() -> None:
    draft = torch.tensor([[0.1, 0.6, 0.3]]).expand(4, -1)
    target = torch.nn.functional.one_hot(torch.tensor([1, 1, 2, 0]), 3).float()
    assert rank_rates(target, draft, 4, Sampling(0.0), torch.Generator()).tolist() == [0.5, 0.25, 0.25, 0.0]


def test_the_source_of_rates_is_named() -> None:
    assert "source='the bundled pair at temperature 0.8'" in str(Sequoia())
    assert all("source='the caller'" in str(Sequoia(rates=rates)) for rates in ((0.5, 0.2), RATES))


@pytest.mark.slow
def test_a_run_with_fitted_rates_records_them_and_refuses_those_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    models = ["--target", save_tiny(Path("target")), "--drafter", save_tiny(Path("drafter"), seed=1)]
    Path("p.jsonl").write_text("".join(json.dumps({"prompt": f"w{n} w2 w3"}) + "\n" for n in range(4)))
    fit = ["bench", "fit-rates", *models, "--suite", "mine=p.jsonl", "--skip", "2", "--limit", "2", "--ranks", "6"]
    assert main([*fit, "--max-new-tokens", "8", "--temperature", "0,1", "--out", "rates.json"]) == 0
    record = json.loads(Path("rates.json").read_text())
    assert record["contexts"] == 16 and {*record["rates"]} == {"0.0", "1.0"}
    assert 0 < record["rates"]["1.0"][0] < 1 and len(record["rates"]["1.0"]) == 6
    with monkeypatch.context() as patch:
        patch.setattr(TreeLM, "max_length", 10)
        with Path("p.jsonl").open("a") as file:
            file.write(json.dumps({"prompt": "w1 w2"}) + "\n")
        assert main([*fit, "--limit", "3", "--max-new-tokens", "8", "--out", "some.json"]) == 0
        assert "2 of 3 prompts are left out: a prompt and 8 new tokens exceed 10" in capsys.readouterr().err
        assert json.loads(Path("some.json").read_text())["contexts"] == 8
        assert main([*fit, "--max-new-tokens", "9", "--out", "some.json"]) == 2
        assert "no prompt fits: a prompt and 9 new tokens exceed 10" in capsys.readouterr().err
    methods = "sequoia:8x3,sequoia:8x3+depth-stop,sequoia:8x3,rates=0.5/0.25"
    run = ["bench", "run", *models, "--suite", "mine=p.jsonl", "--limit", "1", "--max-new-tokens", "4"]
    assert main([*run, "--methods", "sequoia:8", "--out", "default"]) == 0
    assert "sequoia:8 uses acceptance rates of the bundled pair at temperature 0.8" in capsys.readouterr().err
    run.append("--rates")
    assert main([*run, "rates.json", "--methods", methods, "--temperature", "0,1", "--out", "out"]) == 0
    lines = Path("out/results.jsonl").read_text().splitlines()
    timed = [one for one in map(json.loads, lines) if one["metric"] == "tokens_per_s"]
    for one, temperature in product(timed, (0.0, 1.0)):
        growth = one["params"]["growth"]
        if one["params"]["temperature"] == temperature and "0.25" not in one["provider"]:
            assert f"rates={tuple(record['rates'][str(temperature)])}" in growth
            assert f"on 16 contexts of mine, temperature {temperature:g}" in growth
        elif one["params"]["temperature"] == temperature:
            assert "rates=(0.5, 0.25)" in growth and "source='the caller'" in growth
    assert len(timed) == 6 and "uses acceptance rates of" not in capsys.readouterr().err
    Path("edited.json").write_text(json.dumps({**record, "rates": {"0.0": [0.2, 0.4]}}))
    for options, message in (
        (["rates.json", "--drafter", "target"], "the rates in rates.json are of target and drafter"),
        (["rates.json", "--temperature", "0.7"], "has rates of the temperatures [0.0, 1.0], not of [0.7]"),
        (["edited.json"], "edited.json holds no rates of 'stree bench fit-rates': rates must be positive, not growing"),
        (["p.jsonl"], "p.jsonl holds no rates of 'stree bench fit-rates'"),
    ):
        assert main([*run, *options, "--methods", "sequoia:8", "--out", "other"]) == 2
        assert message in capsys.readouterr().err and not Path("other").exists()
    assert main([*fit, "--skip", "9", "--out", "x.json"]) == 2
    assert "no suite has prompts behind the first 9" in capsys.readouterr().err
    save_tiny(Path("drafter"), seed=2)  # trained anew
    for out, message in (("default", "holds a run with weights"), ("other", "are of other weights of")):
        rates = ["--rates", "rates.json"] if out == "other" else []
        assert main([*run[:-1], *rates, "--methods", "sequoia:8", "--out", out]) == 2
        assert message in capsys.readouterr().err
