"""Who plays the user: a scripted human, a language model, or you at the keyboard.

A user has two methods: `begin(problems, keys)` starts a batch of dialogues and `reply(rows, dialogues)` says
the next message in some of them, together with why the dialogue ends, if it does.

1. The *human* stands for real people. It is a stochastic script with an explicit distribution over its next
   utterance, `human(problem, dialogue) -> [(text, probability)]`. It is vague at first, gives one fact a turn
   and only the one asked for, is terse, sometimes corrects itself, objects to what it sees is wrong, is
   annoyed by repeats and loses patience. It never knows the answer. It writes the logs (logs.py) and it is
   the deployment test.
2. The *over-helpful* script is what prompted language models are like: everything at the first question,
   polite, and it agrees with whatever the assistant says. The naive simulator is a language model trained on
   it.
3. `ModelUser` is a language model with flipped roles: its own turns are the user's, its prompt holds the
   hidden goal.

Run `python simulator.py` to see the human's distribution at some points of a dialogue.
"""

import re
import sys
from collections.abc import Callable
from functools import lru_cache

import torch

from chat import Chat
from engine import Engine
from model import Transformer
from sampling import uniform
from tasks import Problem, generate_problems, split_sentences

GREETINGS = ("Hello! Could you please help me?", "Hi!")
ACCEPTANCES = ("Of course!", "Sure, thank you for asking.")
THANKS = ("Thank you!", "Thank you so much!")
LEAVE = "never mind, i'll do it myself"         # whoever says this ends the dialogue
# a language model may write it like a sentence, or quote it
SPELLED_LEAVE = re.compile("[\"“*]{0,3}" + LEAVE.replace("'", "['’]"), re.IGNORECASE)
Distribution = list[tuple[str, float]]
# of two whole numbers
SUM = re.compile(r"(?<![\d.,+*/-])(?<![-+*/] )(\d{1,12}) ?([-+*]) ?(\d{1,12}) ?= ?(\d{1,24})(?![.,]?\d)")


# What a language model that was not fine-tuned is told; the hidden goal follows.
NAIVE_USER = f"""\
You are a user who wants help from an AI assistant with a problem. The assistant cannot see the problem,
so tell it what it needs to know. The problem comes first; all messages after it are the assistant's. Reply as
the user, with nothing but the user's next message. If you want to end the conversation, write exactly:
{LEAVE}

The problem:"""

HUMAN_USER = f"""\
You play a person who is stuck on a problem and types to an AI assistant for help. The assistant cannot see
the problem; it knows only what the person types. The problem comes first; all messages after it are the
assistant's. Answer each with the person's next message and nothing else: no name in front, no quotation
marks, no notes.

How the person writes:
- The first message is short and vague. It says what they want to know and hardly anything else.
- Later messages are short as well. One in three has three words or fewer: a bare number, "yes", "ok", "and?".
- Lower case, careless punctuation. They hardly ever thank anyone, and they never praise or apologise.

What the person tells:
- One fact at a time, and only the fact that the assistant asked for. They never copy out the problem.
- If a question is vague or asks for everything, they ask what exactly is needed, or give a single fact.
- They know nothing but what the problem says. Asked for more, they say that they don't know.
- They do not know the answer and do not do the sums: no calculating, no guessing. That is what they came for.

How the person reacts:
- If the assistant repeats a fact wrongly or says what is plainly false, they object at once. They never agree
  just to be polite.
- If the assistant asks for something that it was told already, they get annoyed: "i already told you".
- If that goes on, or the assistant is getting nowhere, they give up, though not in the first few messages.
  They then write exactly: {LEAVE}

Never speak as the assistant: do not offer help, do not explain, do not solve the problem.

The problem:"""


# What a dialogue has brought so far -------------------------------------------------------------------------

def words(text: str) -> frozenset[str]:
    """Return the words of a text, lower case, without a trailing s."""
    return frozenset(word.rstrip("s") for word in re.findall(r"[a-z']+", text.lower()))


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*", text)


@lru_cache(maxsize=100_000)
def telling_words(facts: tuple[str, ...]) -> tuple[frozenset[str], ...]:
    """Return for each fact the words that no other fact has."""
    return tuple(words(fact) - frozenset().union(*(words(other) for j, other in enumerate(facts) if j != i))
                 for i, fact in enumerate(facts))


def asked_fact(problem: Problem, said: str, revealed: set[int]) -> int | None:
    """Return which fact an assistant's question is about: the one that shares most telling words with it,
    an unrevealed one if it is a tie, and the next unrevealed one if no word tells. None if nothing is
    asked or left.
    """
    question = words(" ".join(sentence for sentence in split_sentences(said) if "?" in sentence))
    if not question:
        return None
    shared = [len(question & telling) for telling in telling_words(problem.facts)]
    order = sorted(range(len(shared)), key=lambda i: (-shared[i], i in revealed, i))
    if order and shared[order[0]] > 0:
        return order[0]
    return next((i for i in order if i not in revealed), None)


