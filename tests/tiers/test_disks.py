"""Disks that are full, slow, stuck or gone: they cost hits, never a step, and never a wrong answer."""

from __future__ import annotations

import errno
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shoal.engine.kv.disk
import shoal.engine.kv.files
import shoal.engine.kv.tiering
from shoal.engine.kv.buffers import Buffers
from shoal.engine.kv.disk import DiskTier
from shoal.engine.kv.files import KVFiles, clear, stored
from shoal.runners.fake import FakeRunner
from shoal.types import Request, SamplingParams
from tests.support.engines import toy_engine
from tests.support.tiers import SIZE, BadFiles, Lab, alone

ROOT = Path(__file__).parents[2]
PROMPTS = [[start + i for i in range(44)] for start in (10, 60, 110, 160)]


def bad(path: Path) -> BadFiles:
    return BadFiles(path, FakeRunner(block_size=SIZE).identity)


def full(files: BadFiles) -> None:
    files.error = OSError(errno.ENOSPC, "No space left on device")


def slow(files: BadFiles) -> None:
    files.slow_s = 0.05  # far more than a step


def stuck(files: BadFiles) -> None:
    files.stuck.set()


def gone(files: BadFiles) -> None:
    files.path = Path("/nowhere/at/all")


def filled(path: Path) -> Lab:
    """One that has answered `PROMPTS` and is closed: their KV lies on the disk."""
    lab = Lab(path)
    for prompt in PROMPTS:
        lab.ask(prompt)
    lab.close()
    return lab


