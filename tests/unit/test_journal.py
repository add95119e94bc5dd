"""What the prefix tree tells of its blocks: hashes that mean the same everywhere, changes that add up, numbers."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterable

import pytest

from shoal.core.journal import BlockJournal, Change, Cleared, Removed, Stored, content_hashes, root_hash
from shoal.engine.engine import Engine
from shoal.engine.feed import BlockBatch, follow
from shoal.types import Namespace, Request, SamplingParams
from tests.support.engines import BLOCK, Driver
from tests.support.live import toy

HERE = Namespace()


def held(changes: Iterable[Change], before: Iterable[int] = ()) -> set[int]:
    """What is held after some changes; each must fit what was held before it."""
    known = set(before)
    for change in changes:
        match change:
            case Stored():
                assert change.parent is None or change.parent in known
                assert not known & set(change.hashes)
                known |= set(change.hashes)
            case Removed():
                assert set(change.hashes) <= known
                known -= set(change.hashes)
            case Cleared():
                known.clear()
    return known


def in_tree(driver: Driver) -> set[int]:
    return {node.content for node in driver.scheduler.kv.tree.walk() if len(node.key) == BLOCK}


def test_hashes_are_of_the_tokens_the_way_there_and_the_namespace() -> None:
    tokens = list(range(11))
    hashes = content_hashes(tokens, HERE, BLOCK)
    assert len(hashes) == 2
    assert content_hashes(tokens, HERE, BLOCK, hashes[:1]) == hashes
    assert content_hashes([*tokens[:7], 99], HERE, BLOCK)[0] == hashes[0]
    assert content_hashes([*tokens[:7], 99], HERE, BLOCK)[1] != hashes[1]
    others = [content_hashes(tokens, Namespace("a", "b", n), BLOCK)[0] for n in range(2)]
    others.append(content_hashes(tokens, Namespace("a, 'b", "", 0), BLOCK)[0])
    assert len({hashes[0], *others}) == 4


def test_hashes_are_the_same_in_another_process() -> None:
    code = (
        "from shoal.core.journal import content_hashes; from shoal.types import Namespace;"
        "print(content_hashes(list(range(8)), Namespace('t', 'a', 3), 4))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert told.strip() == str(content_hashes(list(range(8)), Namespace("t", "a", 3), 4))


@pytest.mark.parametrize("seed", range(6))
def test_changes_add_up_to_what_the_tree_holds(seed: int) -> None:
    choose = random.Random(seed)
    driver = Driver(num_blocks=24, max_batch=4, max_step_tokens=16)
    journal, known = BlockJournal(driver.scheduler.kv.tree), set[int]()
    trunks = [[choose.randrange(9) for _ in range(12)] for _ in range(3)]
    for _ in range(60):
        if choose.random() < 0.4 and len(driver.scheduler) < 6:
            trunk = choose.choice(trunks)
            extra = [choose.randrange(9) for _ in range(choose.randrange(1, 14))]
            space = Namespace("t", "", choose.randrange(2)) if choose.random() < 0.3 else HERE
            driver.add([*trunk[: choose.randrange(1, 12)], *extra], choose.randrange(1, 6), namespace=space)
        if len(driver.scheduler):
            driver.step()
        if choose.random() < 0.5:
            known = held(journal.take(), known)
            assert known == in_tree(driver)
            assert journal.blocks == len(known)
    assert held(journal.snapshot()) == in_tree(driver)
    assert journal.take() == []


def test_a_prompt_has_the_hashes_that_the_tree_gives_its_blocks() -> None:
    driver = Driver()
    journal = BlockJournal(driver.scheduler.kv.tree)
    prompt = list(range(2 * BLOCK + 1))
    driver.add(prompt, 2, namespace=Namespace("t"))
    driver.drain()
    (stored,) = [change for change in journal.take() if isinstance(change, Stored)]
    assert stored.parent is None
    assert list(stored.hashes) == content_hashes(prompt, Namespace("t"), BLOCK)
    assert list(stored.tokens) == prompt[: 2 * BLOCK]


def test_a_journal_that_begins_late_knows_what_was_there() -> None:
    driver = Driver()
    driver.add(list(range(9)), 1)
    driver.drain()
    assert root_hash(HERE) not in in_tree(driver)
    journal = BlockJournal(driver.scheduler.kv.tree)
    assert journal.take() == []
    assert held(journal.snapshot()) == set(content_hashes(list(range(8)), HERE, BLOCK))
    journal.close()
    driver.add(list(range(50, 60)), 1)
    driver.drain()
    assert journal.take() == []


def ask(engine: Engine, text: str) -> None:
    engine.complete(Request(prompt=text, sampling=SamplingParams(max_tokens=1)))


async def read(engine: Engine, after: int | None, texts: Iterable[str]) -> list[BlockBatch]:
    """The batches that come while some prompts are computed."""
    batches: list[BlockBatch] = []
    texts, following = iter(texts), follow(engine, after)
    async for batch in following:
        batches.append(batch)
        if (batch.queued_tokens, batch.running_tokens) == (0, 0):
            text = next(texts, None)
            if text is None:
                break
            await asyncio.to_thread(ask, engine, text)
    await following.aclose()  # type: ignore[attr-defined]
    return batches


def test_batches_are_numbered_and_a_late_reader_gets_a_snapshot() -> None:
    with toy() as engine:
        ask(engine, "a" * 70)
        assert engine.call(lambda: engine._loop.scheduler.kv.tree.journal) is None  # nothing is done for nobody
        first = asyncio.run(read(engine, None, ["b" * 70, "c" * 70]))
        assert isinstance(first[0].changes[0], Cleared)
        assert [batch.seq for batch in first] == list(range(first[0].seq, first[0].seq + len(first)))
        known = held(change for batch in first for change in batch.changes)
        assert known == {h for letter in "abc" for h in content_hashes(list(letter.encode() * 64), HERE, 32)}
        ask(engine, "d" * 70)  # nobody listens: a reader that comes back is told to begin again
        second = asyncio.run(read(engine, first[-1].seq, []))
        assert isinstance(second[0].changes[0], Cleared)
        assert second[0].seq > first[-1].seq
        assert held(second[0].changes) > known


def test_a_reader_that_comes_back_gets_what_it_missed() -> None:
    with toy() as engine:
        staying: list[None] = []
        feed = engine.feed
        assert feed is not None
        engine.call(lambda: feed.listen(lambda: staying.append(None)))
        first = asyncio.run(read(engine, None, ["a" * 70]))
        ask(engine, "b" * 70)
        engine.call(lambda: None)
        again = feed.since(first[-1].seq)
        assert again
        assert not any(isinstance(change, Cleared) for batch in again for change in batch.changes)
        assert held((c for b in again for c in b.changes), held(c for b in first for c in b.changes)) >= set(
            content_hashes(list(b"b" * 64), HERE, 32)
        )
        assert feed.since(first[0].seq - 5) is None
        assert staying
