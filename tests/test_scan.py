"""SCAN against an interpreter of its own: string rewriting after the paper that defined it, no shared code."""

import random
import re
from collections import Counter

import pytest

from prism.errors import UserError
from prism.tasks.scan_cot import ScanCot

SPLITS = ("train", "validation", "test")
DIRECTION = "(?:(?:opposite|around) )?(?:left|right)"
PHRASE = f"(?:(?:walk|look|run|jump)(?: {DIRECTION})?|turn {DIRECTION})"
COMMAND = re.compile(rf"{PHRASE}(?: twice| thrice)?(?: (?:and|after) {PHRASE}(?: twice| thrice)?)?")


def denote(command: str) -> list[str]:
    """The actions of a command, by the denotation rules of the SCAN paper, outermost word first."""
    for joint, order in ((" after ", (1, 0)), (" and ", (0, 1))):
        if joint in command:
            halves = command.split(joint)
            return denote(halves[order[0]]) + denote(halves[order[1]])
    head, _, last = command.rpartition(" ")
    if last in ("twice", "thrice"):
        return denote(head) * (2 if last == "twice" else 3)
    if last in ("left", "right"):
        turn = [f"I_TURN_{last.upper()}"]
        if head.endswith(" around"):
            return (turn + denote(head.removesuffix(" around"))) * 4
        if head.endswith(" opposite"):
            return turn * 2 + denote(head.removesuffix(" opposite"))
        return turn + denote(head)
    return [] if command == "turn" else [f"I_{command.upper()}"]


class Enumerator(random.Random):
    """Draws start, start + 1, ... stop - 1 in turn."""

    done = False
    drawn = 0

    def randrange(self, start, stop=None, step=1):
        self.drawn += 1
        self.done = start + self.drawn == stop
        return start + self.drawn - 1


@pytest.fixture(scope="module")
def pairs() -> dict[str, set]:
    """Every pair of each split, collected through the public way in: drawing."""
    task = ScanCot()
    found = {"test": set(task.subsets()["test set"])}
    for split in ("train", "validation"):
        # A stand-in for the generator that draws every index in turn, so that no pair can hide.
        found[split] = set()
        for length in range(10, 90, 10):
            every = Enumerator()
            while not every.done:
                found[split].add(task.example(every, length, split))
    return found


def length_of(example) -> int:
    return len(" ".join(example).split(" "))


def test_counts(pairs):
    assert {split: len(pairs[split]) for split in SPLITS} == {"train": 16_019, "validation": 971, "test": 3_920}
    assert len(pairs["train"]) + len(pairs["validation"]) == 16_990


def test_splits_are_disjoint_and_cover_the_grammar(pairs):
    commands = [example.prompt.removesuffix(" =") for split in SPLITS for example in pairs[split]]
    assert len(set(commands)) == len(commands) == 20_910
    # The pattern's language has 34 phrases, 102 clauses, 102 + 2 * 102**2 = 20,910 commands: all of them are here.
    assert all(COMMAND.fullmatch(command) for command in commands)


def test_split_is_by_actions(pairs):
    counts = {split: Counter(len(denote(example.prompt[:-2])) for example in pairs[split]) for split in SPLITS}
    assert max(counts["train"]) == max(counts["validation"]) == 22
    assert sorted(counts["test"]) == [24, 25, 26, 27, 28, 30, 32, 33, 36, 40, 48]


def test_stripped_of_its_headings_it_is_scan(pairs):
    for split in SPLITS:
        for prompt, completion in pairs[split]:
            assert re.findall(r"I_\w+", completion) == denote(prompt.removesuffix(" ="))


def test_chain_of_thought_is_what_is_then_carried_out(pairs):
    for split in SPLITS:
        for prompt, completion in pairs[split]:
            thought, performance = completion.removesuffix(" .").split(" → ")
            announced = re.split(r" (?:\+|and|after) ", thought)
            performed = re.findall(r"([a-z ]+?) : ([A-Z_ ]+?)(?= [a-z]|$)", performance)
            assert [phrase.strip() for phrase, _ in performed] == announced
            assert all(actions.split() == denote(phrase.strip()) for phrase, actions in performed)
            joints = [word for word in prompt.split() if word in ("and", "after")]
            assert [word for word in thought.split() if word in ("and", "after")] == joints


def test_answers_agree(pairs):
    task = ScanCot()
    for split in SPLITS:
        assert all(task.answer(prompt) == completion for prompt, completion in pairs[split])


def test_order_of_after():
    assert ScanCot().answer("walk twice after look =") == (
        "look after walk + walk → look : I_LOOK walk : I_WALK walk : I_WALK .")


def test_answer_minds_words_not_blanks():
    assert ScanCot().answer("  walk   left  = ") == "walk left → walk left : I_TURN_LEFT I_WALK ."


def test_sequence_lengths(pairs):
    longest = {split: max(map(length_of, pairs[split])) for split in SPLITS}
    assert longest == {"train": 80, "validation": 80, "test": 107}
    assert ScanCot.training_length == longest["train"]
    assert ScanCot().sweep(80) == (60, 70, 80, 90, 100, 110)


def test_subset_longer_than_training(pairs):
    subsets = ScanCot().subsets()
    longer = set(subsets["longer than training"])
    assert longer == {example for example in pairs["test"] if length_of(example) > 80}
    assert len(longer) == len(subsets["longer than training"]) == 1_352


def test_validation_is_a_fair_sample(pairs):
    """Held-out pairs have the lengths and the words that training has."""
    for measure in (length_of, lambda example: example.prompt.count("left"), lambda example: "after" in example.prompt):
        means = [sum(map(measure, pairs[split])) / len(pairs[split]) for split in ("train", "validation")]
        assert means[0] == pytest.approx(means[1], rel=0.05)


@pytest.mark.parametrize("split", SPLITS)
def test_draws_stay_in_split_and_bin(pairs, split):
    task, rng = ScanCot(), random.Random(0)
    for length in (60, 70, 80):
        drawn = [task.example(rng, length, split) for _ in range(100)]
        assert all(length - 9 <= length_of(example) <= length for example in drawn)
        assert set(drawn) <= pairs[split]
        assert len(set(drawn)) > 5


def test_training_draws_only_train_pairs_up_to_a_length(pairs):
    task, rng = ScanCot(), random.Random(0)
    drawn = [task.training_example(rng, 80) for _ in range(3000)]
    assert set(drawn) <= pairs["train"]
    assert len(set(drawn)) > 2_500
    assert max(length_of(task.training_example(rng, 30)) for _ in range(500)) == 30
    assert {task.training_example(rng, 80, "validation") for _ in range(100)} <= pairs["validation"]


def test_a_length_without_examples_names_those_that_have_some():
    with pytest.raises(UserError, match=r"no test sequence of 41 to 50 tokens.*60, 70, 80, 90, 100, 110"):
        ScanCot().example(random.Random(0), 50)
    with pytest.raises(UserError, match="at most 7 tokens; the shortest has 8"):
        ScanCot().training_example(random.Random(0), 7)
