"""``stree export-generate``: the folder under transformers' ``generate``, in a loaded model, and under lm_eval."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.calls import error_of
from helpers.tiny_pairs import save_tiny
from transformers import AutoModelForCausalLM, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from stree.cli import main
from stree.inputs import ASSETS

IDS = torch.tensor([[1, 2, 3, 1, 2], [0, 0, 9, 8, 9]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
NEW = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def folder(target_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("exported") / "out")
    assert main(["export-generate", target_folder, "--out", out, "--drafter", target_folder, "--budget", "6"]) == 0
    return out


def model_of(folder: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def test_the_folder_is_a_custom_generate_of_transformers(folder: str, target_folder: str) -> None:
    model = model_of(target_folder)
    expected = model.generate(IDS, attention_mask=MASK, **NEW)
    options: dict[str, Any] = {"custom_generate": folder, "trust_remote_code": True, **NEW}
    for rows in (slice(1), slice(2)):
        plain = model.generate(IDS[rows], attention_mask=MASK[rows], **NEW)
        assert model.generate(input_ids=IDS[rows], attention_mask=MASK[rows], **options).equal(plain)
    options |= {"return_dict_in_generate": True, "attention_mask": MASK}
    stats = [model.generate(IDS, **options, **own).stats for own in ({}, {"drafter": "suffix", "budget": 3})]
    assert [one["budget"] for one in stats] == [6, 3] and stats[0]["tau"] > 2, "the drafter is the target itself"
    assert model.generate(IDS, attention_mask=MASK, **NEW).equal(expected), "plain generate is as it was"


def test_a_model_that_is_loaded_from_the_folder_generates_with_trees(folder: str, target_folder: str) -> None:
    expected = model_of(target_folder).generate(IDS[:1], **NEW)
    model, words = model_of(folder, trust_remote_code=True), []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            words.extend(value.flatten().tolist())

        def end(self) -> None:
            words.append(-1)

    assert model.generate(IDS[:1], streamer=Streamer(), **NEW).equal(expected)
    assert words == [*expected[0].tolist(), -1]
    assert model.generate(input_ids=IDS[:1], return_dict_in_generate=True, tokenizer=None, **NEW).stats["tau"] > 2


def test_a_drafter_that_is_trained_anew_is_loaded_anew(folder: str, target_folder: str, tmp_path: Path) -> None:
    model = model_of(folder, trust_remote_code=True)
    options = {"drafter": save_tiny(tmp_path, seed=5), "return_dict_in_generate": True, **NEW}
    before = model.generate(IDS[:1], **options)
    shutil.copy(Path(target_folder, "model.safetensors"), tmp_path)
    after = model.generate(IDS[:1], **options)
    assert before.stats["tau"] < 2 < after.stats["tau"] and after.sequences.equal(before.sequences)


class Ended(StoppingCriteria):  # type: ignore[misc]
    """Is true when every row of the batch has had a token above 75, and remembers which have, as lm_eval's does."""

    def __init__(self, rows: int) -> None:
        self.done = [False] * rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> bool:
        for row in range(len(self.done)):
            self.done[row] |= bool((input_ids[row, 5:] > 75).any())
        return all(self.done)


def test_criteria_that_look_at_a_whole_batch_end_each_row_on_its_own(folder: str, target_folder: str) -> None:
    model, texts = model_of(target_folder), []
    for row in range(2):
        plain = model.generate(
            IDS[row : row + 1], attention_mask=MASK[row : row + 1], stopping_criteria=[Ended(1)], **NEW
        )
        texts.append(plain[0].tolist())
    assert len(texts[0]) != len(texts[1]) and max(map(len, texts)) < 17, "they end, and at different places"
    options: dict[str, Any] = {"custom_generate": folder, "trust_remote_code": True, **NEW}
    found = model.generate(IDS, attention_mask=MASK, stopping_criteria=[Ended(2)], **options).tolist()
    width = max(map(len, texts))
    assert found == [text + [0] * (width - len(text)) for text in texts]


def test_rows_under_criteria_are_sampled_each_on_its_own_and_none_is_lost(folder: str, target_folder: str) -> None:
    options: dict[str, Any] = {"custom_generate": folder, "trust_remote_code": True, **NEW, "do_sample": True}
    model, twice = model_of(target_folder), IDS[:1].expand(2, -1)
    found = model.generate(twice, stopping_criteria=[Ended(2)], num_return_sequences=2, seed=1, **options)
    assert len({tuple(text) for text in found.tolist()}) == 4


def test_rows_under_criteria_are_padded_as_in_transformers(folder: str, target_folder: str) -> None:
    model = model_of(target_folder)
    model.generation_config.pad_token_id = None
    new = {**NEW, "pad_token_id": None}
    text = model.generate(IDS[:1], attention_mask=MASK[:1], **new)[0].tolist()
    options: dict[str, Any] = {"attention_mask": MASK, "eos_token_id": [text[7], 96], **new}
    wanted = model.generate(IDS, **options)
    options |= {"custom_generate": folder, "trust_remote_code": True}
    criteria = StoppingCriteriaList([MaxLengthCriteria(30)])
    assert model.generate(IDS, stopping_criteria=criteria, **options).equal(wanted)
    assert int((wanted == text[7]).sum()) > 2, "a row is padded"


