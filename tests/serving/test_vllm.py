"""Our models in vLLM itself, on the CPU: the tokens of model.generate, and a cache as small as the plan says.

`make test-vllm` installs vLLM in an environment of its own and runs these.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.core import registry
from resformer.core.plan import planes
from resformer.core.policy import LAMBDA_NAMES

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, which `make test-vllm` installs")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: one import of vLLM for all tests
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Prompts of up to 150 tokens are read in pieces of 64, eight at a time; every fourth begins with the same 70 tokens.
ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "kv_cache_memory_bytes": 32 * 2**20,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
}
PATIENCE = 600  # seconds until a server answers; three processes import vLLM one after the other, 30 s on free cores
LENGTHS = (1, 2, 3, 5, 7, 12, 31, 32, 33, 40, 63, 64, 65, 100, 128, 150)
NEW = 10
ACCEPTANCE: dict[str, dict[str, Any]] = {
    "transformer": {},
    "learnable": {},
    "svformer": {},
    "svformer, two sources": {"variant_options": {"anchors": [1, 4]}},
    "cla": {},
}
OTHERS: dict[str, dict[str, Any]] = {
    "identity": {},
    "constant": {},
    "sparse": {},
    "learnable_plus": {},
    "dense": {},
    "gated": {"variant_options": {"activation": "sigmoid"}},
    "neutreno": {},
    "neutreno_resformer": {},
    "rwkv": {},
    "value_embeddings": {},
    "hidden_residual": {},
    "denseformer": {},
    "query_residual": {},
    "key_residual": {},
    "identity_mapping": {},
    "svformer, last third with a scale": {"variant_options": {"layers": "last_third", "gamma": True}},
    "svformer, keys in groups": {"variant_options": {"key_group": 2}},
    "svformer, one KV head": {"num_key_value_heads": 1},
    "svformer, a window": {"sliding_window": 20},
    "learnable, windows": {"sliding_window": 20, "sliding_layers": [2, 4, 5]},
    "cla, keys": {"variant_options": {"share": "k"}},
    "cla, values": {"variant_options": {"share": "v"}},
    "svformer, as GPT-2": {
        **{"position_embedding": "learned", "norm": "layernorm", "mlp": "plain", "hidden_act": "gelu_new"},
        **{"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    },
    "learnable, as OLMo2": {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "all"},
    "svformer, experts": {"num_experts": 4},
    "learnable, some layers without positions": {"nope_layers": [2, 3], "first_block_residual": False},
}
SHAPES = ACCEPTANCE | OTHERS
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("skipv1", {}, r"variant 'skipv1' cannot be served from a paged cache: layer 2\.\.6 makes its values anew"),
    ("attention_residual", {}, r"layer 2\.\.6 reads attention weights.*Use model.generate or `transformers serve`"),
    ("cross_attention", {}, r"layer 2\.\.6 attends to two sets of keys"),
    ("learnable", {"tensor_parallel_size": 2}, "tensor_parallel_size is 2, and the model is not split"),
    ("svformer", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8', and shared values are not quantized"),
]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


def make(name: str, path: Path, **changes: Any) -> ResFormerForCausalLM:
    """A model with sharp attention and lambdas off their starts, saved to `path`."""
    torch.manual_seed(0)
    config = ResFormerConfig(variant=name.split(",")[0], **{**SIZES, **SHAPES.get(name, {}), **changes})
    model = ResFormerForCausalLM(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            elif set(LAMBDA_NAMES) & set(key.split(".")):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return model


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    shared = [draw.randrange(97) for _ in range(70)]
    made = []
    for number in range(count):
        prompt = [draw.randrange(97) for _ in range(LENGTHS[number * 5 % 16])]
        made.append([*shared, *prompt[:40]] if number % 4 == 3 else prompt)
    return made


def expected(model: ResFormerForCausalLM, texts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of model.generate, one prompt at a time; without a mask it would take token 0 for padding."""
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    made = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([text])
            made.append(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(text) :].tolist())
    return made


