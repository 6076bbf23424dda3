"""Stop strings: never half leaked, never dependent on how the text was cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lily.errors import RequestError
from lily.stop_strings import StopMatcher, normal_stops


def shown(stops, pieces):
    matcher = StopMatcher(stops)
    text = "".join(map(matcher.push, pieces))
    return text + matcher.flush(), matcher.matched


CASES = [
    # stops, text, shown, matched
    ((), "abc", "abc", None),
    (("x",), "abc", "abc", None),
    (("b",), "abc", "a", "b"),
    (("abc",), "abc", "", "abc"),
    (("abcd",), "xabc", "xabc", None),
    (("aab",), "aaab", "a", "aab"),
    (("abab",), "ababab", "", "abab"),
    (("b", "abc"), "abc", "a", "b"),          # completed first
    (("bc", "abc"), "abc", "", "abc"),        # completed together: the longest
    (("\n\nUser:", "\n\n"), "a\n\nUser:", "a", "\n\n"),
    (("END", "EN D"), "EN END", "EN ", "END"),
    (("ské",), "ďábelské!", "ďábel", "ské"),
]


@pytest.mark.parametrize("stops, text, expected, matched", CASES)
def test_whole_and_by_character(stops, text, expected, matched):
    assert shown(stops, [text]) == (expected, matched)
    assert shown(stops, list(text)) == (expected, matched)


def test_what_may_be_a_stop_is_held_back():
    matcher = StopMatcher(["</end>"])
    assert [matcher.push(piece) for piece in ("a<", "/en", "d", "x<", "/end", ">b")] == ["a", "", "", "</endx", "", ""]
    assert matcher.matched == "</end>" and matcher.push("more") == "" and matcher.flush() == ""


@pytest.mark.parametrize("stop, expected", [(None, ()), ("a", ("a",)), (["a", "b", "a"], ("a", "b")), ((), ())])
def test_normal_stops(stop, expected):
    assert normal_stops(stop) == expected


@pytest.mark.parametrize("stop", ["", [""], [1], 5, {"a": 1}, ["x"] * 65])
def test_bad_stops(stop):
    with pytest.raises(RequestError, match="stop"):
        normal_stops(stop)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.text("abc", max_size=20), st.lists(st.integers(0, 20), max_size=5))
def test_any_cut_gives_the_same_and_nothing_leaks(stops, text, cuts):
    places = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]
    result, matched = shown(stops, pieces)
    assert (result, matched) == shown(stops, [text])
    assert text.startswith(result) and not any(stop in result for stop in stops)
    assert (matched is None) == (not any(stop in text for stop in stops))
