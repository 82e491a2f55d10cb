"""Directories: what is written, what is checked before it takes its name, what is left when something fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from convert_models import VOCAB, ids, make, random_fields
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from resformer import ResFormerConfig, ResFormerForCausalLM, cli
from resformer.convert import check, source, weights
from resformer.convert.checkpoint import convert_checkpoint
from resformer.core import registry
from resformer.errors import RunError, UserError

LONG = {"max_position_embeddings": 256, "num_hidden_layers": 5, "num_key_value_heads": 2, "num_attention_heads": 4}
SHAPED = {**LONG, "hidden_size": 32, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


@pytest.fixture
def here(monkeypatch):
    """The check without a process of its own, which takes seconds."""

    def load(directory, probe, prelude=()):
        for line in prelude:
            exec(line, {})
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return check.logits(model, probe.ids, probe.positions)

    monkeypatch.setattr(check, "in_another_process", load)


def write(place: Path, family: str = "llama", *, tokenizer: bool = False, dtype=torch.float32, **changes) -> Path:
    """A source on the disk."""
    make(family, **{**SHAPED, **changes}).to(dtype).save_pretrained(place)
    if tokenizer:
        vocabulary = {f"w{n}": n for n in range(VOCAB)}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(place)
    return place


def left_in(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def run(*arguments: object) -> int:
    return cli.main(["convert", *map(str, arguments)])


def test_a_conversion_is_checked_from_a_new_process_and_comes_back(tmp_path, capsys):
    """The whole way, with both checks in processes of their own."""
    model = write(tmp_path / "llama", tokenizer=True, dtype=torch.bfloat16, tie_word_embeddings=True)
    out, back = tmp_path / "deep" / "ours", tmp_path / "back"
    assert run(model, "--variant", "learnable", "--out", out) == 0
    said = capsys.readouterr().out
    assert "equal to" in said and all(f"at position {at}" in said for at in (0, 20, 200))
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(
        left_in(out)
    )
    assert left_in(tmp_path / "deep") == ["ours"]
    saved = load_file(out / "model.safetensors")
    assert saved["model.embed_tokens.weight"].dtype == torch.bfloat16 and "lm_head.weight" not in saved
    assert saved["model.layers.1.self_attn.value_residual.first"].dtype == torch.float32
    assert saved["model.layers.4.self_attn.value_residual.own"].tolist() == [1.0]
    config = json.loads((out / "config.json").read_text())
    assert config["variant_options"] == {"init_first": 0.0, "init_own": 1.0}
    assert config["converted_from"]["model_type"] == "llama" and str(tmp_path) not in json.dumps(config)
    assert AutoTokenizer.from_pretrained(out)("w5 w7").input_ids == [5, 7]
    card = (out / "README.md").read_text()
    assert "largest difference" in card and "The way back" in card

    assert run(out, "--to-hf", "--out", back) == 0
    again = AutoModelForCausalLM.from_pretrained(back)
    assert type(again).__name__ == "LlamaForCausalLM" and again.dtype == torch.bfloat16
    before, after = load_file(model / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(x, after[name]) for name, x in before.items())
    one, other = (json.loads((place / "config.json").read_text()) for place in (model, back))
    assert one == other
    assert left_in(tmp_path) == ["back", "deep", "llama"]


def test_nothing_is_overwritten_without_a_word(tmp_path, here, capsys):
    model, out = write(tmp_path / "llama"), tmp_path / "out"
    assert run(model, "--variant", "learnable", "--out", out) == 0
    assert run(model, "--variant", "gated", "--out", out) == 2
    assert "is there already; pass --overwrite" in capsys.readouterr().err
    assert ResFormerConfig.from_pretrained(out).variant == "learnable"
    assert run(model, "--variant", "gated", "--out", out, "--overwrite") == 0
    assert ResFormerConfig.from_pretrained(out).variant == "gated"
    (out / "notes.py").write_text("mine")
    assert run(model, "--variant", "dense", "--out", out, "--overwrite") == 2
    assert "holds other files (notes.py)" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert run(model, "--variant", "dense", "--out", tmp_path / "file", "--overwrite") == 2
    assert "is a file" in capsys.readouterr().err
    assert left_in(tmp_path) == ["file", "llama", "out"]


def test_a_model_that_computes_something_else_is_not_written(tmp_path, here, monkeypatch, capsys):
    model = write(tmp_path / "llama")
    monkeypatch.setattr(weights, "to_ours", lambda state, family, head_dim: {k: 1.01 * x for k, x in state.items()})
    assert run(model, "--variant", "learnable", "--out", tmp_path / "new" / "out") == 1
    error = capsys.readouterr().err
    assert "do not compute the same: logits at position" in error and "nothing was written" in error
    assert left_in(tmp_path) == ["llama"]


def test_a_process_that_cannot_load_the_model_leaves_nothing(tmp_path):
    model, lines = write(tmp_path / "llama"), ["raise RuntimeError('no room')"]
    with pytest.raises(RunError, match="could not be loaded in a new process: RuntimeError: no room"):
        convert_checkpoint(str(model), tmp_path / "out", variant="learnable", prelude=lines, say=lambda text: None)
    assert left_in(tmp_path) == ["llama"]


def test_a_model_beside_keeps_its_place_when_the_new_one_fails(tmp_path, here):
    model, out = write(tmp_path / "llama"), tmp_path / "out"
    convert_checkpoint(str(model), out, variant="learnable", say=lambda text: None)
    before = (out / "config.json").read_text()
    with pytest.raises(ZeroDivisionError):
        convert_checkpoint(str(model), out, variant="gated", overwrite=True, prelude=["1 / 0"], say=lambda text: None)
    assert (out / "config.json").read_text() == before and left_in(tmp_path) == ["llama", "out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--variant is missing"),
        (("--variant", "learnabel"), "did you mean 'learnable'"),
        (("--variant", "gated", "--set", "activation=relu"), "activation='relu' (exact: 'tanh'); pass --inexact"),
        (("--variant", "identity"), "mixes with constants"),
        (("--variant", "learnable", "--set", "granularity=heads"), "one of 'scalar', 'head', 'channel'"),
        (("--variant", "learnable", "--set", "granularity"), "expected option=value"),
        (("--variant", "learnable", "--calibration", "a.txt"), "this variant shares none"),
        (("--variant", "svformer", "--calibration", "a.txt"), "--calibration: no file or directory 'a.txt'"),
        (("--variant", "learnable", "--to-hf"), "leave --variant out"),
        (("--to-hf", "--inexact"), "--to-hf takes no --inexact"),
        (("--to-hf",), "--to-hf takes models of this library"),
        (("--variant", "svformer", "--calibration-tokens", "10"), "--calibration-tokens is 10"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_mistakes_are_one_line(tmp_path, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(write(tmp_path / "llama", tokenizer=True), "--out", tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1] and error[-1].startswith("resformer: error:")
    assert left_in(tmp_path) == ["llama"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"attention_bias": True}, "are missing (first: model.layers.0.self_attn"),
        ({"num_hidden_layers": 4}, "have no place in the model (first: model.layers.4"),
        ({"intermediate_size": 33}, "have another shape"),
        ({"model_type": "gemma2"}, "supported are llama"),
        ({"model_type": "mine"}, "cannot be loaded"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_source_that_does_not_fit_is_refused(tmp_path, damage, message, capsys):
    model = write(tmp_path / "llama", attention_bias=False)
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    assert run(model, "--variant", "learnable", "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert left_in(tmp_path) == ["llama"]


def test_a_source_with_a_number_that_is_none_is_refused(tmp_path):
    model = make("llama", **SHAPED)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    model.save_pretrained(tmp_path / "llama")
    with pytest.raises(UserError, match=r"model\.norm\.weight is not finite"):
        convert_checkpoint(str(tmp_path / "llama"), tmp_path / "out", variant="learnable")


def test_a_note_in_the_config_can_be_ignored(tmp_path, here):
    model = write(tmp_path / "llama", house="number 7")
    assert run(model, "--variant", "learnable", "--out", tmp_path / "out") == 2
    assert run(model, "--variant", "learnable", "--out", tmp_path / "out", "--ignore-field", "house") == 0


def test_an_inexact_start_is_taken_when_asked_for(tmp_path, here, capsys):
    model, out = write(tmp_path / "llama"), tmp_path / "out"
    assert run(model, "--variant", "gated", "--set", "activation=relu", "--inexact", "--out", out) == 0
    assert "NOT equal to" in capsys.readouterr().out
    assert "needs training" in (out / "README.md").read_text()
    again = tmp_path / "again"  # what starts from random numbers starts from the same ones
    assert run(model, "--variant", "gated", "--set", "activation=relu", "--inexact", "--out", again) == 0
    one, other = load_file(out / "model.safetensors"), load_file(again / "model.safetensors")
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_a_user_s_variant_is_known_to_the_process_that_checks(tmp_path, monkeypatch):
    # What is registered here must not be seen by the tests that go over all variants.
    monkeypatch.setattr(registry, "_registered", {name: registry.get(name) for name in registry.names()})
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from resformer.core.registry import register_variant\n"
        "from resformer.core.variants.learnable import Learnable\n"
        "@register_variant('test_convert_mine')\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine(Learnable):\n"
        "    equation = 'as learnable'\n"
    )
    model, out = write(tmp_path / "llama"), tmp_path / "out"
    assert run(model, "--variant", "test_convert_mine", "--import", file, "--out", out) == 0
    assert ResFormerConfig.from_pretrained(out).variant == "test_convert_mine"


def test_the_way_back_is_refused_where_the_variant_does_something(tmp_path, here, capsys):
    model, out = write(tmp_path / "qwen", "qwen3"), tmp_path / "out"
    assert run(model, "--variant", "learnable", "--out", out) == 0
    trained = ResFormerForCausalLM.from_pretrained(out)
    with torch.no_grad():
        trained.model.layers[3].self_attn.value_residual.first.fill_(0.25)
    trained.save_pretrained(out)
    assert run(out, "--to-hf", "--out", tmp_path / "back") == 2
    assert "is not neutral" in (error := capsys.readouterr().err) and "layer 4: 0.25 V_1 + 1 V_4" in error
    assert run(out, "--variant", "transformer", "--out", tmp_path / "back") == 2
    assert "not neutral" in capsys.readouterr().err
    assert run(model, "--variant", "svformer", "--out", tmp_path / "shared") == 0
    assert run(tmp_path / "shared", "--to-hf", "--out", tmp_path / "back") == 2
    assert "no projections of their own in layers 4, 5" in capsys.readouterr().err
    assert left_in(tmp_path) == ["out", "qwen", "shared"]


def test_a_model_that_changed_its_form_since_is_refused_by_name(tmp_path, here, capsys):
    model, out = write(tmp_path / "llama"), tmp_path / "out"
    assert run(model, "--variant", "learnable", "--out", out) == 0
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "sliding_window": 9}))
    assert run(out, "--to-hf", "--out", tmp_path / "back") == 2
    assert "made of a Llama, which has no such sliding_window" in capsys.readouterr().err


def test_a_model_made_here_is_converted_too(tmp_path, here):
    """A Transformer of ours to another variant, and from learned weights 1 and 0 to the shared value that they are."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6}
    torch.manual_seed(0)
    ours = ResFormerForCausalLM(ResFormerConfig(variant="transformer", num_attention_heads=4, **sizes))
    ours.save_pretrained(tmp_path / "ours")
    result = convert_checkpoint(str(tmp_path / "ours"), tmp_path / "gated", variant="gated", say=lambda text: None)
    assert result.exact and result.config.converted_from is None

    options = {"layers": "last_third", "init_first": 1.0, "init_own": 0.0}
    morphed = ResFormerForCausalLM(
        ResFormerConfig(variant="learnable", variant_options=options, num_attention_heads=4, **sizes)
    )
    morphed.save_pretrained(tmp_path / "morphed")
    result = convert_checkpoint(str(tmp_path / "morphed"), tmp_path / "shared", variant="svformer", say=lambda _: None)
    assert result.exact and max(result.differences.values()) <= 1e-6
    assert result.config.variant_options == {"layers": "last_third"}
    assert "model.layers.5.self_attn.v_proj.weight" not in load_file(tmp_path / "shared" / "model.safetensors")


