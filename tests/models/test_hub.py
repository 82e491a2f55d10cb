"""What users of Hugging Face expect: Auto classes, remote code, missing parameters, dtypes, pipelines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from resformer import ResFormerConfig, ResFormerForCausalLM, ResFormerModel, UserError, build_cache
from resformer.core.policy import COEFFICIENTS_NAME, POLICY_NAME
from resformer.core.registry import names

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def model_of(variant: str, seed: int = 0, **options) -> ResFormerForCausalLM:
    torch.manual_seed(seed)
    return ResFormerForCausalLM(ResFormerConfig(variant=variant, variant_options=options, **SIZES)).eval()


def run(code: str, *args: object) -> str:
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "imports",
    [
        "import resformer, transformers",
        "import transformers.models.auto.modeling_auto, resformer",
        "import resformer; from transformers import LlamaForCausalLM",  # loads the Auto classes half-way through
    ],
)
def test_auto_classes_in_every_import_order(tmp_path, imports):
    model_of("svformer").save_pretrained(tmp_path)
    code = f"""{imports}
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
assert type(AutoConfig.from_pretrained(sys.argv[1])).__name__ == "ResFormerConfig"
assert type(AutoModel.from_pretrained(sys.argv[1])).__name__ == "ResFormerModel"
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model).__module__ == "resformer.models.modeling", type(model)
assert type(AutoModelForCausalLM.from_config(model.config)) is type(model)
assert type(AutoConfig.for_model("resformer", num_hidden_layers=2)).__name__ == "ResFormerConfig"
print("ok")
"""
    assert run(code, tmp_path).strip() == "ok"


def test_remote_code_imports_the_installed_package(tmp_path):
    """Without `import resformer`: told to trust remote code, transformers gets the package's own classes, also after
    saving again.
    """
    model_of("learnable_plus").save_pretrained(tmp_path / "a")
    assert len((tmp_path / "a" / "modeling_resformer.py").read_text().splitlines()) == 3
    code = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__ == "resformer.models.modeling"
model.save_pretrained(sys.argv[2])
"""
    run(code, tmp_path / "a", tmp_path / "b")
    for name in ("modeling_resformer.py", "config.json"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == sorted(p.name for p in (tmp_path / "a").iterdir())


@pytest.mark.parametrize("variant", sorted(set(names()) - {"skipv1"}))  # whose W_v are smaller than the Transformer's
@pytest.mark.parametrize("base_only", [False, True])
def test_lambdas_of_a_plain_checkpoint_are_initialised(tmp_path, variant, base_only):
    """A Transformer's checkpoint loaded into a variant: its lambdas have their initial values, never raw memory."""
    model_of("transformer").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "variant": variant}))
    for _ in range(3):
        junk = [torch.full((n,), 4.5e15) for n in (1, 3, 4, 7)]  # dirty the allocator's free lists
        del junk
        model = (ResFormerModel if base_only else ResFormerForCausalLM).from_pretrained(tmp_path)
        fresh, other = model_of(variant), model_of(variant, seed=1)
        prefix = "model." if base_only else ""
        extra = {name for name, _ in fresh.named_parameters() if "value_" in name}
        assert {prefix + name for name, _ in model.named_parameters() if "value_" in name} == extra
        for name in extra:
            got, want = model.get_parameter(name.removeprefix(prefix)), fresh.get_parameter(name)
            if torch.equal(want, other.get_parameter(name)):
                assert torch.equal(got, want), name
            else:  # drawn at random: of the same size
                assert got.std() < 2 * want.std(), name


def test_saved_lambdas_are_not_reinitialised(tmp_path):
    model = model_of("learnable_plus")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if POLICY_NAME in name or COEFFICIENTS_NAME in name:
                parameter.fill_(0.123)
    model.save_pretrained(tmp_path)
    again = ResFormerForCausalLM.from_pretrained(tmp_path)
    assert again.lambda_map() == model.lambda_map()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lambdas_stay_fp32_in_low_precision(tmp_path, dtype):
    model_of("learnable_plus").save_pretrained(tmp_path)
    model = ResFormerForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for name, kind in kinds.items():
        assert kind == (torch.float32 if POLICY_NAME in name or COEFFICIENTS_NAME in name else dtype), name
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert model(ids).logits.dtype == dtype
        cache = build_cache(model)
        model(ids, past_key_values=cache)
    assert {layer.values.dtype for layer in cache.layers} == {dtype}
    model.generate(ids[:, :5], max_new_tokens=3, do_sample=False, pad_token_id=0)


def test_svformer_checkpoint_holds_no_later_value_projection(tmp_path):
    model_of("svformer").save_pretrained(tmp_path)
    keys = load_file(tmp_path / "model.safetensors")
    assert [key for key in keys if "v_proj" in key] == ["model.layers.0.self_attn.v_proj.weight"]


def test_state_dict_only_adds_to_llama(tmp_path):
    plain, plus = model_of("transformer").state_dict(), model_of("learnable_plus").state_dict()
    assert set(plain) < set(plus)
    assert all(POLICY_NAME in key or COEFFICIENTS_NAME in key for key in set(plus) - set(plain))


def test_generate_with_chunked_prefill_on_a_static_cache():
    """transformers allocates the static cache ahead of time here; keys-only layers must not get room for values."""
    model = model_of("svformer")
    ids = torch.arange(1, 21)[None]
    common = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    got = model.generate(ids, **common, cache_implementation="static", prefill_chunk_size=7)
    assert torch.equal(got, model.generate(ids, **common, use_cache=False))


def test_pipeline(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model_of("svformer").save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0").save_pretrained(tmp_path)
    text = pipeline("text-generation", model=str(tmp_path))("w3 w4", max_new_tokens=3, do_sample=False)
    assert text[0]["generated_text"].startswith("w3 w4")


def test_wrong_configs_name_the_field():
    for changes, words in [
        ({"num_attention_heads": 5}, ["hidden_size 32", "num_attention_heads 5"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads 3"]),
        ({"head_dim": 7}, ["head_dim is 7"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
        ({"variant": "learnabel"}, ["learnabel", "did you mean 'learnable'"]),
        ({"variant": "sparse", "variant_options": {"layer": "last:2"}}, ["'layer'", "did you mean 'layers'"]),
        ({"variant": "sparse", "variant_options": {"layers": [7]}}, ["[7]", "layers 1 to 4"]),
        ({"variant": "sparse", "variant_options": {"layers": "last:5"}}, ["last:5", "only 4 layers"]),
        ({"variant": "constant", "variant_options": {"first": "two"}}, ["'first'", "'two'", "finite number"]),
        ({"variant": "constant", "variant_options": {"first": float("nan")}}, ["'first'", "finite number"]),
        ({"variant": "learnable_plus", "variant_options": {"logit_init": "liner"}}, ["'logit_init'", "'linear'"]),
    ]:
        with pytest.raises(UserError) as caught:
            ResFormerConfig(**{**SIZES, **changes})
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)


def test_build_cache_refuses_what_it_cannot_build():
    for arguments, word in [
        (("model",), "expected a ResFormer model"),
        ((ResFormerConfig(**SIZES), "dynamc"), "did you mean 'dynamic'"),
        ((ResFormerConfig(**SIZES), "static", 0), "max_length is 0"),
    ]:
        with pytest.raises(UserError, match=word):
            build_cache(*arguments)


def test_missing_or_foreign_weights_are_reported(tmp_path, caplog):
    """A truncated checkpoint must not pass as a good one."""
    model_of("learnable").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, report = ResFormerForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"model.layers.1.mlp.up_proj.weight"}
