"""Multi-turn dialogues in a batch: the policy talks with a user until something ends it.

The user speaks first. A turn is an assistant message and the user's answer to it; the horizon H counts
assistant turns. A dialogue ends with a reply that the task takes for an end (maths: an answer marker), when
the user leaves, after H turns, or when a context is full. Finished dialogues leave the batch.

Paper: interactive rollouts with a reward for the finished dialogue alone (arXiv 2605.26403).

Run `python rollout.py` to read dialogues of the scripted human with the logging assistant; `--policy DIR` for
those of a policy, `--user naive|calibrated` with its simulator, `--user me` to talk to the policy yourself,
and `--tokens` to see a dialogue as the update sees it: token by token.

Shapes: B dialogues, T tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from chat import Chat
from config import Parser, UserError, command, number
from engine import Engine
from logs import print_messages, write_logs
from model import Transformer
from sampling import draw_key
from tasks import Dialogue, GradingError, Problem, Task, find_task, generate_problems


@dataclass
class Trajectory:
    """A finished dialogue, token by token as the policy read and sampled it."""
    problem: Problem
    tokens: list[int]           # (T,) the policy's buffer
    action_mask: list[int]      # (T,) 1 where the policy sampled the token, end-of-turn included
    logprobs: list[float]       # (T,) log-probability of every action when it was sampled, else 0
    messages: Dialogue          # the same dialogue as text
    reward: float               # of the finished dialogue; NaN if it failed
    ended: str                  # answer, left, horizon, truncated (a context was full) or failed
    turns: int                  # assistant messages sampled
    cut: int                    # replies that the length limit cut


def graded(task: Task, problem: Problem, dialogue: Dialogue, ended: str, turns: int) -> tuple[float, str]:
    """Return a dialogue's reward and how it ended; without a reply of the policy the reward is 0.

    If a server or the grader failed the dialogue, the reward is NaN and it ended as "failed".
    """
    try:
        reward = task.reward(problem, dialogue, task.equal) if turns and ended != "failed" else 0.0
    except GradingError:
        ended = "failed"
    return (math.nan if ended == "failed" else reward), ended


def rollout(policy: Transformer, chat: Chat, user, task: Task, problems: list[Problem],
            key_parts: list[tuple], *, horizon: int, max_new_tokens: int,
            contexts: list[Dialogue] | None = None) -> list[Trajectory]:
    """Let the policy finish one dialogue per problem and return them in the same order.

    `key_parts[b]` names dialogue b's random draws: the same parts and logits give the same dialogue, whatever
    the batch. With `contexts` every dialogue continues logged messages, whose tokens are no actions, instead
    of a user's opening.
    """
    B = len(problems)
    assert len(key_parts) == B, f"{B} problems need {B} draw keys, got {len(key_parts)}"
    ended, turns, cut = [None] * B, [0] * B, [0] * B
    dialogues = [list(context) for context in contexts] if contexts else [[] for _ in range(B)]

    def let_user_speak(rows: list[int]) -> None:
        for row, (text, ending) in zip(rows, user.reply(rows, dialogues)):
            ended[row] = ending
            if text or ending is None:
                dialogues[row].append({"role": "user", "content": text})

    user.begin([problem.goal for problem in problems], [draw_key(*parts, "user") for parts in key_parts])
    if not contexts:
        let_user_speak(list(range(B)))
    openings = [chat.render(dialogue)[0] for dialogue in dialogues]
    draw_keys = [draw_key(*parts, "policy") for parts in key_parts]
    engine = Engine(policy, chat, openings, draw_keys, max_new_tokens)

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
            if task.ends(text):
                ended[row] = "answer"
            elif turn == horizon:
                ended[row] = "horizon"
        live = [row for row in live if ended[row] is None]
        if live:
            let_user_speak(live)
        for row in live:
            if ended[row] is None:
                engine.feed(row, chat.extend(engine.tokens[row][-1], dialogues[row][-1]["content"]))

    return [Trajectory(problems[row], engine.tokens[row], engine.action_mask[row], engine.logprobs[row],
                       dialogues[row], *graded(task, problems[row], dialogues[row], ended[row], turns[row]),
                       turns[row], cut[row]) for row in range(B)]


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


@command
def main() -> None:
    from extras.dialogue import print_tokens
    from extras.grader import with_algebra
    from extras.hf import load_speaker
    from extras.readers import read_problems
    from extras.speakers import named_user
    parser = Parser("Read dialogues, or talk to a policy.")
    parser.add_fields("task", "policy", "simulator", "problems", "horizon", "facts", "max_new_tokens",
                      "device", "seed")
    parser.add_argument("--user", choices=("scripted", "naive", "calibrated", "me"), default="scripted",
                        help="who talks with the policy (default: scripted); naive and calibrated are "
                             "--simulator or, without it, the ones of --policy's run")
    parser.add_argument("--count", type=number(int, 1), default=3, help="dialogues (default: 3)")
    parser.add_argument("--tokens", nargs="?", const="-", metavar="CSV",
                        help="show one dialogue of a group of 8 token by token, or write it to a file")
    args = parser.parse_args()
    if not args.policy and (args.user != "scripted" or args.tokens):
        raise UserError("--tokens needs --policy" if args.tokens else f"--user {args.user} needs --policy")
    task = with_algebra(find_task(args.task))
    if args.problems:
        problems = read_problems(args.problems, task)[:args.count]
    else:
        problems = generate_problems(task, "test", args.count, args.seed, args.facts)
    if not args.policy:
        for problem, log in zip(problems, write_logs(task, problems, "human", args.seed, "test")):
            print(f"\n[{log['goal']}]  (answer {problem.answer})")
            print_messages(log["messages"])
        return
    problems = problems[:1] * 8 if args.tokens else problems[:1] if args.user == "me" else problems
    new = args.max_new_tokens or task.max_new_tokens
    policy, chat = load_speaker(args.policy, task.policy_instruction, args.device)
    user = named_user(args.user, args.simulator, args.policy, task, args.device, new)
    parts = [(args.seed, "show", 0, problem.id, i if args.tokens else 0)
             for i, problem in enumerate(problems)]
    trajectories = rollout(policy, chat, user, task, problems, parts,
                           horizon=args.horizon or task.horizon, max_new_tokens=new)
    if args.tokens:
        print_tokens(trajectories, chat, args.tokens)
        return
    for t in trajectories:
        if args.user == "me":                          # all but a closing reply has been on the screen
            print_messages(t.messages[-1:] if t.ended in ("answer", "horizon") else [])
        else:
            print(f"\n[{t.problem.goal}]")
            print_messages(t.messages)
        print(f"{'':9}  ended: {t.ended}, reward {t.reward:g}")


if __name__ == "__main__":
    main()
