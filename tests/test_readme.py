"""What the documentation says is true: its Python runs, its commands parse, its links and variants exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from resformer import cli, shell
from resformer.core import registry

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def command_lines() -> list[tuple[str, str]]:
    """(page, command) for every line of every shell block, comments stripped, `a && b` taken apart."""
    found = []
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8"), "sh"):
            for line in block.splitlines():
                found += [(page.name, part.strip()) for part in line.split("  #")[0].split("&&") if part.strip()]
    return found


def python(marker: str) -> dict[str, Any]:
    """Run the README's Python block that contains `marker` and return its names."""
    (block,) = [block for block in blocks(README, "python") if marker in block]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block, "README.md", "exec"), names)
    return names


def make_run(path: Path) -> None:
    """A model with a tokenizer where the documentation has a trained one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from resformer import ResFormerConfig, ResFormerForCausalLM

    words = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = ResFormerConfig(variant="svformer", vocab_size=len(words), max_position_embeddings=256, **sizes)
    ResFormerForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)


def make_corpus(path: Path) -> None:
    """A corpus where the documentation has one."""
    from resformer.data import prepare

    texts = path.parent / "wikipedia.jsonl"
    texts.parent.mkdir(parents=True)
    texts.write_text("".join(f'{{"text": "{f"article {i} " * 90}"}}\n' for i in range(99)))
    prepare([texts], path, vocab_size=300, progress=False)


def test_every_python_block_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks marked `py` need what a test has not, such as a server."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs/mine")
    make_run(tmp_path / "runs/mine/model")
    make_corpus(tmp_path / "data/corpus")
    monkeypatch.setattr(registry, "_registered", {**{n: registry.get(n) for n in registry.names()}})
    count = 0
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8"), "python"):
            exec(compile(block, str(page), "exec"), {"__name__": "__main__"})
            count += 1
    assert count >= 3


def test_the_hugging_face_snippet_loads_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = python("AutoModelForCausalLM")
    assert names["tokens"].shape == (1, 8)
    assert names["model"].config.variant == "sparse"


@pytest.fixture(scope="module")
def stack() -> Any:
    names = python("class Stack")

    def build(variant: str, **options: Any) -> Any:
        torch.manual_seed(0)
        return names["Stack"](variant, options)

    return build


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))


class TestYourOwnAttention:
    """The README's attention is not ours; value residual in it must do what the formula says."""

    @pytest.mark.parametrize(
        ("variant", "neutral"),
        [
            ("identity", {"first": 0.0, "own": 1.0}),
            ("constant", {"first": 0.0}),
            ("sparse", {"first": 0.0}),
            ("learnable", {"init_first": 0.0, "init_own": 1.0}),
        ],
    )
    def test_neutral_options_give_plain_attention(
        self, stack: Any, inputs: torch.Tensor, variant: str, neutral: dict[str, float]
    ) -> None:
        plain = stack("transformer")(inputs)
        assert torch.equal(stack(variant, **neutral)(inputs), plain)
        assert not torch.allclose(stack(variant)(inputs), plain, atol=1e-3)

    def test_it_is_the_formula(self, stack: Any, inputs: torch.Tensor) -> None:
        model, x = stack("constant", first=2.0), inputs
        first = None
        for layer in model.layers:
            q, k, v = layer.qkv(x).view(2, 16, 3, 4, 16).unbind(2)
            first = v if first is None else first
            v = v if first is v else 2.0 * first + v
            scores = torch.einsum("bthd,bshd->bhts", q, k) / 4.0
            scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
            x = x + layer.out(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(2, 16, 64))
        torch.testing.assert_close(model(inputs), x, atol=1e-5, rtol=1e-5)

    def test_later_layers_teach_the_first_value(self, stack: Any, inputs: torch.Tensor) -> None:
        """With everything but the value path of layer 1 cut, its W_v still gets a gradient through layer 2's mix."""
        model = stack("learnable", layers=[4])
        model.layers[0].out.weight.data.zero_()
        model(inputs).square().sum().backward()
        value_rows = model.layers[0].qkv.weight.grad[128:]
        assert value_rows.abs().max() > 0
        assert model.layers[3].value_residual.first.grad.abs() > 0