@pytest.mark.parametrize("suffer", [full, slow, stuck, gone])
@pytest.mark.parametrize("warm", [False, True])
def test_streams_get_a_token_in_every_step_whatever_the_disk_does(
    tmp_path: Path, suffer: Callable[[BadFiles], None], warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`warm`: there are blocks to be brought back too. Steps are counted, not timed."""
    monkeypatch.setattr(shoal.engine.kv.disk, "_STALL_S", 0.1)
    monkeypatch.setattr(shoal.engine.kv.tiering, "_WAIT_S", (0.05, 10.0))
    monkeypatch.setattr(shoal.engine.kv.tiering, "_FLUSH_S", 5.0)
    if warm:
        filled(tmp_path)
    files = bad(tmp_path)
    lab = Lab(files=files)
    suffer(files)
    stream, events = lab.add([*range(200, 220)], 200)
    while not stream.seq.decoding:
        lab.step()
    late = []
    for count in range(150):
        if count % 30 == 0 and count // 30 < 4:
            late.append(lab.add(PROMPTS[count // 30], 4))
        written = len(stream.seq.tokens)
        lab.step()
        assert len(stream.seq.tokens) > written, "a stream waits for the disk"
    lab.drain()
    assert lab.idle_steps == 0
    assert events[-1].result is not None
    assert events[-1].result.tokens == alone([*range(200, 220)], 200)
    for prompt, (_, told) in zip(PROMPTS, late, strict=True):
        assert told[-1].result is not None
        assert told[-1].result.tokens == alone(prompt)
    begin = time.monotonic()
    lab.close()
    files.free()
    assert time.monotonic() - begin < 20.0, "an engine ends also when its disk does not answer"


def test_a_fault_is_said_once_and_the_disk_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shoal.engine.kv.disk, "_PAUSE_S", 0.0)
    files = bad(tmp_path)
    lab = Lab(files=files)
    full(files)
    with caplog.at_level(logging.WARNING):
        for prompt in PROMPTS:
            lab.ask(prompt)
        settle(lab)
    assert len([r for r in caplog.records if "left alone" in r.getMessage()]) == 1
    assert lab.tiers.stats().disk_fault is not None
    assert lab.tiers.stats().dropped_blocks > 0
    files.error = None
    lab.ask([*range(0, 100, 2)])
    settle(lab)
    assert lab.tiers.stats().disk_fault is None
    lab.close()
    again = Lab(tmp_path)
    assert again.ask([*range(0, 100, 2)])[1].disk_tokens == 48
    again.close()


def settle(lab: Lab) -> None:
    end = time.monotonic() + 60.0
    while lab.disk is not None and lab.disk.queued_bytes and time.monotonic() < end:
        time.sleep(0.01)


def test_a_disk_slower_than_computing_is_not_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.engine.kv.tiering, "_WAIT_S", (0.05, 0.05))
    filled(tmp_path)
    files = bad(tmp_path)
    lab = Lab(files=files)
    stuck(files)
    _, receipt = lab.ask(PROMPTS[0])
    assert receipt.disk_tokens == 0
    assert lab.tiers.stats().given_up == 1
    state, _ = lab.add(PROMPTS[1])
    lab.step()
    assert not state.seq.held
    files.free()
    lab.drain()
    lab.close()


def test_one_that_comes_while_another_waits_for_the_disk_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    known = Request(prompt="known " * 40, sampling=sampling)
    with toy_engine(kv_cache="1MiB") as engine:
        expected = engine.complete(known).tokens
    monkeypatch.setattr(shoal.engine.kv.tiering, "_WAIT_S", (60.0, 60.0))
    freed = threading.Event()
    read = KVFiles.read

    def stuck_read(self: KVFiles, digest: bytes, buffers: Buffers) -> object:
        freed.wait(60.0)
        return read(self, digest, buffers)

    monkeypatch.setattr(KVFiles, "read", stuck_read)
    with toy_engine(kv_cache="1MiB") as engine:
        waits = engine.submit(known)
        while not (engine._loop.kv_on_its_way and engine._loop.rest_s):
            time.sleep(0.001)
        other = engine.submit(Request(prompt="another one", sampling=sampling)).result(60.0)
        assert other.finish_reason == "length"
        assert waits.state == "queued"
        freed.set()
        assert waits.result().tokens == expected
        assert waits.result().receipt.disk_tokens == 224


def test_a_damaged_block_is_not_used_and_is_deleted(tmp_path: Path) -> None:
    before = filled(tmp_path)
    assert before.disk is not None
    rng = random.Random(5)
    files = sorted(file for file in before.disk.files.path.iterdir() if len(file.name) == 40)
    for file in files:
        data = bytearray(file.read_bytes())
        how = rng.randrange(4)
        if how == 0:
            data[rng.randrange(len(data) - 24)] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[rng.randrange(len(data)) :]
        elif how == 2:
            data += b"more"
        else:
            data[:] = files[0].read_bytes() if file != files[0] else b""  # another block's, whole
        file.write_bytes(bytes(data))
    lab = Lab(tmp_path)
    for prompt in PROMPTS:
        tokens, receipt = lab.ask(prompt)
        assert (tokens, receipt.disk_tokens) == (alone(prompt), 0)
    lab.close()
    for _ in range(6):  # computed and written anew, where they were found to be damaged
        again = Lab(tmp_path)
        receipts = [again.ask(prompt)[1] for prompt in PROMPTS]
        again.close()
    assert [receipt.disk_tokens for receipt in receipts] == [40] * 4


def test_blocks_of_another_size_are_not_put_on_the_device(tmp_path: Path) -> None:
    before = Lab(tmp_path)
    before.ask(PROMPTS[0])
    assert before.disk is not None
    files = before.disk.files
    before.close()
    for digest in files.digests():
        files.write(digest, np.zeros(3, np.uint8))
    lab = Lab(tmp_path)
    assert lab.ask(PROMPTS[0])[0] == alone(PROMPTS[0])
    lab.close()


def test_a_key_that_is_damaged_is_made_anew_and_hides_what_was_there(tmp_path: Path) -> None:
    before = Lab(tmp_path)
    before.ask(PROMPTS[0])
    before.close()
    (tmp_path / "key").write_bytes(b"short")
    lab = Lab(tmp_path)
    assert lab.ask(PROMPTS[0])[1].disk_tokens == 0
    lab.close()
    again = Lab(tmp_path)
    assert again.ask(PROMPTS[0])[1].disk_tokens == 40
    again.close()


def test_names_tell_nothing_of_the_tokens(tmp_path: Path) -> None:
    names = []
    for place in ("a", "b"):
        lab = Lab(tmp_path / place)
        lab.ask(PROMPTS[0])
        lab.close()
        assert lab.disk is not None
        names.append({file.name for file in lab.disk.files.path.iterdir()} - {"about.json"})
    assert len(names[0]) == len(names[1]) == 5
    assert not names[0] & names[1]


def test_two_engines_share_a_directory(tmp_path: Path) -> None:
    one, two = Lab(tmp_path), Lab(tmp_path)
    for prompt in PROMPTS:
        assert one.ask(prompt)[0] == two.ask(prompt)[0] == alone(prompt)
    assert two.disk is not None
    for digest in list(two.disk.files.digests()):
        (two.disk.files.path / digest.hex()).unlink()  # as another process whose quota is smaller would
    one.loop.drop_kv()
    assert one.ask(PROMPTS[0])[0] == alone(PROMPTS[0])
    one.close()
    two.close()


def test_what_is_kept_is_shown_and_cleared(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.ask(PROMPTS[0])
    lab.close()
    (kept,) = stored(tmp_path)
    assert (kept.about["model"], kept.blocks, kept.bytes) == ("fake", 5, 5 * (64 + 8 * SIZE))
    assert clear(kept) == kept.bytes
    assert stored(tmp_path) == []
    assert stored(tmp_path / "nowhere") == []


def test_an_engine_goes_on_after_its_blocks_were_cleared(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.ask(PROMPTS[0])
    (kept,) = stored(tmp_path)
    clear(kept)
    lab.ask(PROMPTS[1])
    settle(lab)
    assert lab.tiers.stats().disk_fault is None
    lab.loop.drop_kv()
    assert lab.ask(PROMPTS[0])[0] == alone(PROMPTS[0])  # its index still has them: they are not there any more
    lab.close()
    again = Lab(tmp_path)
    assert again.ask(PROMPTS[1])[1].disk_tokens == 40
    again.close()
    assert stored(tmp_path)[0].about["model"] == "fake"


def test_half_written_files_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    files = KVFiles(tmp_path, "x", {}, 1 << 20)
    dead = files.path / ".999999999-1.0"
    dead.write_bytes(b"half")
    files.clean()
    assert not dead.exists()


def test_less_than_a_reserve_of_free_disk_counts_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.engine.kv.files, "_SPARE", 1 << 60)
    files = KVFiles(tmp_path, "x", {}, 1 << 20)
    with pytest.raises(OSError, match="MiB of the disk"):
        files.write(bytes(20), np.zeros(4, np.uint8))
    assert files.digests() == set()


def test_a_write_that_the_system_cuts_short_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = KVFiles(tmp_path, "x", {}, 1 << 20)

    def some(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("os.write", some)
    with pytest.raises(OSError, match="too large"):
        files.write(bytes(20), np.zeros(4, np.uint8))
    monkeypatch.undo()
    assert sorted(file.name for file in files.path.iterdir()) == ["about.json"]


def test_blocks_that_do_not_fit_the_queue_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.engine.kv.disk, "_QUEUED", 300)
    files = bad(tmp_path)
    disk = DiskTier(files, Buffers(100, 300))
    disk.wait_scanned(60.0)
    stuck(files)
    for number in range(5):
        disk.put(bytes([number]) * 20, np.zeros(100, np.uint8))
    assert disk.dropped == 2
    assert disk.queued_bytes == 300
    assert not disk.has_room(100)
    files.free()
    disk.flush(60.0)
    assert disk.written_bytes == 300
    disk.close()


def test_of_too_many_kept_blocks_those_are_forgotten_that_are_wanted_the_shortest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.engine.kv.disk, "_KEPT", 4)
    disk = DiskTier(bad(tmp_path), Buffers(100, 300))
    names = [bytes([number]) * 20 for number in range(8)]
    disk.keep(names[:3], 60.0)
    disk.keep(names[3:5], 10.0)
    disk.keep(names[:1], 5.0)  # it was promised more
    assert set(disk._until) in ({*names[:3], names[3]}, {*names[:3], names[4]})
    disk.keep(names[5:8], 30.0)
    assert {*names[:3]} < set(disk._until)
    assert len(disk._until) == 4
    for _ in range(20):  # again and again: nothing piles up
        disk.keep(names[:3], 90.0)
    assert {*names[:3]} < set(disk._until)
    assert len(disk._soonest) <= 9
    disk.close()


def test_nothing_wrong_is_left_by_processes_that_are_killed() -> None:
    """`scripts/kv_kill.py` does it two hundred times."""
    told = subprocess.run(
        [sys.executable, ROOT / "scripts" / "kv_kill.py", "3"], capture_output=True, text=True, timeout=300, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
