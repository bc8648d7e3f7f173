"""Multi-turn dialogues in a batch: the policy talks with a user until something ends it.

The user speaks first. A turn is an assistant message and the user's answer to it; the horizon H counts
assistant turns. A dialogue ends when the policy gives an answer marker, when the user leaves, after H turns,
or when a context is full. Policy and simulator keep their own KV caches over the turns, and finished
dialogues leave the batch.

Run `python rollout.py` to read dialogues of the scripted human with the logging assistant; `--policy DIR` for
those of a policy, `--user naive|calibrated --simulator DIR` against a language model, `--user me` to talk to
the policy yourself.

Shapes: B dialogues, T tokens.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from chat import Chat
from endpoint import EndpointError, EndpointUser, is_endpoint
from engine import Engine
from grader import GradingError
from logs import print_messages, write_logs
from model import Transformer
from sampling import draw_key
from simulator import NAIVE_USER, KeyboardUser, ModelUser, ScriptedUser, human
from tasks import Problem, generate_problems, marked_answer, read_problems, reward
from weights import load_speaker

HORIZON = 5                    # assistant turns a dialogue may have: three questions, an answer, one to spare
MAX_NEW_TOKENS = 48             # tokens a reply may have
# what a policy that was not fine-tuned is told
ASSISTANT = ("Help the user with a word problem. Only the user knows the facts: ask for what you need, one "
             "thing at a time. Then show the sum and end with #### and the number.")


@dataclass
class Trajectory:
    """A finished dialogue, token by token as the policy read and sampled it."""
    problem: Problem
    tokens: list[int]           # (T,) the policy's buffer
    action_mask: list[int]      # (T,) 1 where the policy sampled the token, end-of-turn included
    logprobs: list[float]       # (T,) log-probability of every action when it was sampled, else 0
    messages: list[dict]        # the same dialogue as text
    reward: float               # of the finished dialogue; NaN if it failed
    ended: str                  # answer, left, horizon, truncated (a context was full) or failed
    turns: int                  # assistant messages sampled
    cut: int                    # replies that the length limit cut


def graded(problem: Problem, dialogue: list[dict], ended: str) -> tuple[float, str]:
    """Return a dialogue's reward and how it ended; NaN and "failed" if a server or the grader failed it."""
    if ended != "answer":
        return (math.nan if ended == "failed" else 0.0), ended
    try:
        return reward(problem, dialogue[-1]["content"]), ended
    except GradingError:
        return math.nan, "failed"


def rollout(policy: Transformer, chat: Chat, user, problems: list[Problem], keys: list[tuple], *,
            horizon: int, max_new_tokens: int, contexts: list[list[dict]] | None = None) -> list[Trajectory]:
    """Let the policy finish one dialogue a problem and return them in the same order.

    `keys[b]` names dialogue b's random draws: the same key and logits give the same dialogue, whatever the
    batch. With `contexts` every dialogue continues logged messages, whose tokens are no actions, instead of a
    user's opening.
    """
    B = len(problems)
    assert len(keys) == B, f"{B} problems need {B} keys, got {len(keys)}"
    ended, turns, cut = [None] * B, [0] * B, [0] * B
    dialogues = [list(context) for context in contexts] if contexts else [[] for _ in range(B)]

    def let_user_speak(rows: list[int]) -> None:
        for row, (text, outcome) in zip(rows, user.reply(rows, dialogues)):
            ended[row] = outcome
            if text or outcome is None:
                dialogues[row].append({"role": "user", "content": text})

    user.begin(problems, [draw_key(*key, "user") for key in keys])
    if not contexts:
        let_user_speak(list(range(B)))
    openings = [chat.render(dialogue)[0] for dialogue in dialogues]
    engine = Engine(policy, chat, openings, [draw_key(*key, "policy") for key in keys], max_new_tokens)

    for turn in range(1, horizon + 1):
        for row in range(B):
            if ended[row] is None and not engine.has_room(row):
                ended[row] = "truncated"
        live = [row for row in range(B) if ended[row] is None]
        if not live:
            break
        engine.keep(live)
        for row, ids in zip(live, engine.reply()):
            text = chat.text(ids)
            dialogues[row].append({"role": "assistant", "content": text})
            turns[row] = turn
            cut[row] += ids[-1] not in chat.stop_ids
            if marked_answer(text) is not None:
                ended[row] = "answer"
            elif turn == horizon:
                ended[row] = "horizon"
        live = [row for row in live if ended[row] is None]
        if live:
            let_user_speak(live)
        for row in live:
            if ended[row] is None:
                engine.feed(row, chat.extend(engine.tokens[row][-1], dialogues[row][-1]["content"]))

    rewards = [graded(*dialogue) for dialogue in zip(problems, dialogues, ended)]
    return [Trajectory(problems[row], engine.tokens[row], engine.action_mask[row], engine.logprobs[row],
                       dialogues[row], *rewards[row], turns[row], cut[row]) for row in range(B)]


