"""What every runner owes the core, on every runner. Rows are compared bit for bit where a runner says it is exact.

A runner with recurrent state is asked to take a prefix up where a checkpoint was kept, others at any block.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.errors import RunnerError
from shoal.runners.base import BlockAccess, Runner
from shoal.runners.plan import Draw, ScheduledSequence, StepPlan, Want

Row = NDArray[np.float32]


class Bench:
    """Plans over fresh blocks of one runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.size = runner.spec.block_size
        self._blocks = itertools.cycle(range(runner.spec.num_blocks))
        self._ids = itertools.count(1)
        self._steps = itertools.count(1)
        self.rng = random.Random(7)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, min(self.runner.spec.vocab_size, 250)) for _ in range(count)]

    def table(self, tokens: int) -> tuple[int, ...]:
        return tuple(next(self._blocks) for _ in range(-(-tokens // self.size)))

    def item(
        self,
        tokens: Sequence[int],
        start: int,
        table: tuple[int, ...],
        want: Want = Want.LOGITS,
        seq_id: int = 0,
        generated: int = 0,
        *,
        load: int | None = None,
        save: int | None = None,
    ) -> ScheduledSequence:
        if not self.runner.spec.recurrent:
            load = save = None
        return ScheduledSequence(seq_id or self.new_id(), tuple(tokens), start, table, want, generated, load, save)

    def new_id(self) -> int:
        return next(self._ids)

    def run(self, *items: ScheduledSequence, copies: tuple[tuple[int, int], ...] = ()) -> list[Row]:
        output = self.runner.execute(StepPlan(next(self._steps), items, copies))
        return [] if output.logits is None else [row.copy() for row in output.logits]

    def whole(self, tokens: Sequence[int], generated: int = 0) -> Row:
        """Logits after tokens computed in one piece, alone, in blocks of their own; the last ones may be output."""
        item = self.item(tokens, 0, self.table(len(tokens)), generated=generated)
        (row,) = self.run(item)
        self.runner.release([item.seq_id])  # as the core does: a device has room for the states of a batch, no more
        return row

    def same(self, a: Row, b: Row) -> bool:
        """Bits, where they are promised. Else rows as far apart as rounding makes them, and another best token only
        where the two best of a row are closer together than that: a near-tie, no fault.
        """
        if self.runner.spec.exact:
            return a.tobytes() == b.tobytes()
        apart, noise = float(np.abs(a - b).max()), rounding(self.runner.spec.precision) * float(np.abs(b).max())
        second, best = np.partition(b, -2)[-2:]
        return apart <= noise and (int(a.argmax()) == int(b.argmax()) or best - second <= 2 * noise)


def rounding(precision: str) -> float:
    """How far logits may be from others of the same tokens, against the largest of them."""
    return 1e-4 if precision == "float32" else 0.05


@pytest.fixture(scope="module")
def bench(runner: Runner) -> Bench:
    return Bench(runner)


def test_the_spec_tells_the_truth(bench: Bench) -> None:
    spec = bench.runner.spec
    tokens = bench.tokens(5)
    (last,) = bench.run(bench.item(tokens, 0, (spec.num_blocks - 1,)))  # every block that it promises is there
    assert bench.same(last, bench.whole(tokens))
    assert bench.whole(bench.tokens(5)).shape == (spec.vocab_size,)
    assert bench.whole(bench.tokens(5)).dtype == np.float32


def test_logits_depend_on_every_token(bench: Bench) -> None:
    tokens = bench.tokens(40)
    row = bench.whole(tokens)
    for at in (0, 20, 39):
        changed = [*tokens]
        changed[at] = tokens[at] + 1
        assert not np.array_equal(row, bench.whole(changed)), f"token {at} does not matter"


@pytest.mark.parametrize("cuts", [[1], [31], [32], [33], [10, 20, 69]])
def test_chunks_give_what_the_whole_gives(bench: Bench, cuts: list[int]) -> None:
    tokens = bench.tokens(70)
    table, seq_id = bench.table(70), bench.new_id()
    edges = [0, *cuts, 70]
    rows: list[Row] = []
    for begin, end in itertools.pairwise(edges):
        want = Want.LOGITS if end == 70 else Want.NOTHING
        rows = bench.run(bench.item(tokens[begin:end], begin, table, want, seq_id))
        assert len(rows) == (end == 70)
    assert bench.same(rows[0], bench.whole(tokens))


def test_batch_mates_change_nothing(bench: Bench) -> None:
    tokens = bench.tokens(45)
    alone = bench.whole(tokens)
    mate, table, mate_id = bench.tokens(30), bench.table(31), bench.new_id()
    bench.run(bench.item(mate, 0, table, seq_id=mate_id))
    rows = bench.run(
        bench.item(bench.tokens(1), 30, table, seq_id=mate_id, generated=1),
        bench.item(tokens, 0, bench.table(45)),
        bench.item(bench.tokens(90), 0, bench.table(90), Want.NOTHING),
        bench.item(bench.tokens(2), 0, bench.table(2)),
    )
    assert bench.same(rows[1], alone)


def test_decoded_tokens_give_what_computing_them_again_at_once_gives(bench: Bench) -> None:
    tokens, table, seq_id = bench.tokens(70), bench.table(96), bench.new_id()
    bench.run(bench.item(tokens[:30], 0, table, seq_id=seq_id))
    rows: list[Row] = []
    for at in range(30, 70):
        rows = bench.run(bench.item(tokens[at : at + 1], at, table, seq_id=seq_id, generated=1))
    assert bench.same(rows[0], bench.whole(tokens, generated=40))
    (row,) = bench.run(bench.item(tokens[:50], 0, table, generated=20))
    assert bench.same(row, bench.whole(tokens[:50], generated=20))
    if not bench.runner.spec.splits_decode:
        assert bench.same(rows[0], bench.whole(tokens))


def test_a_lone_token_is_no_special_case(bench: Bench) -> None:
    token = bench.tokens(1)
    alone = bench.whole(token)
    rows = bench.run(bench.item(token, 0, bench.table(1)), bench.item(bench.tokens(7), 0, bench.table(7)))
    assert bench.same(rows[0], alone)


def test_blocks_may_lie_anywhere_and_be_longer_than_needed(bench: Bench) -> None:
    tokens = bench.tokens(80)
    table = list(bench.table(160))
    bench.rng.shuffle(table)
    (row,) = bench.run(bench.item(tokens, 0, tuple(table)))
    assert bench.same(row, bench.whole(tokens))


def test_shared_blocks_serve_many_at_once(bench: Bench) -> None:
    trunk, table = bench.tokens(64), bench.table(64)
    bench.run(bench.item(trunk, 0, table, Want.NOTHING, save=0))
    branches = [bench.tokens(n) for n in (5, 5, 9)]
    rows = bench.run(*(bench.item(branch, 64, (*table, *bench.table(9)), load=0) for branch in branches))
    for row, branch in zip(rows, branches, strict=True):
        assert bench.same(row, bench.whole([*trunk, *branch]))


def test_kv_stays_when_the_sequence_that_wrote_it_is_released(bench: Bench) -> None:
    trunk, table = bench.tokens(32), bench.table(32)
    bench.run(bench.item(trunk, 0, table, Want.NOTHING, seq_id=10_001, save=0))
    bench.runner.release([10_001, 99_999])
    bench.whole(bench.tokens(40))
    (row,) = bench.run(bench.item([5, 6], 32, (*table, *bench.table(2)), load=0))
    assert bench.same(row, bench.whole([*trunk, 5, 6]))


def test_a_block_used_again_shows_nothing_of_before(bench: Bench) -> None:
    table = bench.table(64)
    bench.run(bench.item(bench.tokens(64), 0, table))
    tokens = bench.tokens(40)
    (row,) = bench.run(bench.item(tokens, 0, table))
    assert bench.same(row, bench.whole(tokens))


def test_a_copied_block_serves_up_to_where_the_tokens_agree(bench: Bench) -> None:
    if not bench.runner.spec.copies_blocks or bench.runner.spec.recurrent:
        pytest.skip("this runner cannot cut a prefix at any token")
    first = bench.tokens(40)
    table = bench.table(64)
    bench.run(bench.item(first, 0, table))
    second = [*first[:35], *bench.tokens(6)]
    copy = bench.table(1)
    (row,) = bench.run(bench.item(second[35:], 35, (table[0], *copy)), copies=((table[1], copy[0]),))
    assert bench.same(row, bench.whole(second))
    (row,) = bench.run(bench.item([9], 40, table))  # the source is as it was
    assert bench.same(row, bench.whole([*first, 9]))


def test_recurrent_state_is_taken_up_from_where_it_was_kept(bench: Bench) -> None:
    if not bench.runner.spec.recurrent:
        pytest.skip("this model has no recurrent state")
    tokens, table = bench.tokens(40), bench.table(64)
    seq_id = bench.new_id()
    bench.run(bench.item(tokens[:32], 0, table, Want.NOTHING, seq_id, save=0))
    bench.run(bench.item(tokens[32:], 32, table, Want.NOTHING, seq_id, save=1))
    copy = bench.table(1)
    (row,) = bench.run(bench.item([9, 8], 40, (table[0], *copy), load=1), copies=((table[1], copy[0]),))
    assert bench.same(row, bench.whole([*tokens, 9, 8]))
    rows = bench.run(  # what is saved in a step is loaded before it
        bench.item([7], 0, bench.table(1), Want.NOTHING, save=0),
        bench.item([4, 5, 6], 32, (table[0], *bench.table(1)), load=0),
    )
    assert bench.same(rows[0], bench.whole([*tokens[:32], 4, 5, 6]))
    (row,) = bench.run(bench.item([3], 40, table, seq_id=seq_id))  # and its first owner goes on
    assert bench.same(row, bench.whole([*tokens, 3]))


def test_rows_join_and_leave_at_any_token(bench: Bench) -> None:
    """Sequences of different length come and go while others decode; each row is what it is alone."""
    lengths, joins, stays = [5, 40, 33, 70, 1, 64], [0, 0, 2, 3, 5, 5], [9, 4, 6, 3, 4, 2]
    prompts = [bench.tokens(n + more) for n, more in zip(lengths, stays, strict=True)]
    tables = [bench.table(len(p)) for p in prompts]
    ids = [bench.new_id() for _ in prompts]
    for step in range(10):
        items, members = [], []
        for i, prompt in enumerate(prompts):
            at = step - joins[i]
            if not 0 <= at < stays[i]:
                continue
            begin, end = (0 if at == 0 else lengths[i] + at - 1), lengths[i] + at
            items.append(bench.item(prompt[begin:end], begin, tables[i], seq_id=ids[i], generated=min(at, 1)))
            members.append((i, end))
        for (i, end), row in zip(members, bench.run(*items), strict=True):
            assert bench.same(row, bench.whole(prompts[i][:end], generated=end - lengths[i])), f"sequence {i} at {end}"
        bench.runner.release([ids[i] for i in range(len(ids)) if step - joins[i] == stays[i] - 1])


def test_wants_are_answered_in_plan_order(bench: Bench) -> None:
    prompts = [bench.tokens(n) for n in (3, 4, 5, 6, 7)]
    wants = [Want.LOGITS, Want.ARGMAX, Want.NOTHING, Want.LOGITS, Want.ARGMAX]
    items = [bench.item(p, 0, bench.table(len(p)), w) for p, w in zip(prompts, wants, strict=True)]
    output = bench.runner.execute(StepPlan(1, tuple(items)))
    assert set(output.argmax) == {items[1].seq_id, items[4].seq_id}
    assert output.logits is not None
    rows = [row.copy() for row in output.logits]
    assert len(rows) == 2
    expected = [bench.whole(p) for p in prompts]
    assert bench.same(rows[0], expected[0])
    assert bench.same(rows[1], expected[3])
    for i in (1, 4):
        assert output.argmax[items[i].seq_id] == (int(expected[i].argmax()),)


def test_several_rows_are_those_of_the_tokens_one_by_one(bench: Bench) -> None:
    most = bench.runner.spec.max_rows
    if most == 1:
        pytest.skip("this runner gives the logits after the last token")
    prompts, counts = [bench.tokens(n) for n in (2, most, most + 5)], [2, most, 3]
    items = [bench.item(p, 0, bench.table(len(p))) for p in prompts]
    items = [item._replace(rows=count) for item, count in zip(items, counts, strict=True)]
    best = bench.item(prompts[2], 0, bench.table(most + 5), Want.ARGMAX)
    output = bench.runner.execute(StepPlan(1, (items[0], best, *items[1:])))
    assert output.logits is not None
    rows = [row.copy() for row in output.logits]
    ends = [(p, len(p) - count + 1 + i) for p, count in zip(prompts, counts, strict=True) for i in range(count)]
    assert len(rows) == len(ends)
    exact = bench.runner.spec.exact
    if exact:
        assert output.argmax[best.seq_id] == (int(rows[-1].argmax()),)
    for row, (prompt, end) in zip(rows, ends, strict=True):
        if (
            exact or end > 1
        ):  # of a lone token OpenVINO has another kernel, whose logits are further apart than rounding
            assert bench.same(row, bench.whole(prompt[:end]))


def test_the_most_likely_tokens_after_several_are_those_of_their_logits(bench: Bench) -> None:
    """As speculation asks: a token that was written and drafts behind it, in the middle of a block and over its end."""
    most = min(bench.runner.spec.max_rows, 9)
    if most == 1:
        pytest.skip("this runner gives the logits after the last token")
    prompts, counts = [bench.tokens(n) for n in (35, 61, 20)], [most, 5, 1]
    tables, ids = [bench.table(len(p) + most) for p in prompts], [bench.new_id() for _ in prompts]
    drafts = [bench.tokens(count) for count in counts]
    bench.run(*(bench.item(p, 0, t, Want.NOTHING, i) for p, t, i in zip(prompts, tables, ids, strict=True)))
    items = [
        bench.item(d, len(p), t, Want.ARGMAX, i, len(d))._replace(rows=len(d))
        for d, p, t, i in zip(drafts, prompts, tables, ids, strict=True)
    ]
    argmax = bench.runner.execute(StepPlan(next(bench._steps), tuple(items))).argmax
    for seq_id, prompt, fed in zip(ids, prompts, drafts, strict=True):
        assert len(argmax[seq_id]) == len(fed)
        if bench.runner.spec.exact:
            rows = [bench.whole([*prompt, *fed[: i + 1]], generated=i + 1) for i in range(len(fed))]
            assert argmax[seq_id] == tuple(int(row.argmax()) for row in rows)


def test_the_best_few_are_those_of_the_logits(bench: Bench) -> None:
    most = bench.runner.spec.max_top
    if most == 0:
        pytest.skip("this runner gives all logits or the arg-max")
    prompts, counts = [bench.tokens(n) for n in (3, 40, 7)], [1, most, 5]
    items = [bench.item(p, 0, bench.table(len(p)), Want.TOP) for p in prompts]
    items = [item._replace(top=count) for item, count in zip(items, counts, strict=True)]
    other = bench.item(prompts[0], 0, bench.table(3))
    output = bench.runner.execute(StepPlan(1, (*items, other)))
    assert output.logits is not None
    assert len(output.logits) == 1
    assert output.argmax == {}
    for item, prompt, count in zip(items, prompts, counts, strict=True):
        row = bench.whole(prompt)
        expected = np.sort(np.argsort(-row, kind="stable")[:count])
        ids, logits = output.top[item.seq_id]
        assert ids.dtype == np.int64
        assert logits.dtype == np.float32
        if bench.runner.spec.exact:
            assert np.array_equal(ids, expected)
            assert logits.tobytes() == row[expected].tobytes()


def test_a_drawn_token_is_the_samplers(bench: Bench) -> None:
    if not bench.runner.spec.draws:
        pytest.skip("this runner gives all logits to draw from")
    prompts = [bench.tokens(n) for n in (3, 40, 7, 12)]
    items = [bench.item(p, 0, bench.table(len(p)), Want.DRAW) for p in prompts]
    other = bench.item(prompts[0], 0, bench.table(3))
    output = bench.runner.execute(StepPlan(1, (*items, other)))
    assert output.rows is not None
    assert output.logits is not None
    assert len(output.logits) == 1
    draws = {item.seq_id: Draw(2.0, 0.0, (0.5 + i) / len(items)) for i, item in enumerate(items)}
    found = output.rows.draw(draws)
    for item, prompt in zip(items, prompts, strict=True):
        row, drawn = bench.whole(prompt), found[item.seq_id]
        if not isinstance(drawn, int):  # it could not tell: the sampler does
            assert bench.same(drawn, row)
            continue
        weights = np.exp((row.astype(np.float64) - row.max()) * 2.0)
        expected = int(weights.cumsum().searchsorted(draws[item.seq_id].number * weights.sum(), side="right"))
        assert drawn == expected or not bench.runner.spec.exact


def test_logits_may_be_written_to(bench: Bench) -> None:
    expected = bench.whole([3, 4])
    output = bench.runner.execute(StepPlan(1, (bench.item([3, 4], 0, bench.table(2)),)))
    assert output.logits is not None
    output.logits[0] = 0.0
    assert bench.same(bench.whole([3, 4]), expected)


def test_a_chain_is_the_same_as_single_steps(bench: Bench) -> None:
    longest = bench.runner.spec.max_chain
    if longest == 1:
        pytest.skip("this runner does not chain")
    prompt, table, seq_id = bench.tokens(30), bench.table(30 + longest), bench.new_id()
    token = int(bench.run(bench.item(prompt, 0, table, seq_id=seq_id))[0].argmax())
    plan = StepPlan(1, (bench.item([token], 30, table, Want.ARGMAX, seq_id, 1),), chain=longest)
    chained = bench.runner.execute(plan).argmax[seq_id]
    written = [token]
    for _ in range(longest):
        written.append(int(bench.whole([*prompt, *written], generated=len(written)).argmax()))
    assert chained == tuple(written[1:])


def _schedule(bench: Bench, lengths: Sequence[int], draw: Callable[[int, int], int]) -> None:
    """Several sequences in random chunks and random company; the last row of each must be its row alone."""
    prompts = [bench.tokens(n) for n in lengths]
    tables = [bench.table(n) for n in lengths]
    ids = [bench.new_id() for _ in lengths]
    done = [0] * len(lengths)
    rows: dict[int, Row] = {}
    while len(rows) < len(lengths):
        items, members = [], []
        for i, prompt in enumerate(prompts):
            if done[i] == len(prompt) or draw(0, 3) == 0:
                continue
            take = min(draw(1, 50), len(prompt) - done[i])
            last = done[i] + take == len(prompt)
            want = Want.LOGITS if last else Want.NOTHING
            items.append(bench.item(prompt[done[i] : done[i] + take], done[i], tables[i], want, seq_id=ids[i]))
            members += [i] if last else []
            done[i] += take
        if items:
            rows.update(zip(members, bench.run(*items), strict=True))
    for i, prompt in enumerate(prompts):
        assert bench.same(rows[i], bench.whole(prompt)), f"prompt {i} of {len(prompt)} tokens"


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_give_each_what_it_gets_alone(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    _schedule(bench, [rng.randint(1, 150) for _ in range(rng.randint(1, 8))], rng.randint)


def test_a_block_that_was_read_and_put_back_elsewhere_gives_the_same_rows(bench: Bench) -> None:
    access = bench.runner.access
    if access is None:
        pytest.skip("its blocks cannot be read")
    size, spec = bench.size, bench.runner.spec
    tokens = bench.tokens(2 * size + 5)
    table = bench.table(len(tokens))
    bench.run(bench.item(tokens[: 2 * size], 0, table, Want.NOTHING, save=0))
    expected = bench.run(bench.item(tokens[2 * size :], 2 * size, table, load=0))[0]
    kept = [block_of(access, block) for block in table[:2]]
    state = access.read_checkpoint(0) if spec.recurrent else None
    access.discard_blocks(table[:2])
    bench.run(bench.item(bench.tokens(2 * size), 0, table, Want.NOTHING, save=0))  # others take their place
    elsewhere = bench.table(len(tokens))
    for block, data in zip(elsewhere, kept, strict=False):
        access.write_block(block, data)
    if state is not None:
        assert state.shape == (spec.checkpoint_bytes,)
        access.write_checkpoint(1, 2 * size, state)
    again = bench.run(bench.item(tokens[2 * size :], 2 * size, elsewhere, load=1))[0]
    assert bench.same(expected, again)
    assert [bytes(block_of(access, block)) for block in elsewhere[:2]] == [bytes(data) for data in kept]


def block_of(access: BlockAccess, block: int) -> NDArray[np.uint8]:
    out = np.empty(access.block_bytes, np.uint8)
    access.read_block(block, out)
    return out


def test_blocks_out_of_range_are_not_read(bench: Bench) -> None:
    access = bench.runner.access
    if access is None:
        pytest.skip("its blocks cannot be read")
    for read in (functools.partial(block_of, access), access.read_checkpoint):
        with pytest.raises((RunnerError, IndexError, KeyError)):
            read(bench.runner.spec.num_blocks + 10**6)
