"""From own values to shared ones."""

from __future__ import annotations

import pytest
import torch
from convert_models import ids, make

from resformer.convert.checkpoint import in_memory
from resformer.convert.morph import morph, share_after
from resformer.errors import UserError


@pytest.mark.parametrize("tie", ["free", "lerp"])
def test_a_morphed_model_goes_from_its_source_to_shared_values(tie):
    theirs = make("llama", num_hidden_layers=6)
    ours = in_memory(theirs, variant="learnable", options={"layers": "last_third", "tie": tie})
    for step, share in ((0, 0.0), (5, 0.5), (20, 1.0)):
        assert share_after(step, 10) == share and morph(ours, share) == 2
        table = ours.lambda_map()
        assert table == {"layers": [5, 6], "first": [share] * 2, "own": [1 - share] * 2}
        gap = (ours(ids()).logits - theirs(ids()).logits).abs().max()
        assert (gap < 1e-5) == (share == 0)
    with torch.no_grad():  # own values no longer count
        for layer in ours.model.layers[4:]:
            before = ours(ids()).logits
            layer.self_attn.v_proj.weight.zero_()
            assert torch.equal(ours(ids()).logits, before)


@pytest.mark.parametrize(
    ("variant", "options", "share", "message"),
    [
        ("gated", {}, 0.5, "morph one of the variant 'learnable'"),
        ("learnable", {"tie": "own_one"}, 0.5, "with tie 'own_one'"),
        ("learnable", {}, 1.5, "share is 1.5"),
    ],
)
def test_what_cannot_be_morphed_is_refused(variant, options, share, message):
    with pytest.raises(UserError, match=message):
        morph(in_memory(make("llama"), variant=variant, options=options), share)
