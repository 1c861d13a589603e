"""The last collectives of a rank, as another process reads them."""

from __future__ import annotations

import multiprocessing

from zreal.processes.progress import KEPT, TEXT_BYTES, Progress


def test_the_last_texts_are_there_in_order() -> None:
    progress = Progress(multiprocessing)
    assert progress.recent() == ()
    texts = [f"all_gather #{number} of 64 B over dp" for number in range(3 * KEPT)]
    for count, text in enumerate(texts, start=1):
        progress.announce(text)
        assert progress.recent() == tuple(texts[max(0, count - KEPT) : count])


def test_a_long_text_is_cut_between_two_characters() -> None:
    progress = Progress(multiprocessing)
    progress.announce("é" * TEXT_BYTES)
    assert progress.recent() == ("é" * ((TEXT_BYTES - 1) // 2),)


def test_a_text_is_read_whole_or_not_at_all() -> None:
    """A rank may die in the middle of an announcement: the slot that is written next is garbled."""
    progress = Progress(multiprocessing)
    texts = tuple(f"broadcast #{number}" for number in range(KEPT))
    for text in texts:
        progress.announce(text)
    following = 1 + (progress._memory[0][0] + 1) % (KEPT + 1) * TEXT_BYTES
    progress._memory[following : following + 4] = b"half"
    assert progress.recent() == texts
