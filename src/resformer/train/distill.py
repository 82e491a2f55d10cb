"""Distillation from the model that a converted one was made from: KL divergence beside the cross-entropy.

Shapes: B sequences, T tokens, C hidden size, V vocabulary, N = B * T rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from resformer.errors import UserError
from resformer.evaluate.loading import load_model, model_directory
from resformer.evaluate.loss import kept_apart
from resformer.models import ResFormerConfig
from resformer.train.config import Config

LOGITS = 1 << 25  # of a chunk, at a time: 128 MB in fp32, a few times over
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """What to distil from.

    Attributes:
        model: any causal LM with the student's vocabulary, in evaluation mode, whole in every process.
        share: of the KL in the objective, 0..1.
        temperature: of both distributions (Hinton et al. 2015, arXiv 1503.02531; hence the KL times its square).
    """

    model: Any
    share: float
    temperature: float = 1.0


@dataclass(kw_only=True)
class Source:
    """The model of `uptrain.source` while it is needed: for one score, or as long as the run distils from it."""

    model: Any = None


def open_source(config: Config, described: ResFormerConfig, device: torch.device) -> Any:
    """The model of `uptrain.source`, in evaluation mode on `device`. In a run in fp32 its weights are too, so that an
    exact conversion scores as it does; in one in bf16 they stay as they are stored.

    Raises:
        UserError: there is none, or its vocabulary is not that of the model that is trained.
    """
    assert config.uptrain.source is not None
    model, _ = load_model(config.uptrain.source, device, dtype=torch.float32 if config.train.dtype == "fp32" else None)
    _check_vocabulary(config.uptrain.source, model.config, described)
    return model.requires_grad_(False)


def check_source(config: Config, described: ResFormerConfig) -> None:
    """See, without reading its weights, whether `uptrain.source` can be one.

    Raises:
        UserError: as `open_source`, as far as its config tells.
    """
    from transformers import AutoConfig

    source = config.uptrain.source
    if source is None:
        return
    try:
        found = AutoConfig.from_pretrained(model_directory(source))
    except (OSError, ValueError) as error:
        raise UserError(f"uptrain.source {source} cannot be read: {' '.join(str(error).split())[:300]}") from None
    _check_vocabulary(source, found, described)


def _check_vocabulary(source: str, found: Any, described: ResFormerConfig) -> None:
    rows = found.get_text_config().vocab_size
    if rows != described.vocab_size:
        raise UserError(
            f"uptrain.source {source} has a vocabulary of {rows} entries, the model one of {described.vocab_size}; "
            "name the model that this one was made from"
        )


def distilled_losses(
    model: Any,
    tokens_BT1: Tensor,
    mask_BT: Tensor | None = None,
    positions_BT: Tensor | None = None,
    *,
    teacher: Teacher,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The objective summed over tokens, (1 - share) CE + share t^2 KL(teacher || model); the load-balancing loss of
    experts; and what it is made of, `[2]`: the sums of CE and of t^2 KL, without gradients.

    Arguments are those of `loss.batch_losses`. Logits of the student exist for a part of the rows at a time, and are
    computed once more in the backward pass; the teacher's are there for the whole micro-batch.
    """
    inputs_BT, targets_BT = tokens_BT1[:, :-1], tokens_BT1[:, 1:]
    if mask_BT is not None:
        targets_BT = targets_BT.masked_fill(~mask_BT, IGNORED)
    with torch.no_grad():
        wanted_NV = teacher.model(
            input_ids=inputs_BT, use_cache=False, **kept_apart(teacher.model, positions_BT)
        ).logits.flatten(0, 1)
    output = model.base_model(input_ids=inputs_BT, use_cache=False, **kept_apart(model, positions_BT))
    head: Any = model.get_output_embeddings()
    hidden_NC, targets_N = output.last_hidden_state.flatten(0, 1), targets_BT.flatten()
    sums, objective = hidden_NC.new_zeros(2, dtype=torch.float32), hidden_NC.new_zeros((), dtype=torch.float32)
    rows = max(64, LOGITS // wanted_NV.shape[-1])
    part: Callable[..., tuple[Tensor, Tensor]] = _chunk
    for hidden, wanted, targets in zip(
        hidden_NC.split(rows), wanted_NV.split(rows), targets_N.split(rows), strict=True
    ):
        nll, kl = checkpoint(
            part,
            hidden,
            head.weight,
            head.bias,
            wanted,
            targets,
            teacher.temperature,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        objective = objective + (1 - teacher.share) * nll + teacher.share * kl
        sums += torch.stack([nll.detach(), kl.detach()])
    aux_loss = getattr(output, "aux_loss", None)
    return objective, None if aux_loss is None else model.config.router_aux_loss_coef * aux_loss, sums


def _chunk(
    hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, wanted_NV: Tensor, targets_N: Tensor, t: float
) -> tuple[Tensor, Tensor]:
    """Sums of the negative log-likelihoods and of t^2 KL(wanted || predicted), fp32, over rows whose target counts."""
    logits_NV = F.linear(hidden_NC, weight_VC, bias_V).float()
    nll = F.cross_entropy(logits_NV, targets_N, reduction="sum", ignore_index=IGNORED)
    wanted_NV = F.log_softmax(wanted_NV.float() / t, dim=-1)
    kl_N = F.kl_div(F.log_softmax(logits_NV / t, dim=-1), wanted_NV, reduction="none", log_target=True).sum(dim=-1)
    return nll, t * t * kl_N.masked_fill(targets_N == IGNORED, 0.0).sum()
