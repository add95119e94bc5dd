from __future__ import annotations

from shoal.core.queue import WaitingQueue
from shoal.core.request import RequestSpec
from shoal.core.sequence import Sequence
from shoal.types import Priority, SamplingParams


def seq(
    seq_id: int, *, rank: int = 1, arrival: float = 0.0, deadline: float | None = None, group: str = ""
) -> Sequence:
    spec = RequestSpec(
        prompt=(1,),
        sampling=SamplingParams(max_tokens=9),
        priority=list(Priority)[rank],
        deadline_s=None if deadline is None else deadline - arrival,
        group=group,
    )
    return Sequence(seq_id, spec, arrival=arrival)


def queue_of(*seqs: Sequence) -> WaitingQueue:
    queue = WaitingQueue(ageing_s=10)
    for one in seqs:
        queue.join(one)
        queue.push(one)
    return queue


def order(queue: WaitingQueue, now: float = 0.0) -> list[int]:
    return [one.seq_id for one in queue.candidates(now)]


def test_classes_come_before_arrival() -> None:
    queue = queue_of(seq(1, rank=2), seq(2, rank=1), seq(3, rank=0), seq(4, rank=1))
    assert order(queue) == [3, 2, 4, 1]


def test_ageing_lifts_a_class_per_period() -> None:
    queue = queue_of(seq(1, rank=2, arrival=0.0), seq(2, rank=1, arrival=19.0))
    assert order(queue, 9.9) == [2, 1]
    assert order(queue, 20.1) == [1, 2]


def test_groups_take_turns_by_service() -> None:
    a, b = seq(1, group="a"), seq(2, group="b")
    queue = queue_of(a, b, seq(3, group="a"))
    queue.serve(a, 100)
    assert order(queue) == [2, 1, 3]


def test_a_new_group_has_no_arrears_to_collect() -> None:
    a = seq(1, group="a")
    queue = queue_of(a)
    queue.serve(a, 5000)
    late = seq(2, group="b")
    queue.join(late)
    assert queue.service(late) == 5000


def test_deadlines_order_a_lane_but_never_for_ever() -> None:
    queue = queue_of(seq(1, arrival=0.0), seq(2, arrival=1.0, deadline=5.0), seq(3, arrival=98.0, deadline=150.0))
    assert order(queue, 1.0) == [2, 1, 3]


def test_removal_and_forgetting_of_groups() -> None:
    a, b = seq(1, group="a"), seq(2, group="a")
    queue = queue_of(a, b)
    queue.remove(a)
    queue.leave(a)
    assert order(queue) == [2]
    queue.remove(b)
    queue.leave(b)
    assert len(queue) == 0
    assert not queue._service
