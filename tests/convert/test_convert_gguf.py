"""GGUF files: what they hold is what comes out, and what they need is said."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from convert_models import VOCAB, ids, make
from torch import Tensor
from transformers import AutoModelForCausalLM

from resformer import ResFormerForCausalLM, cli
from resformer.convert import check

SHAPED = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Rotary pairs side by side, as files of Llamas have them."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def write_gguf(file: Path, family: str, model) -> Path:
    gguf = pytest.importorskip("gguf", reason="writing a GGUF file needs the package gguf (the extra `convert`)")
    config = model.config
    writer = gguf.GGUFWriter(str(file), family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(f"w{n}" for n in range(VOCAB - 2)), "w", "1"])
    writer.add_token_merges(["w 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        part, _, kind = name.removeprefix("model.layers.").rpartition(".")
        number, _, inner = part.partition(".")
        place = f"blk.{number}.{NAMES[inner]}" if number.isdigit() else NAMES[part]
        if family == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in inner else config.num_key_value_heads
            tensor = neighbours(tensor, heads)
        writer.add_tensor(f"{place}.{kind}", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_becomes_ours(tmp_path, family, monkeypatch, capsys):
    def here(directory, probe, prelude=()):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return check.logits(model, probe.ids, probe.positions)

    monkeypatch.setattr(check, "in_another_process", here)
    theirs = make(family, **SHAPED)
    file = write_gguf(tmp_path / "tiny.gguf", family, theirs)
    assert cli.main(["convert", str(file), "--variant", "learnable", "--out", str(tmp_path / "ours")]) == 0
    assert "equal to" in capsys.readouterr().out
    ours = ResFormerForCausalLM.from_pretrained(tmp_path / "ours")
    assert ours.config.rope_parameters["rope_theta"] == 1e6 and ours.config.num_key_value_heads == 2
    assert ours.config.converted_from["model_type"] == family and ours.dtype == torch.float32
    want = check.logits(theirs, ids(), range(40))
    assert (check.logits(ours, ids(), range(40)) - want).abs().max() <= 1e-5 * max(1.0, want.abs().max())
    assert "tiny.gguf" in (tmp_path / "ours" / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "tiny.gguf"]


def test_without_the_package_the_way_out_is_one_line(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "gguf" else find(name, *more))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert cli.main(["convert", str(tmp_path / "model.gguf"), "--variant", "learnable", "--out", "out"]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "pip install 'resformer[convert]'" in error[0]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no GGUF at all" * 10])
def test_a_file_that_is_none_is_one_line(tmp_path, content, capsys):
    pytest.importorskip("gguf", reason="reading a GGUF file needs the package gguf (the extra `convert`)")
    (tmp_path / "model.gguf").write_bytes(content)
    arguments = ["convert", str(tmp_path / "model.gguf"), "--variant", "learnable", "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "model.gguf cannot be loaded" in error[0], error
