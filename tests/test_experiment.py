"""What defines the experiment: who trains on what, what is held out from what, what is scored.

One small run of all methods is watched from outside: every fine-tuning, every rollout, every optimiser step
and the report card are recorded as they are called. Each test is a sentence that the README says.
"""

import copy
import csv
import json
import math
from collections import defaultdict
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import pytest
import torch

import align_sim
import extras.speakers as speakers
import train
from chat import tiny_chat
from config import METHODS, complete, parse_config
from extras.hf import load_model
from extras.records import interval
from logs import logged_contexts, make_data, split_problems, warm_start_dialogues, write_logs
from report_card import measure
from rollout import Trajectory, rollout
from sft import sft
from simulator import ModelUser, ScriptedUser, simulator_messages
from task_math import TASK, facts_of, marked_answer
from tasks import generate_problems

FLAGS = ("--method all --seed 4 --sft-steps 6 --sft-batch 5 --sft-lr 0.002 --calibration-steps 4 --steps 3 "
         "--lr 0.0007 --clip-eps 0.3 --kl-coef 0.05 --minibatches 2 --prompts 4 --group-size 2 --horizon 3 "
         "--max-new-tokens 7 --train-problems 60 --eval-problems 5 --eval-every 2 --test-problems 9 "
         "--card-dialogues 12 --token-budget 3000").split()

# so that an untrained policy earns something, and its weights move
LIVELY = replace(TASK, reward=lambda problem, dialogue, equal: len(dialogue[-1]["content"]) % 5 / 4)


def fingerprint(model):
    """The weights of a model in a few letters."""
    digest = sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:12]


def watched(calls, name, function, describe):
    """Return a function that does the same and keeps what `describe` says of each call and its result."""
    def call(*arguments, **options):
        seen = describe(*arguments, **options)
        seen["result"] = function(*arguments, **options)
        calls[name].append(SimpleNamespace(**seen))
        return seen["result"]
    return call


def trainings(rollouts):
    """The rollouts that train, each with its step: four methods take three."""
    found = [call for call in rollouts if call.draw_keys[0][1] == "train"]
    for i, call in enumerate(found):
        call.step = 1 + i % 3
    return found


