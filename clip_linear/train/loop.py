"""The training loop: ``train(config)`` runs a run from wherever its folder stands to its end, and says how it ended."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from clip_linear import provenance
from clip_linear.data.state import add_up
from clip_linear.errors import RunError, UserError
from clip_linear.files import write_json
from clip_linear.train import checkpoint, evaluating, folder, rng, saving
from clip_linear.train.build import build, make_loss, make_optimizer, make_schedule, write_open_clip_config
from clip_linear.train.cadence import Cadence
from clip_linear.train.config import TrainConfig
from clip_linear.train.ema import Ema
from clip_linear.train.evaluating import Evaluate, Row
from clip_linear.train.feed import Feed, MakeLoader, shard_names
from clip_linear.train.guards import Guards
from clip_linear.train.report import Report, check_targets
from clip_linear.train.speed import Clock, memory
from clip_linear.train.step import Stepper
from clip_linear.train.stop import EXIT_CODES, StopFlag
from clip_linear.train.watch import Watch
from clip_linear.train.world import World
from clip_linear.train.wrap import wrap

log = logging.getLogger(__name__)
SAVE_PATIENCE_S = 1800.0  # how long the other ranks wait for rank 0's last checkpoint


def train(config: TrainConfig, evaluate: Evaluate | None = None, make_loader: MakeLoader | None = None) -> int:
    """Train until done or told to stop. Returns 0 (done), 75 (continue me: SIGUSR2) or 143 (stopped: SIGTERM).

    Ranks other than the first return 0 when they were told to stop. A finished run returns 0 at once. Raises UserError
    for a user's mistake and RunError for a run that cannot go on; failed.json then says why.
    """
    run_dir = config.run_dir
    folder.check_same_run(run_dir, config)
    if folder.is_done(run_dir):
        log.info("%s is done already", run_dir)
        return 0
    check_targets(config)
    trainer: Trainer | None = None
    with StopFlag() as stop:
        world = World.join(config.openclip, run_dir, config.dist_timeout_s)
        try:
            trainer = Trainer(config, world, stop, evaluate, make_loader)
            return trainer.run()
        except Exception as error:
            dead = trainer.watch.dead() if trainer is not None else []
            if dead:
                error.add_note(f"rank {dead[0]} is dead: it was killed, or ran out of memory")
            folder.write_failed(run_dir, error, world.rank, trainer.step if trainer is not None else None)
            if world.world_size > 1:
                mistake = isinstance(error, UserError)
                log.error("rank %d failed: %s", world.rank, error, exc_info=not mistake)
                world.forget_rendezvous()
                logging.shutdown()
                os._exit(2 if mistake else 1)  # the others see the closed connection; a tidy end would wait for them
            raise
        finally:
            world.leave()


class Trainer:
    """One attempt at a run."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        stop: StopFlag,
        evaluate: Evaluate | None = None,
        make_loader: MakeLoader | None = None,
    ) -> None:
        self.config, self.world, self.stop, self.evaluate = config, world, stop, evaluate
        self.run_dir: Path = config.run_dir
        facts = {"code": provenance.commit(), "versions": provenance.versions(), "run": config.run_id}
        facts["shard list"] = shard_names(config) if make_loader is None else ""
        if world.is_first:
            folder.take_over(self.run_dir, config)
        table = world.preflight(facts)
        if world.is_first:
            folder.claim(self.run_dir, config, table)
        self.watch = Watch(self.run_dir, table, world.rank)
        _set_backends(config.deterministic)
        rng.seed_all(config.seed)
        self.parts = build(config, world.device)
        rng.seed_all(config.seed + world.rank)
        self.inner = self.parts.model
        self.model = wrap(self.inner, config, world)
        self.optimizer = make_optimizer(config, self.inner)
        self.schedule = make_schedule(config, self.optimizer)
        self.ema = Ema(self.inner, config.ema_decay) if config.ema_decay else None
        loss = make_loss(config, world.rank, world.world_size)
        self.stepper = Stepper(
            config, self.model, self.inner, loss, self.optimizer, world, self.parts.teacher, self.parts.transfer
        )
        self.guards = Guards(config.max_bad_steps)
        self.cadence = Cadence(config)
        self.step, self.seconds, self.loss = 0, 0.0, float("nan")
        self.faults: dict[str, int] = {}  # of all ranks, at the last logged step
        states = saving.restore(self)
        self.saved_step = self.step if states is not None else -1
        self.feed = Feed(config, self.parts, world, states, self.step, make_loader)
        self.lag: deque[tuple[int, Tensor, torch.cuda.Event | None, Row | None]] = deque()
        if world.is_first:
            folder.cut_back(self.run_dir, self.step)
            self.writer = checkpoint.Writer(
                self.run_dir, config.keep_last, self.cadence.is_milestone, config.save_most_recent
            )
            self.report = Report(self.run_dir, config, self.step)
            self.attempt = folder.Attempt(self.run_dir, config)
            self.attempt.start(self.step)

    def run(self) -> int:
        """Train to the end. See ``train``."""
        code, reason = 1, ""
        try:
            code = self._train()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if self.world.is_first:
                with contextlib.suppress(RunError):  # a checkpoint that is being written is not lost with the run
                    self.writer.wait()
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise RunError(
                    f"cannot write {error.filename or self.run_dir} ({error.strerror}); the earlier checkpoints are "
                    "untouched: make room, then start the same command again"
                ) from error
            raise
        finally:
            self.watch.stop()
            self.feed.close()
            if self.world.is_first:
                self.report.close()
                self.attempt.end(code, reason)
        return code if self.world.is_first else 0

    def begin(self) -> None:
        """Get ready for ``one_step``: training mode, clocks running."""
        self.model.train()
        self.clock, self.started = Clock(self.config, self.inner, self.world), time.perf_counter()

    def _train(self) -> int:
        self.begin()
        while True:
            last = self.step >= self.config.steps
            asked, minutes = self.world.agree([self.stop.asked, int(self.cadence.minutes_over())])
            if self.step != self.saved_step and (last or asked or minutes or self.cadence.saves(self.step)):
                self._save()
            if asked or last:
                self._flush()
            if asked:
                return EXIT_CODES[asked]
            if evaluating.is_due(self, last):
                if self.step != self.saved_step:
                    self._save()
                self._flush()
                evaluating.evaluate(self, last)
            if last:
                self._finish()
                return 0
            self.one_step()

    def one_step(self) -> None:
        """Take the next step, and look at those whose numbers have arrived."""
        waiting = time.perf_counter()
        pairs = self.feed.next_pairs()
        self.clock.waited += time.perf_counter() - waiting
        lr = self.schedule(self.step)
        vector, losses = self.stepper(pairs)
        if self.ema is not None:
            self.ema.update()
        self.step += 1
        self.clock.count(self.config.global_batch)
        row = self._row(lr, losses) if self.cadence.logs(self.step) else None
        arrived = None
        if vector.is_cuda:  # look at the numbers while the next step runs
            host = torch.empty(vector.shape, pin_memory=True)
            vector, arrived = host.copy_(vector, non_blocking=True), torch.cuda.Event()
            arrived.record()
        self.lag.append((self.step, vector, arrived, row))
        self._look(behind=0 if arrived is None else 1)
        if self.world.is_first:
            self.attempt.update(step=self.step, samples_seen=self.step * self.config.global_batch)

    def _row(self, lr: float, losses: dict[str, Tensor]) -> Row:
        samples = self.step * self.config.global_batch
        row: Row = {"step": self.step, "samples_seen": samples, "epoch": self.step / self.config.steps_per_epoch}
        row |= {"loss": None, "lr": lr, "logit_scale": None, "grad_norm": None}
        if len(losses) > 2 or self.parts.transfer is not None:
            row |= {name: value.item() for name, value in losses.items() if name != "loss"}
        row |= self.clock.read() | memory(self.world.device)
        self.faults = add_up(self.world.gather(self.feed.faults))
        return row | {"faults": self.faults, "t": time.time()}

    def _look(self, behind: int) -> None:
        """Look at the steps whose numbers have arrived: the guards at each, a row for those that are logged."""
        while len(self.lag) > behind:
            step, vector, arrived, row = self.lag.popleft()
            if arrived is not None:
                arrived.synchronize()
            loss, norm, scale, bad = vector.tolist()
            self.guards.look(step, loss, norm, scale, bool(bad))
            if row is None:
                continue
            self.loss = self.world.mean([loss])[0]
            if self.world.is_first:
                row |= {"loss": self.loss, "logit_scale": scale, "grad_norm": norm} | self.guards.counts()
                self.report.row(row)
                rate = row["samples_per_s"]
                eta = (self.config.steps - step) * self.config.global_batch / rate
                self.attempt.update(loss=self.loss, samples_per_s=rate, eta_s=eta)

    def seconds_so_far(self) -> float:
        """Seconds of training, all attempts together."""
        return self.seconds + time.perf_counter() - self.started

    def _save(self) -> None:
        self._look(behind=0)
        state = saving.collect(self)
        self.cadence.saved()
        self.saved_step = self.step
        if state is not None:
            if not (self.run_dir / checkpoint.OPENCLIP_CONFIG).exists():
                write_open_clip_config(self.run_dir / checkpoint.OPENCLIP_CONFIG, self.config, self.inner)
            self.writer.save(*state)

    def _flush(self) -> None:
        """Rank 0's checkpoint is on disk, and everybody knows."""
        self._look(behind=0)
        if self.world.is_first:
            self.writer.wait()
        self.world.wait(SAVE_PATIENCE_S)

    def _finish(self) -> None:
        if not self.world.is_first:
            return
        facts = {"run_id": self.config.run_id, "step": self.step, "samples_seen": self.step * self.config.global_batch}
        facts |= {"loss": self.loss, "seconds": self.seconds_so_far(), "date": provenance.date()}
        write_json(self.run_dir / folder.DONE, facts | self.guards.counts() | {"faults": self.faults})


def _set_backends(deterministic: bool) -> None:
    """OpenCLIP's settings for CUDA (TF32, cuDNN's search), or none that may give other bits."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = not deterministic
        torch.backends.cudnn.deterministic = deterministic
