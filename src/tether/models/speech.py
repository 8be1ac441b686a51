"""Chat settings of a trained model, kept in its folder: the tokens that end a turn, its system
message, and the type of its training.

Settings that transformers has a place for are stored in that place, for other programs. The rest is
in `tether_encoding.json`, which tether reads when it loads the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from tether.core.errors import ModelError
from tether.core.rundir import read_json, write_json
from tether.core.types import Facts, Ids, Json
from tether.models.trunk import setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPEECH = "tether_encoding.json"
FORMAT = 1


class Speech(TypedDict):
    """`tether_encoding.json`."""

    stop_ids: list[int]
    system_prompt: str | None
    dtype: str


def eos_ids(tokenizer: PreTrainedTokenizerBase, generation_config: object) -> Ids:
    """The ids that end a response: the tokenizer's EOS first, then those that the model
    declares.
    """
    declared = setting(generation_config, "eos_token_id")
    ids = [tokenizer.eos_token_id, *([declared] if isinstance(declared, int) else declared or [])]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def declare_ends(
    model: PreTrainedModel,
    tokenizer: Any,
    stop_ids: Ids,
    template: object,
) -> None:
    """Write the ids that end a turn where other programs read them: generation_config, config, and
    the tokenizer's EOS.

    The ids of the base follow them. If a template writes `eos_token`, the tokenizer keeps its EOS,
    because the rendered text would change. It also keeps it if the end of a turn is not one token.
    """
    declared = eos_ids(tokenizer, model.generation_config)
    ends = list(dict.fromkeys((*stop_ids, *declared)))
    model.generation_config.eos_token_id = ends
    if declared[: len(stop_ids)] == tuple(stop_ids):
        return
    model.config.eos_token_id = model.config.get_text_config().eos_token_id = ends
    token = tokenizer.convert_ids_to_tokens(stop_ids[0])
    if token in tokenizer.get_added_vocab() and "eos_token" not in str(template):
        tokenizer.eos_token = token


def write_speech(folder: Path, encoding: Facts, dtype: str) -> None:
    """Write `tether_encoding.json` from what an encoder says of itself."""
    values: Json = {
        "stop_ids": list(encoding["stop_ids"]),
        "system_prompt": encoding["system_prompt"],
        "dtype": dtype,
    }
    write_json(folder / SPEECH, {"format": FORMAT, **values})


def read_speech(folder: str | Path) -> Speech | None:
    """Settings that `write_speech` wrote in a folder; None without its file.

    Raises:
        ModelError: it is of a newer tether, or another program's.
    """
    path = Path(folder).expanduser() / SPEECH
    if not path.is_file():
        return None
    values = read_json(path)
    if (
        not isinstance(values, dict)
        or values.get("format") != FORMAT
        or not Speech.__required_keys__ <= values.keys()
    ):
        raise ModelError(
            f"{path} is not what this tether writes. Take it away, and set "
            "model.stop_tokens and system_prompt.",
        )
    return {
        "stop_ids": values["stop_ids"],
        "system_prompt": values["system_prompt"],
        "dtype": values["dtype"],
    }
