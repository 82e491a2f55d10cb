"""`resformer generate`: where prompts come from and texts go, exit codes, interruption, the compiled step."""

from __future__ import annotations

import inspect
import io
import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from generation_helpers import build_model, build_tokenizer

from resformer import cli
from resformer.commands import generate as command
from resformer.evaluate import compiled
from resformer.evaluate.generation import check_cache, generate_many
from resformer.evaluate.generation_cache import CacheCheck
from resformer.models.cache import KINDS

OPTIONS = ("--max-new-tokens", "6", "--temperature", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("model")
    build_model("svformer", max_position_embeddings=64).save_pretrained(place)
    build_tokenizer().save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without an end-of-text token."""
    place = tmp_path_factory.mktemp("endless")
    build_model("svformer", max_position_embeddings=64, eos_token_id=None).save_pretrained(place)
    build_tokenizer(eos=False).save_pretrained(place)
    return str(place)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["generate", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_several_prompts_are_printed_in_order_each_as_if_alone(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ("abc", "hello there", "-- x")
    alone = [run(capsys, model, f"--prompt={prompt}", *OPTIONS)[1] for prompt in prompts]
    code, out, err = run(capsys, model, *(f"--prompt={prompt}" for prompt in prompts), *OPTIONS)
    assert (code, err) == (0, "")
    assert out == "---\n".join(alone)
    code, out, _ = run(capsys, model, "--prompt", "abc", "--num-samples", "2", *OPTIONS)
    first, second = out.split("\n---\n")
    assert first + "\n" == alone[0] != second


def test_prompts_from_a_file_and_from_standard_input(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"abc\r\n\n  \nhello there"
    (tmp_path / "prompts.txt").write_bytes(content)
    code, expected, _ = run(capsys, model, "--prompt", "abc", "--prompt", "hello there", *OPTIONS)
    assert code == 0
    assert run(capsys, model, "--prompt-file", str(tmp_path / "prompts.txt"), *OPTIONS)[1] == expected
    feed(monkeypatch, content)
    assert run(capsys, model, "--prompt-file", "-", *OPTIONS)[1] == expected
    feed(monkeypatch, b"hello there\n")
    assert run(capsys, model, "--prompt", "abc", "--prompt", "-", *OPTIONS)[1] == expected


def test_json_holds_what_was_made(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "made.json"
    line = (model, "--prompt", "abc", "--prompt", "x", "--json", str(target), "--seed", "5", "--stats", *OPTIONS)
    code, out, err = run(capsys, *line, "--check-cache")
    assert code == 0
    found = json.loads(target.read_text())
    assert [(one["prompt"], one["sample"], one["seed"]) for one in found["results"]] == [("abc", 0, 5), ("x", 0, 5)]
    for one in found["results"]:
        assert one["prompt"] + one["text"] in out
        assert one["finish"] == ("end" if one["tokens"][-1] == 256 else "length")
    stats = found["stats"]
    assert stats["new_tokens"] == sum(len(one["tokens"]) for one in found["results"])
    assert stats["cache_bytes"] == 2 * stats["cache_tokens"] * 5 * 2 * 8 * 4 and stats["cache_difference_passed"]
    assert f"cache {stats['cache_bytes']:,} bytes for" in err and "peak memory " in err
    before = target.read_bytes()
    code, out, err = run(capsys, *line)
    assert code == 2 and "pass --overwrite" in err and not out and target.read_bytes() == before
    assert run(capsys, *line, "--overwrite")[0] == 0


def test_stop_texts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(capsys, model, "--prompt", "abc", *OPTIONS)[1].removesuffix("\n")
    stop = whole[4:6]
    assert run(capsys, model, "--prompt", "abc", f"--stop={stop}", "--stop", "never", *OPTIONS)[1] == whole[:4] + "\n"


def test_beyond_the_positions(endless: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = (endless, "--prompt", "abc", "--max-new-tokens", "70", "--temperature", "0")
    code, out, err = run(capsys, *line)
    assert code == 0 and len(out) > 30
    assert err == (
        "warning: 3 prompt tokens and 70 new ones (max_new_tokens) make 73; the model was trained for 64 positions, "
        "and text beyond may be poor\n"
    )
    code, out, err = run(capsys, *line, "--strict")
    assert (code, out) == (2, "") and "built for 64 positions" in err


def test_a_cache_that_changes_the_logits_fails_with_strict(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from resformer.evaluate import generation

    bad = CacheCheck(difference=0.5, scale=5.0, tolerance=1e-4, lossy=False)
    monkeypatch.setattr(generation, "check_cache", lambda *_, **__: bad)
    line = (model, "--prompt", "abc", *OPTIONS, "--check-cache")
    code, out, err = run(capsys, *line)
    assert code == 0 and "5.000e-01, 1.0e-01 of the largest logit, over the tolerance of 0.0001" in err
    code, strict_out, err = run(capsys, *line, "--strict")
    assert code == 1 and strict_out == out and "more than 0.0001" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "a prompt is missing"),
        ("--prompt - --prompt-file -", "standard input can be read once"),
        ("--prompt a b", "Unrecognized options: b"),
        ("--prompt a --num-samples 0", "--num-samples is 0"),
        ("--prompt a --cache statik", "invalid choice 'statik'"),
        ("--prompt a --max-new-tokens 6 --cache offloaded", "on 'cpu'"),
        ("--prompt a --cache tokens --compile", "compile needs a static cache"),
        ("--prompt-file nowhere.txt", "nowhere.txt"),
        ("--prompt a --json nowhere/out.json", "there is no directory nowhere"),
        ("--prompt a --min-p 2", "min_p is 2.0"),
        ("--prompt a --stop=", "none of them empty"),
    ],
)
def test_mistakes_are_one_line(model: str, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    code, out, err = run(capsys, model, *line.split())
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


def test_bytes_that_are_no_text(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"ab\xff\n")
    code, _, err = run(capsys, model, "--prompt-file", "-")
    assert code == 2 and "standard input is no UTF-8 (byte 3 is 0xff)" in err
    feed(monkeypatch, b"\n\n")
    code, _, err = run(capsys, model, "--prompt-file", "-")
    assert code == 2 and "holds no prompt" in err


def test_the_kinds_of_the_help_are_those_of_the_library() -> None:
    hints = typing.get_type_hints(command.generate)
    assert typing.get_args(hints["cache"]) == KINDS
    ours = set(inspect.signature(generate_many).parameters)
    assert {"num_samples", "min_p", "repetition_penalty", "stop", "cache", "compile"} <= ours & set(hints)


LONG = ("--max-new-tokens", "100000", "--temperature", "1")


# Importing takes most of the time of a process that says a few words, so one process imports and forks for each end.
# A fork runs `python -m resformer` to the interpreter's own end, with pipes for its output.
ENDS = """
import json, os, runpy, signal, sys, time
import resformer.commands.generate, resformer.evaluate.generation

def started():
    out, err = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.dup2(out[1], 1), os.dup2(err[1], 2)
        for end in (*out, *err):
            os.close(end)
        runpy.run_module("resformer", run_name="__main__", alter_sys=True)
    os.close(out[1]), os.close(err[1])
    return child, out[0], open(err[0])

child, out, err = started()
text = os.read(out, 5)
os.close(out)
said = err.read()
found = {"reader gone": (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text.decode(), said)}

child, out, err = started()
text = os.read(out, 8)  # the text has begun to come
time.sleep(0.3)
os.kill(child, signal.SIGINT)
text, said = text + open(out, "rb").read(), err.read()
found["ctrl-c"] = (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text.decode(), said)
print(json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_ctrl_c_keeps_the_text_and_a_reader_that_goes_away_is_no_error(endless: str) -> None:
    line = [sys.executable, "-c", ENDS, "generate", endless, "--prompt", "abc", *LONG]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    code, text, said = found["reader gone"]
    assert code == 141 and text.startswith("abc")
    assert [one for one in said.splitlines() if not one.startswith("warning: ")] == []

    code, text, said = found["ctrl-c"]
    assert code == 130
    assert text.startswith("abc") and text.endswith("\n")
    assert said.splitlines()[-1] == "resformer: error: interrupted" and "Traceback" not in said


def test_lengths_are_rounded_so_that_few_graphs_are_compiled() -> None:
    assert [compiled.rounded_length(n) for n in (1, 256, 257, 2047, 2048, 2049, 5000)] == [
        256, 256, 512, 2048, 2048, 2560, 5120,
    ]  # fmt: skip
    assert all(n <= compiled.rounded_length(n) <= max(n + 255, 1.25 * n + 1) for n in range(1, 9000, 7))


def test_windows_cannot_be_compiled_yet() -> None:
    from resformer.errors import UserError

    model = build_model("svformer", sliding_window=8)
    with pytest.raises(UserError, match="no sliding-window layers"):
        generate_many(model, build_tokenizer(), ["abc"], max_new_tokens=4, compile=True)


@pytest.mark.slow
def test_the_compiled_step_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer, said = build_model("svformer"), build_tokenizer(), []
    for prompts in (["abc"], ["hello there"], ["abc", "hello there", "x"]):
        for temperature in (0.0, 1.0):
            made = [
                generate_many(
                    model,
                    tokenizer,
                    prompts,
                    max_new_tokens=20,
                    temperature=temperature,
                    repetition_penalty=1.2,
                    compile=compile,
                    announce=said.append,
                )
                for compile in (False, True)
            ]
            assert [one.tokens for one in made[0]] == [one.tokens for one in made[1]]
    assert len(said) == 2 and all("compiling the decoding step, once" in one for one in said)  # one batch size each
    assert made[1][0].cost.cache_capacity == 256
    assert check_cache(model, tokenizer, made[1], compile=True).passed


def test_a_result_never_takes_the_place_of_what_is_no_file(tmp_path: Path) -> None:
    from resformer.errors import UserError
    from resformer.train.files import check_output, write_json

    pipe, target, link = tmp_path / "pipe", tmp_path / "target.json", tmp_path / "link.json"
    os.mkfifo(pipe)
    for overwrite in (True, False):
        with pytest.raises(UserError, match=r"--json .*pipe is no regular file"):
            check_output(pipe, overwrite=overwrite, flag="--json")
    target.write_text("old")
    link.symlink_to(target)
    check_output(link, overwrite=True, flag="--json")
    write_json(link, {"a": 1})
    assert link.is_symlink() and '"a": 1' in target.read_text()
    with pytest.raises(UserError, match="no regular file"):
        check_output(Path("/dev/full"), overwrite=True, flag="--json")
