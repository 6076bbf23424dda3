"""The split of thought and answer (case 20): the same result however the text is cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.reasoning import ReasoningSplitter, prompt_opens_thought, split_reasoning
from tests.checkpoint_tools import GOLDENS


def pushed(pieces, in_thought):
    splitter = ReasoningSplitter(in_thought)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.text for part in parts)


CASES = [
    # generated text, prompt opened a thought, reasoning, answer
    ("", True, "", ""),
    ("hm", True, "hm", ""),
    ("hm\n", True, "hm\n", ""),
    ("hm\n</think>\n\nYes", True, "hm", "Yes"),
    ("hm</think>Yes", True, "hm", "Yes"),
    ("\nhm\n\n</think>\n\n\n  Yes\n", True, "hm", "  Yes\n"),
    ("</think>\n\nYes", True, "", "Yes"),
    ("a\n\nb\n</think>\n\nc\n\nd", True, "a\n\nb", "c\n\nd"),
    ("a </thin b</think>c</think>d", True, "a </thin b", "c</think>d"),
    ("cut </thi", True, "cut </thi", ""),
    ("cut\n</thi", True, "cut\n</thi", ""),
    ("hm</think>\n\n", True, "hm", ""),
    ("Yes", False, "", "Yes"),
    ("\n Yes", False, "", "\n Yes"),
    ("<think>\nhm\n</think>\n\nYes", False, "hm", "Yes"),
    ("\n<think>hm", False, "hm", ""),
    ("<thin air", False, "", "<thin air"),
    ("<thi", False, "", "<thi"),
    ("say <think> twice", False, "", "say <think> twice"),
    ("no </think> here", False, "", "no </think> here"),
    ("\n", False, "", "\n"),
]


@pytest.mark.parametrize("text, in_thought, reasoning, answer", CASES)
def test_whole_and_by_character(text, in_thought, reasoning, answer):
    assert split_reasoning(text, in_thought) == (reasoning, answer)
    assert pushed(list(text), in_thought) == (reasoning, answer)


def test_case_20_a_tag_over_two_pieces():
    splitter = ReasoningSplitter(True)
    assert splitter.push("done</th") == ("done", "")
    assert splitter.in_thought
    assert splitter.push("ink>\n\nYes") == ("", "Yes")
    assert not splitter.in_thought


def test_a_thought_flows_before_it_ends():
    splitter = ReasoningSplitter(True)
    assert splitter.push("one ") == ("one ", "") and splitter.push("two\n") == ("two", "") and splitter.push("three") == ("\nthree", "")


def test_a_hidden_closing_token():
    splitter = ReasoningSplitter(True, close_id=7)
    assert splitter.push("hm\n", 1) == ("hm", "") and splitter.push("", 7) == ("", "") and splitter.push("\n\nYes", 2) == ("", "Yes")


def test_a_visible_closing_token():
    splitter = ReasoningSplitter(True, close_id=7)
    assert splitter.push("hm", 1) == ("hm", "") and splitter.push("</think>", 7) == ("", "") and splitter.push("Yes</think>", 7) == ("", "Yes</think>")


@pytest.mark.parametrize("ids, opens", [([], False), ([1, 8], True), ([8, 1, 2], True), ([8, 9, 1], False), ([9, 1, 8, 2], True), ([1, 2], False)])
def test_prompt_opens_thought(ids, opens):
    assert prompt_opens_thought(ids, 8, 9) is opens
    assert not prompt_opens_thought(ids, None, None)


def test_goldens_agree_with_their_prompts():
    for conversation in json.loads(GOLDENS.read_text(encoding="utf-8")):
        thinks = conversation["template_kwargs"].get("enable_thinking", True)
        assert prompt_opens_thought(conversation["prompt_ids"], 6138, 6139) is thinks
        split = split_reasoning(conversation["text"], thinks)
        assert bool(split.reasoning) is thinks and "</think>" not in split.text and split.text == split.text.strip()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "</th", "ink>", "<", "\n", " ", "a", "\n\n", "b c"]), max_size=12), st.booleans(), st.randoms())
def test_any_cut_gives_the_same(parts, in_thought, random):
    text = "".join(parts)
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(4))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert pushed(pieces, in_thought) == split_reasoning(text, in_thought)
