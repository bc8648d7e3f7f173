"""Human dialogues: what the method starts from.

The simulator is calibrated on the user's turns, static contexts are cut from the dialogues, and the report
card is measured on logs that nobody has trained on. The policy's warm start always has logs of the scripted
human. A log is `{"messages": [{"role", "content"}, ...], "goal"}`; the goal, what the user wanted and knew,
may be missing.

Logs are written by the task's scripted human with its logging assistant, or come from a file. `Data` holds
everything that a run learns from and is judged on, and says what is held out from what.

Run `python logs.py` to read some logs and to count what the default run has.
"""

import random
from dataclasses import dataclass

from config import Config, Parser, UserError, command
from sampling import draw_key
from tasks import LEAVE, Dialogue, Problem, Script, Task, find_task, generate_problems


def append_utterance(user: Script, goal: str, dialogue: Dialogue, rng: random.Random) -> None:
    """Append what a script says next, drawn from its distribution."""
    texts, weights = zip(*user(goal, dialogue))
    dialogue.append({"role": "user", "content": rng.choices(texts, weights)[0]})


def write_logs(task: Task, problems: list[Problem], speaker: str, seed: int, split: str = "train",
               turns: int = 6) -> list[dict]:
    """Return a dialogue of the logging assistant with a script, "human" or "overhelpful", per problem."""
    user, logs = getattr(task, speaker), []
    for problem in problems:
        rng, dialogue = random.Random(draw_key(seed, "logs", split, speaker, problem.id)), []
        while len(dialogue) < 2 * turns:
            append_utterance(user, problem.goal, dialogue, rng)
            if dialogue[-1]["content"] == LEAVE:
                break
            dialogue.append({"role": "assistant", "content": task.assistant(problem, dialogue, rng)})
            if task.ends(dialogue[-1]["content"]):
                break
        logs.append({"messages": dialogue, "goal": problem.goal})
    return logs


def write_probes(task: Task, problems: list[Problem], logs: list[dict], speaker: str, seed: int,
                 split: str = "validation") -> list[dict]:
    """Return beginnings of `logs`, each followed by a planted mistake and what the user says to it."""
    probes = []
    for problem, log in zip(problems, logs):
        rng = random.Random(draw_key(seed, "probe", split, speaker, problem.id))
        for end in range(1, len(log["messages"]) + 1, 2):
            context = log["messages"][:end]
            planted = None if context[-1]["content"] == LEAVE else task.probe(problem, context, rng)
            if planted is not None:
                dialogue = [*context, {"role": "assistant", "content": planted}]
                append_utterance(getattr(task, speaker), problem.goal, dialogue, rng)
                probes.append({"messages": dialogue, "goal": problem.goal})
                break
    return probes


def warm_start_dialogues(task: Task, problems: list[Problem], seed: int) -> list[Dialogue]:
    """Return what the base policy learns: three fifths logs of the human with the mediocre assistant, two
    fifths in which everything is told at once and done right. What it lacks is the dialogue.
    """
    rng = random.Random(draw_key(seed, "told at once"))
    shown = [task.told_at_once(problem, rng) for problem in problems]
    logged = [log["messages"] for log in write_logs(task, problems, "human", seed)]
    cut = len(logged) * 3 // 5
    return logged[:cut] + shown[cut:]


# Cutting and splitting --------------------------------------------------------------------------------------

def logged_contexts(logs: list[dict]) -> dict[str, Dialogue]:
    """Return a static context per goal: its log without the last assistant message and what follows."""
    contexts = {}
    for log in logs:
        assistant = [i for i, m in enumerate(log["messages"]) if m["role"] == "assistant"]
        if assistant and log.get("goal"):
            contexts[log["goal"]] = log["messages"][:assistant[-1]]
    return contexts


def split_logs(logs: list[dict], seed: int) -> tuple[list[dict], list[dict]]:
    """Return four fifths to calibrate on and one fifth for the report card, by whole dialogues."""
    if len(logs) < 2:
        raise UserError("one human dialogue is not enough: calibration and report card need one each")
    order = random.Random(draw_key(seed, "split logs")).sample(logs, len(logs))
    fifth = max(1, len(logs) // 5)
    return order[fifth:], order[:fifth]


def split_problems(problems: list[Problem], seed: int) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Return a file's problems, each goal once, 8 : 1 : 1: to train on, to validate and to test."""
    rows = list({problem.goal: problem for problem in problems}.values())
    if len(rows) < 3:
        raise UserError(f"--problems holds {len(rows)}: training, validation and test need one each")
    random.Random(draw_key(seed, "split")).shuffle(rows)
    tenth = max(1, len(rows) // 10)
    return rows[2 * tenth:], rows[:tenth], rows[tenth:2 * tenth]


@dataclass(frozen=True)
class Data:
    """What a run learns from, and what it is judged on."""
    task: Task
    train: list[Problem]        # warm start, naive simulator, GRPO
    validation: list[Problem]   # scores during training; the scripted human's held-out logs are about them
    test: list[Problem]         # the final score, and nothing else
    logs: list[dict]            # what people said: calibration and static contexts
    held_out: list[dict]        # what people said: the report card, and nothing else
    probes: list[dict]          # planted mistakes for the report card; none without the scripted human
    scripted: bool              # whether the scripted human wrote the logs


def make_data(task: Task, config: Config, problems: list[Problem], logs: list[dict]) -> Data:
    """Split `problems` and human `logs`; where they are empty, make problems and write logs.

    Raises: UserError if there are too few, or none that static can use.
    """
    if problems:
        train, validation, test = split_problems(problems, config.seed)
    else:
        sizes = {"train": config.train_problems, "test": config.test_problems,
                 "validation": max(config.card_dialogues, config.eval_problems)}
        train, validation, test = (generate_problems(task, split, sizes[split], config.seed, config.facts)
                                   for split in ("train", "validation", "test"))
    if logs:
        data = Data(task, train, validation, test, *split_logs(logs, config.seed), probes=[], scripted=False)
        gradable = logged_contexts(data.logs).keys() & {problem.goal for problem in train}
        if config.method in ("static", "all") and not gradable:
            raise UserError(f"{config.human_logs}: static needs logs whose 'goal' is a training problem")
        return data
    judged = validation[:config.card_dialogues]
    logs, held_out = (write_logs(task, part, "human", config.seed, split)
                      for part, split in ((train, "train"), (judged, "validation")))
    return Data(task, train, validation, test, logs, held_out,
                write_probes(task, judged, held_out, "human", config.seed), scripted=True)


def print_messages(messages: Dialogue) -> None:
    print("\n".join(f"{message['role']:>9}: {message['content']}" for message in messages))


@command
def main() -> None:
    parser = Parser("Read human logs, and count what a run learns from.")
    parser.add_fields("task", "facts", "seed")
    args = parser.parse_args()
    data = make_data(find_task(args.task), Config(facts=args.facts, seed=args.seed), [], [])
    for log in data.logs[:3] + data.probes[:1]:
        print(f"\n[{log['goal']}]")
        print_messages(log["messages"])
    names = ("train", "validation", "test", "logs", "held_out", "probes")
    print("\n" + "\n".join(f"{name:10s} {len(getattr(data, name)):5d}" for name in names))


if __name__ == "__main__":
    main()