def watched_rollout(policy, chat, user, task, problems, draw_keys, **options):
    who = user.script if isinstance(user, ScriptedUser) else fingerprint(user.model)
    return dict(policy=fingerprint(policy), user=who, problems=problems, draw_keys=draw_keys, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The calls of a small run of all methods, its files and its data."""
    out, calls = tmp_path_factory.mktemp("experiment") / "run", defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        def describe_sft(model, examples, **options):
            return dict(before=fingerprint(model), model=model, examples=examples, **options)

        def describe_update(policy, optimiser, tokens, action_mask, old_logprobs, advantages, **options):
            return dict(policy=fingerprint(policy), lr=optimiser.param_groups[0]["lr"], mask=action_mask,
                        advantages=advantages, **options | {"reference": fingerprint(options["reference"])})

        def describe_card(task, logs, simulators, chat, **options):
            return dict(logs=logs, simulators={n: fingerprint(m) for n, m in simulators.items()}, **options)

        patch.setattr(train, "find_task", lambda name: LIVELY)
        for module in (speakers, align_sim):
            patch.setattr(module, "sft", watched(calls, "sft", module.sft, describe_sft))
        patch.setattr(train, "rollout", watched(calls, "rollout", train.rollout, watched_rollout))
        patch.setattr(train, "update", watched(calls, "update", train.update, describe_update))
        patch.setattr(train, "report_card", watched(calls, "card", train.report_card, describe_card))
        train.main([*FLAGS, "--out", str(out)])
    config = complete(parse_config(FLAGS), TASK)
    with open(out / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return SimpleNamespace(out=out, config=config, data=make_data(TASK, config, [], []), rows=rows,
                           result=json.loads((out / "result.json").read_text()), **calls,
                           training=trainings(calls["rollout"]),
                           evaluation=[call for call in calls["rollout"] if call.draw_keys[0][1] != "train"])


def weights_of(run, *path):
    return fingerprint(load_model(run.out.joinpath(*path)))


def of_method(calls, method, per_method):
    """The calls of one trained method: methods train one after the other, with as many calls each."""
    i = METHODS[1:].index(method)
    return calls[i * per_method:(i + 1) * per_method]


# What each model trains on ----------------------------------------------------------------------------------

def test_the_base_policy_learns_three_fifths_human_logs_and_two_fifths_told_at_once(run):
    chat, warm = tiny_chat(), run.sft[0]
    logs = [log["messages"] for log in write_logs(TASK, run.data.train, "human", run.config.seed)]
    assert warm.examples[:36] == [chat.render(messages) for messages in logs[:36]]
    for problem, (ids, mask) in zip(run.data.train[36:], warm.examples[36:], strict=True):
        told = chat.decode(ids)
        assert problem.goal in told and chat.decode([i for i, m in zip(ids, mask) if m]) == (
            problem.solution + "<|end|>")
    assert warm_start_dialogues(TASK, run.data.train, run.config.seed)[:36] == logs[:36]


def test_the_naive_simulator_learns_the_user_side_of_the_overhelpful_script_and_no_human_log(run):
    naive, chat = run.sft[1], tiny_chat()
    logs = write_logs(TASK, run.data.train, "overhelpful", run.config.seed)
    assert naive.examples == [chat.render(simulator_messages(log)) for log in logs]
    said = [chat.decode([i for i, m in zip(ids, mask) if m]) for ids, mask in naive.examples]
    assert all("Thank you" in text for text in said)                   # people hardly ever do


def test_the_calibrated_simulator_is_the_naive_one_trained_on_the_training_logs_of_the_human(run):
    calibration, chat = run.sft[2], tiny_chat()
    assert calibration.before == weights_of(run, "simulator_naive")
    assert calibration.examples == [chat.render(simulator_messages(log)) for log in run.data.logs]
    assert fingerprint(calibration.model) == weights_of(run, "simulator_calibrated")
    assert len(run.sft) == 3


def test_warm_start_calibration_and_naive_simulator_take_the_steps_and_rates_that_were_asked_for(run):
    assert [call.steps for call in run.sft] == [6, 3, 4]               # the naive simulator takes half of 6
    assert {call.batch for call in run.sft} == {5} and {call.lr for call in run.sft} == {0.002}
    assert [len(call.result) for call in run.sft] == [6, 3, 4]


def test_no_two_phases_learn_their_dialogues_in_the_same_order(chat, model):
    """The order is keyed by phase: a stream that is shared would repeat between policy and simulators."""
    examples = [([i, i + 1, i + 2], [0, 1, 1]) for i in range(40)]
    orders = {}
    for phase in ("warm start of the policy", "naive simulator", "calibration"):
        losses = sft(copy.deepcopy(model), examples, steps=6, batch=2, lr=0.0, seed=0, phase=phase)
        orders[phase] = tuple(round(loss, 9) for loss in losses)
    assert len(set(orders.values())) == 3


def test_only_logs_of_real_people_are_calibrated_on_with_early_stopping(run, tmp_path, monkeypatch):
    """The scripted human's logs never end; a sixth of a file's says when to stop, and is not trained on."""
    assert not run.sft[2].validation
    logs, calls = write_logs(TASK, run.data.train, "human", 0), defaultdict(list)
    monkeypatch.setattr(align_sim, "sft", lambda model, examples, **options: calls["sft"].append(
        (examples, options["validation"])) or [0.0])
    chat = tiny_chat()
    align_sim.calibrate(None, chat, logs[:12], steps=1, batch=1, lr=1.0, seed=0, stop_early=True)
    [(examples, validation)] = calls["sft"]
    assert len(validation) == 2 and len(examples) == 10
    assert not [example for example in validation if example in examples]


# Where the methods part -------------------------------------------------------------------------------------

def test_each_method_talks_with_its_own_user(run):
    naive, calibrated = weights_of(run, "simulator_naive"), weights_of(run, "simulator_calibrated")
    for method, user in (("naive", naive), ("calibrated", calibrated), ("human", TASK.human)):
        calls = of_method(run.training, method, 3)
        assert {call.user for call in calls} == {user} and naive != calibrated
        assert {call.horizon for call in calls} == {3} and not any(call.contexts for call in calls)


def test_static_says_one_reply_in_a_logged_context_that_lacks_the_logged_answer(run):
    contexts = {log["goal"]: log["messages"] for log in run.data.logs}
    for call in of_method(run.training, "static", 3):
        assert call.horizon == 1
        for problem, context, trajectory in zip(call.problems, call.contexts, call.result, strict=True):
            logged = contexts[problem.goal]
            replies = [i for i, message in enumerate(logged) if message["role"] == "assistant"]
            assert context == logged[:replies[-1]] and context[-1]["role"] == "user"
            assert not any(marked_answer(message["content"]) for message in context)
            assert trajectory.turns == 1 and trajectory.messages[:-1] == context


def test_a_context_is_cut_before_the_last_reply_and_needs_a_goal():
    talk = [{"role": role, "content": text} for role, text in
            (("user", "hi"), ("assistant", "How many?"), ("user", "7"), ("assistant", "#### 7"))]
    assert logged_contexts([{"goal": "g", "messages": talk}]) == {"g": talk[:3]}
    assert logged_contexts([{"goal": "g", "messages": [*talk, talk[0]]}]) == {"g": talk[:3]}
    assert logged_contexts([{"messages": talk}, {"goal": "g", "messages": talk[:1]}]) == {}


def test_all_methods_start_from_the_base_policy_and_share_problems_and_draws(run):
    base = weights_of(run, "base", "policy")
    steps = [of_method(run.training, method, 3) for method in METHODS[1:]]
    assert [calls[0].policy for calls in steps] == [base] * 4
    for calls in zip(*steps):
        assert all(call.draw_keys == calls[0].draw_keys for call in calls)
        assert all(call.problems == calls[0].problems for call in calls)
        assert {key[:3] for key in calls[0].draw_keys} == {(4, "train", calls[0].step)}      # no step repeats


def test_a_step_rolls_out_g_dialogues_on_each_of_p_training_problems(run):
    for call in run.training:
        ids = [problem.id for problem in call.problems]
        assert len(ids) == 8 and ids[::2] == ids[1::2] and len(set(ids)) == 4
        assert all(problem in run.data.train for problem in call.problems)
        assert [key[-1] for key in call.draw_keys] == [0, 1] * 4 and call.max_new_tokens == 7


def test_the_user_is_handed_goals_and_never_an_answer(model, chat, monkeypatch):
    """What a simulator reads is its goal and the dialogue; the answer is in neither."""
    handed, problems = [], generate_problems(TASK, "train", 4)
    user = ModelUser(model, chat, 4)
    begin = user.begin
    monkeypatch.setattr(user, "begin", lambda goals, keys: handed.extend(goals) or begin(goals, keys))
    rollout(model, chat, user, TASK, problems, [(0, p.id) for p in problems], horizon=1,
            max_new_tokens=4)
    assert handed == [problem.goal for problem in problems]
    for ids, problem in zip(user.engine.tokens, problems):
        assert ids[:len(chat.open(problem.goal))] == chat.open(problem.goal)
        assert problem.solution not in chat.decode(ids)


# What the update sees ---------------------------------------------------------------------------------------

def test_the_update_gets_what_was_configured(run):
    assert {call.lr for call in run.update} == {0.0007}
    for name, value in (("clip_eps", 0.3), ("kl_coef", 0.05), ("token_budget", 3000)):
        assert {getattr(call, name) for call in run.update} == {value}
    assert len(run.update) == 4 * 3 * 2                        # methods, steps, minibatches


def test_the_reference_is_the_base_policy_at_every_step_and_not_the_policy_that_trains(run):
    base = weights_of(run, "base", "policy")
    assert {call.reference for call in run.update} == {base}
    assert of_method(run.update, "human", 6)[-1].policy != base


def test_advantages_are_those_of_the_rewards_within_each_group(run):
    for step, call in enumerate(run.training):
        rewards = torch.tensor([t.reward for t in call.result]).view(4, 2)
        expected = train.advantages(rewards).flatten()
        halves = run.update[2 * step:2 * step + 2]
        assert torch.equal(torch.cat([half.advantages for half in halves]), expected)
        masks = [[bool(on) for on in t.action_mask] for t in call.result]
        seen = [row.tolist() for half in halves for row in half.mask]
        assert all(ours[:len(mask)] == mask and not any(ours[len(mask):]) for ours, mask in zip(seen, masks))


@pytest.fixture
def step(model, chat, monkeypatch):
    """Take one training step in which given dialogues fail; return the row and what the update saw."""
    def take(failed, largest=0.9):
        class Failing(ScriptedUser):
            last_failure = "no answer"

            def reply(self, rows, dialogues):
                return [("", "failed") if row in failed and dialogues[row] else reply
                        for row, reply in zip(rows, super().reply(rows, dialogues))]

        flags = ("--prompts 2 --group-size 2 --horizon 2 --max-new-tokens 4 --train-problems 9 "
                 f"--minibatches 1 --card-dialogues 3 --eval-problems 3 --test-problems 3 "
                 f"--max-failed {largest}")
        config = complete(parse_config(flags.split()), TASK)
        seen = []
        monkeypatch.setattr(train, "update", lambda *arguments, **options: seen.append(arguments) or dict(
            kl=0.0, ratio_max=1.0, clip_frac=0.0, grad_norm=0.0))
        row, trajectories = train.train_step(1, "human", config, make_data(TASK, config, [], []), chat, model,
                                             None, None, Failing(TASK.human), None)
        return row, trajectories, seen[0]
    return take


def test_a_failed_dialogue_has_no_action_in_the_update(step):
    row, trajectories, (_, _, tokens, action_mask, _, advantages) = step({1})
    assert sum(trajectories[1].action_mask) > 0                         # the policy had spoken before
    assert not action_mask[1].any() and advantages[1] == 0 and action_mask[[0, 2, 3]].any(1).all()
    assert row["failed"] == 1 and row["tokens"] == int(action_mask.sum())
    assert row["turns"] == sum(t.turns for t in trajectories if t.ended != "failed") / 3
    assert row["reward"] == sum(t.reward for t in trajectories if t.ended != "failed") / 3


def test_too_many_failed_dialogues_stop_the_run(step):
    with pytest.raises(train.EndpointError, match="2 of 4 dialogues failed, the last because of: no answer"):
        step({0, 3}, largest=0.4)


# What is held out, and what is scored -----------------------------------------------------------------------

def test_no_goal_is_in_two_splits_and_held_out_logs_are_about_validation_problems(run):
    data = run.data
    splits = [{frozenset(facts_of(problem.goal)) for problem in part}
              for part in (data.train, data.validation, data.test)]
    assert not splits[0] & splits[1] and not splits[0] & splits[2] and not splits[1] & splits[2]
    assert [log["goal"] for log in data.logs] == [p.goal for p in data.train]
    assert [log["goal"] for log in data.held_out] == [p.goal for p in data.validation[:12]]
    assert {log["goal"] for log in data.probes} <= {log["goal"] for log in data.held_out}


@pytest.mark.parametrize("speaker", ("human", "overhelpful"))
def test_held_out_logs_are_drawn_apart_from_training_logs(speaker):
    """Drawn from one stream, dialogue i of either split opened with the same template in 300 of 300 pairs."""
    def openings(split):
        problems = generate_problems(TASK, split, 300)
        for problem, log in zip(problems, write_logs(TASK, problems, speaker, 0, split)):
            texts = [text for text, _ in getattr(TASK, speaker)(problem.goal, [])]
            yield texts.index(log["messages"][0]["content"])
    agree = sum(a == b for a, b in zip(openings("train"), openings("validation")))
    assert agree < 150                                                  # of 300; by chance 70 to 90


def test_the_report_card_is_measured_on_held_out_logs_and_probes(run):
    [card] = run.card
    assert card.logs == run.data.held_out and card.probes == run.data.probes and card.scripted
    assert card.simulators == {"naive": weights_of(run, "simulator_naive"),
                               "calibrated": weights_of(run, "simulator_calibrated")}
    assert run.result["report_card"] == json.loads(json.dumps(card.result))


def test_a_file_of_problems_and_logs_is_split_without_overlap():
    problems = generate_problems(TASK, "train", 30)
    logs = write_logs(TASK, problems, "human", 0)
    data = make_data(TASK, complete(parse_config(["--human-logs", "x"]), TASK), problems, logs)
    parts = [data.train, data.validation, data.test]
    assert [len(part) for part in parts] == [24, 3, 3] and len({p.id for part in parts for p in part}) == 30
    assert len(data.logs) == 24 and len(data.held_out) == 6 and not data.probes and not data.scripted
    assert not [log for log in data.held_out if log in data.logs]


def test_a_goal_that_a_file_holds_twice_is_in_one_split():
    problems = generate_problems(TASK, "train", 12)
    twice = [replace(problem, id=i) for i, problem in enumerate(problems * 2)]
    parts = split_problems(twice, seed=0)
    goals = [problem.goal for part in parts for problem in part]
    assert len(goals) == len(set(goals)) == 12 and [len(part) for part in parts] == [10, 1, 1]


def test_the_final_score_is_on_all_test_problems_with_the_human_and_the_last_weights(run):
    finals = [call for call in run.evaluation if call.draw_keys[0][1] == "test"]
    test = [problem for call in finals for problem in call.problems]
    assert test == run.data.test * 5                                    # no other, and once per method
    assert {call.user for call in finals} == {TASK.human} and {call.horizon for call in finals} == {3}
    weights = [weights_of(run, method, "policy") for method in METHODS]
    assert [call.policy for call in finals[::2]] == weights and len(set(weights)) == 5
    for method, calls in zip(METHODS, zip(finals[::2], finals[1::2])):
        trajectories = [t for call in calls for t in call.result]
        rewards = [t.reward for t in trajectories]
        found = run.result["methods"][method]
        assert found["score"] == pytest.approx(sum(rewards) / 9) and found["ci"] == interval(rewards)
        assert found["turns"] == pytest.approx(sum(t.turns for t in trajectories) / 9)


def test_every_method_is_scored_with_the_same_draws(run):
    finals = [call.draw_keys for call in run.evaluation if call.draw_keys[0][1] == "test"]
    assert all(keys == finals[i % 2] for i, keys in enumerate(finals))
    assert finals[0] == [(4, "test", 0, problem.id, 0) for problem in run.data.test[:8]]


def test_human_score_is_on_validation_problems_at_every_second_step_and_the_last(run):
    calls = [call for call in run.evaluation if call.draw_keys[0][1] == "validation"]
    assert len(calls) == 4 * 2 and {call.user for call in calls} == {TASK.human}
    scores = [row["human_score"] for row in run.rows]
    assert [score != "" for score in scores] == [False, True, True] * 4
    for call, score in zip(calls, filter(None, scores)):
        assert call.problems == run.data.validation[:5]
        assert float(score) == pytest.approx(sum(t.reward for t in call.result) / 5, rel=1e-4, abs=1e-9)


def test_mean_turns_and_scores_leave_failed_dialogues_out(model, chat, tmp_path, monkeypatch):
    problem = generate_problems(TASK, "test", 1)[0]
    ends = [(1.0, "answer", 4), (math.nan, "failed", 1), (0.0, "horizon", 5)]
    trajectories = [Trajectory(problem, [], [], [], [], reward, ended, turns, 0)
                    for reward, ended, turns in ends]
    monkeypatch.setattr(train, "rollout", lambda *arguments, **options: trajectories)
    config = complete(parse_config(["--out", str(tmp_path), "--max-failed", "0.5"]), TASK)
    data = SimpleNamespace(task=TASK, test=[problem] * 3)
    found = train.score(model, chat, "human", config, data)
    assert (found["score"], found["turns"]) == (0.5, 4.5) and found["ci"] == interval([1.0, 0.0])


def test_each_number_of_a_metrics_row_is_what_the_glossary_says(run):
    for i, (row, call) in enumerate(zip(run.rows, run.training, strict=True)):
        stats, trajectories = [half.result for half in run.update[2 * i:2 * i + 2]], call.result
        rewards = torch.tensor([t.reward for t in trajectories]).view(4, 2)
        expected = {"reward": rewards.mean(), "turns": sum(t.turns for t in trajectories) / 8,
                    "kl": sum(s["kl"] for s in stats) / 2, "ratio_max": max(s["ratio_max"] for s in stats),
                    "clip_frac": sum(s["clip_frac"] for s in stats) / 2,
                    "frac_zero_std": (rewards[:, 0] == rewards[:, 1]).float().mean(),
                    "grad_norm": sum(s["grad_norm"] for s in stats) / 2,
                    "tokens": sum(sum(t.action_mask) for t in trajectories), "failed": 0,
                    "truncated": sum(t.cut > 0 or t.ended == "truncated" for t in trajectories) / 8}
        assert (row["method"], row["step"]) == (METHODS[1 + i // 3], str(1 + i % 3))
        for name, value in expected.items():
            assert float(row[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-9), name


def test_samples_are_dialogues_as_they_were_with_their_rewards(run):
    samples = [json.loads(line) for line in (run.out / "samples.jsonl").read_text().splitlines()]
    spoken = {json.dumps(t.messages): t for call in run.training + run.evaluation for t in call.result}
    for sample in samples:
        trajectory = spoken[json.dumps(sample["messages"])]
        assert (sample["reward"], sample["ended"]) == (trajectory.reward, trajectory.ended)
        assert sample["problem"] == trajectory.problem.goal
    assert {sample["step"] for sample in samples if sample["method"] == "base"} == {0}         # never trained
    assert {sample["step"] for sample in samples if sample["method"] == "human"} == {2, 3}


def test_probes_are_held_out_dialogues_with_a_planted_mistake_and_the_humans_reply(run):
    goals = {log["goal"]: log["messages"] for log in run.data.held_out}
    for probe in run.data.probes:
        *told, planted, reply = probe["messages"]
        assert told == goals[probe["goal"]][:len(told)] and (planted["role"], reply["role"]) == ("assistant",
                                                                                                "user")
        assert reply["content"] in dict(TASK.human(probe["goal"], [*told, planted]))
        assert TASK.probed in measure(TASK, probe["goal"], [*told, planted], reply["content"])