def test_gguf_needs_a_package_and_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gguf"):
        source.open_source(str(tmp_path / "model.gguf"))
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=r"no file .*model\.gguf"):
        source.open_source(str(tmp_path / "model.gguf"))


def test_the_sequence_of_the_check_is_as_long_as_windows_and_positions_want():
    def positions(**fields):
        given = {**random_fields("llama", 0), **SHAPED, **fields}
        rope = given.pop("rope_parameters")
        config = ResFormerConfig(variant="transformer", rope_parameters=rope, **given)
        probe = check.probe_for(config)
        return probe.positions, probe.unseen

    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert positions() == ((0, 20, 200), ())
    assert positions(max_position_embeddings=16) == ((0, 15), ())
    assert positions(max_position_embeddings=4096, sliding_window=400) == ((0, 20, 200, 423), ())
    assert positions(max_position_embeddings=4096, sliding_window=4096)[1] == ("windows of 4096 tokens",)
    assert positions(rope_parameters=dynamic) == ((0, 20, 200, 279), ())
    assert positions(rope_parameters=dynamic, max_position_embeddings=9000)[1] == ("rotary positions from 9000 on",)


def test_a_kill_in_the_middle_leaves_nothing_behind(tmp_path):
    """SIGTERM while the other process runs."""
    model = write(tmp_path / "llama")
    code = (
        "import os, signal, sys\n"
        "from resformer import cli\n"
        "from resformer.convert import check\n"
        "check.in_another_process = lambda *a: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"sys.exit(cli.main(['convert', {str(model)!r}, '--variant', 'learnable', '--out', {str(tmp_path / 'out')!r}]))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 143
    assert left_in(tmp_path) == ["llama"]


def test_a_conversion_in_memory_shares_no_state_with_later_ones():
    from resformer.convert.checkpoint import in_memory

    theirs = make("llama", **SHAPED)
    ours = in_memory(theirs, variant="gated")
    assert torch.allclose(ours(ids()).logits, theirs(ids()).logits, atol=1e-5)
    with pytest.raises(UserError, match="no exact start"):
        in_memory(theirs, variant="svformer")
    assert AutoConfig.for_model("llama").model_type == "llama"


def test_projections_that_are_gone_are_named(tmp_path):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6}
    options = {"layers": "last_third"}
    ours = ResFormerForCausalLM(
        ResFormerConfig(variant="svformer", variant_options=options, num_attention_heads=4, **sizes)
    )
    ours.save_pretrained(tmp_path / "ours")
    with pytest.raises(
        UserError, match=r"'svformer' has no projections of their own in layers 5, 6, which 'learnable'"
    ):
        convert_checkpoint(str(tmp_path / "ours"), tmp_path / "out", variant="learnable", say=lambda text: None)
