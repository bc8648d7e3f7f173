"""Problems of the three splits, and human dialogues about the first two: what a run learns from.

Run `python data.py` to see how many of each the default run has.
"""

import random
from dataclasses import dataclass

from config import Config
from logs import logged_contexts, read_logs, split_logs, write_logs, write_probes
from sampling import draw_key
from simulator import human
from tasks import Problem, generate_problems, read_problems


@dataclass(frozen=True)
class Data:
    """What a run learns from, and what it is judged on."""
    train: list[Problem]
    validation: list[Problem]
    test: list[Problem]
    logs: list[dict]            # what people said; to calibrate on, and static contexts
    held_out: list[dict]        # for the report card
    probes: list[dict]          # planted mistakes, for its sycophancy line; none without the scripted human
    scripted: bool              # whether the scripted human wrote the logs


def read_splits(path: str, seed: int) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Return the problems of a file in three parts, 8 : 1 : 1.

    Raises: ValueError if there are fewer than three.
    """
    rows = read_problems(path)
    random.Random(draw_key(seed, "split")).shuffle(rows)
    tenth = max(1, len(rows) // 10)
    if len(rows) < 3:
        raise ValueError(f"{path} has {len(rows)} problems: each split needs one")
    return rows[2 * tenth:], rows[:tenth], rows[tenth:2 * tenth]


def load_data(config: Config) -> Data:
    """Read or generate problems and human logs, as the configuration says.

    Raises: ValueError naming the file and the line of what is wrong.
    """
    if config.problems:
        train, validation, test = read_splits(config.problems, config.seed)
    else:
        train = generate_problems("train", config.train_problems, config.seed, config.facts)
        validation = generate_problems("validation", max(config.card_dialogues, config.eval_problems),
                                       config.seed, config.facts)
        test = generate_problems("test", config.test_problems, config.seed, config.facts)
    if config.human_logs:
        data = Data(train, validation, test, *split_logs(read_logs(config.human_logs), config.seed),
                    probes=[], scripted=False)
        gradable = logged_contexts(data.logs).keys() & {problem.goal for problem in train}
        if config.method in ("static", "all") and not gradable:
            raise ValueError(f"{config.human_logs}: static needs logs whose 'goal' is a training problem")
        return data
    judged = validation[:config.card_dialogues]
    logs, held_out = write_logs(train, human, config.seed), write_logs(judged, human, config.seed)
    return Data(train, validation, test, logs, held_out, write_probes(judged, held_out, human, config.seed),
                scripted=True)


def main() -> None:
    data = load_data(Config())
    for name in ("train", "validation", "test", "logs", "held_out", "probes"):
        print(f"{name:10s} {len(getattr(data, name)):5d}")


if __name__ == "__main__":
    main()
