"""Every lab holds its bands, and leaves them when the thing that it teaches is broken."""

import html
import re
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tether.api.labs.lab import OutsideBandError
from tether.api.labs.sums import HABITS

FOLDER = Path(__file__).resolve().parents[3] / "labs"
LABS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
MOST_SECONDS = 10
"""Labs that take longer are slow tests."""


def seconds(path):
    """The time that a lab states in its first cell."""
    number, unit = re.search(r"\*\*Time:\*\* (\d+) (second|minute)", path.read_text()).groups()
    return int(number) * {"second": 1, "minute": 60}[unit]


def marked(path, *values, name):
    slow = seconds(path) > MOST_SECONDS
    return pytest.param(path, *values, id=name, marks=[pytest.mark.slow] * slow)


def run(path, source, folder, monkeypatch):
    """A lab's text as a program, with the folder as the place of its pages."""
    monkeypatch.chdir(folder)
    code = compile(source, str(path), "exec")
    exec(code, {"__name__": "__main__", "__file__": str(path)})
    return folder / "runs" / "labs" / f"{path.stem}.html"


@pytest.mark.parametrize("path", [marked(path, name=path.stem) for path in LABS])
def test_a_lab_holds_its_bands_and_leaves_a_page(path, tmp_path, monkeypatch):
    page = run(path, path.read_text(), tmp_path, monkeypatch).read_text()
    assert page.count("<figure") >= 1
    assert "outside" not in page.partition("at-numbers")[2]
    assert not re.search(r'(src|href)="(?!#|data:)', page), "the page needs no network"
    main = page[page.index("<main>") : page.index("</main>")]
    asked, drawn, code, lesson = (
        main.index(part) for part in ('"question"', "<figure", 'class="code"', "at-lesson")
    )
    assert asked < drawn < code < lesson
    assert len(re.findall(r'<pre class="code">', main)) == main.count("<details>"), (
        "all code is folded"
    )
    assert not re.search(r"<(section|figure|table|pre)", main[lesson:]), "the lesson ends the page"


