"""A GGUF file holds the model, the tokenizer and the template of the folder beside it, and Ollama's
template renders what the tokenizer's own does.
"""

import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import gguf
import pytest
import torch
from tests.models.architectures import small_config
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tether.cli.tools.export import export_model
from tether.core.errors import ConfigError, ModelError
from tether.models.pretrained import read_gguf, resolve
from tether.settings.model import ModelConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text", "phi3")
TEXTS = (
    "Hello, I'm 12345 years old.",
    "  two  spaces\n\n人 and the end",
    "the quick brown fox jumps over the lazy dog, isn't it?",
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<start_of_turn>")
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\n"
    "You are \"helpful\".<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% set first = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ first if loop.first }}"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set first = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ first if loop.first }}"
    "{{ m['content'] }}[/INST]{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PUBLISHED = {
    "qwen3": {"head_dim": 128},
    "phi3": {"sliding_window": 2047},
    "gemma3_text": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "layer_types": None,
        "num_hidden_layers": 7,
    },
}
"""What readers of GGUF take for granted of published models."""
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
    "phi3": PHI3,
}


def words(pieces):
    """A trained tokenizer: of bytes, split as Qwen's, or of characters, as SentencePiece's."""
    inner = Tokenizer(BPE(unk_token="<unk>", byte_fallback=pieces, fuse_unk=pieces))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if pieces:
        inner.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
        )
        inner.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ],
        )
        alphabet = []
    else:
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ],
        )
        inner.decoder = decoders.ByteLevel()
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256) if pieces)]
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    text = Path(__file__).read_text(encoding="utf-8")
    # pieces: one word at a time, as SentencePiece merges none across a space
    inner.train_from_iterator(re.findall(r"\s?\S+", text) if pieces else [text], trainer)
    if pieces:
        state = json.loads(inner.to_str())
        state["added_tokens"] = state["added_tokens"][: len(SPECIAL)]
        inner = Tokenizer.from_str(json.dumps(state))
    inner.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def model_in(folder, kind, **own):
    pieces = kind in ("phi3", "gemma3_text")
    tokenizer = words(pieces)
    tokenizer.save_pretrained(folder)
    usual = small_config(kind, vocab_size=len(tokenizer) + 3, hidden_size=64).to_dict()
    config = CONFIG_MAPPING[kind](**usual | PUBLISHED.get(kind, {}) | own)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def read(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder / "gguf",
        gguf_file="model.gguf",
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).eval()


@torch.no_grad()
def logprobs(model, ids):
    return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_file_holds_the_model_its_tokenizer_and_template(tmp_path, kind):
    source = model_in(tmp_path / "base", kind)
    export_model(str(source), tmp_path / "out", dtype="float32", gguf="f32")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out/gguf", gguf_file="model.gguf")
    model = read(tmp_path / "out")
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        torch.testing.assert_close(logprobs(model, ids), logprobs(whole, ids), atol=1e-4, rtol=0)
        if kind != "gemma3_text":  # transformers reads those with the white space of Gemma's own
            assert again(text, add_special_tokens=False)["input_ids"] == ids
    fields = gguf.GGUFReader(tmp_path / "out/gguf/model.gguf").fields
    types = fields["tokenizer.ggml.token_type"].contents()
    assert types.count(gguf.TokenType.BYTE) == (256 if kind in ("gemma3_text", "phi3") else 0)
    assert types.count(gguf.TokenType.UNUSED) == 3
    assert again.chat_template == tokenizer.chat_template
    assert again.eos_token == "<|im_end|>"
    assert again.get_vocab()["<think>"] == tokenizer.get_vocab()["<think>"]


@pytest.mark.parametrize("kind", ["q8_0", "bf16", "f16"])
def test_weights_are_off_by_no_more_than_the_type_rounds(tmp_path, kind):
    source = model_in(tmp_path / "base", "llama")
    made = export_model(str(source), tmp_path / "out", dtype="float32", gguf=kind)
    assert 0 < made["gguf"] < 1
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    rounded = read(tmp_path / "out").state_dict()
    moved = 0.0
    for name, weight in whole.state_dict().items():
        if weight.ndim == 1:
            assert torch.equal(rounded[name], weight)
            continue
        blocks = weight.reshape(-1, 32)
        step = {"q8_0": blocks.abs().amax(1, keepdim=True) / 127, "bf16": blocks.abs() / 2**8}
        bound = step.get(kind, blocks.abs() / 2**11) * 0.501 * (1 if kind == "q8_0" else 2)
        off = (rounded[name].reshape(-1, 32) - blocks).abs()
        # a block's scale is itself held in float16
        slack = blocks.abs().amax(1, keepdim=True) / 2**11 if kind == "q8_0" else 1e-7
        assert (off <= bound + slack).all()
        moved = max(moved, float(off.max()))
    assert moved > 0


LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 1e2,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_scaled_positions_are_a_tensor_of_divisors(tmp_path):
    longer = {"rope_parameters": LLAMA31, "max_position_embeddings": 512}
    source = model_in(tmp_path / "base", "llama", **longer)
    sharper = AutoModelForCausalLM.from_pretrained(source)  # so that positions matter
    with torch.no_grad():
        for name, weight in sharper.named_parameters():
            weight.fill_(1) if "norm" in name else weight.mul_(2 if "attn" in name else 1)
    sharper.save_pretrained(source)
    export_model(str(source), tmp_path / "out", dtype="float32", gguf="f32")
    file = tmp_path / "out/gguf/model.gguf"
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    pairs = whole.config.head_dim // 2
    by_hand = []
    for pair in range(pairs):
        turns = 64 / (2 * math.pi * 1e2 ** (pair / pairs))  # in the original context
        share = min(max((turns - 1) / 3, 0), 1)
        by_hand.append(1 / ((1 - share) / 8 + share))
    assert 1 in by_hand and 8 in by_hand and len(set(by_hand)) > 3
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    assert tensors["rope_freqs.weight"] == pytest.approx(by_hand, rel=1e-5)
    ids = torch.randint(10, 640, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    unscaled = read(tmp_path / "out")  # transformers alone reads no scales
    assert (logprobs(unscaled, ids) - logprobs(whole, ids)).abs().max() > 0.1
    again = read_gguf(file, torch.float32)
    torch.testing.assert_close(logprobs(again, ids), logprobs(whole, ids), atol=1e-4, rtol=0)
    with pytest.raises(ModelError, match="positions are scaled"):
        resolve(ModelConfig(source=str(file)))


def test_what_gguf_cannot_hold_is_refused_and_leaves_nothing(tmp_path):
    other = model_in(tmp_path / "neox", "gpt_neox")
    with pytest.raises(ModelError, match="gpt_neox"):
        export_model(str(other), tmp_path / "out", gguf="q8_0")
    scaled = model_in(tmp_path / "gemma", "gemma3_text", query_pre_attn_scalar=8)
    with pytest.raises(ModelError, match="differs"):
        export_model(str(scaled), tmp_path / "out", dtype="float32", gguf="f32")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    turned = model_in(tmp_path / "yarn", "llama", rope_parameters=yarn)
    with pytest.raises(ModelError, match="yarn"):
        export_model(str(turned), tmp_path / "out", gguf="q8_0")
    qwen = model_in(tmp_path / "qwen", "qwen2", rope_parameters=LLAMA31)
    with pytest.raises(ModelError, match="llama3"):
        export_model(str(qwen), tmp_path / "out", gguf="q8_0")
    with pytest.raises(ConfigError, match="q9"):
        export_model("tiny", tmp_path / "out", gguf="q9")
    with pytest.raises(ConfigError, match="q8_0"):
        export_model("tiny", tmp_path / "out", gguf="q8_0", adapter=True)
    assert not (tmp_path / "out").exists()


def go(template, messages):  # noqa: C901
    """What Go's text/template makes of the few actions that a Modelfile of tether has."""
    tokens = re.split(r"(\{\{-? .*? ?-?\}\})", template)
    for n, token in enumerate(tokens):
        if token.startswith("{{-"):
            tokens[n - 1] = tokens[n - 1].rstrip()
    names = {}

    def value(word, turn):
        if word.startswith('"'):
            return json.loads(word)
        return names[word] if word.startswith("$") else turn[word.removeprefix(".").lower()]

    def run(at, turn, live):
        """Write until an `else` or `end` of this level; (text, where that stands)."""
        text = ""
        while at < len(tokens):
            token = tokens[at]
            action = token.strip("{}- ") if token.startswith("{{") else None
            if action is None:
                text += token if live else ""
            elif action.startswith(("else", "end")):
                return text, at
            elif action.startswith("range"):
                for each in messages:
                    more, end = run(at + 1, each, live)
                    text += more
                at = end
            elif action.startswith("if"):
                taken = not live
                while not action.startswith("end"):
                    test = re.search(r'eq (\S+) (".*")', action)
                    here = not taken and (not test or value(test[1], turn) == json.loads(test[2]))
                    taken |= here
                    more, at = run(at + 1, turn, here)
                    text += more
                    action = tokens[at].strip("{}- ")
            elif not live:
                pass
            elif action.startswith("slice"):
                raise IndexError(action)
            elif kept := re.fullmatch(r"(\$\w+) :?= (.*)", action):
                names[kept[1]] = value(kept[2], turn)
            else:
                text += value(action, turn)
            at += 1
        return text, at

    return run(0, {}, True)[0]


def talks():
    turn = ("user", "assistant")
    plain = [
        [{"role": turn[n % 2], "content": f'{n} "so" {{{{ 人\n\n- x'} for n in range(length)]
        for length in (1, 3, 5)
    ]
    return plain, [[{"role": "system", "content": "Be\n`brief`."}, *talk] for talk in plain]


@pytest.fixture(scope="session")
def gos_own(tmp_path_factory):
    """Texts of conversations by Go's own text/template; None where it fails."""
    if shutil.which("go") is None:
        pytest.skip("no Go: install one")
    folder = tmp_path_factory.mktemp("go")
    program = folder / "modelfile"
    shutil.copy(Path(__file__).with_name("modelfile.go"), folder)
    where = {"GOCACHE": str(folder / "cache"), "GO111MODULE": "off", "GOFLAGS": ""}
    subprocess.run(
        ["go", "build", "-o", str(program), str(folder / "modelfile.go")],
        env=os.environ | where,
        check=True,
    )

    def render(template, talks):
        given = json.dumps({"template": template, "talks": talks})
        done = subprocess.run([program], input=given, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return render


@pytest.mark.parametrize("name", TEMPLATES)
def test_gos_own_templates_render_what_the_chat_template_renders(tmp_path, name, gos_own):
    tokenizer, template = exported(tmp_path, name)
    plain, told = talks()
    expected = [
        None
        if name == "gemma2" and talk[0]["role"] == "system"
        else tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        for talk in plain + told
    ]
    assert gos_own(template, plain + told) == expected


def exported(folder, name):
    """A tokenizer with this template, and the template of its Modelfile."""
    source = model_in(folder / "base", "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = TEMPLATES[name]
    start = {"single": "<s> $A", "special_tokens": [("<s>", 1)]}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**start)
    tokenizer.save_pretrained(source)
    export_model(str(source), folder / "out", gguf="q8_0")
    text = (folder / "out/gguf/Modelfile").read_text(encoding="utf-8")
    assert 'PARAMETER stop "<|im_end|>"\n' in text
    assert text.startswith("FROM ./model.gguf\n")
    return tokenizer, text.split('"""')[1]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ollama_renders_what_the_chat_template_renders(tmp_path, name):
    tokenizer, template = exported(tmp_path, name)
    fields = gguf.GGUFReader(tmp_path / "out/gguf/model.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False  # the template has it
    plain, told = talks()
    for talk in plain if name == "gemma2" else plain + told:
        expected = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        assert go(template, talk) == expected
    if name == "gemma2":
        with pytest.raises(IndexError):
            go(template, told[0])


def test_a_template_that_does_more_gets_no_modelfile(tmp_path, caplog):
    source = model_in(tmp_path / "base", "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = CHATML.replace("{% for m", "{{ messages | length }}{% for m", 1)
    tokenizer.save_pretrained(source)
    export_model(str(source), tmp_path / "out", gguf="q8_0")
    assert [path.name for path in (tmp_path / "out/gguf").iterdir()] == ["model.gguf"]
    assert "Modelfile" in caplog.text
    assert gguf.GGUFReader(tmp_path / "out/gguf/model.gguf").fields["tokenizer.chat_template"]
