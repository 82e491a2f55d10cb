"""`transformers serve` with an exported SVFormer, asked by the real `openai` client: one request after the other, and
with continuous batching.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.models.compat import CACHE

pytestmark = [
    pytest.mark.skipif(not is_serve_available(), reason="needs pip install 'resformer[serving]'"),
    pytest.mark.skipif(
        CACHE != "cache", reason="servers before transformers 5.24 list no local model (docs/serving.md)"
    ),
]
PATIENCE = 90  # seconds until a server answers; it imports for ten of them on a free core
PROMPT, OTHER, NEW = "w1 w2 w3", "w7 w8 w9 w10 w1 w1 w3", 8
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
MODES = {
    "one by one": [],
    "continuous batching": [
        *("--continuous-batching", "--cb-block-size", "16", "--cb-num-blocks", "8", "--cb-max-batch-tokens", "64")
    ],
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    path: Path
    model: ResFormerForCausalLM
    tokenizer: PreTrainedTokenizerFast

    def expect(self, prompt: str) -> str:
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        return self.tokenizer.decode(self.model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    path = tmp_path_factory.mktemp("export") / "svformer"
    words = Tokenizer(models.WordLevel({"<end>": 0, **{f"w{i}": i for i in range(1, 61)}}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = ResFormerConfig(
        variant="svformer",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
    )
    model = ResFormerForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)  # near-uniform attention would forgive much
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Exported(path=path, model=model, tokenizer=tokenizer)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def server(model: Path, options: list[str], log: Path) -> Iterator[str]:
    """Start `transformers serve` in a process of its own and end it in any case; gives the address of its API."""
    port = free_port()
    program = Path(sys.executable).with_name("transformers")
    command = [program, "serve", model, "--trust-remote-code", "--device", "cpu", "--port", str(port), *options]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(log.parent / "hub"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("w") as out:
        process = subprocess.Popen([*map(str, command)], stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_for(process, port, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait(timeout=20)


def wait_for(process: subprocess.Popen, port: int, log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    pytest.fail(f"no server after {PATIENCE} s (exit code {process.poll()}):\n{log.read_text()[-3000:]}")


def complete(client, exported: Exported, prompt: str, **options):
    return client.completions.create(model=str(exported.path), prompt=prompt, max_tokens=NEW, temperature=0, **options)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow) if mode == "one by one" else mode for mode in MODES]
)
def test_clients_get_what_generate_gives(mode, exported, tmp_path):
    """One test for each mode, so that each server starts once however the tests are spread over processes."""
    from openai import OpenAI

    with server(exported.path, MODES[mode], tmp_path / "log.txt") as address:
        client = OpenAI(base_url=address, api_key="none", timeout=30, max_retries=0)
        check_completions(client, exported)
        check_requests_at_the_same_time(client, exported)
        check_chat(client, exported)
    assert f"CB: {bool(MODES[mode])}" in (tmp_path / "log.txt").read_text()


def check_completions(client, exported: Exported) -> None:
    assert [model.id for model in client.models.list()] == [str(exported.path)]
    answer = complete(client, exported, PROMPT)
    assert answer.choices[0].text == exported.expect(PROMPT)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, NEW)
    chunks = [chunk.choices[0].text for chunk in complete(client, exported, PROMPT, stream=True)]
    assert "".join(chunks) == answer.choices[0].text
    assert len([chunk for chunk in chunks if chunk]) > 1


def check_requests_at_the_same_time(client, exported: Exported) -> None:
    prompts = [PROMPT, OTHER] * 2
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: complete(client, exported, prompt), prompts))
    assert [answer.choices[0].text for answer in answers] == [exported.expect(prompt) for prompt in prompts]


def check_chat(client, exported: Exported) -> None:
    """A base model has no template for chats; the one here puts the messages one after the other."""
    messages = [{"role": "user", "content": PROMPT}]
    answer = client.chat.completions.create(model=str(exported.path), messages=messages, max_tokens=NEW, temperature=0)
    assert answer.choices[0].message.content == exported.expect(PROMPT + " ")
