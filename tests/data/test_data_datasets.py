"""What the datasets package reads as sources, and mixtures by name. No network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_data_tables import documents, parquet, refused

from resformer.data import tables
from resformer.data.presets import PRESETS, check_name, preset
from resformer.data.reading import Reading, Report
from resformer.errors import RunError, UserError

pa = pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`alone`, a saved dataset; `splits`, a saved one of two splits; `json` and `parquet`, directories of files."""
    datasets = pytest.importorskip("datasets")
    top = tmp_path_factory.mktemp("saved")
    datasets.disable_progress_bars()
    rows = [{"text": f"row {i}", "meta": {"redpajama_set_name": "RedPajamaC4"}, "n": i} for i in range(1000)]
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(top / "alone")
    datasets.DatasetDict({"train": whole, "validation": whole.select(range(3))}).save_to_disk(top / "splits")
    for split, count in (("train", 1000), ("validation", 3)):
        lines = "".join(json.dumps(row) + "\n" for row in rows[:count])
        (top / "json").mkdir(exist_ok=True)
        (top / "json" / f"{split}.jsonl").write_text(lines)
        parquet(top / "parquet" / f"{split}-00000-of-00001.parquet", pa.Table.from_pylist(rows[:count]).to_pydict())
    datasets.enable_progress_bars()
    return top


def dataset(spec: str, **reading: str) -> tables.DatasetSource:
    return tables.DatasetSource(f"dataset:{spec}", Reading(**reading))


@pytest.mark.parametrize("kind", ["alone", "splits", "json", "parquet"])
def test_local_datasets(saved: Path, kind: str) -> None:
    own = dataset(f"{saved / kind}")
    assert own.domain == kind and own.size > 0
    found, report = documents(own)
    assert found == [("c4", f"row {i}") for i in range(1000)]
    assert report.totals == {"files": 1}
    assert documents(dataset(f"{saved / kind}", domain_from="file"))[0][0] == (kind, "row 0")
    assert len(list(own.blocks())) == 1  # 1000 short rows
    if kind != "alone":
        for spec in (f"{saved / kind}:validation", f"{saved / kind}::validation"):
            assert documents(dataset(spec))[0] == [("c4", f"row {i}") for i in range(3)]
        assert "no " in (message := refused(dataset(f"{saved / kind}:validaton"))), message
        assert "did you mean 'validation'?; it has the splits train, validation; name one at the end" in message
    if kind in ("json", "parquet"):
        assert len(documents(dataset(f"{saved / kind}:default"))[0]) == 1000
        assert len(documents(dataset(f"{saved / kind}:default:validation"))[0]) == 3
        assert "cannot be loaded (BuilderConfig 'zz' not found" in refused(dataset(f"{saved / kind}:zz:train"))
    else:
        assert "a saved dataset has no configuration" in refused(dataset(f"{saved / kind}:zz:train"))
    message = refused(dataset(f"{saved / kind}", text_column="txt"))
    assert "no column 'txt'; did you mean 'text'?; its text columns are text, meta.redpajama_set_name" in message


def test_rows_of_a_dataset_have_numbers(saved: Path) -> None:
    own = dataset(f"{saved / 'splits'}:validation")
    names = [d.name for block in own.blocks() for d in block.documents(Report())]
    assert names == [f"{own.name}:{i}" for i in (1, 2, 3)]


def test_rows_of_a_dataset_without_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "c"}\n')
    own = dataset(str(tmp_path))
    assert f"{own.name}:2: expected a string" in refused(own)
    found, report = documents(own, "skip")
    assert [text for _, text in found] == ["a", "c"] and report.totals == {"files": 1, "bad_lines": 1}


