"""``stree generate`` on a tiny model saved to disk."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.calls import error_of, run_json
from helpers.tiny_models import VOCAB
from helpers.tiny_pairs import WORDS, byte_fallback, save_tiny, writing_model
from transformers import AutoTokenizer

from stree import generation
from stree.cli import main
from stree.growth import Calibrated
from stree.inputs import tokenizer_fingerprint
from stree.models.tree_lm import TreeLM
from stree.retrieval import Datastore
from stree.sampling import Sampling
from stree.vocabulary import save_vocabulary


@pytest.fixture(scope="module")
def target(target_folder: str) -> str:
    return target_folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("drafter"), seed=1)


PROMPT = ("generate", "w1 w2 w3 w1 w2", "--max-new-tokens", "12")


def test_json_is_the_last_line_and_has_every_documented_key(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, *PROMPT, "--target", target)
    keys = {"text", "token_ids", "num_prompt_tokens", "num_new_tokens", "steps", "tau", "tokens_per_s", "draft_s"}
    keys |= {"verify_s", "accept_s", "commit_s", "growth", "budget", "verifier", "finish_reason", "device", "dtype"}
    assert keys <= set(report)
    assert (report["verifier"], report["rule"], report["lossless"]) == ("auto", "match", True)
    assert report["num_prompt_tokens"] == 5 and report["num_new_tokens"] == len(report["token_ids"])
    assert report["finish_reason"] in ("stop", "length") and report["dtype"] == "float32"


def test_closed_standard_streams_are_empty(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main([*PROMPT, "--target", target]) == 0
    assert main(["generate", "--target", target]) == 2, "an empty prompt"


def test_characters_that_the_output_cannot_encode_are_written_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    target = save_tiny(tmp_path, words=["w1", "\u00e9", *WORDS[2:]])
    assert main(["generate", "w1 \u00e9", "--max-new-tokens", "2", "--target", target]) == 0
    assert written.getvalue().startswith(rb"w1 \xe9")


@pytest.mark.slow
def test_every_drafter_gives_the_text_of_plain_decoding(
    target: str, drafter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run_json(capsys, *PROMPT, "--target", target, "--drafter", "none")
    assert plain["tau"] == 1.0
    for options in (["suffix"], [drafter], [drafter, "--growth", "chain:3"], [drafter, "--growth", "static:2,2"]):
        report = run_json(capsys, *PROMPT, "--target", target, "--drafter", *options)
        assert report["token_ids"] == plain["token_ids"], options


def test_every_option_reaches_the_generation(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def generate(lm: Any, prompts: Any, drafter: Any, **options: Any) -> None:
        seen.update(options, prompts=prompts, captures_steps=lm.captures_steps)
        raise ValueError("seen")

    monkeypatch.setattr(generation, "generate", generate)
    options = {
        "temperature": 0.7,
        "top-k": 5,
        "top-p": 0.9,
        "min-p": 0.1,
        "stop": "w3",
        "seed": 3,
        "budget": 6,
        "verifier": "match",
    }
    listed = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["generate", "w1 w2", "--target", target, "--max-new-tokens", "9", "--eager", *listed]) == 2
    capsys.readouterr()
    assert (seen["sampling"], seen["seed"]) == (Sampling(0.7, 5, 0.9, 0.1), 3)
    assert seen["stop_strings"] == ["w3"]
    assert (seen["budget"], seen["verifier"], seen["max_new_tokens"], seen["growth"]) == (6, "match", 9, None)
    assert (seen["prompts"], seen["captures_steps"]) == ([[1, 2]], False)
    assert main(["generate", "w1 w2", "--target", target, "--drafter", target, "--growth", "calibrated:6x2"]) == 2
    assert (seen["growth"], seen["budget"]) == (Calibrated(depth=2), 6)
    assert seen["captures_steps"] is None, "which is decided by the device"


def test_token_rules_hold(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = run_json(capsys, *PROMPT, "--target", target)["token_ids"]
    for option, allowed in (
        (["--allowed-token-ids", "[7, 8]"], {7, 8}), (["--logit-bias", '{"9": 100}'], {9}),
        (["--bad-words", "w1", "--bad-words", "w2"], {*range(VOCAB)} - {*_ids(target, "w1 w2")}),
    ):  # fmt: skip
        found = run_json(capsys, *PROMPT, "--target", target, *option, "--min-new-tokens", "3")["token_ids"]
        assert {*found} <= allowed and len(found) >= 3
        assert found == plain or not {*plain} <= allowed
    penalised = run_json(capsys, *PROMPT, "--target", target, "--presence-penalty", "2", "--frequency-penalty", "2")
    assert len({*penalised["token_ids"]}) >= len({*plain})


def _ids(folder: str, text: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    return ids


def test_several_texts_of_a_prompt_are_printed_behind_their_numbers(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-n", "3", "--target", target, "--drafter", "suffix", "--temperature", "1"]
    assert main([*PROMPT, *options]) == 0
    printed = capsys.readouterr().out
    report = run_json(capsys, *PROMPT, *options)
    texts = [sample["text"] for sample in report["samples"]]
    assert printed == "".join(f"[{number}] {text}\n" for number, text in enumerate(texts, 1))
    assert len({*texts}) == 3 and texts[0] == report["text"]
    assert "--num-samples 3 needs a temperature above 0" in error_of(capsys, *PROMPT, "-n", "3", "--target", target)


def test_a_trimmed_drafter_must_keep_the_token_that_ends_the_target_s_texts(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_vocabulary(tmp_path / "kept.json", [3, 4], VOCAB)
    options = ["--target", target, "--drafter", target, "--drafter-vocab", str(tmp_path / "kept.json")]
    assert "leaves out the target's stop tokens [0]" in error_of(capsys, "generate", "w1 w2", *options)


def test_the_token_that_ended_a_text_is_listed_and_not_shown(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(
        capsys, *PROMPT, "--target", target, "--temperature", "1", "--max-new-tokens", "200", "--budget", "1"
    )
    assert (report["finish_reason"], report["token_ids"][-1]) == ("stop", 0)
    assert report["text"] and "<|end|>" not in report["text"]


@pytest.mark.slow
def test_a_fused_drafter_reads_the_datastore(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--target", target, "--drafter", f"fused:{target}", "--budget", "12"]
    plain = run_json(capsys, *PROMPT, "--target", target, "--drafter", "none")
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = [1, 2, 3, 1, 2, *plain["token_ids"]]
    Datastore.build([text], VOCAB, tokenizer=tokenizer_fingerprint(tokenizer)).save(tmp_path / "store")
    report = run_json(capsys, *PROMPT, *options, "--datastore", str(tmp_path / "store"))
    assert report["token_ids"] == plain["token_ids"] and report["steps"] < plain["steps"]


TEMPLATE = "{% for m in messages %}w1 {{ m['content'] }} w2{% endfor %}{% if add_generation_prompt %} w3{% endif %}"


def test_a_chat_template_is_put_around_the_prompt(
    target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    common = ["--target", target, "--max-new-tokens", "4"]
    chat = run_json(capsys, "generate", "w4 w5", "--chat", "--tokenizer", str(tmp_path), *common)
    plain = run_json(capsys, "generate", "w1 w4 w5 w2 w3", *common)
    assert (chat["num_prompt_tokens"], chat["token_ids"]) == (5, plain["token_ids"])


def test_an_answer_of_a_chat_ends_at_the_tokenizers_own_stop_token(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokenizer = byte_fallback("<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ids = tokenizer.convert_tokens_to_ids(["▁a", *"user", "<|im_end|>", *"fin", "</s>"])
    writing_model(tokenizer, ids, eos_token_id=ids[-1]).model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    command = ["generate", "a", "--target", str(tmp_path), "--max-new-tokens", "30"]
    chat, plain = run_json(capsys, *command, "--chat"), run_json(capsys, *command)
    assert (chat["text"], chat["token_ids"], chat["finish_reason"]) == ("user", ids[1:6], "stop")
    assert (plain["text"], plain["token_ids"]) == ("userfin", ids[1:]), "as transformers' generate ends it"


def test_printed_text_keeps_the_spaces_of_every_line_and_cut_characters_apart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(
        ["▁a", "b", "<0x0A>", "▁", "▁ab", "<0xE6>", "<0x97>", "<0xA5>", "<0xF0>", "f"]
    )
    writing_model(tokenizer, ids).model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    command = ["generate", "a", "--target", str(tmp_path), "--max-new-tokens", "8"]
    assert main(command) == 0
    assert capsys.readouterr().out == "ab\n  ab日\ufffd\n"
    assert run_json(capsys, *command)["text"] == "b\n  ab日\ufffd"


def test_a_target_without_tokenizer_needs_one_named(
    target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    TreeLM.from_pretrained(target).model.save_pretrained(tmp_path)
    arguments = ["generate", "w1 w2", "--target", str(tmp_path), "--max-new-tokens", "3"]
    assert "knows no words; name one by --tokenizer" in error_of(capsys, *arguments)
    assert run_json(capsys, *arguments, "--tokenizer", target)["num_prompt_tokens"] == 2
    message = "no tokenizer that transformers can read at 'no/such/folder'; name one by --tokenizer"
    assert message in error_of(capsys, *arguments, "--tokenizer", "no/such/folder")


def test_a_checkpoint_s_code_is_not_run_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "homemade", "auto_map": {"AutoConfig": "code.C"}}')
    (tmp_path / "code.py").write_text("raise ValueError('the code ran')\n")
    arguments = ["generate", "a", "--target", str(tmp_path)]
    assert "would execute code of its own" in error_of(capsys, *arguments)
    assert "the code ran" in error_of(capsys, *arguments, "--trust-remote-code")


@pytest.mark.slow
def test_html_is_a_page_of_the_same_text(target: str, drafter: str, tmp_path: Path, capsys: Any) -> None:
    models = ("--target", target, "--drafter", drafter)
    report = run_json(capsys, *PROMPT, *models, "--html", str(tmp_path / "page.html"))
    assert report["token_ids"] == run_json(capsys, *PROMPT, *models)["token_ids"]
    html = (tmp_path / "page.html").read_text()
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])["trees"]
    assert [token for step in data["steps"] for token in step["ids"]] == report["token_ids"]
    assert "".join(step["text"] for step in data["steps"]).strip() == report["text"].strip()
    assert sum(step["tree"] is not None for step in data["steps"]) == report["steps"] == len(data["steps"]) - 1
    assert all(len(step["tree"]["target_probs"]) == len(step["tree"]["path"]) for step in data["steps"][1:])
    assert data["figures"]["prefill_s"] + data["figures"]["decode_s"] == pytest.approx(report["total_s"])
    message = error_of(capsys, *PROMPT, *models, "--html", str(tmp_path / "none" / "page.html"))
    assert "its folder does not exist" in message
