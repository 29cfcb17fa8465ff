"""MTP layers of every family's checkpoints: head.run against a forward written here, and what is refused.

Run: python -m pytest tests/heads/test_mtp.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import built
from helpers.tiny_heads import LAYOUTS, save_with_mtp, target_and_head
from helpers.tiny_models import Outer
from helpers.tiny_pairs import save_tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import stree
from stree.cli import main
from stree.distill.heads import new_head
from stree.drafters import HeadDrafter, NoDrafter
from stree.models.heads.mtp import load_mtp

LENGTH = 64


def rms_norm(x: Tensor, weight: Tensor, family: str) -> Tensor:
    scale = (x.square().mean(-1, keepdim=True) + (1e-5 if family == "nemotron_h" else 1e-6)).rsqrt()
    return x * scale * (weight + family.startswith("qwen"))


def plain_forward(family: str, lm: stree.TreeLM, ids: Tensor, hidden: Tensor, swapped: bool = False) -> Tensor:
    """Logits of the MTP layers of a checkpoint, by transformers' layers and weights that are read here."""
    file = Path(lm.model.config._name_or_path) / "model.safetensors"
    tensors, (lent, (fc, *norms), norm) = load_file(file), LAYOUTS[family]
    parts = lm.model.get_input_embeddings()(ids), hidden
    mixed = [rms_norm(part, tensors[f"{name}.weight"], family) for part, name in zip(parts, norms, strict=True)]
    x = torch.cat(mixed[::-1] if swapped else mixed, -1) @ tensors[f"{fc}.weight"].T
    # A model of the whole target whose lent layers have the MTP layers' weights, of which only these layers are run.
    folder = file.parent / "lent"
    if not folder.exists():
        folder.mkdir()
        (folder / "config.json").write_text((file.parent / "config.json").read_text())
        mine = {name: value for name, value in tensors.items() if not name.startswith(tuple(lent.values()))}
        for ours, theirs in lent.items():
            mine |= {name.replace(theirs, ours): value for name, value in tensors.items() if name.startswith(theirs)}
        save_file({name: value for name, value in mine.items() if "mtp" not in name}, folder / "model.safetensors")
    lending = type(lm.model).from_pretrained(folder)
    positions = torch.arange(ids.shape[1])[None]
    options: dict[str, Any] = {"attention_mask": torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)[None, None]}
    if hasattr(lending.base_model, "rotary_emb"):
        rotary = lending.base_model.rotary_emb
        axes = positions.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else positions
        options["position_embeddings"] = rotary(x, axes)
    for index in sorted(int(name.split(".")[2]) for name in lent):
        x = lending.base_model.layers[index](x, position_ids=positions, **options)
    return torch.nn.functional.linear(
        rms_norm(x, tensors[f"{norm}.weight"], family), lm.model.get_output_embeddings().weight
    )


@pytest.mark.parametrize("family", LAYOUTS)
def test_run_gives_the_logits_of_a_plain_forward(family: str) -> None:
    lm, head = target_and_head(family)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 90, (1, LENGTH), generator=generator)
    hidden = torch.randn(1, LENGTH, head.num_features, generator=generator)
    with torch.no_grad():
        expected, swapped = (plain_forward(family, lm, ids, hidden, swapped) for swapped in (False, True))
    found, scale = head.run(ids, hidden)[0], expected.abs().max()
    assert (found - expected).abs().max() < 1e-4 * scale
    assert (found - swapped).abs().max() > 1e-2 * scale, "the embedding comes first"
    shifted = head.run(ids, hidden.roll(1, 1))[0]
    assert (shifted - expected).abs().max() > 1e-2 * scale, "features of the position before"


@pytest.mark.parametrize("family", slow_unless([*LAYOUTS][:1].__contains__, LAYOUTS))
@pytest.mark.parametrize("temperature", slow_unless(bool, [0.0, 1.5], in_ci=lambda _: False))
def test_texts_are_those_of_plain_decoding(family: str, temperature: float) -> None:
    lm, head = target_and_head(family)
    options: dict[str, Any] = {"max_new_tokens": 16, "seed": 1, "sampling": stree.Sampling(temperature)}
    prompts = [[5, 17, 9, 33, 20], [4, 8, 9]]
    expected = stree.generate(lm, prompts, NoDrafter(), **options)
    for growth in ("chain:3", "calibrated"):
        found = stree.generate(lm, prompts, HeadDrafter(head), growth=growth, budget=8, verifier="match", **options)
        assert found.sequences == expected.sequences


def test_a_checkpoint_in_several_files_is_read(tmp_path: Path) -> None:
    tensors = load_file(save_with_mtp(tmp_path) / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file, metadata={"format": "pt"})
    (tmp_path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    head = load_mtp(stree.TreeLM.from_pretrained(tmp_path, "cpu"))
    ids, hidden = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, head.num_features)
    torch.testing.assert_close(head.run(ids, hidden)[0], target_and_head()[1].run(ids, hidden)[0])


