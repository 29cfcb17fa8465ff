"""The conversion of a Llama model into a hybrid: copied weights, the training forward, and a run from text to files."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("zstandard")
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import stree
from benchmarks.training import data, hybrid, hybridise
from benchmarks.training.data import Document


@pytest.fixture
def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1234.0},
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def test_a_model_whose_layers_all_keep_their_attention_has_the_logits_of_the_original(llama: PreTrainedModel) -> None:
    tokens = torch.randint(1, 320, (2, 100))
    wanted = llama(tokens).logits
    torch.testing.assert_close(hybrid.convert(llama, range(3))(tokens).logits, wanted, rtol=0, atol=1e-5)
    assert (hybrid.convert(llama, [0, 2])(tokens).logits - wanted).abs().max() > 1e-2


@torch.no_grad()
def test_queries_keys_values_and_outputs_become_c_b_x_and_outputs(llama: PreTrainedModel) -> None:
    mixer, attention = hybrid.mixers_of(hybrid.convert(llama, [0, 2]))[1], llama.model.layers[1].self_attn
    gate, x, B, C, dt = mixer.in_proj.weight.split([64, 64, 64, 64, 4])
    for head in range(4):
        rows, shared = slice(16 * head, 16 * head + 16), slice(16 * (head // 2), 16 * (head // 2) + 16)
        assert torch.equal(x[rows], attention.v_proj.weight[shared])
        assert torch.equal(B[rows], hybrid.SCALE * attention.k_proj.weight[shared])
        assert torch.equal(C[rows], hybrid.SCALE * attention.q_proj.weight[rows])
    assert torch.equal(mixer.out_proj.weight, attention.o_proj.weight)
    assert not gate.any() and not dt.any()
    inputs = torch.randn(1, mixer.conv_dim, 9)
    torch.testing.assert_close(mixer.conv1d(inputs)[..., :9], inputs)
    torch.testing.assert_close(torch.nn.functional.silu(mixer.in_proj.bias[:64]), torch.ones(64))


def test_the_training_forward_and_its_gradients_are_those_of_transformers(llama: PreTrainedModel) -> None:
    own, fast = hybrid.convert(llama, [2]), hybrid.convert(llama, [2])
    for mixer in hybrid.mixers_of(own).values():
        for parameter in mixer.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    fast.load_state_dict(own.state_dict())
    hybrid.use_training_forward(fast, torch.float32)
    tokens = torch.randint(1, 320, (2, 128))
    for model in (own, fast):
        model(tokens, use_cache=False).logits.log_softmax(-1)[..., 3].mean().backward()
    for (name, wanted), found in zip(own.named_parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad, wanted.grad, rtol=1e-3, atol=1e-5 * float(wanted.grad.abs().max()), msg=name
        )


def test_layers_and_widths_that_cannot_be_converted_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"in \[0, 3\), got \[3\]"):
        hybrid.hybrid_config(llama.config, [3])
    llama.config.head_dim = 32
    with pytest.raises(ValueError, match="width 64, got 4 x 32"):
        hybrid.hybrid_config(llama.config, [2])


@pytest.fixture
def source(llama: PreTrainedModel, tmp_path: Path) -> list[str]:
    """Write the model, a tokenizer and texts of two kinds; return the options that name them."""
    words = " ".join(f"word{i % 7} of {i % 5}" for i in range(4000))
    documents = [Document(kind, kind, "", words) for kind in data.MIXTURE]
    tokenizer = data.train_tokenizer(documents, 300, 10_000)
    llama.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    records = [{"text": words[:20000], "source": "books", "path": "a"}, {"text": words, "source": "anyio", "path": "b"}]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return ["--source", str(tmp_path / "llama"), "--text", str(tmp_path / "text.jsonl"), "--out", str(tmp_path / "out")]


@pytest.mark.slow
def test_a_run_lowers_both_losses_writes_a_model_that_stree_decodes_and_can_be_resumed(
    source: list[str], tmp_path: Path
) -> None:
    options = ["--length", "64", "--batch", "2", "--dtype", "float32", "--measure-tokens", "640"]
    hybridise.main([*source, *options, "--minutes", "0.06"])
    out = tmp_path / "out"
    result = json.loads((out / "hybridise.json").read_text())
    assert all(phase["loss"] < phase["first_loss"] for phase in result["phases"].values())
    assert all(phase["tokens"] == 128 * phase["steps"] > 0 for phase in result["phases"].values())
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    prompt = tokenizer("word1 of", return_tensors="pt")["input_ids"]
    wanted = model.generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
    lm = stree.TreeLM(model)
    lm.self_check()
    assert stree.generate(lm, prompt.tolist(), max_new_tokens=12).sequences[0] == wanted

    hybridise.main([*source, *options, "--minutes", "0.06", "--resume"])
    assert json.loads((out / "hybridise.json").read_text())["phases"] == result["phases"]
    again = ["--minutes", "0", "--mixers", str(out / "mixers")]
    hybridise.main([*source[:-1], str(tmp_path / "again"), *options, *again])
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict().items():
        assert torch.equal(value, model.state_dict()[name].to(value.dtype)), name
