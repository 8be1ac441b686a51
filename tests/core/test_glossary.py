"""Every metric of a log and every word of a report has a meaning to look up."""

import re
import tomllib
from pathlib import Path

import pytest

from tether.core.glossary import ALSO, EVERY, METRICS, TERMS, meanings, near
from tether.core.rundir import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tether"
INNER = {"run/share"}
"""Given to the detectors, and not logged."""


def test_metrics_that_stages_write_have_an_entry():
    found = set()
    for room in ("stages", "rollout", "evaluation", "runner"):
        for path in (SOURCE / room).rglob("*.py"):
            names = re.findall(
                r'"((?:policy|value|kl|reward|response|teacher|group|kept|pairs|heldout|gold|engine|time)/[a-z_0-9]+)"',
                path.read_text(encoding="utf-8"),
            )
            found |= set(names)
    assert len(found) > 35 and sorted(found - METRICS.keys() - INNER) == []


def shown(name):
    """A title as a page shows it where gold judges."""
    words = {"judge": "gold", "labels": "gold", "proxy": "proxy", "reward": "proxy reward"}
    name = re.sub(
        r"[${](judge|labels|proxy|reward)\b",
        lambda m: words[m[1].lower()],
        name,
        flags=re.I,
    )
    return name.replace(":", " ").replace("}", "") if "}" in name else name


def test_titles_of_charts_and_names_of_tiles_have_an_entry():
    charts = tomllib.loads(
        (SOURCE / "watch" / "report" / "charts.toml").read_text(encoding="utf-8"),
    )
    titles = re.findall(
        r"^title = \"(.+)\"$",
        (SOURCE / "watch" / "report" / "charts.toml").read_text(encoding="utf-8"),
        re.M,
    )
    rows = tomllib.loads((SOURCE / "watch" / "report" / "tiles.toml").read_text(encoding="utf-8"))
    tiles = [row["name"] for table in rows.values() for row in table]
    assert charts and len(titles) > 35 and len(tiles) > 15
    studies = {
        title for title in titles if title.startswith(("Best-of-n", "PPO:", "Step ", "{"))
    }  # of pages with captions of their own
    missing = [word for word in {*titles, *tiles} - studies if not meanings(shown(word))]
    assert sorted(missing) == []


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("length", "response/length"),
        ("kl", "KL"),
        ("clip", "clip"),
        ("explained variance", "value/explained_variance"),
        ("response/stop_rate", "response/stop_rate"),
        ("Gold win rate", "gold win rate"),
        ("epochs", "epoch"),
        ("goodharts law", "Goodhart's law"),
        ("kl.coefficient", "KL coefficient"),
        ("β", "KL coefficient"),
        ("nucleus sampling", "top-p"),
        ("Goodhart", "Goodhart's law"),
        ("over-optimization", "overoptimization"),
        ("advantage normalization", "whitening"),
        ("pad token", "padding"),
        ("pairwise", "pairwise comparison"),
        ("clip ratio", "clip range"),
    ],
)
def test_a_word_is_found_by_its_whole_name_or_its_last_part(word, name):
    assert name in meanings(word)


def test_slips_of_the_fingers_and_beginnings_find_their_word():
    assert near("explained_varience")[0] in ("value/explained_variance", "explained variance")
    assert near("tokeniser")[0] == "tokenizer" and near("quantiz")[0] == "quantization"
    assert near("max_lenth", ["max_length"])[0] == "max_length"
    assert near("hallu") == ["hallucination"] and near("zzzzqq") == []
    assert meanings("explained_varience") == {}


WORDS = """
ablation, action, actor-critic, AdamW, advantage, advantage normalization, agent, alignment,
alignment tax, annotator, attention, attention mask, backpropagation, base model, batch size, beam
search, behavior policy, best-of-n sampling, β, bfloat16, BOS, Bradley-Terry model, calibration,
catastrophic forgetting, chain of thought, chat template, checkpoint, clip ratio, clipping, Cohen's
kappa, cold start, completion, confidence interval, Constitutional AI, context window, convergence,
credit assignment, critic, cross-entropy, dataset, data leakage, demonstration, discount factor,
distillation, distribution shift, dropout, early stopping, embedding, entropy bonus, environment,
episode, epoch, exploration, fine-tuning, generalization, Goodhart, Goodhart's law, gradient
accumulation, gradient clipping, gradient descent, ground truth, hallucination, hyperparameter,
imitation learning, implicit reward, importance sampling, inference, instruction tuning,
inter-annotator agreement, KL divergence, KV cache, label smoothing, language model, learning rate,
learning rate schedule, length bias, logits, log-probability, LoRA rank, loss function, Markov
decision process, mid-training, mini-batch, mixed precision, mode collapse, momentum, nucleus
sampling, odds ratio, off-policy, on-policy, open weights, optimizer, outcome reward,
over-optimization, overfitting, pad token, padding, pairwise, parameter, perplexity, Plackett-Luce,
policy gradient, policy gradient theorem, PPO, pre-training, preference data, process reward,
process reward model, prompt injection, prospect theory, proxy reward, quantization, red teaming,
reference model, regularization, REINFORCE, rejection sampling, return, reward hacking, reward
shaping, RLAIF, RLHF, RLVR, seed, self-play, sigmoid, softmax, sycophancy, system prompt,
temperature, test set, test-time compute, token-level reward, tokenizer, top-k, top-p, trajectory,
transformer, trust region, validation set, value function, value head, variance, verifiable reward,
vocabulary, warmup, weight decay, win rate
"""
"""Words of the indexes of textbooks on RLHF and of glossaries of deep learning."""


def test_words_of_textbooks_have_a_term():
    words = WORDS.replace("\n", " ").split(", ")
    assert len(words) > 130
    assert [word for word in words if not meanings(word).keys() & TERMS.keys()] == []


@pytest.mark.parametrize("page", ["reference/vocabulary.md", "guides/labs.md"])
def test_words_that_a_page_defines_have_an_entry(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = re.search(r"^\| word.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.M)
    assert table
    cells = [row.split("|")[1] for row in table[1].splitlines()]
    symbols = r"\(x\)|(?<=\w) (V\(s\)|\w_t|π_old|π_ref|π|γ)(?=,| )|[`)]"
    words = [
        word.strip() for cell in cells for word in re.split(r"[,(]", re.sub(symbols, "", cell))
    ]
    assert len(words) > 20 and [word for word in words if not meanings(word)] == []


def test_another_name_stands_for_one_term_that_has_no_such_name():
    assert set(ALSO.values()) <= TERMS.keys()
    assert [name for name in ALSO if list(meanings(name)) != [ALSO[name]]] == []


def test_meanings_are_sentences():
    assert [text for text in EVERY.values() if not text.endswith(".") or text[0].islower()] == []


def test_every_entry_is_found_by_its_name():
    assert [name for name in EVERY if name not in meanings(name)] == []
    assert len({name.lower() for name in EVERY}) == len(EVERY)


@pytest.mark.slow
def test_metrics_of_every_stage_have_an_entry(tmp_path):
    from tests.every_stage import recipe

    from tether.runner.run import run_recipe
    from tether.settings.reading import build
    from tether.settings.recipe import Recipe

    run_recipe(build(Recipe, recipe(tmp_path, tmp_path / "run")))
    logged = {
        key
        for path in (tmp_path / "run").rglob("metrics.jsonl")
        for row in read_jsonl(path)
        for key in row
    }
    assert len(logged) > 50 and sorted(name for name in logged if not meanings(name)) == []