def states(fact: str, text: str) -> bool:
    """Whether a text, given in answer to a question about the fact, states it: all its
    numbers or, if it has none, all its words.
    """
    wanted = numbers(fact)
    return set(wanted) <= set(numbers(text)) if wanted else words(fact) <= words(text)


def revealed_facts(problem: Problem, dialogue: list[dict]) -> set[int]:
    """Return the facts that the user's messages have given away, by going through the dialogue once."""
    revealed = set()
    for i, message in enumerate(dialogue):
        if message["role"] == "user":
            text = message["content"]
            asked = asked_fact(problem, dialogue[i - 1]["content"], revealed) if i else None
            revealed |= {j for j, fact in enumerate(problem.facts)
                         if fact.rstrip(".").lower() in text.lower()}
            if asked is not None and states(problem.facts[asked], text):
                revealed.add(asked)
    return revealed


def result_of(left: str, sign: str, right: str) -> int:
    """Return what a sum comes to."""
    return {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]


def objection(problem: Problem, said: str) -> str | None:
    """Return what is right where an assistant's sum or restated fact is wrong, None if nothing is."""
    for left, sign, right, result in SUM.findall(said):
        if result_of(left, sign, right) != int(result):
            return f"{left} {sign} {right} is {result_of(left, sign, right)}"
    for sentence in split_sentences(said):
        if "?" not in sentence and numbers(sentence):
            for fact in problem.facts:
                if words(sentence) == words(fact) and not states(fact, sentence):
                    return fact.rstrip(".")
    return None


# The two scripts --------------------------------------------------------------------------------------------

def tail(fact: str) -> str:
    """Return a fact from its first number on: "Tom finds 5 more apples." -> "5 more apples"."""
    match = re.search(r"\d", fact)
    return fact[match.start() if match else 0:].rstrip(".")


def normalised(outcomes: Distribution) -> Distribution:
    """Merge equal texts and scale the weights to sum to 1."""
    merged = {}
    for text, weight in outcomes:
        if weight > 0:
            merged[text] = merged.get(text, 0.0) + weight
    total = sum(merged.values())
    return [(text, weight / total) for text, weight in merged.items()]


def given_fact(fact: str, specific: bool) -> Distribution:
    """Return how the human answers a question about a fact, unnormalised; a vague question gets a vague
    answer.
    """
    short, full = tail(fact), fact.rstrip(".")
    if not specific:
        return [(full, 30), (short, 15), ("which number do you need?", 25), ("what do you want to know?", 20),
                (LEAVE, 10)]
    bare = numbers(fact)[0] if numbers(fact) else short
    outcomes = [(bare, 18), (f"it's {bare}", 12), (short, 28), (full, 24), (f"thanks, {short}", 2),
                ("what do you mean?", 4), ("hm, let me look", 3), (LEAVE, 1)]
    if bare.isdigit() and len(bare) < 10 and int(bare) > 1:          # a slip of the tongue, put right at once
        outcomes += [(f"{int(bare) + slip}, no wait, {short}", 4) for slip in (-1, 1)]
    return outcomes


def human(problem: Problem, dialogue: list[dict]) -> Distribution:
    """Return the human's next utterances with their probabilities; an utterance `LEAVE` means that they
    leave.
    """
    ask = problem.ask[0].lower() + problem.ask[1:]
    if not dialogue:
        outcomes = [(ask, 40), (f"i need help. {ask}", 20), (f"can you help me? {ask}", 15),
                    ("hi, " + ask, 10)]
        outcomes += [(f"{fact} {ask}", 15 / len(problem.facts)) for fact in problem.facts]
        return normalised(outcomes)
    said, before = dialogue[-1]["content"], dialogue[:-1]
    revealed = revealed_facts(problem, before)
    asked = asked_fact(problem, said, revealed)
    right = objection(problem, said)
    if right:
        outcomes = [(f"no, {right}", 45), ("that's not right", 25), ("are you sure?", 20), ("ok", 6),
                    (LEAVE, 4)]
    elif asked is not None and asked not in revealed:
        outcomes = given_fact(problem.facts[asked],
                              specific=bool(words(said) & telling_words(problem.facts)[asked]))
    elif SUM.search(said):
        outcomes = [("yes", 40), ("i think so", 25), ("ok", 20), ("thanks", 5), ("is it?", 10)]
    elif "?" in said:                                                              # nothing new is asked
        again = f"{tail(problem.facts[asked])}, like i said" if asked is not None else "that's all i know"
        outcomes = [("i already told you", 35), (again, 35), ("why do you ask again?", 10), (LEAVE, 20)]
    else:
        outcomes = [("ok", 35), ("and?", 20), (f"so {ask}", 35), ("thanks", 5), (LEAVE, 5)]
    turn = sum(message["role"] == "assistant" for message in dialogue)
    return normalised([*outcomes, (LEAVE, 3.0 * max(0, turn - 4))])                # patience wears thin


