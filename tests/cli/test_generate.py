"""``stree generate`` on a tiny model saved to disk."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, Mamba2Config, Mamba2ForCausalLM, PreTrainedTokenizerFast

from stree import generation
from stree.cli import main
from stree.inputs import tokenizer_fingerprint
from stree.models.tree_lm import TreeLM
from stree.retrieval import Datastore
from stree.sampling import Sampling
from stree.vocabulary import save_vocabulary

WORDS = ["<|endoftext|>", *(chr(code) for code in range(97, 123)), *["ab", "bc", "cd", "de", "ef"]]


def save_model(folder: Path, words: list[str] = WORDS, seed: int = 0) -> str:
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0]).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Mamba2Config(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_heads=2, head_dim=16, state_size=8, n_groups=1,
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    Mamba2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("drafter"), seed=1)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["generate", "a b c a b", "--max-new-tokens", "12", "--json", *arguments]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_json_is_the_last_line_and_has_every_documented_key(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "--target", target)
    keys = {"text", "token_ids", "num_prompt_tokens", "num_new_tokens", "steps", "tau", "tokens_per_s", "draft_s"}
    keys |= {"verify_s", "accept_s", "commit_s", "growth", "budget", "verifier", "finish_reason", "device", "dtype"}
    assert keys <= set(report)
    assert report["num_prompt_tokens"] == 5 and report["num_new_tokens"] == len(report["token_ids"])
    assert report["finish_reason"] in ("stop", "length") and report["dtype"] == "float32"


def test_every_drafter_gives_the_text_of_plain_decoding(
    target: str, drafter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run_json(capsys, "--target", target, "--drafter", "none")
    assert plain["tau"] == 1.0
    for options in (["suffix"], [drafter], [drafter, "--growth", "chain:3"], [drafter, "--growth", "static:2,2"]):
        report = run_json(capsys, "--target", target, "--drafter", *options)
        assert report["token_ids"] == plain["token_ids"], options


def test_every_option_reaches_the_generation(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def generate(lm: Any, prompts: Any, drafter: Any, **options: Any) -> None:
        seen.update(options, prompts=prompts, captures_steps=lm.captures_steps)
        raise ValueError("seen")

    monkeypatch.setattr(generation, "generate", generate)
    options = {"temperature": 0.7, "top-k": 5, "top-p": 0.9, "seed": 3, "budget": 6, "verifier": "match"}
    listed = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["generate", "a b", "--target", target, "--max-new-tokens", "9", "--eager", *listed]) == 2
    capsys.readouterr()
    assert (seen["sampling"], seen["seed"]) == (Sampling(0.7, 5, 0.9), 3)
    assert (seen["budget"], seen["verifier"], seen["max_new_tokens"], seen["growth"]) == (6, "match", 9, None)
    assert (seen["prompts"], seen["stop_token_ids"], seen["captures_steps"]) == ([[1, 2]], [0], False)
    assert main(["generate", "a b", "--target", target]) == 2
    assert seen["captures_steps"] is None, "which is decided by the device"


def test_text_is_streamed_and_the_summary_goes_to_standard_error(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "a b c", "--target", target, "--max-new-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("a b c") and "tau" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--temperature", "-1"], "temperature must be finite and not negative, got -1.0"),
        (["x", "--budget", "0"], "budget must be at least 1, got 0"),
        (["x", "--budget", "most"], "budget must be a number of nodes or 'auto', got 'most'"),
        (["x", "--dtype", "float31"], "dtype must be 'auto', a floating torch dtype or its name, got 'float31'"),
        *([] if torch.cuda.is_available() else [(["x", "--device", "cuda"], "device must be one that torch finds")]),
        (["x", "--verifier", "block"], "block verification takes trees without branches"),
        (["x", "--growth", "chain:2", "--drafter", "suffix"], "--growth shapes the trees of a draft model"),
        (["", "--drafter", "suffix"], "the prompt is empty"),
        (["x", "--target", "no/such/folder"], "no checkpoint that transformers can read at 'no/such/folder'"),
    ],
)
def test_bad_input_is_named_and_ends_with_status_two(
    arguments: list[str], message: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--target" not in arguments:
        arguments = [*arguments, "--target", target]
    assert main(["generate", *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_different_tokenizers_are_refused(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = save_model(tmp_path, [WORDS[0], *reversed(WORDS[1:])])
    assert main(["generate", "a b", "--target", target, "--drafter", other]) == 2
    assert f"have different tokenizers ({len(WORDS)} and {len(WORDS)} tokens" in capsys.readouterr().err


def test_a_trimmed_drafter_must_keep_the_token_that_ends_the_target_s_texts(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_vocabulary(tmp_path / "kept.json", [3, 4], len(WORDS))
    options = ["--target", target, "--drafter", target, "--drafter-vocab", str(tmp_path / "kept.json")]
    assert main(["generate", "a b", *options]) == 2
    assert "leaves out the target's stop tokens [0]" in capsys.readouterr().err


def test_the_token_that_ended_a_text_is_listed_and_not_shown(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "--target", target, "--temperature", "1", "--max-new-tokens", "200", "--budget", "1")
    assert (report["finish_reason"], report["token_ids"][-1]) == ("stop", 0)
    assert report["text"] and WORDS[0] not in report["text"]


def test_a_fused_drafter_reads_the_datastore(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--target", target, "--drafter", f"fused:{target}", "--budget", "12"]
    plain = run_json(capsys, "--target", target, "--drafter", "none")
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = [1, 2, 3, 1, 2, *plain["token_ids"]]
    Datastore.build([text], len(WORDS), tokenizer=tokenizer_fingerprint(tokenizer)).save(tmp_path / "store")
    report = run_json(capsys, *options, "--datastore", str(tmp_path / "store"))
    assert report["token_ids"] == plain["token_ids"] and report["steps"] < plain["steps"]


TEMPLATE = "{% for m in messages %}a {{ m['content'] }} b{% endfor %}{% if add_generation_prompt %} c{% endif %}"


def test_a_chat_template_is_put_around_the_prompt(
    target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["generate", "a b", "--chat", "--target", target]) == 2
    assert "the target's tokenizer has no chat template; leave --chat out" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    common = ["--target", target, "--max-new-tokens", "4", "--json"]
    assert main(["generate", "d e", "--chat", "--tokenizer", str(tmp_path), *common]) == 0
    chat = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["generate", "a d e b c", *common]) == 0
    plain = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (chat["num_prompt_tokens"], chat["token_ids"]) == (5, plain["token_ids"])


def test_a_target_without_tokenizer_needs_one_named(
    target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    TreeLM.from_pretrained(target).model.save_pretrained(tmp_path)
    arguments = ["generate", "a b", "--target", str(tmp_path), "--max-new-tokens", "3"]
    assert main(arguments) == 2
    assert "knows no words; name one by --tokenizer" in capsys.readouterr().err
    assert main([*arguments, "--tokenizer", target, "--json"]) == 0
    capsys.readouterr()
    assert main([*arguments, "--tokenizer", "no/such/folder"]) == 2
    message = "no tokenizer that transformers can read at 'no/such/folder'; name one by --tokenizer"
    assert message in capsys.readouterr().err


def test_a_checkpoint_s_code_is_not_run_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "homemade", "auto_map": {"AutoConfig": "code.C"}}')
    (tmp_path / "code.py").write_text("raise ValueError('the code ran')\n")
    arguments = ["generate", "a", "--target", str(tmp_path)]
    assert main(arguments) == 2
    assert "would execute code of its own" in capsys.readouterr().err
    assert main([*arguments, "--trust-remote-code"]) == 2
    assert "the code ran" in capsys.readouterr().err
