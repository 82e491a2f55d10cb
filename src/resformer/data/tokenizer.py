"""Byte-level BPE: trained on the corpus, or a tokenizer.json that exists. Text is always encoded with special tokens
NOT parsed.

So a document that contains the literal text "<|endoftext|>" is encoded as those characters; the end-of-text id stands
in a shard only where a document ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resformer.data.vocabulary import Vocabulary
from resformer.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json")
END_OF_TEXT = "<|endoftext|>"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # of somebody: "gpt2" may as well be a misspelt directory
# Tried in this order when neither tokenizer_config.json nor special_tokens_map.json names the end-of-text token.
_USUAL_END = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
MIN_VOCAB_SIZE = 257  # 256 bytes and the end-of-text token
# The trainer reserves memory for all entries at the start; the largest published vocabularies have about a million.
MAX_VOCAB_SIZE = 1 << 24


def train(texts: Iterable[str], vocab_size: int) -> str:
    """Train byte-level BPE; return the JSON of the tokenizer. The same texts and size give the same JSON (no
    randomness, ties by id).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer.to_str(pretty=False)


def check_vocab_size(vocab_size: int) -> None:
    """UserError unless `vocab_size` holds all bytes and the end-of-text token and can be trained."""
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise UserError(
            f"--vocab-size: got {vocab_size}, expected {MIN_VOCAB_SIZE} (256 bytes and {END_OF_TEXT}) to "
            f"{MAX_VOCAB_SIZE}; take 4096 for small corpora or 16384 and more for large ones"
        )


def write_trained(tokenizer_json: str, directory: Path) -> None:
    """Write the two files that `AutoTokenizer.from_pretrained(directory)` needs."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    _write(directory, tokenizer_json.encode("utf-8"), config)


def _write(directory: Path, tokenizer_json: bytes, config: dict[str, Any]) -> None:
    """Both files, each there as a whole, tokenizer.json last."""
    config_json = (json.dumps(config, indent=2) + "\n").encode()
    for name, data in (("tokenizer_config.json", config_json), ("tokenizer.json", tokenizer_json)):
        waiting = directory / f".{name}.{os.getpid()}"
        waiting.write_bytes(data)
        os.replace(waiting, directory / name)


def read_existing(source: Path) -> tuple[Path, dict[str, Any]]:
    """A user's tokenizer (a tokenizer.json or the directory that holds one), checked: its tokenizer.json and what goes
    into tokenizer_config.json. UserError names the user's file.
    """
    home = source if source.is_dir() else source.parent
    file = locate(source)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    own = home / "tokenizer_config.json"
    if own.is_file():
        config = _json_object(own)
    # special_tokens_map.json is the older place; merged here, one file is enough for AutoTokenizer.
    special = home / "special_tokens_map.json"
    if special.is_file():
        config = {**_json_object(special), **config}
    config["eos_token"] = config.get("eos_token") if _content(config.get("eos_token")) else None
    tokenizer = _load(file, f"--tokenizer {file}")
    config["eos_token"] = config["eos_token"] or _usual_end(tokenizer, file)
    _vocabulary(tokenizer, config, file, own if own.is_file() else special if special.is_file() else file)
    return file, config


def losses_of(source: Path) -> str:
    """`Vocabulary.losses` of a user's tokenizer."""
    file, config = read_existing(source)
    return _vocabulary(_load(file), config, file, file).losses()


def copy_existing(source: Path, directory: Path) -> None:
    """Copy a user's tokenizer byte for byte; write a tokenizer_config.json that names its end-of-text token."""
    file, config = read_existing(source)
    _write(directory, file.read_bytes(), config)