def test_the_layers_of_a_model_inside_another_are_loaded() -> None:
    folder = target_and_head()[0].model.config._name_or_path
    head = load_mtp(stree.TreeLM(Outer(stree.TreeLM.from_pretrained(folder, "cpu").release())))
    ids, hidden = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, head.num_features)
    torch.testing.assert_close(head.run(ids, hidden)[0], target_and_head()[1].run(ids, hidden)[0])


def without(folder: Path, is_dropped: Any) -> None:
    """Drop tensors of a checkpoint."""
    file = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if not is_dropped(name)}
    save_file(kept, file, metadata={"format": "pt"})


BROKEN: dict[str, tuple[Any, str]] = {
    "no layers": (lambda folder: without(folder, lambda name: "mtp" in name), "holds no MTP layers: .* tensors mtp"),
    "one missing": (
        lambda folder: without(folder, lambda name: name == "mtp.fc.weight"),
        r"must have fusion.fc.weight",
    ),
    "name without a number": (
        lambda folder: save_file(
            load_file(folder / "model.safetensors") | {"mtp.layers.x": torch.ones(1)}, folder / "model.safetensors"
        ),
        "must have layers.x not at all",
    ),
    "truncated": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100]),
        "cannot be read as safetensors",
    ),
    "index of no files": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"mtp.fc.weight": 1}}'),
        "must hold a JSON object with a weight_map of tensors and their files",
    ),
    "missing file": (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_without_whole_layers_is_refused(name: str, tmp_path: Path) -> None:
    breaking, message = BROKEN[name]
    target = target_and_head()[0]
    breaking(save_with_mtp(tmp_path))
    with pytest.raises(ValueError, match=message):
        load_mtp(target, tmp_path)


def test_layers_of_a_kind_that_the_family_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_and_head("nemotron_h")[0]
    monkeypatch.setattr(target.model.config, "mtp_layers_block_type", ["*", "E"])
    with pytest.raises(ValueError, match=r"no MTP layers of .* with mtp_layers_block_type .*: KeyError: '\*'"):
        load_mtp(target)
    monkeypatch.setattr(target.model.config, "mtp_layers_block_type", ["moe", "full_attention"])
    with pytest.raises(ValueError, match=r"with mtp_layers_block_type \['moe', 'full_attention'\] must have layers"):
        load_mtp(target)


@pytest.mark.parametrize("number", ["two", None, 10**12])
def test_a_number_of_layers_that_cannot_be_listed_is_refused_by_its_name(number: Any, tmp_path: Path) -> None:
    folder = save_with_mtp(tmp_path, "bailing_hybrid")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": number}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"num_nextn_predict_layers must be an integer of at most .*, got {number!r}"):
        stree.TreeLM.from_pretrained(folder, "cpu")


def test_layers_of_other_sizes_and_families_are_refused(tmp_path: Path) -> None:
    save_with_mtp(tmp_path, hidden_size=48)
    with pytest.raises(ValueError, match=r"must have layers.0.input_layernorm.weight \[32\], got \[48\]"):
        load_mtp(target_and_head()[0], tmp_path)
    with pytest.raises(ValueError, match="the drafter has 61 tokens, the target 97"):
        stree.generate(target_and_head()[0], [[1]], HeadDrafter(target_and_head(vocab_size=61)[1]))
    new_head(target_and_head()[0], "mtp", 0).save(tmp_path)
    with pytest.raises(ValueError, match="must have hidden_size 48, the target's, got 32"):
        stree.heads.load(tmp_path, stree.TreeLM(built("qwen3_next", hidden_size=48)))


@pytest.mark.parametrize("family", LAYOUTS)
def test_info_says_whether_the_layers_can_be_loaded(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with_mtp(tmp_path, family)
    assert main(["info", str(tmp_path)]) == 0
    assert "parameters; --drafter mtp\n" in capsys.readouterr().out
    norm = f"{LAYOUTS[family][2]}.weight"
    without(tmp_path, norm.__eq__)
    assert main(["info", str(tmp_path)]) == 0
    reason = re.search(r"parameters; not loaded: (.* must have .* differ\))\n", capsys.readouterr().out)
    with pytest.raises(ValueError, match=re.escape(reason[1] if reason else "")):
        load_mtp(stree.TreeLM.from_pretrained(tmp_path, "cpu"))
    assert reason is not None


def test_the_command_line_names_the_layers_and_drafts_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with_mtp(tmp_path)
    save_tiny(tmp_path / "words")
    assert main(["info", str(tmp_path), "--json"]) == 0
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        sizes = [file.get_tensor(name).numel() for name in file.keys() if name.startswith("mtp.")]  # noqa: SIM118
    assert json.loads(capsys.readouterr().out)["mtp_parameters"] == sum(sizes)
    words = ["generate", "w1 w2", "--target", str(tmp_path), "--tokenizer", str(tmp_path / "words")]
    words += ["--max-new-tokens", "8", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["growth"] is not None, "not the suffix drafter"
    assert main([*words, "--drafter", "none"]) == 0
    assert found["token_ids"] == json.loads(capsys.readouterr().out.splitlines()[-1])["token_ids"]
