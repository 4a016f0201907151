"""Worker processes that encode blocks; results come back in the order of the blocks.

Each worker has a pipe of its own and reads its blocks from disk itself. When the parent dies, however it dies, the pipe
closes and the worker leaves: no process stays behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Union, cast

from megakit.data.preprocess.records import Block
from megakit.data.preprocess.worker import Result, Task, encode_block
from megakit.data.tokenizer import load_tokenizer
from megakit.errors import Stop

_QUEUED = 2  # blocks handed to a worker: the next one waits in its pipe
_AHEAD = 4  # blocks per worker that may be under way or done but not yet taken: bounds memory


def encode_blocks(blocks: Iterable[Block], task: Task, workers: int) -> Generator[tuple[Block, Result], None, None]:
    """Encode all blocks with `workers` processes and yield them in order. Close the iterator to stop the workers early."""
    pool = _Pool(task, workers)
    try:
        yield from pool.run(iter(blocks))
    finally:
        pool.close()


class _Pool:
    def __init__(self, task: Task, workers: int):
        context = multiprocessing.get_context("spawn")  # never a copy of the caller's threads
        self._processes: dict[Connection, BaseProcess] = {}
        self._queued: dict[Connection, deque[tuple[int, Block]]] = {}
        # workers inherit the mask: Ctrl-C is for the parent, which ends them. The tracker's start would undo it
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, task), daemon=True)
                process.start()
                theirs.close()
                self._processes[ours] = process
                self._queued[ours] = deque()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run(self, blocks: Iterator[Block]) -> Iterator[tuple[Block, Result]]:
        done: dict[int, tuple[Block, Result]] = {}
        handed = taken = 0
        more = True
        while True:
            while more and handed - taken < _AHEAD * len(self._processes):
                pipe = min(self._queued, key=lambda pipe: len(self._queued[pipe]))
                if len(self._queued[pipe]) == _QUEUED:
                    break
                block = next(blocks, None)
                if block is None:
                    more = False
                    break
                self._queued[pipe].append((handed, block))
                with contextlib.suppress(OSError):  # a worker that died is noticed when its result is waited for
                    pipe.send(block)
                handed += 1
            if taken in done:
                yield done.pop(taken)
                taken += 1
            elif taken == handed:
                return
            else:
                busy = [pipe for pipe, queued in self._queued.items() if queued]
                for pipe in cast("list[Connection]", wait(busy)):
                    number, block = self._queued[pipe].popleft()
                    done[number] = (block, self._receive(pipe, block))

    def _receive(self, pipe: Connection, block: Block) -> Result:
        where = f"{block.paths[0]}, bytes {block.start} to {block.end}"
        try:
            result: Union[Result, Stop, str] = pipe.recv()
        except (EOFError, OSError):
            process = self._processes[pipe]
            process.join(timeout=5)
            raise Stop(
                f"a worker died with exit code {process.exitcode} at {where} (-9: killed, often for memory): use fewer workers"
            ) from None
        if isinstance(result, Stop):
            raise result
        if isinstance(result, str):
            raise Stop(f"a worker failed at {where}:\n{result}")
        return result

    def close(self) -> None:
        for pipe in self._processes:
            pipe.close()
        for process in self._processes.values():
            process.terminate()
            process.join()


def _work(pipe: Connection, task: Task) -> None:
    try:
        tokenizer = load_tokenizer(task.tokenizer)
        while True:
            pipe.send(encode_block(pipe.recv(), task, tokenizer))
    except (EOFError, BrokenPipeError):
        return  # the parent is gone, or wants no more
    except Stop as e:
        _tell(pipe, e)
    except BaseException:
        _tell(pipe, traceback.format_exc())


def _tell(pipe: Connection, message: Union[Stop, str]) -> None:
    with contextlib.suppress(OSError):
        pipe.send(message)
