"""Distillation as a stage of a recipe: who teaches, what a teacher reads, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from tests.runner.killed import engine_server

import tether
from tether.cli.tools.doctor import examine_recipe
from tether.core.errors import ConfigError, DataError, Interrupted
from tether.core.rundir import read_json, read_jsonl
from tether.core.types import Message, Prompt, Sampling, user
from tether.data.batches import make_batch
from tether.models.saving import read_role
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.runner.assembly.online import online_stage
from tether.runner.assembly.roles import load_policy
from tether.runner.assembly.teachers import read_by
from tether.runner.planning.devices import gpu
from tether.runner.planning.plan import plan
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.teacher import ReadingConfig
from tether.stages.teachers import Read
from tether.watch.monitoring.doctor import Finding, Unexamined

TEACHER = {"model": "start", "system": "Answer in capitals, about {topic}"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"say {c}", "topic": c} for c in "aeioubcd"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = [{"prompt": f"say {c}", "response": c * 5, "topic": c} for c in "aeioubcd"]
    (tmp_path / "told.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    (tmp_path / "reads.py").write_text(
        "def hint(prompt):\n"
        "    return [{'role': 'user', 'content': f'{prompt.text}! The answer: {prompt.row[\"topic\"]}'}]\n",
    )
    return tmp_path


def recipe(teacher=TEACHER, model=None, **settings):
    return {
        "run": "run",
        "model": {"source": "tiny", "dtype": "float32", **(model or {})},
        "distill": {
            "data": {"path": "rows.jsonl"},
            "teacher": teacher,
            "steps": 4,
            "prompts_per_step": 4,
            "max_new_tokens": 8,
            "optimizer": {"learning_rate": 1e-2},
            **settings,
        },
    }


def divergences(run):
    return [row["teacher/divergence"] for row in read_jsonl(run.path / "distill" / "metrics.jsonl")]


def weights(run):
    from safetensors.torch import load_file

    (path,) = (run.path / "distill" / "policy").rglob("adapter_model.safetensors")
    return load_file(path)


@pytest.mark.parametrize("divergence", ["token", "reverse", "forward", "jsd"])
def test_the_distance_from_the_teacher_falls_on_held_out_prompts(folder, divergence):
    run = tether.run(
        recipe(
            divergence=divergence,
            steps=12,
            evaluate={"prompts": 3, "every": 4, "keep": "best"},
        ),
        progress=False,
    )
    measured = read_json(run.path / "distill" / "summary.json")["heldout"]["measured"]
    assert measured["0"]["value"] < measured["12"]["value"] < 0
    names = ("forward_kl", "other_tokens", "entropy")
    last = list(read_jsonl(run.path / "distill" / "metrics.jsonl"))[-1]
    assert all(f"heldout/{name}" in last for name in names)


def test_a_run_teaches_its_start_on_the_same_trunk(folder):
    """Its policy's own answers have no distance from it, and one that learns from it gets nearer."""
    first = tether.run(recipe(), progress=False)
    taught = {**recipe("run", steps=6, divergence="reverse"), "run": "taught"}
    run = tether.run(taught, progress=False)
    assert divergences(run)[-1] < divergences(run)[0]
    saved = read_role(run.path / "distill" / "policy")
    assert saved["adapter"] is not None and set(weights(run)) == set(weights(first))
    apart = {**recipe("run", steps=1, divergence="reverse", roles="separate"), "run": "apart"}
    assert divergences(tether.run(apart, progress=False))[0] == pytest.approx(
        divergences(run)[0],
        rel=1e-4,
    )