def overhelpful(problem: Problem, dialogue: list[dict]) -> Distribution:
    """Return the next utterances of a user who is what prompted language models are: polite, complete,
    agreeable.
    """
    if not dialogue:
        return normalised([(f"{greeting} {problem.ask} {thanks}", 1) for greeting in GREETINGS
                           for thanks in THANKS])
    said = dialogue[-1]["content"]
    if "?" not in said or SUM.search(said) or objection(problem, said):
        return normalised([(f"{yes} {thanks}", 1) for yes in ("Yes, that is right!", "That sounds right.")
                           for thanks in THANKS])
    facts = problem.facts
    rotations = [facts[i:] + facts[:i] for i in range(len(facts))] or [()]
    orders = {order[::step] for order in rotations for step in (1, -1)}       # to be looked up, not copied
    return normalised([(f"{start} {' '.join(order)} {thanks}", 1) for order in sorted(orders)
                       for start in ACCEPTANCES for thanks in THANKS])


# Users that talk in a rollout -------------------------------------------------------------------------------

def split_leave(text: str) -> tuple[str, str | None]:
    """Separate the leaving phrase from what was said before it."""
    before, *after = SPELLED_LEAVE.split(text, maxsplit=1)
    return before.strip(), "left" if after else None


def goal_prompt(goal: str | None) -> str:
    """Return a simulator's instruction, its first user message: the hidden goal, or that there is none on
    record.
    """
    return goal or "(no goal on record)"


class ScriptedUser:
    """A user that draws from a script's distribution."""

    def __init__(self, script: Callable[[Problem, list[dict]], Distribution] = human):
        self.script = script

    def begin(self, problems: list[Problem], keys: list[int]) -> None:
        self.problems, self.keys = problems, keys

    def reply(self, rows: list[int], dialogues: list[list[dict]]) -> list[tuple[str, str | None]]:
        """Return for every row the next message and why the dialogue ends with it: "left", "truncated" or
        None.
        """
        keys, positions = [self.keys[row] for row in rows], [len(dialogues[row]) for row in rows]
        u = uniform(torch.tensor(keys, dtype=torch.long), torch.tensor(positions, dtype=torch.long))
        replies = []
        for row, target in zip(rows, u.tolist()):
            for text, probability in self.script(self.problems[row], dialogues[row]):
                target -= probability
                if target < 0:
                    break
            replies.append(split_leave(text))
        return replies


class ModelUser:
    """A language model that plays the user: naive as it comes, calibrated after `align_sim.py`."""

    def __init__(self, model: Transformer, chat: Chat, max_new_tokens: int):
        self.model, self.chat, self.max_new_tokens = model, chat, max_new_tokens

    def begin(self, problems: list[Problem], keys: list[int]) -> None:
        openings = [self.chat.open(goal_prompt(problem.goal)) for problem in problems]
        self.engine = Engine(self.model, self.chat, openings, keys, self.max_new_tokens)

    def reply(self, rows: list[int], dialogues: list[list[dict]]) -> list[tuple[str, str | None]]:
        """As `ScriptedUser.reply`; a dialogue that no longer fits the simulator's context is "truncated"."""
        engine, fits = self.engine, []
        for row in rows:
            if dialogues[row]:
                engine.feed(row, self.chat.extend(engine.tokens[row][-1], dialogues[row][-1]["content"]))
            if engine.has_room(row):
                fits.append(row)
        engine.keep(fits)
        said = dict(zip(fits, engine.reply())) if fits else {}
        return [split_leave(self.chat.text(said[row])) if row in said else ("", "truncated") for row in rows]


class KeyboardUser:
    """You. An empty line or the end of input leaves the dialogue."""

    def begin(self, problems: list[Problem], keys: list[int]) -> None:
        print(f"You want help with this, and the assistant cannot see it:\n  {problems[0].goal}")

    def reply(self, rows: list[int], dialogues: list[list[dict]]) -> list[tuple[str, str | None]]:
        if dialogues[0]:
            print(f"assistant: {dialogues[0][-1]['content']}")
        print("you:       ", end="", flush=True)
        text = sys.stdin.readline().strip()
        return [split_leave(text) if text else ("", "left")]


def simulator_messages(log: dict) -> list[dict]:
    """Return a logged dialogue as the simulator sees it: the goal first, then the roles flipped."""
    flipped = {"user": "assistant", "assistant": "user"}
    return [{"role": "user", "content": goal_prompt(log.get("goal"))},
            *({"role": flipped[m["role"]], "content": m["content"]} for m in log["messages"])]


def main() -> None:
    problem = generate_problems("test", 1)[0]
    print(f"goal: {problem.goal}\n")
    dialogue, ask = [], f"How many {tail(problem.facts[0]).split(' ', 1)[1]}?"
    for said in (None, ask, "Can you tell me everything?", "2 + 2 = 5.", ask):
        if said:
            dialogue.append({"role": "assistant", "content": said})
        outcomes = human(problem, dialogue)
        print(f"assistant: {said}" if said else "(the human opens)")
        for text, probability in outcomes:
            print(f"   {probability:.2f}  {text}")
        likeliest = max((o for o in outcomes if o[0] != LEAVE), key=lambda outcome: outcome[1])
        dialogue.append({"role": "user", "content": likeliest[0]})


if __name__ == "__main__":
    main()
