"""Configuration: what is refused, what is reported, which word is the last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from resformer.errors import UserError
from resformer.recipes import names, recipe
from resformer.train.checks import effective
from resformer.train.config import Config, OptimConfig, TrainConfig, keys
from resformer.train.configure import configure, edit, from_toml, nearest, to_toml

QUICK = recipe("quick")


def complaint(tmp_path: Path, text: str = "", **how: object) -> str:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        configure(QUICK, file=path if text else None, **how)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "path", "hint"),
    [
        ("learning_rate = 1e-3", "learning_rate", "optim.lr"),
        ("[train]\nlr = 1e-3", "train.lr", "optim.lr"),
        ("[train]\nnum-epochs = 3", "train.num-epochs", "train.steps"),
        ("[model]\nhiden_size = 64", "model.hiden_size", "model.hidden_size"),
        ("[trian]\nsteps = 3", "trian.steps", "train.steps"),
        ("[optimizer]\nweight_decay = 0.0", "optimizer.weight_decay", "optim.weight_decay"),
        ("[modle]", "modle", "model"),
        ("[data]\nseq_len = 64", "data.seq_len", "data.sequence_length"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(tmp_path: Path, text: str, path: str, hint: str) -> None:
    message = complaint(tmp_path, text)
    assert message == f"{tmp_path / 'c.toml'}: {path}: no such key; did you mean {hint}?"


def test_a_key_near_to_nothing_gets_the_list(tmp_path: Path) -> None:
    assert "[track] has log_every_seconds" in complaint(tmp_path, "[track]\nqqq = 1")
    assert "the sections are model, data, train" in complaint(tmp_path, "[zzz]\nqqq = 1")


@pytest.mark.parametrize(
    ("text", "got", "expected"),
    [
        ("[train]\nsteps = 1.5", "1.5", "a whole number"),
        ("[train]\nsteps = true", "True", "a whole number"),
        ("[train]\nsteps = 0", "0", "at least 1"),
        ("[train]\nmicro_batch_size = 'half'", "'half'", "a whole number or none"),
        ("[optim]\nlr = 'fast'", "'fast'", "a number"),
        ("[optim]\nlr = nan", "nan", "a finite number"),
        ("[optim]\nlr = 0.0", "0.0", "more than 0"),
        ("[optim]\nbeta1 = 1.0", "1.0", "less than 1"),
        ("[optim]\nmin_lr_ratio = 2", "2", "at most 1"),
        ("[train]\ncompile = 'yes'", "'yes'", "true or false"),
        ("[train]\ndtype = 'fp16'", "'fp16'", "one of 'fp32', 'bf16'"),
        ("[train]\ndevice = 'gpu'", "'gpu'", "auto, cpu, mps, cuda or cuda:N"),
        ("[data]\ndir = 3", "3", "a text or none"),
        ("[data]\ndir = ''", "''", "some text"),
        ("[train]\nthreads = 100000", "100000", "at most 1024"),
        ("[train]\nseed = 99999999999999999999", "99999999999999999999", "less than 9223372036854775808"),
        ("[model]\nnum_hidden_layers = 100000000", "100000000", "at most 1024"),
        ("[model]\nhidden_size = 100000000", "100000000", "at most 1048576"),
        ("[model]\nvocab_size = 99999999999", "99999999999", "at most 2147483647"),
        ("[data.weights]\na = -1.0", "-1.0 for a", "at least 0"),
        ("[model]\nvariant_options = 3", "3", "a table"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(tmp_path: Path, text: str, got: str, expected: str) -> None:
    assert complaint(tmp_path, text).endswith(f": got {got}, expected {expected}")


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    text = "[optim]\nlr = 'fast'\n[train]\nbatch_size = 7\nmicro_batch_size = 4\n[model]\nvariant = 'lernable'"
    message = complaint(
        tmp_path, text, overrides=["model.num_attention_heads=3", "train.stepps=4", "nothing"], flags={"train.seed": -1}
    )
    lines = message.splitlines()
    assert lines[0] == "7 problems in the configuration:"
    for part in (
        "optim.lr: got 'fast'",
        "train.micro_batch_size 4 does not divide train.batch_size 7; 1 would",
        "unknown variant 'lernable'; did you mean 'learnable'?",
        "model.num_attention_heads 3 does not divide model.hidden_size 128",
        "--set train.stepps=4: no such key; did you mean train.steps?",
        "--set nothing: expected section.key=value",
        "train.seed=-1: got -1, expected at least 0",
    ):
        assert sum(part in line for line in lines[1:]) == 1, part


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.sequence_length=512", "model.max_position_embeddings=256"],
            "is over model.max_position_embeddings 256",
        ),
        (["model.num_key_value_heads=3"], "model.num_key_value_heads 3 does not divide model.num_attention_heads 4"),
        (["model.head_dim=33"], "model.head_dim is 33; rotary positions need an even number"),
        (["optim.start_lr=1"], "optim.start_lr 1 is over optim.lr 0.002"),
        (
            ["train.checkpoint_every=5", "train.keep_every=12"],
            "train.keep_every 12 is no multiple of train.checkpoint_",
        ),
        (["model.variant_options.layers=[]"], "model.variant_options.layers: variant 'learnable': layers is an empty"),
        (
            ["model.variant_options.init_own=x", "model.variant_options.tie=free"],
            "model.variant_options.init_own: option",
        ),
        (["model.variant_options.init_frist=1"], "did you mean 'init_first'?"),
        (["model.variant_options.init_first=high"], "option 'init_first' of variant 'learnable' is 'high'"),
    ],
)
def test_what_must_hold_between_keys(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert message in complaint(tmp_path, overrides=overrides)


def test_a_file_that_is_no_toml_or_not_there(tmp_path: Path) -> None:
    assert "no valid TOML" in complaint(tmp_path, "lr = fast")
    with pytest.raises(UserError, match="cannot be read"):
        configure(QUICK, file=tmp_path / "none.toml")


def test_a_flag_is_named_as_it_was_typed() -> None:
    with pytest.raises(UserError, match=r"^--steps 0 \(train.steps\): got 0, expected at least 1$"):
        configure(QUICK, flags={"train.steps": 0}, typed={"train.steps": "--steps"})


def test_options_that_are_wrong_together_are_not_blamed_singly() -> None:
    """Each is right by itself: layer 3 is no mixing layer only because the source is layer 3."""
    with pytest.raises(UserError, match=r"^model\.variant_options: variant 'sparse': layers is \[3\]"):
        configure(
            QUICK,
            flags={"model.variant": "sparse", "model.variant_options": {"source": 3, "layers": [3]}},
        )


def test_file_then_set_then_flags(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[train]\nsteps = 10\nseed = 10\nbatch_size = 10\n")
    made = configure(
        QUICK, file=path, overrides=["train.seed=20", "train.batch_size=20"], flags={"train.batch_size": 30}
    )
    assert (made.train.steps, made.train.seed, made.train.batch_size) == (10, 20, 30)
    assert made.optim == QUICK.optim
    assert configure(QUICK, flags={"train.steps": None}) == QUICK


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("optim.lr=1e-3", 1e-3),
        ("optim.lr=.5", 0.5),
        ("optim.lr=1", 1.0),
        ("train.compile=True", True),
        ("train.micro_batch_size=none", None),
        ("data.dir=2024", "2024"),
        ("data.weights={a=1, b=2.5}", {"a": 1.0, "b": 2.5}),
        ("model.variant_options.layers=last:3", {"layers": "last:3"}),
        ("model.variant_options.layers=[6, 7]", {"layers": [6, 7]}),
    ],
)
def test_texts_are_read_by_the_type_of_their_key(text: str, value: object) -> None:
    section, name = text.partition("=")[0].split(".")[:2]
    found = getattr(getattr(configure(QUICK, overrides=[text]), section), name)
    assert found == value
    assert type(found) is type(value)


def test_options_belong_to_their_variant() -> None:
    sparse = edit(QUICK, {"model.variant": "sparse", "model.variant_options": {"first": 3.0}})
    assert edit(sparse, {"model.variant": "sparse"}).model.variant_options == {"first": 3.0}
    assert edit(sparse, {"model.variant": "constant"}).model.variant_options == {}
    both = configure(sparse, overrides=["model.variant_options.init_own=0.7"], flags={"model.variant": "learnable"})
    assert both.model.variant_options == {"init_own": 0.7}


def test_toml_round_trip_with_every_key(tmp_path: Path) -> None:
    made = edit(
        QUICK,
        {"data.weights": {"a": 1.0}, "model.variant_options": {"layers": [2, 3]}, "data.dir": "x", "optim.eps": 1e-9},
    )
    text = to_toml(made)
    (tmp_path / "c.toml").write_text(text)
    assert from_toml(tmp_path / "c.toml") == made
    assert configure(recipe("tiny"), file=tmp_path / "c.toml") == made
    assert all(f"{key.name} = " in text or f".{key.name}]" in text for key in keys().values())


def test_a_long_warmup_is_shortened_with_a_note() -> None:
    made, notes = effective(edit(QUICK, {"train.steps": 50}))
    assert made.optim.warmup_steps == 5
    assert notes == ["optim.warmup_steps 80 is longer than train.steps 50: shortened to 5"]
    assert effective(QUICK) == (QUICK, [])
    assert effective(made) == (made, [])


def test_sections_are_strict_and_frozen() -> None:
    with pytest.raises(ValidationError):
        TrainConfig(steps=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        OptimConfig(learning_rate=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        QUICK.train.steps = 3  # type: ignore[misc]
    assert OptimConfig(lr=1).lr == 1.0


def test_every_key_is_documented_and_found_by_its_own_name() -> None:
    assert all(key.doc for key in keys().values())
    assert all(nearest(path) == path for path in keys())


def test_recipes() -> None:
    assert "quick" in names()
    for name in names():
        made = recipe(name)
        assert isinstance(made, Config)
        assert effective(made) == (made, [])
    with pytest.raises(UserError, match="did you mean 'quick'"):
        recipe("quik")


def test_configuring_does_not_import_torch() -> None:
    code = "import sys; from resformer.recipes import recipe; recipe('quick'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("quote", ["'", '"'])
def test_keys_with_dots_are_quoted_as_in_toml(quote: str) -> None:
    """The documentation's own example."""
    text = f"optim.lr_scale.{quote}model.layers.0.*{quote}=2.0"
    config = configure(recipe("tiny"), overrides=[text])
    assert config.optim.lr_scale == {"model.layers.0.*": 2.0}
