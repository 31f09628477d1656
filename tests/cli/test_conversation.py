from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.chat import Conversation


def size(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)


def test_messages_alternate_after_the_system_message() -> None:
    talk = Conversation(system="s").ask("a").answer("b").ask("c")
    assert talk.messages() == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert talk.undo().messages() == talk.messages()[:3]
    assert Conversation().undo() == Conversation()


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=8), st.integers(0, 60))
def test_fitting_drops_oldest_turns_only_and_no_more_than_needed(turns: list[tuple[str, str]], limit: int) -> None:
    talk = Conversation(system="ss", turns=tuple(turns)).ask("last")
    fitting = talk.fit(size, limit)
    dropped = len(talk.turns) - len(fitting.turns)
    assert fitting.turns == talk.turns[dropped:]
    assert fitting.turns[-1] == ("last", None)
    assert fitting.system == talk.system
    assert size(fitting.messages()) <= limit or len(fitting.turns) == 1
    if dropped:
        assert size(Conversation(system="ss", turns=talk.turns[dropped - 1 :]).messages()) > limit