@pytest.mark.parametrize(("page", "line"), [pair for pair in command_lines() if pair[1].startswith("resformer ")])
def test_resformer_commands_parse(page: str, line: str) -> None:
    words = shlex.split(line)[1:]
    if words == ["--help"]:
        return
    name = " ".join(words[:2]) if " ".join(words[:2]) in cli.COMMANDS else words[0]
    assert name in cli.COMMANDS, f"{page}: {line}"
    shell.parse(cli.COMMANDS[name], words[len(name.split()) :], program=f"resformer {name}")


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = {line.split()[1] for _, line in command_lines() if line.startswith("make ")}
    assert {"compare", "test"} <= named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("#"):
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name} links to {target}"


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_variants_is_what_the_registry_says(generator: Any) -> None:
    page = (ROOT / "docs" / "variants.md").read_text(encoding="utf-8")
    assert page == generator.text(), "run `make docs`"


def test_every_variant_and_option_is_documented(generator: Any) -> None:
    page = generator.text()
    for name in registry.names():
        cls = registry.get(name)
        assert f"\n## {name}\n" in page
        assert cls.equation and cls.reference and cls.when, f"{name} lacks equation, reference or when"
        said = generator.option_texts(cls)
        for option in cls.options():
            assert said.get(option), f"{name}: the docstring does not explain the option {option}"


def test_options_come_from_the_nearest_docstring(generator: Any) -> None:
    class Base:
        """Base.

        Options:
            one: of the base,
                over two lines.
            two: of the base.
        """

    class Child(Base):
        """Child.

        Options:
            two: of the child.
            one: see `Base`.

        Not an option: this.
        """

    class Silent(Child):
        pass

    assert generator.option_texts(Silent) == {"two": "of the child.", "one": "of the base, over two lines."}


def test_measured_step_times_reach_the_page(generator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ratio = {"ratio": 1.0123, "ratio_lower_95": 1.0014, "ratio_upper_95": 1.0251}
    found = {
        "about": {"date": "2001-02-03", "processor": "some processor", "torch": "2.x", "transformers": "5.x"},
        "settings": {"threads": 1, "rounds": 3},
        "shape": {"num_hidden_layers": 8, "hidden_size": 256, "batch_size": 4, "sequence_length": 256},
        "results": {"gated": ratio},
    }
    path = tmp_path / "variants.json"
    path.write_text(json.dumps(found))
    monkeypatch.setattr(generator, "MEASURED", path)
    page = generator.text()
    assert "2001-02-03: some processor" in page.replace("\n", " ")
    assert "step time 1.012 (95 % interval 1.001 to 1.025)" in page.replace("\n  ", " ")
    (row,) = [line for line in page.splitlines() if line.startswith("| [`gated`]")]
    assert row.endswith("| 1.012 |")


def test_readme_names_only_variants_that_exist() -> None:
    rows = re.findall(r"^\| `([a-z_0-9]+)` \|", README.partition("## Variants")[2].partition("\n## ")[0], re.MULTILINE)
    assert rows and set(rows) <= set(registry.names())


def test_contributings_variant_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from resformer.evaluate.contract.suite import run
    from resformer.train.imports import import_files

    monkeypatch.setattr(registry, "_registered", {n: registry.get(n) for n in registry.names()})
    (block,) = blocks((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "python")
    path = tmp_path / "my_gated.py"
    path.write_text(block)
    (imported,) = import_files([path])
    assert imported.variants == ("my_gated",)
    assert [one for one in run("my_gated", heads={"GQA": 4}) if one.result == "failed"] == []
