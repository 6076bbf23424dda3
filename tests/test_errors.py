"""Errors: one line that says what, where and what to do; all under LilyError; they survive a pickle."""

import pickle

import pytest

from lily import errors


@pytest.mark.parametrize("where, fix, text", [
    (None, None, "too big"),
    ("a.json", None, "a.json: too big"),
    (None, "cut it", "too big; cut it"),
    ("a.json", "cut it", "a.json: too big; cut it"),
])
def test_message(where, fix, text):
    assert str(errors.LilyError("too big", where=where, fix=fix)) == text


def test_message_is_one_line():
    assert "\n" not in str(errors.RequestError("first\nsecond", fix="a\n b"))


@pytest.mark.parametrize("name", ["CheckpointError", "TemplateError", "RequestError", "ContextLengthError", "DeviceError"])
def test_every_error_is_a_lily_error(name):
    assert issubclass(getattr(errors, name), errors.LilyError)


def test_pickle_keeps_everything():
    error = errors.ContextLengthError("too long", where="prompt", fix="shorten it", tokens=10, limit=5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.ContextLengthError
    assert (str(copy), copy.where, copy.fix, copy.tokens, copy.limit) == (str(error), "prompt", "shorten it", 10, 5)