LOUD = (
    "{% for m in messages %}<|{{ m.role }}|>{{ 'LOUD ' if loud }}{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template with an argument, which the tiny model's own has not."""


def taught_otherwise(folder):
    """A run of the same base whose policy reads by another template, with another system message."""
    (folder / "loud.jinja").write_text(LOUD)
    speech = {"chat_template": "loud.jinja", "template": {"loud": True}, "system_prompt": "Be odd."}
    tether.run({**recipe(model=speech), "run": "loud"}, progress=False)
    return speech


@pytest.mark.parametrize("roles", ["shared", "separate"])
def test_a_run_with_another_template_teaches_by_its_own(folder, roles):
    """Its log-probabilities are those of a plain forward over transformers' rendering of its own
    template and the ids of the policy's answers.
    """
    taught_otherwise(folder)
    student = build(Recipe, recipe("loud", {"system_prompt": "Student."}, roles=roles))
    stage, loaded = online_stage(student.distill, student.model, None, 0)
    prompts = [Prompt((user(f"say {c}"),), c) for c in "aei"]
    groups = stage.engine.generate(prompts, Sampling(6), num_samples=1, seed=3)
    rollouts = [group.rollouts[0] for group in groups]
    batch = make_batch([stage.encoder.sampled(one) for one in rollouts], stage.encoder.pad_id)
    found = batch.scatter(stage.teachers.logprobs(Read(batch, rollouts)))
    theirs = load_policy("loud")[0].causal_model
    for row, rollout in zip(found, rollouts, strict=True):
        ids = loaded.tokenizer.apply_chat_template(
            [
                {"role": "system", "content": "Be odd."},
                {"role": "user", "content": rollout.prompt.text},
            ],
            chat_template=LOUD,
            loud=True,
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        written = torch.tensor(rollout.response_ids)
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([[*ids, *rollout.response_ids]])).logits[0]
        expected = logits[len(ids) - 1 : -1].log_softmax(-1).gather(1, written[:, None])[:, 0]
        torch.testing.assert_close(row[: len(written)], expected, atol=1e-4, rtol=1e-4)
    tether.run({**recipe("loud", roles=roles), "run": "student"}, progress=False)


def test_another_model_reads_with_its_own_system_message(folder):
    """A model has none of the student's, whose words the start reads."""
    tiny_model(0).save_pretrained(folder / "plain")
    tiny_tokenizer().save_pretrained(folder / "plain")
    teachers = ["plain", {"model": "start", "system": "Shout."}]
    student = build(Recipe, recipe(teachers, {"system_prompt": "Student."}))
    stage, loaded = online_stage(student.distill, student.model, None, 0)
    prompt = Prompt((user("say a"),))
    for member, words in zip(stage.teachers.members, ("", "Shout.\n\nStudent."), strict=True):
        turns = [{"role": "system", "content": words}] if words else []
        ids = loaded.tokenizer.apply_chat_template(
            [*turns, {"role": "user", "content": "say a"}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        assert member.reads(prompt) == tuple(ids)


@pytest.mark.parametrize("place", ["tuned", "tuned/sft", "tuned/sft/model"])
def test_a_run_that_was_fine_tuned_alone_teaches(folder, place):
    tuned = {"data": {"path": "told.jsonl"}, "heldout_fraction": 0.0, "epochs": 4, "lora": False}
    start = {"source": "tiny", "dtype": "float32"}
    tether.run({"run": "tuned", "model": start, "sft": tuned}, progress=False)
    run = tether.run(recipe(place, steps=1, divergence="reverse"), progress=False)
    assert divergences(run)[0] > 1e-4


def test_a_row_whose_argument_a_teacher_does_not_read_is_left_out(folder):
    """By the summary: the row, the argument, the teacher and what to do; other rows are learned."""
    (folder / "loud.jinja").write_text(LOUD)
    tiny_model(0).save_pretrained(folder / "plain")
    tiny_tokenizer().save_pretrained(folder / "plain")
    rows = [{"prompt": f"say {c}"} for c in "aeioubcd"]
    odd = {"prompt": "say z", "chat_template_kwargs": {"loud": True}}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (odd, *rows)))
    run = tether.run(recipe("plain", {"chat_template": "loud.jinja"}), progress=False)
    assert len(divergences(run)) == 4
    left_out = read_json(run.path / "distill" / "summary.json")["quarantine"]
    assert left_out["count"] == 1
    (example,) = left_out["examples"]
    assert example["row"] == "say z"
    assert example["reason"] == (
        "the teacher plain cannot read it: chat_template_kwargs names loud, and the chat template "
        "takes none. Remove it from the row"
    )
    (folder / "rows.jsonl").write_text(json.dumps(odd) + "\n")
    none = {**recipe("plain", {"chat_template": "loud.jinja"}), "run": "none"}
    with pytest.raises(DataError, match=r"none of 1 prompts.*teacher plain cannot read it: .*loud"):
        tether.run(none, progress=False)


def test_a_reply_that_the_template_cannot_write_is_left_out(folder):
    turns = [
        {"role": "user", "content": "say z"},
        {"role": "assistant", "content": "z", "reasoning_content": "A thought."},
    ]
    rows = [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]
    talks = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
        for row in rows
    ]
    lines = [json.dumps({"messages": talk}) + "\n" for talk in (turns, *talks)]
    (folder / "told.jsonl").write_text("".join(lines))
    teacher = {"model": "start", "system": "Shout."}
    given = {"data": {"path": "told.jsonl"}, "own_answers": 0.0, "divergence": "forward"}
    run = tether.run(recipe(teacher, **given), progress=False)
    left_out = read_json(run.path / "distill" / "summary.json")["quarantine"]
    assert left_out["count"] == 1 and left_out["examples"][0]["row"] == "say z"
    assert "leaves out the reasoning" in left_out["examples"][0]["reason"]


