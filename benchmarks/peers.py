"""One whole training step of our engine and of others, each behind one small adapter, for equal sizes and settings.

Everybody gets the same tokens and targets, AdamW (fused, one learning rate, betas 0.9 and 0.95, weight decay 0.1), a
gradient norm clipped at 1, and nothing beyond what its own way of training does. What is not installed says so in one
line, and the others still run.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from turns import Step

from resformer.errors import UserError, did_you_mean

COMPILED = "+compile"
LR, BETAS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model and of its batch; a head is hidden size / heads wide, the output head is not tied."""

    layers: int
    hidden_size: int
    heads: int
    intermediate_size: int
    vocab_size: int
    batch_size: int
    sequence_length: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_size * self.sequence_length

    def config(self) -> dict[str, Any]:
        """Fields that our config and transformers' LlamaConfig share."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.sequence_length,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
        }

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


# The paper's 82M model (arXiv 2410.17897v2, table 4) on a batch that a CPU gets through, and a model of CPU size.
SHAPES = {
    "cpu": Shape(
        layers=8, hidden_size=256, heads=8, intermediate_size=704, vocab_size=8192, batch_size=4, sequence_length=512
    ),
    "82m": Shape(
        layers=8, hidden_size=512, heads=8, intermediate_size=1792, vocab_size=50277, batch_size=2, sequence_length=512
    ),
}


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A model and its training step, which returns the loss in nats per token."""

    model: Any
    step: Callable[[], float]

    def bare(self) -> Step:
        """The step as something to be timed."""
        return lambda: void(self.step())


def void(_: Any) -> None:
    """Nothing of anything."""


