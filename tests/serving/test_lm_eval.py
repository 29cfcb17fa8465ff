"""Multiple choice by lm_eval's client for completions: log-likelihoods are those of lm_eval's own transformers model.

Run: pip install 'lm_eval[api]'; python -m pytest tests/serving/test_lm_eval.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.http_served import KEY, Served

from stree.inputs import ASSETS

TASK = """
task: stree_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
QUESTIONS = [
    ("Question: Tom has 3 apples. He gets 2 more. How many does he have?\nAnswer:", [" 5", " a river", " Tom has 3"]),
    ("def add(a, b):\n    return", [" a + b", " the", " a"]),
    ("import", [" os", " of the", " numpy as np"]),
    ("She told them about", [" the river", " def", " it."]),
]


@pytest.mark.slow
def test_scores_of_choices_are_those_of_transformers(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval, which is not a requirement")
    pytest.importorskip("tenacity", reason="needs what lm_eval[api] installs")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    lines = [{"question": text, "choices": choices, "label": 0} for text, choices in QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "task.yaml").write_text(TASK.replace("DATA", str(tmp_path / "rows.jsonl")))

    def evaluate(kind: str, **arguments: Any) -> tuple[dict[str, float], list[tuple[float, bool]]]:
        found = lm_eval.simple_evaluate(
            model=kind, model_args=arguments, tasks=["stree_choices"], log_samples=True, bootstrap_iters=0,
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        )  # fmt: skip
        samples = sorted(found["samples"]["stree_choices"], key=lambda sample: sample["doc_id"])
        scores = {name: found["results"]["stree_choices"][f"{name},none"] for name in ("acc", "acc_norm")}
        return scores, [(float(value), bool(greedy)) for one in samples for value, greedy in one["filtered_resps"]]

    target = str(ASSETS / "target")
    scores, found = evaluate(
        "local-completions", model="tiny", base_url=f"{served.url}/v1/completions", tokenizer=target, max_length=255
    )
    expected_scores, expected = evaluate("hf", pretrained=target, dtype="float32", device="cpu")
    assert scores == expected_scores and len(found) == 12
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    values = [value for value, _ in expected]
    assert [value for value, _ in found] == pytest.approx(values, abs=1e-3)
    assert [value for value, _ in found] != pytest.approx([*values[1:], values[0]], abs=1e-3), "those of other choices"