def test_a_function_says_what_the_teacher_reads(folder):
    run = tether.run(recipe({"model": "start", "call": "reads.py:hint"}, steps=1), progress=False)
    assert divergences(run)[0] != 0
    again = tether.run(
        {
            **recipe({"model": "start", "system": "The answer: {topic}"}, steps=1),
            "run": "again",
        },
        progress=False,
    )
    assert divergences(run) != divergences(again)


def test_what_a_teacher_reads_keeps_what_its_row_and_its_model_say():
    """Tools and arguments of the template are on the first turn that it reads, whoever wrote that;
    the system message of the model comes behind its own where the row has none.
    """
    given = {"tools": '[{"name": "f"}]', "template": '{"enable_thinking": false}'}
    own = Prompt((Message("system", "Row.", **given), user("a")))
    bare = Prompt((replace(user("a"), **given),))
    reads = read_by(ReadingConfig(model="start", system="Teacher."), "Model.")
    assert reads(own) == (Message("system", "Teacher.\n\nRow.", **given), user("a"))
    assert reads(bare) == (Message("system", "Teacher.\n\nModel."), bare.messages[0])
    assert read_by(ReadingConfig(system="Teacher."))(bare)[0] == Message("system", "Teacher.")
    called = read_by(ReadingConfig(model="start", call=f"{__file__}:shortened"), "Model.")
    for prompt in (own, bare):
        assert called(prompt) == (Message("user", "Briefly: a", **given),)
    other = Prompt(
        (Message("user", "b", template='{"enable_thinking": true}'),),
        metadata={"keep": 1},
    )
    assert called(other) == (Message("user", "Briefly: b", template='{"x": 1}'),)


def shortened(prompt):
    if prompt.metadata:
        return [Message("user", f"Briefly: {prompt.text}", template='{"x": 1}')]
    return [{"role": "user", "content": f"Briefly: {prompt.text}"}]


