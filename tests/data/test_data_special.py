"""Text that looks like a special token never becomes one, with tokenizers of every kind; losses are said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_helpers import all_stored, write_rows

from resformer.data import open_dataset, tokenizer

LITERALS = ["</s>", "<s>", "<pad>", "<|im_start|>", "a<s>b <pad> x", "x </s> y", "</s></s>", "<|im_<|im_start|>"]
PLAIN = [f"plain words number {i}" for i in range(12)]


def byte_level(**marks: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens(
        [AddedToken(token, normalized=False, **marks) for token in ("</s>", "<s>", "<pad>", "<|im_start|>")]
    )
    return made


def unigram() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted({c for text in [*LITERALS, *PLAIN] for c in text} - {" "})
    pieces = [("<unk>", 0.0), ("</s>", -1.0), ("<s>", -1.0), ("<pad>", -1.0), ("<|im_start|>", -1.0), ("\u2581", -2.0)]
    made = Tokenizer(models.Unigram([*pieces, *((c, -3.0) for c in letters)], unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens([AddedToken(token) for token in ("</s>", "<s>", "<pad>", "<|im_start|>")])
    return made


def written(made: Any, home: Path, **config: Any) -> Path:
    home.mkdir(exist_ok=True)
    made.save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **config}))
    return home


@pytest.mark.parametrize("marked", [True, False])
def test_byte_level_tokens_marked_or_only_named(build: Callable[..., Path], tmp_path: Path, marked: bool) -> None:
    more = {"bos_token": "<s>", "pad_token": {"content": "<pad>"}, "additional_special_tokens": ["<|im_start|>"]}
    home = written(byte_level(special=marked), tmp_path / "tok", **more)
    file = write_rows(tmp_path / "a.jsonl", [*PLAIN, *LITERALS])
    assert sorted(all_stored(open_dataset(build([file], tokenizer=home)))) == sorted([*PLAIN, *LITERALS])


def test_a_vocabulary_that_holds_them_refuses_what_it_cannot_spell(
    build: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from resformer.errors import UserError

    home = written(unigram(), tmp_path / "tok")
    file = write_rows(tmp_path / "a.jsonl", [*PLAIN, *LITERALS])
    with pytest.raises(UserError, match=r"a\.jsonl:13: holds the text of a special token"):
        build([file], tokenizer=home)
    dataset = open_dataset(build([file], tokenizer=home, on_bad_line="skip"))
    kept = all_stored(dataset)
    assert set(PLAIN) <= set(kept) <= {*PLAIN, *LITERALS}
    skipped = dataset.index["readers"]["totals"]["bad_documents"]
    assert skipped == len(PLAIN) + len(LITERALS) - len(kept) > 0
    assert f"skipped in all: {skipped} bad documents" in capsys.readouterr().err


def test_unknown_tokens_are_counted_and_losses_said(
    build: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = written(unigram(), tmp_path / "tok", unk_token="<unk>")
    file = write_rows(tmp_path / "a.jsonl", [*PLAIN, "\u6f22 \u5b57"])
    dataset = open_dataset(build([file], tokenizer=home))
    assert dataset.index["domains"]["a"]["counts"]["unknown_tokens"] == 2
    said = capsys.readouterr().err
    assert "the tokenizer has no token for some text: 2 tokens are its unknown one" in said
    assert f"note: --tokenizer {home} does not keep every text as it is: 'line\\nline' comes back as" in said


def test_a_changed_end_of_text_token_is_another_corpus(build: Callable[..., Path], tmp_path: Path) -> None:
    from resformer.errors import UserError

    home = written(byte_level(special=True), tmp_path / "tok")
    file = write_rows(tmp_path / "a.jsonl", PLAIN)
    build([file], tokenizer=home)
    written(byte_level(special=True), tmp_path / "tok", eos_token="<pad>")
    with pytest.raises(UserError, match="already prepared with other settings"):
        build([file], tokenizer=home)
    assert tokenizer.losses_of(home) == ""
