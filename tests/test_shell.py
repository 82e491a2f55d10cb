"""What the shell does with bytes that are no text, outputs that break, and failures that explain themselves."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resformer import shell
from resformer.errors import RunError


def ended(capsys: pytest.CaptureFixture[str], command: shell.Command, *arguments: str) -> tuple[int, str]:
    code = shell.run({"do": command}, ["do", *arguments], program="p", about="", version="1")
    return code, capsys.readouterr().err


def test_a_failure_that_explains_itself_is_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        """Fail."""
        raise RunError("step 2: loss is nan")

    assert ended(capsys, fail) == (1, "p: error: step 2: loss is nan\n")


def test_ctrl_c_that_a_library_swallowed_is_still_one(capsys: pytest.CaptureFixture[str]) -> None:
    def importing() -> None:
        """Import."""
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            raise RecursionError("half imported") from None

    before = signal.getsignal(signal.SIGINT)
    assert ended(capsys, importing) == (130, "p: error: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before


def places(name: str, /, *, out: Path | None = None, files: tuple[Path, ...] = ()) -> None:
    """Do nothing.

    Args:
        name: A name.
        out: A place.
        files: More places.
    """


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("n", "--out", ""), "--out: expected a path, got an empty text"),
        (("n", "--files", ""), "--files: expected a path, got an empty text"),
        (("",), "NAME of `p do` is empty"),
        (("caf\udce9",), "argument 2 is no UTF-8: 'caf\\udce9'"),
    ],
)
def test_empty_places_and_bytes_that_are_no_text(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, said = ended(capsys, places, *arguments)
    assert code == 2
    assert message in said


def test_a_missing_option_is_named_without_unicode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs(*, out: Path) -> None:
        """Do nothing.

        Args:
            out: A place.
        """

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    code, said = ended(capsys, needs)
    assert code == 2
    assert said.startswith("p: error: Missing from p do: --out PATH"), said


def test_an_ascii_output_shows_other_characters_as_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))

    def say() -> None:
        """Say."""
        print("caf\u00e9")

    assert shell.run({"say": say}, ["say"], program="p", about="", version="1") == 0
    assert raw.getvalue() == b"caf\\xe9\n"


def test_a_table_whose_reader_went_away_ends_with_141() -> None:
    code = "import sys; from resformer.cli import main; sys.exit(main(['suite', 'list']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