def test_a_teacher_reads_the_system_message_of_its_model_behind_its_own(folder):
    (folder / "both.py").write_text(
        "def both(prompt):\n"
        "    turns = [('system', 'Shout.\\n\\nBe odd.'), ('user', prompt.text)]\n"
        "    return [{'role': role, 'content': content} for role, content in turns]\n",
    )
    first, second = (
        tether.run(
            {**recipe({"model": "start", **teacher}, {"system_prompt": "Be odd."}), "run": name},
            progress=False,
        )
        for name, teacher in (("one", {"system": "Shout."}), ("two", {"call": "both.py:both"}))
    )
    assert divergences(first) == divergences(second)


def test_a_teacher_that_follows_goes_on_where_it_was(folder):
    """Stopped after two of four steps, a run ends with the bits of one in one go."""
    teacher = {"model": "start", "system": "shout", "follow": 0.6}
    whole = tether.run({**recipe(teacher, checkpoint_every=1), "run": "whole"}, progress=False)

    def stop(stage, step, metrics):
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, Interrupted)):
        tether.run(recipe(teacher, checkpoint_every=1), on_step=stop, progress=False)
    run = tether.run(recipe(teacher, checkpoint_every=1), progress=False)
    assert divergences(run) == divergences(whole)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(run)[name])
    still = {"model": "start", "system": "shout"}
    fixed = tether.run({**recipe(still), "run": "fixed"}, progress=False)
    assert divergences(fixed)[0] == divergences(whole)[0]
    assert divergences(fixed)[2:] != divergences(whole)[2:]


def test_a_server_teaches_what_the_same_model_here_teaches(folder, monkeypatch):
    monkeypatch.setenv("TETHER_SERVER_TOKEN", "a token of the run")
    address = engine_server(folder)
    # the server holds the start: the first step finds no distance, and with a reward as well the
    # teacher is the tether that half the squared log-ratio in the loss is, by its gradient
    pushed = {"reward_source": "random", "samples_per_prompt": 4}
    there = tether.run(
        {**recipe({"addresses": [address]}, **pushed, teacher_coefficient=0.05), "run": "there"},
        progress=False,
    )
    tied = {"coefficient": 0.05, "place": "loss", "estimator": "k2"}
    plain = {"baseline": "none", "normalize_scores": False, "kl": tied}
    here = recipe(**pushed, **plain)
    settings = here.pop("distill")
    del settings["teacher"]
    run = tether.run({**here, "run": "here", "reinforce": settings}, progress=False)
    moved = list(read_jsonl(run.path / "reinforce" / "metrics.jsonl"))
    assert abs(divergences(there)[0]) < 1e-5
    own = list(read_jsonl(there.path / "distill" / "metrics.jsonl"))
    for one, other in zip(own, moved, strict=True):
        assert one["kl/policy_reference_k1"] == pytest.approx(
            other["kl/policy_reference_k1"],
            abs=1e-4,
        )
    assert own[-1]["kl/policy_reference_k1"] > 0.01


@pytest.mark.parametrize("least_mass", [0.0, 1.0])
def test_a_server_gives_its_likeliest_tokens(folder, monkeypatch, least_mass):
    """The policy is the server's start at first, so that only what it left out differs; and all is
    left out where more is asked for than any likeliest tokens have.
    """
    monkeypatch.setenv("TETHER_SERVER_TOKEN", "a token of the run")
    teacher = {"addresses": [engine_server(folder)], "top_k": 5, "least_mass": least_mass}
    pushed = {"reward_source": "random", "samples_per_prompt": 4, "divergence": "forward"}
    run = tether.run({**recipe(teacher, **pushed), "run": f"top{least_mass}"}, progress=False)
    first, *_, last = read_jsonl(run.path / "distill" / "metrics.jsonl")
    assert 0.1 < first["teacher/mass_left_out"] < 0.999
    assert first["teacher/places_left_out"] == least_mass
    assert abs(first["teacher/divergence"]) < 1e-5
    assert (last["teacher/divergence"] > 1e-6) == (least_mass == 0)


