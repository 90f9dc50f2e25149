"""What `test_rank_calls.py` runs on each of three ranks, of which one makes a call alone.

lone_ranks.py CASE FOLDER
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from shardwright.core.runtime import rank_calls as settings
from shardwright.core.runtime.counted_calls import rank_calls
from shardwright.core.runtime.rank_calls import RankCalls


class Lone:
    """A model that is trained on all ranks, and what one of them does alone."""

    def __init__(self, folder: Path, *, untrained: bool = False, unplanned: bool = False) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
        net = sw.WithLoss(layers, nn.CrossEntropyLoss())
        self.batch = torch.randn(12, 6), torch.arange(12) % 3
        storage = sw.OptimizerParallel(level="level3", threshold=0)
        plan = sw.plan(net, self.batch, devices=3, mode="data_parallel", hsdp=storage)
        self.folder, self.alone = folder, dist.get_rank() == 0
        if unplanned and not self.alone:
            return
        self.net: Any = sw.parallelize(net, plan)
        self.calls = cast("RankCalls", rank_calls())
        if not untrained:
            for _ in range(3):
                self.net(*self.batch).backward()

    def evaluate(self) -> None:
        self.net.eval()
        with torch.no_grad():
            self.net(*self.batch)
        self.net.train()

    def gather(self) -> None:
        for each in self.net.state_dict().values():
            each.full_tensor()

    def evaluates(self) -> None:
        if self.alone:
            self.evaluate()
        self.net(*self.batch).backward()

    def evaluates_during_a_backward_pass(self) -> None:
        loss: Tensor = self.net(*self.batch)
        if self.alone:
            self.evaluate()
        loss.backward()

    def evaluates_before_a_barrier(self) -> None:
        if self.alone:
            self.evaluate()
        dist.barrier()

    def parallelizes_before_a_barrier(self) -> None:
        dist.barrier()

    def parallelizes_when_the_others_have_ended(self) -> None:
        return

    def makes_its_first_call_before_a_barrier(self) -> None:
        if self.alone:
            self.net(*self.batch)
        dist.barrier()

    def saves_before_a_barrier(self) -> None:
        if self.alone:
            sw.save_checkpoint(self.folder, self.net, position=sw.Position(step=1))
        dist.barrier()

    def saves_a_state_dict(self) -> None:
        if self.alone:
            sw.save_state_dict(self.net, self.folder / "net.pt")
        self.net.train_step(*self.batch)

    def gathers(self) -> None:
        loss: Tensor = self.net(*self.batch)
        if self.alone:
            with sw.whole(self.net):
                pass
        loss.backward()

    def calls_another_model(self) -> None:
        torch.manual_seed(0)
        net = sw.WithLoss(nn.Linear(6, 3), nn.CrossEntropyLoss())
        other = sw.parallelize(net, sw.plan(net, self.batch, devices=3, mode="data_parallel"))
        for model in (other, self.net) if self.alone else (self.net, other):
            model(*self.batch).backward()

    def clips(self) -> None:
        if self.alone:
            self.net.clip_grad_norm_(1.0)
        self.net(*self.batch).backward()

    def prints_a_norm(self) -> None:
        if self.alone:
            print(next(self.net.parameters()).norm().item())
        self.net(*self.batch).backward()

    def reduces_a_number(self) -> None:
        if self.alone:
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        self.net(*self.batch).backward()

    def reduces_a_number_in_a_group_of_its_own(self) -> None:
        group = dist.new_group()
        if self.alone:
            dist.all_reduce(torch.ones(3), group=group)
        self.net(*self.batch).backward()

    def evaluates_in_a_thread(self) -> None:
        with ThreadPoolExecutor(1) as threads:
            if self.alone:
                # The others make no such call, so it waits for them.
                evaluation = threads.submit(self.evaluate)
                while not evaluation.running() or not self.calls.is_inside_a_call:
                    time.sleep(0.01)
            self.net.train_step(*self.batch)

    def calls_in_turn_in_threads(self) -> None:
        eager, x = nn.Linear(3, 3), torch.ones(3)
        with ThreadPoolExecutor(1) as threads:
            others = [threads.submit(lambda: eager(x).sum().backward()) for _ in range(200)]
            self.net(*self.batch).backward()
            for each in others:
                each.result()
            for _ in range(3):
                threads.submit(self.evaluate).result()
                self.net.train_step(*self.batch)
                threads.submit(self.gather).result()

    def ends(self) -> None:
        if self.alone:
            raise OSError("record 17 is damaged")
        self.net(*self.batch).backward()

    def ends_before_a_checkpoint(self) -> None:
        if not self.alone:
            sw.save_checkpoint(self.folder, self.net, position=sw.Position(step=1))

    def leaves_out_a_backward_pass(self) -> None:
        loss: Tensor = self.net(*self.batch)
        if not self.alone:
            loss.backward()
        self.net.train_step(*self.batch)

    def is_slow(self) -> None:
        if self.alone:
            time.sleep(3)
        self.evaluate()
        dist.barrier()

    def outlasts_the_others(self) -> None:
        if self.alone:
            self.evaluate()
        else:
            time.sleep(9)

    def is_waited_for_in_an_asynchronous_collective(self) -> None:
        sent, received = torch.ones(2), torch.ones(2)
        if self.alone:
            work = dist.all_reduce(sent, async_op=True)
            dist.recv(received, src=1)
            work.wait()
            return
        if dist.get_rank() == 1:
            dist.send(received, 0)
        dist.all_reduce(sent)

    def is_refused_alone(self) -> None:
        if self.alone:
            try:
                self.net(torch.ones(2))
            except sw.PlanError:
                print("refused alone")
        self.evaluate()
        self.net(*self.batch).backward()
        with sw.whole(self.net):
            pass


CASES: dict[str, Callable[[Lone], None]] = {
    name: function
    for name, function in vars(Lone).items()
    if name[0] != "_" and name not in ("evaluate", "gather")
}


def main(case: str, folder: Path) -> None:
    # Seconds would pass in each case.
    for name, value in (("IDLE_SECONDS", 1.0), ("POLL_INTERVAL", 0.1), ("ERROR_DELAY", 1.0)):
        setattr(settings, name, value)
    seconds = 5 if case == "outlasts_the_others" else 120
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    torch.set_num_threads(1)
    untrained = case == "makes_its_first_call_before_a_barrier"
    started = time.monotonic()
    try:
        lone = Lone(folder, untrained=untrained, unplanned=case.startswith("parallelizes"))
        CASES[case](lone)
    except (sw.DataError, RuntimeError) as error:
        kind, text = type(error).__name__, str(error).replace("\n", " / ")
        seconds = time.monotonic() - started
        print(f"rank {dist.get_rank()} raised {kind} in {seconds:.0f} s: {text}", flush=True)
    except OSError as error:
        sys.last_value = error  # As Python sets it for an exception that ends a process.
    else:
        print(f"rank {dist.get_rank()} passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
