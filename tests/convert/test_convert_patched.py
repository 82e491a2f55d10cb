"""Models that `resformer.patch` has changed, converted: with their lambdas, or refused by name."""

from __future__ import annotations

import pytest
import torch
from convert_models import ids, make
from test_convert_checkpoint import SHAPED, here, left_in, run  # noqa: F401  (a fixture)

import resformer
from resformer import ResFormerForCausalLM
from resformer.convert.checkpoint import in_memory
from resformer.errors import UserError


def patched(family: str, variant: str, **options):
    """As after some training."""
    model = resformer.patch(make(family, **SHAPED), variant=variant, variant_options=options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "value_" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


@pytest.mark.parametrize(
    ("family", "variant", "options"),
    [
        ("llama", "learnable", {"granularity": "head"}),
        ("qwen3", "learnable_plus", {}),
        ("helium", "gated", {}),
        ("olmo2", "dense", {"layers": [3, 5]}),
        ("mistral", "constant", {"first": 3.0}),  # which has no weights that would show that it is there
        ("qwen2", "neutreno", {}),
    ],
)
@torch.no_grad()
def test_a_patched_model_becomes_ours_with_what_it_has_learned(family, variant, options):
    theirs = patched(family, variant, **options)
    ours = in_memory(theirs, variant=variant)
    want, stock = theirs(ids()).logits, make(family, **SHAPED)(ids()).logits
    assert (ours(ids()).logits - want).abs().max() <= 1e-5 * max(1.0, want.abs().max())
    assert (want - stock).abs().max() > 1e-2
    assert not hasattr(ours.config, "resformer_patch") and "resformer_patch" not in ours.config.converted_from


def test_from_files_with_a_check(tmp_path, here, capsys):  # noqa: F811
    model = patched("llama", "learnable")
    model.save_pretrained(tmp_path / "patched")
    assert run(tmp_path / "patched", "--variant", "learnable", "--out", tmp_path / "ours") == 0
    assert "equal to" in capsys.readouterr().out
    ours = ResFormerForCausalLM.from_pretrained(tmp_path / "ours")
    name = "model.layers.3.self_attn.value_residual.first"
    assert torch.equal(ours.get_parameter(name), model.get_parameter(name))
    for arguments, message in (
        (("--variant", "gated"), "is patched with 'learnable', not 'gated'"),
        (("--variant", "learnable", "--set", "granularity=head"), "asked for: granularity='head' (there: 'scalar')"),
        (("--variant", "transformer", "--ignore-field", "resformer_patch"), "is patched with 'learnable'"),
        (("--to-hf",), "--to-hf takes models of this library"),
    ):
        assert run(tmp_path / "patched", *arguments, "--out", tmp_path / "out") == 2
        assert message in capsys.readouterr().err
    assert left_in(tmp_path) == ["ours", "patched"]


def test_a_model_that_lost_its_patch_is_not_taken_for_one():
    model = patched("llama", "learnable")
    stock = make("llama", **SHAPED)
    stock.config.resformer_patch = model.config.resformer_patch
    with pytest.raises(UserError, match=r"saved patched, but loaded without.*load_patched"):
        in_memory(stock, variant="learnable")