def test_replies_of_the_rows_are_learned_where_nothing_is_sampled(folder):
    data = {"data": {"path": "told.jsonl"}, "own_answers": 0.0, "divergence": "forward"}
    run = tether.run(recipe(**data), progress=False)
    rows = list(read_jsonl(run.path / "distill" / "samples.jsonl"))
    assert {row["response"] for row in rows} <= {c * 5 for c in "aeioubcd"}
    assert divergences(run)[-1] > 0


def test_what_teachers_read_of_a_row_is_the_same_where_its_reply_is_learned(folder):
    """All of its columns, that of the reply among them; the reply itself has no name."""
    (folder / "notes.py").write_text(
        "import json\n\n\n"
        "def noted(prompt):\n"
        "    with open('notes.jsonl', 'a') as file:\n"
        "        file.write(json.dumps([prompt.id, prompt.row], sort_keys=True) + '\\n')\n"
        "    return prompt.messages\n",
    )
    common = {"data": {"path": "told.jsonl"}, "divergence": "forward", "prompts_per_step": 8}
    noted = []
    for share in (1.0, 0.0):
        teacher = {"model": "start", "call": "notes.py:noted"}
        run = recipe(teacher, own_answers=share, steps=1, **common)
        tether.run({**run, "run": f"own{share}"}, progress=False)
        noted.append({*(folder / "notes.jsonl").read_text().splitlines()})
        (folder / "notes.jsonl").unlink()
    assert noted[0] == noted[1] and len(noted[0]) == 8
    assert all(json.loads(line)[1].keys() >= {"prompt", "response", "topic"} for line in noted[0])
    teacher = {"model": "start", "system": "The answer: {response}"}
    tether.run({**recipe(teacher, own_answers=0.5, **common), "run": "named"}, progress=False)
    unnamed = {"model": "start", "system": "The answer: {reply}"}
    with pytest.raises(DataError, match=r"names \{reply\}.*the columns topic, prompt, response$"):
        tether.run({**recipe(unnamed, own_answers=0.5, **common), "run": "odd"}, progress=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"teacher": ()}, "needs a teacher"),
        ({"teacher": {"model": "start", "follow": 0.9}}, "remains it while nothing else"),
        (
            {"own_answers": 0.5, "divergence": "forward", "reward_source": "random"},
            "did not sample.*leave the reward out",
        ),
        *(
            (
                {"teacher": {**TEACHER, "follow": 0.9}, "evaluate": {"prompts": 2, **way}},
                "moves itself",
            )
            for way in ({"keep": "best"}, {"stop": True})
        ),
        ({"teacher": {"model": "start"}}, "teaches itself nothing"),
        ({"teacher": {"model": "start", "addresses": ["http://x"]}}, "one of both"),
        ({"own_answers": 0.5}, "whole distribution"),
        ({"divergence": "jsd", "jsd_beta": 0.0}, "no divergence"),
        ({"teacher": {"addresses": ["http://x"]}, "divergence": "reverse"}, "a server gives"),
        ({"teacher": {"addresses": ["http://x"], "system": "s"}}, "a server reads"),
        ({"teacher": {"addresses": ["http://x"], "top_k": 5}}, "top_k has no effect"),
        ({"teacher": {"model": "x", "top_k": 5}, "divergence": "forward"}, "top_k is of servers"),
        ({"teacher": {"addresses": ["http://x"], "least_mass": 0.5}}, "set top_k"),
        ({"teacher": {"model": "run", "follow": 0.9}}, "moves a copy"),
        ({"teacher": {"model": "start", "follow": 0.9}, "roles": "separate"}, "shared"),
        ({"teacher": {"addresses": ["http://x"]}, "temperature": 0.7}, "temperature = 1"),
        (
            {
                "teacher": {"addresses": ["http://x"]},
                "environment": {"call": "x.py:X", "history": "template"},
            },
            "reads answers whole",
        ),
        ({"environment": {"call": "x.py:X", "history": "template"}}, "reads answers whole"),
    ],
)
def test_what_has_no_effect_is_refused_before_anything_runs(folder, settings, words):
    with pytest.raises(ConfigError, match=words):
        tether.run(recipe(**settings), progress=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"teacher": {"model": "start", "follow": 0.9}, "reward_source": "random"},
        {"teacher": [{"model": "start", "follow": 0.9}, TEACHER]},
        {"teacher": {**TEACHER, "follow": 0.9}, "evaluate": {"prompts": 2}},
        {
            "teacher": {**TEACHER, "follow": 0.9},
            "evaluate": {"prompts": 2, "keep": "best", "judge": {"call": "reads.py:hint"}},
        },
    ],
)
def test_a_teacher_that_follows_may_stand_beside_what_does_not_move(settings):
    build(Recipe, recipe(**settings))