def test_rows_of_a_dataset_that_differ_in_kind(tmp_path: Path) -> None:
    """The package makes JSON of such columns."""
    pytest.importorskip("datasets")
    rows = [
        {"text": "a", "meta": {"redpajama_set_name": "RedPajamaC4", "x": 1}},
        {"text": '\u00e4 "b"', "meta": {"redpajama_set_name": "RedPajamaBook", "x": "s"}},
        {"text": 7, "meta": {"redpajama_set_name": "RedPajamaBook"}},
        {"text": "d"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = dataset(str(tmp_path))
    assert refused(own).startswith(f"{own.name}:3: expected a string in the field 'text', got ")
    found, report = documents(own, "skip")
    domain = own.domain
    assert found == [("c4", "a"), ("book", '\u00e4 "b"'), (domain, "d")] and report.totals["bad_lines"] == 1
    named = dataset(str(tmp_path), domain_from="meta.redpajama_set_name")
    assert [name for name, _ in documents(named, "skip")[0]] == ["c4", "book"]


def test_a_dataset_that_breaks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 3\n')
    assert str(tmp_path) in refused(dataset(str(tmp_path)), "skip")
    (tmp_path / "a.jsonl").unlink()
    assert "cannot be loaded (" in refused(dataset(str(tmp_path)))
    own = dataset("allenai/c4")
    assert isinstance(own._broken(OSError("gone\naway")), RunError)
    assert "type the same command to go on" in str(own._broken(OSError("gone\naway")))


def test_identity_of_datasets(saved: Path, tmp_path: Path) -> None:
    first = dataset(f"{saved / 'json'}").identity()
    assert first == dataset(f"{saved / 'json'}").identity() != dataset(f"{saved / 'json'}:validation").identity()
    assert json.loads(json.dumps(first)) == first and "train.jsonl" in str(first)
    assert dataset("allenai/c4:en:train").identity() == ["dataset:", "allenai/c4", "en", "train", []]
    assert dataset("allenai/c4:en").size == 0 and dataset("allenai/c4:en").domain == "c4"
    (tmp_path / "a:b").mkdir()
    (tmp_path / "a:b" / "x.jsonl").write_text('{"text": "a"}\n')
    assert documents(dataset(f"{tmp_path}/a:b:train"))[0] == [("a_b", "a")]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "expected dataset:NAME"),
        (":en", "expected dataset:NAME"),
        ("a:b:c:d", "expected dataset:NAME"),
        ("/no/such/place", "no directory '/no/such/place'; expected dataset:NAME"),
        ("./none:train", "no directory './none'"),
    ],
)
def test_what_names_no_dataset(spec: str, message: str) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(UserError) as caught:
        dataset(spec)
    assert str(caught.value).startswith("--input: ") and message in str(caught.value)


def test_a_hub_out_of_reach_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    message = refused(dataset("allenai/c4:en"))
    assert message == (
        "dataset:allenai/c4:en: 127.0.0.1 cannot be reached (Connection refused); where it can, save the dataset with "
        "save_to_disk('DIR') and pass dataset:DIR; HF_HUB_OFFLINE=1 uses a copy in the cache"
    )


def test_offline_without_a_copy_in_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    code = (
        "from resformer.data.tables import DatasetSource; from resformer.data.reading import Reading; "
        "list(DatasetSource('dataset:no/such', Reading()).blocks())"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("resformer.errors.UserError: dataset:no/such: cannot be loaded (Couldn't reach 'no/such'")


PAJAMA = ["arxiv", "book", "c4", "commoncrawl", "github", "stackexchange", "wikipedia"]


def test_the_paper_s_mixture() -> None:
    weights = preset("paper", PAJAMA)
    assert weights == dict(PRESETS["paper"]) and sum(weights.values()) == pytest.approx(1)
    own = ["ArXiv", "books", "c4", "cc", "github", "stack_exchange", "wiki", "extra"]
    assert preset("paper", own) == {
        "ArXiv": 0.05,
        "books": 0.05,
        "c4": 0.2,
        "cc": 0.5,
        "github": 0.1,
        "stack_exchange": 0.05,
        "wiki": 0.05,
    }
    assert preset("paper", ["common_crawl", *[name for name in PAJAMA if name != "commoncrawl"]])["common_crawl"] == 0.5


def test_mixtures_that_cannot_be() -> None:
    check_name("paper")
    with pytest.raises(UserError, match="no mixture 'papr'; did you mean 'paper'"):
        check_name("papr")
    with pytest.raises(UserError, match="the corpus has no commoncrawl, arxiv; it has book, c4, github"):
        preset("paper", [name for name in PAJAMA if name not in ("arxiv", "commoncrawl")])
    with pytest.raises(UserError, match="it has no domain;"):
        preset("paper", [])
    with pytest.raises(UserError, match="'book' and 'books' both name the domain 'book'"):
        preset("paper", [*PAJAMA, "books"])