BROKEN = {
    "01_bandit_and_clip": [
        ("torch.full((1, 1), advantage)", "torch.full((1, 1), -advantage)", "slope"),
        ("            clip_range=clip,\n            denominator=1,\n        )\n        (slope,)",
         "            clip_range=1e6,\n            denominator=1,\n        )\n        (slope,)",
         "ratio at rest"),
        ("clip_range=clip,\n                denominator=16", "clip_range=1e6,\n                denominator=16",
         "with the clip"),
        ("reward - reward.mean(1, keepdim=True)", "reward.mean(1, keepdim=True) - reward",
         "π with the clip"),
    ],
    "02_reward_model": [
        ("train = compare(1000, luck)", "train = compare(1000, luck, flipped=1.0)", "held-out accuracy"),
        ("reward = fit_reward(train)", "reward = 4 * fit_reward(train)", "calibration error"),
    ],
    "03_reinforce": [
        ("return -torch.autograd.grad(loss, table)[0]", "return torch.autograd.grad(loss, table)[0]",
         "power of n"),
        ("shop, learned = train(polite)", "shop, learned = train(random_reward)", "reward at the end"),
    ],
    "04_gradient_variance": [
        ("- expected(answers, baseline, offset)", "+ expected(answers, baseline, offset)", "variance"),
        ("return shop.evaluate(answers)[1].detach() + offset",
         "return gold(answers)[:, None].expand(answers.mask.shape) * 0.5 + offset", "bias of the value"),
    ],
    "05_kl_shaped_reward": [
        ("return shaped(scores, policy, reference, mask, -beta)",
         "return shaped(scores, policy, reference, mask, beta)", "the doctor judges"),
        ("terminal = scores - BETA", "terminal = scores + BETA", "per token minus terminal"),
    ],
    "06_ppo_in_40_lines": [
        ("shops[name] = Shop(lab.seed, score)",
         "shops[name] = Shop(lab.seed, lambda answers, score=score: -score(answers))",
         "PPO minus the cooled start"),
        ("beta=BETA, epochs=count", "beta=BETA, epochs=4", "share clipped, 1 epoch"),
        ("rewards[:, int(mask.sum(1).max()) - 1] += scores",
         "rewards[torch.arange(len(scores)), mask.sum(1) - 1] += scores", "score in the last column"),
    ],
    "07_hundred_steps": [
        ("steps = train(tethered, steps=STEPS, beta=BETA)",
         "steps = train(tethered, steps=STEPS, beta=0.0)", "true gain"),
        ("free = train(loose, steps=STEPS, beta=0.0)",
         "free = train(loose, steps=STEPS, beta=BETA)", "true reward with β = 0"),
    ],
    "08_slider": [
        ("train(shop, steps=STEPS, beta=beta)", "train(shop, steps=STEPS, beta=0.0)", "gain − β KL"),
    ],
    "09_group_advantages": [
        ('"group": leave_one_out_baseline(scores, groups)',
         '"group": leave_one_out_baseline(scores, everything)', "G = 8, batch over group"),
        ("own = group_relative(scores, groups, scale=False)", "own = group_relative(scores, groups)",
         "group mean minus 7/8"),
        ("game.update(surrogate + BETA * kl, step + 1)", "game.update(surrogate - BETA * kl, step + 1)",
         "KL of GRPO over that of PPO"),
    ],
    "10_best_of_n": [
        ("return torch.arange(PROMPTS) * max(SIZES) + rows.argmax(1)",
         "return torch.arange(PROMPTS) * max(SIZES) + rows.argmin(1)", "largest distance from n/(n + 1)"),
        ("chance * (chance / at).log()", "chance * (chance / at).log2()", "largest KL minus the formula"),
        ('favourites(scores["reward model"], n) for', 'favourites(scores["truth"], n) for',
         "n at which the truth peaks"),
    ],
    "11_dpo_ipo_kto": [
        ("return dpo_loss(chosen, rejected,", "return dpo_loss(rejected, chosen,",
         "held-out accuracy of DPO"),
        ("return ipo_loss(chosen, rejected,", "return dpo_loss(chosen, rejected,",
         "margin of IPO, end over half way"),
        ("good = torch.arange(len(both)) < len(chosen)", "good = torch.arange(len(both)) >= len(chosen)",
         "best truth of KTO"),
    ],
    "12_fooled_reward": [
        ("lambda answers: torch.zeros(len(answers.kinds))",
         "lambda answers: 0.15 * answers.mask.sum(1)", "honest: alarms"),
        ("watch.observe_texts(step, metrics, texts)", "watch.observe_texts(step, {}, texts)",
         "sycophancy is the first alarm"),
    ],
    "13_process_reward": [
        ("lambda batch: batch.right.float(), shaped", "lambda batch: batch.sound.float(), shaped",
         "trained on the outcome: every line right"),
        ("(line_chances, each_line)", "(less_the_mean, each_line)", "trained on the sum: lines"),
        ("labelled.errors == 0, labelled.mask", "labelled.errors != 0, labelled.mask",
         "the weakest line"),
    ],
    "14_annotators": [
        ("truth ^ ~coin(accuracy) for name, accuracy in PEOPLE",
         "truth ^ coin(accuracy) for name, accuracy in PEOPLE", "accuracies"),
        ("torch.where(only_one, says_sorry[0], row)", "torch.where(only_one, row, row)",
         "all with the taste"),
        ("seen = worth + noise + shift * shifts", "seen = worth + noise + shift",
         "share in the right order"),
    ],
    "15_pipeline": [
        ("proxy = learned(reward)", "proxy = learned(-reward)", "held-out accuracy"),
        ("steps=80, beta=beta)", "steps=80, beta=0.0)", "PPO: the verdict is better"),
        ("before = answers_of(tuned)", "before = answers_of(base())", "the start once more"),
    ],
    "16_episodes": [
        ('written if masked else torch.ones_like(written)', 'torch.ones_like(written)',
         "rise of the environment's words, masked"),
        ("scores = torch.where(called, 1 - price, right.float())",
         "scores = torch.where(called, 1.0, right.float())", "a call is made where it pays"),
    ],
    "17_two_peaks": [
        ('"reverse KL": fitted("reverse", START)', '"reverse KL": fitted("forward", START)',
         "place of the reverse KL's student"),
        ("gaps * own.log_prob(drawn)", "own.log_prob(drawn)", "error of the sampled gradient"),
    ],
}  # fmt: skip
"""By lab: what stands in it, what breaks it, and what the error must name."""


@pytest.mark.parametrize(
    ("path", "right", "wrong", "named"),
    [
        marked(FOLDER / f"{lab}.py", *change, name=f"{lab}-{number}")
        for lab, changes in BROKEN.items()
        for number, change in enumerate(changes)
    ],
)
def test_a_broken_lab_leaves_its_bands(path, right, wrong, named, tmp_path, monkeypatch):
    source = path.read_text()
    assert source.count(right) == 1
    with pytest.raises(OutsideBandError, match=re.escape(named)):
        run(path, source.replace(right, wrong), tmp_path, monkeypatch)


def test_every_lab_is_broken_somewhere():
    assert [path.stem for path in LABS if path.stem not in BROKEN] == []


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_has_all_parts(path):
    source = path.read_text()
    first = source.split("# %%\n")[0]
    for part in (
        "# %% [markdown]\n# # ",
        "**Question:**",
        "**Goal.**",
        "**Chapter:**",
        "**Time:**",
    ):
        assert part in first, part
    for part in ("**Question to try.**", "look_at=", "lab.expect("):
        assert part in source, part
    assert f'Lab("{path.stem}")' in source
    assert source.count("leads=True") == 1