def find(source: str | Path) -> Path:
    """The tokenizer.json, or the directory with one, that a user's --tokenizer means: a path, or a name on the hub."""
    path = Path(source)
    if path.exists() or not _HUB_NAME.fullmatch(str(source)):
        locate(path)
        return path
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        file = hf_hub_download(str(source), "tokenizer.json")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"--tokenizer: there is no file or directory '{source}', and no tokenizer.json of that name came from the "
            f"hub ({reason}); expected the path of a tokenizer.json, of a directory that holds one, or a hub name"
        ) from error
    for other in ("tokenizer_config.json", "special_tokens_map.json"):
        with contextlib.suppress(HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
            hf_hub_download(str(source), other)
    return Path(file).parent


def locate(source: Path) -> Path:
    """The tokenizer.json that `source` means; UserError when there is none."""
    file = source / "tokenizer.json" if source.is_dir() else source
    if not file.is_file():
        raise UserError(
            f"--tokenizer: no file {file}; expected the path of a tokenizer.json or of a directory that holds one "
            "(leave it out to train one)"
        )
    return file


def open_vocabulary(directory: Path) -> Vocabulary:
    """Read tokenizer.json and tokenizer_config.json of `directory`."""
    file = directory / "tokenizer.json"
    config_file = directory / "tokenizer_config.json"
    config = _json_object(config_file) if config_file.is_file() else {}
    return _vocabulary(_load(file), config, file, config_file)


def _vocabulary(tokenizer: Tokenizer, config: dict[str, Any], file: Path, config_file: Path) -> Vocabulary:
    eos_token = _content(config.get("eos_token")) or _usual_end(tokenizer, file)
    bos_token = _content(config.get("bos_token"))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    for key, token in (("eos_token", eos_token), ("bos_token", bos_token)):
        if token is not None and token not in ids:
            raise UserError(
                f"{config_file}: {key} is '{token}', which {file} does not hold; name a token of the vocabulary"
            )
    special, unknown = special_tokens(tokenizer, config)
    return Vocabulary(
        tokenizer=tokenizer,
        special=tuple(sorted({*special, eos_token})),
        unknown_id=None if unknown is None else tokenizer.token_to_id(unknown),
        vocab_size=max(ids.values()) + 1,
        eos_token=eos_token,
        eos_token_id=ids[eos_token],
        bos_token=bos_token,
        bos_token_id=None if bos_token is None else ids[bos_token],
    )


def special_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> tuple[set[str], str | None]:
    """All special tokens, those that are marked so and those that the configuration names; and the unknown one."""
    found = {added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special}
    for key, value in config.items():
        if key.endswith("_token") and _content(value):
            found.add(str(_content(value)))
        elif key in ("additional_special_tokens", "extra_special_tokens"):
            values = value.values() if isinstance(value, dict) else value
            found |= {str(_content(one)) for one in values or () if _content(one)}
    unknown = getattr(tokenizer.model, "unk_token", None) or _content(config.get("unk_token"))
    return found, unknown


def identity(source: Path) -> str:
    """What says that a user's tokenizer is still the same: its file, and the tokens that its configuration names."""
    file, config = read_existing(source)
    named = json.dumps({key: value for key, value in sorted(config.items()) if key.endswith("_token")}, sort_keys=True)
    return f"{fingerprint(file)} {hashlib.sha256(named.encode()).hexdigest()[:16]}"


def fingerprint(file: Path) -> str:
    """sha256 of a tokenizer.json, as hex."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _load(file: Path, called: str = "") -> Tokenizer:
    """The tokenizer in a file, which messages name as `called`."""
    from tokenizers import Tokenizer

    called = called or str(file)

    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{called}: cannot be read ({error.strerror}); expected the tokenizer that belongs to the shards"
        ) from error
    except Exception as error:  # tokenizers raises plain Exception for a file it cannot parse
        raise UserError(
            f"{called}: not a tokenizer that the tokenizers package reads ({error}); expected a tokenizer.json"
        ) from error
    # Files from the hub often carry truncation or padding, which would silently cut documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _usual_end(tokenizer: Tokenizer, file: Path) -> str:
    for token in _USUAL_END:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise UserError(
        f"{file}: no end-of-text token found (tried {', '.join(_USUAL_END)}); name it as eos_token in a "
        "tokenizer_config.json beside it"
    )


def _content(token: Any) -> str | None:
    """A special token as configs write it: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value