def test_a_model_s_own_folder_gets_one_file_and_a_copy_has_no_links(target_folder: str, tmp_path: Path) -> None:
    own, copied = tmp_path / "größe", tmp_path / "copied"
    shutil.copytree(target_folder, own)
    before = {path.name for path in own.iterdir()}
    for _ in range(2):  # its own file is replaced
        assert main(["export-generate", str(own), "--out", str(own), "--drafter", str(own)]) == 0
    assert b"gr\\xf6\\xdfe" in (own / "custom_generate/generate.py").read_bytes(), "whatever the encoding of files is"
    assert {path.name for path in own.iterdir()} == before | {"custom_generate"}
    assert main(["export-generate", str(own), "--out", str(copied), "--drafter", "suffix", "--copy"]) == 0
    assert {path.name for path in copied.iterdir()} == before | {"custom_generate"}
    assert not any(path.is_symlink() for path in copied.iterdir())


def test_an_export_over_another_one_replaces_links_and_no_model(
    target_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other, linked = tmp_path / "own", tmp_path / "other", tmp_path / "linked"
    for folder in (own, other):
        shutil.copytree(target_folder, folder)
    (other / "model.safetensors").rename(other / "other.safetensors")
    export = ["export-generate", "--drafter", "suffix", "--out"]
    for out in (own, linked):
        assert main([*export, str(out), str(own)]) == 0
    assert "own is not empty" in error_of(capsys, *export, str(own), str(other))
    assert not any(path.is_symlink() for path in own.iterdir()), "the model is as it was"
    assert main([*export, str(linked), str(other)]) == 0
    names = {path.name for path in other.iterdir()}
    assert {path.name for path in linked.iterdir()} == names | {"custom_generate"}, "no weights of the first model"


@pytest.mark.parametrize(
    ("options", "message"),
    {
        "nowhere --out out": "no checkpoint that transformers can read at 'nowhere'",
        "TARGET --out full": "full is not empty; choose a new folder for --out, or the model's own",
        "TARGET --out theirs": "theirs/custom_generate/generate.py is not of stree export-generate",
        "TARGET --out full/file": "a folder is needed at full/file, but full/file is a file",
        "TARGET --out out --budget 0": "budget must be at least 1, got 0",
        "TARGET --out out --drafter suffix --growth chain:2": "--growth shapes the trees of a draft model",
        "TARGET --out out --verifier fastest": "--verifier must be one of",
        "native --out out": "'native' is a checkpoint of mamba-ssm or MambaInLlama, which transformers cannot load",
    }.items(),
)
def test_a_mistake_is_named_and_nothing_is_written(
    options: str, message: str, target_folder: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("full/file", "theirs/custom_generate/generate.py", "native/config.json"):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text(json.dumps({"d_model": 8, "n_layer": 1, "vocab_size": 9, "ssm_cfg": {}}))
    error = error_of(capsys, "export-generate", *options.replace("TARGET", target_folder).split())
    assert message in error and len(error.splitlines()) == 1
    assert not Path("out").exists() and len([*tmp_path.rglob("*")]) == 7


TASK = """
task: stree_tiny
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
QUESTIONS = ["def add(a, b):\n    return", "import", "for i in", "class Foo:\n    def", "x ="]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, which is not a requirement")
def test_scores_of_lm_eval_are_those_of_plain_transformers(tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    target, out = str(ASSETS / "target"), str(tmp_path / "out")
    assert main(["export-generate", "bundled", "--out", out, "--budget", "8"]) == 0

    def evaluate(answers: list[str], name: str, batch_size: int, **options: Any) -> tuple[float, list[str]]:
        data = tmp_path / f"{name}.jsonl"
        lines = [{"question": question, "answer": answer} for question, answer in zip(QUESTIONS, answers, strict=True)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / "task.yaml").write_text(TASK.replace("DATA", str(data)))
        results = lm_eval.simple_evaluate(
            model="hf", model_args=f"pretrained={target},dtype=float32", tasks=["stree_tiny"], device="cpu",
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), batch_size=batch_size,
            log_samples=True, bootstrap_iters=0, **options,
        )  # fmt: skip
        texts = {one["doc_id"]: one["filtered_resps"][0] for one in results["samples"]["stree_tiny"]}
        return results["results"]["stree_tiny"]["exact_match,none"], [text for _, text in sorted(texts.items())]

    _, texts = evaluate([""] * 5, "unknown", 1)
    answers = [texts[0], "wrong", texts[2], "wrong", texts[4]]
    assert evaluate(answers, "known", 1) == (0.6, texts)
    for batch_size in (1, 3):
        options = {"gen_kwargs": f"custom_generate={out},trust_remote_code=True"}
        assert evaluate(answers, "known", batch_size, **options) == (0.6, texts)