def test_a_notebook_shows_each_plot_below_its_cell(tmp_path, monkeypatch):
    shown = []
    notebook = SimpleNamespace(display=shown.append, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    monkeypatch.chdir(tmp_path)
    path = FOLDER / "01_bandit_and_clip.py"
    source = path.read_text()
    exec(compile(source, "cell", "exec"), {"__name__": "__main__"})
    assert len(shown) == source.count("lab.plot(")
    (drawn, *_) = re.findall(r'srcdoc="([^"]*)"', shown[0])
    assert html.unescape(drawn).count("<figure") == 1
    assert "The clipped objective" in drawn and not list(tmp_path.rglob("*.html"))


TRIED = {
    "01_bandit_and_clip": [
        ("EPOCHS = 20", "EPOCHS = 1"),
    ],
    "02_reward_model": [
        ("compare(1000, luck, flipped=noise)", "compare(10_000, luck, flipped=noise)"),
    ],
    "03_reinforce": [
        ("STEPS = 60", "STEPS = 1"),
        ("(-1.0, -0.5, 0.0, 1.0, 4.0)", "(-1.0, -0.75, -0.5, -0.25, 0.0, 1.0, 4.0)"),
    ],
    "04_gradient_variance": [
        ("ANSWERS = 32", "ANSWERS = 2"),
        ("torch.full(answers.mask.shape, average + offset)", "(gold(answers).mean() + offset).expand(answers.mask.shape)"),
    ],
    "05_kl_shaped_reward": [
        ("STEPS = 30", "STEPS = 1"),
        ('"right": (Shop(lab.seed, gold)', '"right": (Shop(lab.seed, lambda a: gold(a) + 0.1 * a.mask.sum(1))'),
    ],
    "06_ppo_in_40_lines": [
        ("STEPS = 40", "STEPS = 1"),
        ("epochs=count)", "epochs=count, lam=1.0)"),
        ("epochs=count)", "epochs=count, lam=0.0)"),
    ],
    "07_hundred_steps": [
        ("STEPS = 100", "STEPS = 8"),
        ("STEPS = 100", "STEPS = 1"),
    ],
    "08_slider": [
        ("STEPS = 80", "STEPS = 1"),
        ("compare(1000, luck)", "compare(10_000, luck)"),
    ],
    "09_group_advantages": [
        ("STEPS = 50", "STEPS = 1"),
        ("LIKED = torch.tensor([0.0, 1.0, 2.0, 3.0])", "LIKED = torch.zeros(4)"),
    ],
    "10_best_of_n": [
        ("compare(1000, luck)", "compare(10_000, luck)"),
    ],
    "11_dpo_ipo_kto": [
        ("STEPS = 150", "STEPS = 2"),
        ("BETA = 0.1", "BETA = 1.0"),
    ],
    "12_fooled_reward": [
        ("STEPS = 60", "STEPS = 1"),
        ("BETA = 0.5", "BETA = 3.0"),
        ("BETA = 0.5", "BETA = 0.1"),
    ],
    "13_process_reward": [
        ("STEPS = 60", "STEPS = 1"),
        ("start = HABITS.log()", "HABITS[2, :2] = torch.tensor([0.6, 0.3])\nstart = HABITS.log()"),
    ],
    "14_annotators": [
        ("KNOWN = 0", "KNOWN = 20"),
        ("KNOWN = 0", "KNOWN = 60"),
    ],
    "15_pipeline": [
        ("COUNT = 2000", "COUNT = 10"),
        ("COUNT = 2000", "COUNT = 100"),
    ],
    "16_episodes": [
        ("STEPS = 20", "STEPS = 1"),
        ("return PRAISE, float(right), self.turns == 3 or not right",
         "return PRAISE if right else 'Wrong.', float(right), self.turns == 3"),
    ],
    "17_two_peaks": [
        ("START = 1.5", "START = 0.5"),
    ],
}  # fmt: skip
"""By lab: what its question changes, and its shortest run; the first is quick."""


@pytest.mark.parametrize(
    ("path", "published", "tried"),
    [
        pytest.param(path, *change, id=f"{path.stem}-{change[1]}", marks=[pytest.mark.slow] * slow)
        for path in LABS
        for slow, change in zip((False, True, True), TRIED[path.stem], strict=False)
    ],
)
def test_a_lab_answers_its_own_question(path, published, tried, tmp_path, monkeypatch):
    """The changed numbers may leave their bands, but the page is there."""
    monkeypatch.setattr("tether.api.labs.sums.HABITS", HABITS.clone())
    source = path.read_text()
    assert source.count(published) == 1
    with suppress(OutsideBandError):
        run(path, source.replace(published, tried), tmp_path, monkeypatch)
    assert (tmp_path / "runs" / "labs" / f"{path.stem}.html").is_file()
