"""Text -> token ids with a model's own tokenizer, and what stands before a document."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from resformer.data.encode import cut_safely
from resformer.data.tokenizer import Vocabulary, special_tokens
from resformer.errors import UserError, did_you_mean
from resformer.models.configuration import ResFormerConfig

POLICIES = ("auto", "none", "model")
_PROBE = "text"


@dataclass(frozen=True, kw_only=True)
class Start:
    """What stands before a document as the context of its first token.

    Attributes:
        policy: as it was asked for.
        ids: the tokens; none = the first token of a document is not scored.
        why: in words.
    """

    policy: str
    ids: tuple[int, ...]
    why: str

    def record(self) -> dict[str, Any]:
        """For eval.json."""
        return {**asdict(self), "ids": list(self.ids)}


def start_of_documents(model: Any, tokenizer: Any, policy: str = "auto", *, document_mask: bool = False) -> Start:
    """What stands before a document.

    Args:
        model: any causal LM of transformers.
        tokenizer: the model's, of transformers.
        policy: "auto" = as in training: a model of ours has the end-of-text id there, as every document but the first
            has it in the shards; another model has what its tokenizer puts before a text, and where that is nothing the
            first token is not scored. "none" = nothing, the first token is not scored. "model" = the begin-of-text
            token of tokenizer or config, whether or not the tokenizer puts it there.
        document_mask: the model was trained with documents kept apart: "auto" is "none" then.

    Raises:
        UserError: an unknown policy, or "model" where no such token is named.
    """
    if policy not in POLICIES:
        raise UserError(f"--bos is {policy!r}; expected one of {', '.join(POLICIES)}{did_you_mean(policy, POLICIES)}")
    if policy == "none":
        return Start(policy=policy, ids=(), why="nothing, as asked for")
    config = model.config
    if policy == "model":
        found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else _one(config.bos_token_id)
        if found is None:
            raise UserError(
                "--bos model: neither the tokenizer nor the config names a begin-of-text token; use auto or none"
            )
        return Start(policy=policy, ids=(int(found),), why="the model's begin-of-text token")
    if isinstance(config, ResFormerConfig):
        if document_mask:
            return Start(policy=policy, ids=(), why="nothing, as in training, which kept documents apart")
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else _one(config.eos_token_id)
        if end is not None:
            return Start(policy=policy, ids=(int(end),), why="the end-of-text token, as in training")
    put = _put_before(tokenizer)
    return Start(policy=policy, ids=put, why="what the tokenizer puts there" if put else "nothing, as the tokenizer")


def _one(token_id: Any) -> int | None:
    """A config's token id; some have a list of them."""
    return next(iter(token_id), None) if isinstance(token_id, list | tuple) else token_id


def _put_before(tokenizer: Any) -> tuple[int, ...]:
    """The ids that a tokenizer puts before a text."""
    plain = tokenizer(_PROBE, add_special_tokens=False).input_ids
    whole = tokenizer(_PROBE).input_ids
    if not plain:  # a vocabulary without these letters
        return tuple(whole[:1]) if whole[:1] == [tokenizer.bos_token_id] else ()
    for before in range(len(whole) - len(plain) + 1):
        if whole[before : before + len(plain)] == plain:
            return tuple(whole[:before])
    return ()


class TextEncoder:
    """Encodes texts without special tokens; the literal text "<|endoftext|>" is encoded by its characters, as it is in
    the shards.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.vocabulary = _vocabulary(tokenizer) if getattr(tokenizer, "is_fast", False) else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int64 `[n]`.

        Raises:
            UserError: a token that is not among the model's.
        """
        if self.vocabulary is None:
            found = [self._slow(text) for text in texts]
        else:
            pieces = [list(cut_safely(text)) if self.vocabulary.cuts_safely else [text] for text in texts]
            flat = [piece for some in pieces for piece in some]
            # What cannot be spelled without a special token is encoded as the tokenizer does it.
            encoded = iter(
                self._slow(piece) if ids is None else ids
                for piece, ids in zip(flat, self.vocabulary.encode(flat), strict=True)
            )
            found = [np.concatenate([next(encoded) for _ in some] or [np.zeros(0, np.int64)]) for some in pieces]
        for ids in found:
            if len(ids) and ids.max() >= self.vocab_size:
                raise UserError(
                    f"the tokenizer gives token {ids.max()}, but the model knows {self.vocab_size}; they do not belong "
                    "together"
                )
        return found

    def _slow(self, text: str) -> np.ndarray:
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
        return np.asarray(ids, dtype=np.int64)


def _vocabulary(tokenizer: Any) -> Vocabulary:
    """The same encoder as that of the data pipeline, with the model's tokenizer."""
    inner = _plain(tokenizer)
    inner.encode_special_tokens = True
    special, unknown = special_tokens(inner, dict(tokenizer.special_tokens_map))
    return Vocabulary(
        special=tuple(sorted(special)),
        unknown_id=None if unknown is None else inner.token_to_id(unknown),
        tokenizer=inner,
        vocab_size=max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        eos_token=tokenizer.eos_token or "",
        eos_token_id=-1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
        bos_token=tokenizer.bos_token,
        bos_token_id=tokenizer.bos_token_id,
    )


def _plain(tokenizer: Any) -> Any:
    """A copy of the encoder inside, without truncation and padding, which calls leave behind in it."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    inner.no_truncation()
    inner.no_padding()
    return inner


def fingerprint(tokenizer: Any) -> str:
    """sha256 of what a tokenizer does, as hex: equal for equal vocabularies, merges and rules."""
    if getattr(tokenizer, "is_fast", False):
        return hashlib.sha256(_plain(tokenizer).to_str().encode()).hexdigest()
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