def plain_step(model: Any, loss_of: Callable[[], Any]) -> Callable[[], float]:
    """The loop that a user of a bare model writes: loss, backward, clip, AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    model.train()

    def step() -> float:
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def ours(variant: str, shape: Shape, tokens_BT1: Any, *, compile: bool) -> Runner:
    """Our engine: what `resformer train` does in a step, without its files and its progress line."""
    from resformer import ResFormerConfig, ResFormerForCausalLM
    from resformer.parallel.wrap import compile_blocks
    from resformer.train.config import OptimConfig
    from resformer.train.loss import accumulate
    from resformer.train.optim import build_optimizers, clip_gradients, gradient_norms

    model = ResFormerForCausalLM(ResFormerConfig(variant=variant, **shape.config()))
    model.train()
    if compile:
        compile_blocks(model)
    optim = OptimConfig(lr=LR, beta1=BETAS[0], beta2=BETAS[1], weight_decay=WEIGHT_DECAY, grad_clip=CLIP)
    optimizers = build_optimizers(model, optim)
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]

    def step() -> float:
        with deterministic():
            loss = accumulate(model, tokens_BT1, micro_batch_size=len(tokens_BT1))
            clip_gradients(parameters, gradient_norms(parameters), optim.grad_clip)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            return float(loss)

    return Runner(model=model, step=step)


@contextlib.contextmanager
def deterministic() -> Any:
    """Deterministic kernels, with which our engine trains on the CPU and nobody else does."""
    import torch

    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


def hf_trainer(shape: Shape, tokens_BT1: Any, *, compile: bool) -> Runner:
    """LlamaForCausalLM in transformers' Trainer: the calls of its inner loop for one step, in its order, on the model
    and the optimizer as its accelerator prepares them (which is what compiles the model).
    """
    needs("accelerate", "accelerate")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="trainer-"),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        optim="adamw_torch_fused",
        learning_rate=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        torch_compile=compile,
    )
    trainer: Any = Trainer(model=LlamaForCausalLM(LlamaConfig(**shape.config(), use_cache=False)), args=arguments)
    trainer.create_optimizer_and_scheduler(num_training_steps=1_000_000)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped, trainer.optimizer = model, optimizer
    trainer.current_gradient_accumulation_steps = 1
    inputs_BT, targets_BT = split(tokens_BT1)
    count = targets_BT.numel()

    def step() -> float:
        inputs = {"input_ids": inputs_BT, "labels": targets_BT, "shift_labels": targets_BT}
        loss = trainer.training_step(model, inputs, count)
        trainer.accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()
        return float(loss)

    return Runner(model=model, step=step)


def litgpt(shape: Shape, tokens_BT1: Any, *, compile: bool) -> Runner:
    """litgpt's GPT in Llama's form, with the loss of its pretraining script."""
    needs("litgpt", "litgpt", "lightning", "jsonargparse")
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    model: Any = GPT(
        Config(
            block_size=shape.sequence_length,
            n_layer=shape.layers,
            n_embd=shape.hidden_size,
            n_head=shape.heads,
            n_query_groups=shape.heads,
            vocab_size=shape.vocab_size,
            padded_vocab_size=shape.vocab_size,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            intermediate_size=shape.intermediate_size,
        )
    )
    run = torch.compile(model) if compile else model
    inputs_BT, targets_BT = split(tokens_BT1)
    return Runner(model=model, step=plain_step(model, lambda: chunked_cross_entropy(run(inputs_BT), targets_BT)))


def x_transformers(shape: Shape, tokens_BT1: Any, *, compile: bool, value_residual: bool = True) -> Runner:
    """x-transformers' decoder in Llama's form, with its value residual (a gate per token and head, as is its default)
    and its attention by F.scaled_dot_product_attention.
    """
    needs("x_transformers", "x-transformers", "einops", "einx", "loguru", "torch-einops-utils")
    import torch
    import torch.nn.functional as F
    from x_transformers import Decoder, TransformerWrapper

    head_dim = shape.hidden_size // shape.heads
    model: Any = TransformerWrapper(
        num_tokens=shape.vocab_size,
        max_seq_len=shape.sequence_length,
        use_abs_pos_emb=False,
        tie_embedding=False,
        attn_layers=Decoder(
            dim=shape.hidden_size,
            depth=shape.layers,
            heads=shape.heads,
            attn_dim_head=head_dim,
            rotary_pos_emb=True,
            rotary_emb_dim=head_dim,
            attn_flash=True,
            use_rmsnorm=True,
            ff_glu=True,
            ff_swish=True,
            ff_no_bias=True,
            ff_mult=shape.intermediate_size / shape.hidden_size,
            add_value_residual=value_residual,
        ),
    )
    run = torch.compile(model) if compile else model
    inputs_BT, targets_BT = split(tokens_BT1)

    def loss() -> Any:
        logits_BTV = run(inputs_BT)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    return Runner(model=model, step=plain_step(model, loss))


PEERS: dict[str, Callable[..., Runner]] = {
    "hf-trainer": hf_trainer,
    "litgpt": litgpt,
    "x-transformers": x_transformers,
}


def step_flops(shape: Shape) -> int:
    """Operations of one training step in matrix products, scores counted whole (`resformer.models.accounting`)."""
    from resformer import ResFormerConfig
    from resformer.models.accounting import account

    costs = account(ResFormerConfig(variant="transformer", **shape.config()), sequence_length=shape.sequence_length)
    return 3 * costs.flops_per_token * shape.tokens


def versions() -> dict[str, str]:
    """Versions of the peers that are installed."""
    found = {}
    for package in ("accelerate", "litgpt", "x-transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def split(tokens_BT1: Any) -> tuple[Any, Any]:
    """Inputs and targets `[B, T]`."""
    return tokens_BT1[:, :-1].contiguous(), tokens_BT1[:, 1:].contiguous()


def needs(module: str, *packages: str) -> None:
    """Refuse a peer that is not installed.

    Raises:
        UserError: with the command that installs it.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        command = f"pip install --no-deps {' '.join(packages)}"
        raise UserError(f"{packages[0]} cannot be imported ({error}); `{command}` (see benchmarks/README.md)") from None


def check_name(text: str) -> None:
    """Refuse a name that is neither a peer nor a variant, with or without "+compile".

    Raises:
        UserError: with the nearest name.
    """
    from resformer.core.registry import names

    name, known = text.removesuffix(COMPILED), [*PEERS, *names()]
    if name not in known:
        raise UserError(f"unknown model {text!r}{did_you_mean(name, known)} (peers: {', '.join(PEERS)}; or a variant)")


def build(text: str, shape: Shape, tokens_BT1: Any) -> Runner:
    """The runner of a name such as `litgpt`, `learnable+compile`.

    Raises:
        UserError: unknown, or not installed.
    """
    import torch

    check_name(text)
    name, compiled = text.removesuffix(COMPILED), text.endswith(COMPILED)
    torch.manual_seed(0)
    if name in PEERS:
        return PEERS[name](shape, tokens_BT1, compile=compiled)
    return ours(name, shape, tokens_BT1, compile=compiled)
