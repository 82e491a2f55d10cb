"""Entry points of continuous batching. What depends on transformers' young API for it is in `paged`, imported only when
somebody asks for a manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.plan import Plan
from ..errors import UserError
from .attention import implementations
from .compat import transformers_version
from .configuration import ResFormerConfig
from .masks import views

if TYPE_CHECKING:
    from transformers.generation import GenerationMixin

    from .pretrained import ResFormerPreTrainedModel

    class _Base(ResFormerPreTrainedModel, GenerationMixin):
        pass
else:
    _Base = object

# Their frequencies follow the longest sequence of a forward call, so one request would change another's text.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class BatchedGeneration(_Base):
    """Continuous batching with a cache laid out by the plan, for a causal language model; goes before transformers'
    classes among the bases.
    """

    def init_continuous_batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """transformers' manager of requests, whose cache keeps what the plan stores and no more.

        Raises:
            UserError: for a model or a generation config that cannot be run in this way, or a transformers whose
                batching we do not know.
        """
        check_batching(self.config)
        config = generation_config if generation_config is not None else self.generation_config
        if getattr(config, "num_beams", None) not in (None, 1):
            raise UserError(
                f"num_beams is {config.num_beams}, but continuous batching has no beam search; leave it at 1, or use "
                "model.generate"
            )
        try:
            from .paged import plan_manager, prepared
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"continuous batching of transformers {transformers_version} is not what resformer knows ({error}); "
                "install one from 5.19 to 5.24, or use model.generate"
            ) from None
        batching = continuous_batching_config or getattr(config, "continuous_batching_config", None)
        ready = prepared(self.config, batching)
        manager = super().init_continuous_batching(config, ready, *args, **kwargs)
        return plan_manager(manager, self.config)

    def generate_batch(self, inputs: list[list[int]], generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers.

        Raises:
            UserError: as `init_continuous_batching`; also for learned positions that end before the texts do.
        """
        config = generation_config if generation_config is not None else self.generation_config
        new = kwargs.get("max_new_tokens") or getattr(config, "max_new_tokens", None) or 1
        needed = max((len(prompt) for prompt in inputs), default=0) + new - 1  # the last token is not read any more
        if self.config.position_embedding == "learned" and needed > self.config.max_position_embeddings:
            raise UserError(
                f"the longest prompt with max_new_tokens {new} needs {needed} positions, but the model has learned "
                f"{self.config.max_position_embeddings} (max_position_embeddings); ask for fewer tokens"
            )
        return super().generate_batch(inputs, generation_config, *args, **kwargs)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """As elsewhere; a manager's name for attention by matrices says nothing new to a plan that needs them."""
        if attn_implementation == "paged|eager" and "eager" in implementations(self.config.plan()):
            return attn_implementation
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)


def check_batching(config: ResFormerConfig) -> None:
    """Raises UserError for a model whose requests cannot be packed into one batch."""
    problem = _window_problem(config.plan())
    kind = config.rope()["rope_type"] if config.position_embedding == "rope" else None
    if problem is None and kind in LENGTH_DEPENDENT_ROPE:
        problem = f"rope_type {kind!r} turns all requests of a batch by the length of the longest"
    if problem is not None:
        raise UserError(f"continuous batching cannot run this model: {problem}; use model.generate")


def _window_problem(plan: Plan) -> str | None:
    """What a cache of whole and sliding slots, each with masks of its own kind, cannot serve."""
    for row, view in zip(plan, views(plan), strict=True):
        if view.aligns:
            return f"layer {row.layer} reads slots that slide and slots that do not"
        windows = {plan[n - 1].slot_window for n in row.slots}
        if windows != {row.window}:
            return f"layer {row.layer} has a window of {row.window}, but attends to a slot that keeps more"
    return None