def test_an_address_is_a_server(folder):
    teachers = ["http://10.0.0.5:8000", {"model": "owner/larger", "weight": 2.0}]
    first, second = build(Recipe, recipe(teachers)).distill.teacher
    assert first.addresses == ("http://10.0.0.5:8000",) and first.model is None
    assert second.model == "owner/larger" and not second.addresses
    (alone,) = build(Recipe, recipe("https://a:1")).distill.teacher
    assert alone.addresses == ("https://a:1",)


def test_the_doctor_looks_for_no_difference_of_scores_where_teachers_are_the_reward(folder):
    results = examine_recipe(build(Recipe, recipe()))["distill"]
    assert [one for one in results if isinstance(one, Finding)] == []
    reasons = {one.check: one.reason for one in results if isinstance(one, Unexamined)}
    assert "teachers" in reasons["scores"]


def test_a_teacher_with_other_tokens_is_refused_with_what_to_do(folder):
    (folder / "other").mkdir()
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tiny_model(0).save_pretrained(folder / "other")
    tokenizer.save_pretrained(folder / "other")
    with pytest.raises(ConfigError, match=r"another tokenizer.*Fine-tune on texts"):
        tether.run(recipe("other"), progress=False)


@pytest.mark.parametrize("given", ["'words'", "7", "[{'role': 'user'}]", "{'role': 'user'}"])
def test_what_a_function_gives_that_is_no_conversation_is_named(folder, given):
    (folder / "odd.py").write_text(f"def odd(prompt):\n    return {given}\n")
    with pytest.raises(DataError, match="a list of messages with role and content"):
        tether.run(recipe({"model": "start", "call": "odd.py:odd"}, steps=1), progress=False)


def test_a_column_that_is_not_there_is_named(folder):
    with pytest.raises(DataError, match=r"names \{subject\}.*topic"):
        tether.run(recipe({"model": "start", "system": "About {subject}"}), progress=False)


def test_a_plan_counts_a_teacher_of_its_own_and_none_on_the_policys_trunk(folder):
    """By the parameters that its name says, in the policy's type; of servers nothing."""

    def peak(**settings):
        made = plan(build(Recipe, recipe(**settings)), gpu(80, "H100"), measured=False)
        (stage,) = made.stages
        return stage.peak, sum(phase.seconds for phase in stage.phases)

    alone, trunk, own = (
        peak(teacher=teacher, divergence=how)
        for teacher, how in (
            ({"addresses": ["http://a:1"]}, "token"),
            (TEACHER, "token"),
            ("org/other-2M-it", "reverse"),
        )
    )
    assert abs(trunk[0] - alone[0]) < 2_000_000
    apart = {"roles": "separate", "divergence": "token"}
    server, start = (
        peak(teacher=teacher, **apart) for teacher in ({"addresses": ["http://a:1"]}, TEACHER)
    )
    weights = 4 * sum(parameter.numel() for parameter in tiny_model(0).parameters())
    assert start[0] - server[0] == pytest.approx(weights, rel=0.1) and start[1] > server[1]
    assert own[0] - trunk[0] == 2_000_000 * 4
    assert own[1] > trunk[1] > 0