def pad(trajectories: list[Trajectory], device=None) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, action mask and recorded log-probabilities, each (B, T) and padded on the right with
    zeros.
    """
    T = max(len(t.tokens) for t in trajectories)
    rows = [[values + [0] * (T - len(values)) for values in (t.tokens, t.action_mask, t.logprobs)]
            for t in trajectories]
    tokens, action_mask, logprobs = zip(*rows)
    return (torch.tensor(tokens, device=device), torch.tensor(action_mask, device=device).bool(),
            torch.tensor(logprobs, device=device))


def evaluate(policy: Transformer, chat: Chat, user, problems: list[Problem], key: tuple, *, horizon: int,
             max_new_tokens: int, batch: int = 256) -> list[Trajectory]:
    """Return one dialogue a problem, at temperature 1; equal keys give every policy the same random draws."""
    trajectories = []
    for i in tqdm(range(0, len(problems), batch), desc="evaluation", disable=None, leave=False):
        part = problems[i:i + batch]
        trajectories += rollout(policy, chat, user, part, [(*key, 0, p.id, 0) for p in part], horizon=horizon,
                                max_new_tokens=max_new_tokens)
    return trajectories


def solved(trajectories: list[Trajectory]) -> tuple[float, int]:
    """Return how many dialogues were rewarded, of how many that did not fail."""
    rewards = [t.reward for t in trajectories if t.ended != "failed"]
    return sum(rewards), len(rewards)


def wilson(successes: float, n: int) -> list[float]:
    """Return the 95 % interval of a share. Source: Wilson 1927."""
    p, z = successes / n, 1.96
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))]


def find_simulator(policy: str, name: str) -> str:
    """Return the folder of a run's simulator from that of its policy: out/policy or out/METHOD/policy."""
    candidates = [run / f"simulator_{name}" for run in Path(policy).resolve().parents[:2]]
    return str(next((folder for folder in candidates if folder.is_dir()), candidates[0]))


def fail(message: str) -> None:
    """Say what is wrong in one line and leave."""
    print(f"rollout.py: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Read dialogues, or talk to a policy.", allow_abbrev=False)
    parser.add_argument("--policy",
                        help="folder, GGUF file or hub id; without one, the logging assistant talks")
    parser.add_argument("--user", choices=("scripted", "naive", "calibrated", "me"), default="scripted",
                        help="who talks with the policy (default: scripted)")
    parser.add_argument("--simulator", help="for --user naive or calibrated, named like --policy, or "
                                            "http://HOST:PORT/v1#MODEL (default: that of --policy's run)")
    parser.add_argument("--problems", help="JSONL of problems (default: generated test problems)")
    parser.add_argument("--count", type=int, default=3, help="dialogues (default: 3)")
    parser.add_argument("--horizon", type=int, default=HORIZON,
                        help=f"assistant turns a dialogue may have (default: {HORIZON})")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS,
                        help=f"tokens a reply may have (default: {MAX_NEW_TOKENS})")
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu", help="(default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="of every random draw (default: 0)")
    parser.error = fail
    args = parser.parse_args()
    if min(args.count, args.horizon, args.max_new_tokens) < 1:
        fail("--count, --horizon and --max-new-tokens must be at least 1")
    if args.user != "scripted" and not args.policy:
        fail(f"--user {args.user} needs --policy")
    return args


def chosen_user(args: argparse.Namespace):
    """Return who talks with the policy.

    Raises: ValueError if it is a simulator that cannot be loaded.
    """
    if args.user in ("scripted", "me"):
        return ScriptedUser() if args.user == "scripted" else KeyboardUser()
    source = args.simulator or find_simulator(args.policy, args.user)
    if is_endpoint(source):
        return EndpointUser(source, NAIVE_USER, max_new_tokens=args.max_new_tokens)
    return ModelUser(*load_speaker(source, NAIVE_USER, args.device), args.max_new_tokens)


def main() -> None:
    args = parse_args()
    try:
        if args.problems:
            problems = read_problems(args.problems)[:args.count]
        else:
            problems = generate_problems("test", args.count, args.seed)
        if args.user == "me":
            problems = problems[:1]
        if not args.policy:
            for problem, log in zip(problems, write_logs(problems, human, args.seed)):
                print(f"\n[{log['goal']}]  (answer {problem.answer})")
                print_messages(log["messages"])
            return
        user, (policy, chat) = chosen_user(args), load_speaker(args.policy, ASSISTANT, args.device)
        keys = [(args.seed, "show", 0, problem.id, 0) for problem in problems]
        trajectories = rollout(policy, chat, user, problems, keys, horizon=args.horizon,
                               max_new_tokens=args.max_new_tokens)
    except (ValueError, EndpointError) as error:
        fail(str(error))
    for t in trajectories:
        if args.user == "me":                          # all but a closing reply has been on the screen
            print_messages(t.messages[-1:] if t.ended in ("answer", "horizon") else [])
        else:
            print(f"\n[{t.problem.goal}]")
            print_messages(t.messages)
        print(f"{'':9}  ended: {t.ended}, reward {t.reward:.0f}")


if __name__ == "__main__":
    main()