@contextlib.contextmanager
def engine(path: Path, **changes: Any) -> Iterator[Any]:
    """An engine of vLLM, ended in any case."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    made = LLM(model=str(path), seed=0, **{**ENGINE, **changes})
    try:
        yield made
    finally:
        del made
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(llm: Any, texts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Greedy tokens of vLLM, all prompts at once, and how many prompt tokens it took from its prefix cache."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": text} for text in texts], settings, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done], sum(one.num_cached_tokens or 0 for one in done)


def held_tokens(llm: Any) -> int:
    cache = llm.llm_engine.vllm_config.cache_config
    return cache.num_gpu_blocks * cache.block_size


def test_every_variant_of_ours_is_served_or_refused_here() -> None:
    assert {name.split(",")[0] for name in SHAPES} | {name for name, _, _ in REFUSED} == set(registry.names())


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_are_those_of_generate(name: str, tmp_path: Path) -> None:
    """Pieces of prompts beside each other and beside texts that decode; then all once more, from cached prefixes."""
    model = make(name, tmp_path)
    texts = prompts(32 if name in ACCEPTANCE else 6)
    assert max(map(len, texts)) > ENGINE["max_num_batched_tokens"], "no prompt would be read in pieces"
    want = expected(model, texts)
    with engine(tmp_path) as llm:
        got, _ = generate(llm, texts)
        again, cached = generate(llm, texts)
        held = held_tokens(llm)
    assert got == want
    assert again == want
    assert cached >= 64
    if model.config.sliding_window is None:  # of slots that slide vLLM counts blocks in another way
        per_token = sum(planes(model.config.plan())) * model.config.num_key_value_heads * 32 * 4
        assert held == pytest.approx(ENGINE["kv_cache_memory_bytes"] / per_token, abs=ENGINE["block_size"])


def test_the_same_memory_holds_at_least_1_7_times_as_many_tokens_of_an_svformer(tmp_path: Path) -> None:
    tokens = {}
    for name in ("transformer", "svformer"):
        make(name, tmp_path / name)
        with engine(tmp_path / name) as llm:
            tokens[name] = held_tokens(llm)
    assert tokens["svformer"] >= 1.7 * tokens["transformer"]


@pytest.mark.parametrize(("name", "changes", "says"), REFUSED)
def test_what_cannot_be_served_is_refused_before_an_engine_starts(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make(name, tmp_path)
    with pytest.raises(ValueError, match=says), engine(tmp_path, **changes):
        pass


def test_a_head_that_the_kernels_do_not_have_is_refused(tmp_path: Path) -> None:
    make("svformer", tmp_path, head_dim=16)
    with pytest.raises(ValueError, match=r"head_dim is 16, and vLLM's kernel for CPUs has 32, 64"), engine(tmp_path):
        pass


@pytest.mark.parametrize("name", ["learnable", "svformer, last third with a scale"])
def test_weights_of_a_16_bit_engine_keep_their_lambdas(name: str, tmp_path: Path) -> None:
    """In bf16 near ties fall either way, so what is held is most first tokens, and that lambdas are not rounded."""
    model = make(name, tmp_path)
    texts = prompts(8)
    want = expected(model, texts)
    with engine(tmp_path, dtype="bfloat16") as llm:
        got, _ = generate(llm, texts)
        (dtypes,) = llm.apply_model(_lambda_dtypes)
    assert dtypes == ["torch.float32"]
    assert sum(a[0] == b[0] for a, b in zip(got, want, strict=True)) >= 6


def _lambda_dtypes(model: Any) -> list[str]:
    return sorted({str(p.dtype) for n, p in model.named_parameters() if set(LAMBDA_NAMES) & set(n.split("."))})


def test_an_engine_in_a_process_of_its_own_finds_the_plug_in(tmp_path: Path) -> None:
    """As `vllm serve` runs it: nothing of ours is imported by hand; the entry point of the installed package is all."""
    model = make("svformer", tmp_path / "model")
    texts = prompts(4)
    asked = {"engine": {**ENGINE, "model": str(tmp_path / "model")}, "prompts": texts, "new": NEW}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "from vllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    asked = json.load(open(sys.argv[1]))\n"
        "    llm = LLM(**asked['engine'])\n"
        "    settings = SamplingParams(temperature=0, max_tokens=asked['new'], ignore_eos=True, detokenize=False)\n"
        "    done = llm.generate([{'prompt_token_ids': text} for text in asked['prompts']], settings, use_tqdm=False)\n"
        "    print('TOKENS', json.dumps([list(one.outputs[0].token_ids) for one in done]))\n"
    )
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(
        [sys.executable, program, tmp_path / "asked.json"], capture_output=True, text=True, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.split("TOKENS")[-1]) == expected(model, texts)


@contextlib.contextmanager
def server(path: Path, log: Path) -> Iterator[str]:
    """vLLM's OpenAI-compatible server in processes of its own, ended in any case; gives the address of its API."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = {
        **{"host": "127.0.0.1", "port": port, "served-model-name": "served", "dtype": "float32", "max-model-len": 256},
        **{"block-size": 32, "kv-cache-memory-bytes": 32 * 2**20},
    }
    # What `vllm serve` starts. That command itself needs a distribution named vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        _wait_for(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):  # the engine's processes, if the server left them
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def _wait_for(process: subprocess.Popen, address: str, log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urlopen(address, timeout=5):
            return
        time.sleep(0.5)
    pytest.fail(f"no server after {PATIENCE} s (exit code {process.poll()}):\n{log.read_text()[-3000:]}")


def test_the_server_answers_with_the_tokens_of_generate(tmp_path: Path) -> None:
    """OpenAI's completions of a text and of token ids, from a directory with a tokenizer, by the entry point alone."""
    path = tmp_path / "model"
    model = make("svformer", path, num_key_value_heads=4)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    ids = prompts(4)[3]
    want = expected(model, [ids])[0]
    asked = {"model": "served", "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with server(path, tmp_path / "log.txt") as api:
        for prompt in (ids, " ".join(f"w{i}" for i in ids)):
            body = json.dumps({**asked, "prompt": prompt}).encode()
            with urlopen(Request(f"{api}/completions", body, {"Content-Type": "application/json"}), timeout=120) as got:
                (choice,) = json.load(got)["choices"]
            assert choice["token_ids"] == want
            assert choice["text"].split() == [f"w{i}" for i in want]
