"""Scoring checkpoints in order: shared over processes, equal weights once, finished ones not again.

On a GPU a checkpoint is ended while the next one is on its way: meanwhile the host computes eigenvalues.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from interp.finished import Facts, Finished, FinishedFolder
from interp.finite_outputs import check_finite_scores
from interp.plan import Plan
from interp.ranks import Ranks, current_ranks
from interp.records import AttentionMap, CheckpointScores
from interp.sources import Checkpoint
from interp.subject import Subject
from models.errors import CheckpointError, ConfigError

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is done with a loaded checkpoint: choose probes (once), score, make maps (of the last one).

    Attributes:
        measure: Done with the model when it returns; the function that it returns gives the scores.
        overlap: Whether to call that function when the next checkpoint has been measured, or at once.
    """

    plan: Callable[[Subject], Plan]
    measure: Callable[[Subject, Plan, Checkpoint], Callable[[], CheckpointScores]]
    maps: Callable[[Subject, Plan, CheckpointScores], tuple[AttentionMap, ...]]
    overlap: bool = False


@dataclass(kw_only=True)
class CheckpointRun:
    """A run over checkpoints in step order.

    Attributes:
        finished: Where scores are kept and found again; None keeps none.
        lenient: A checkpoint that cannot be read is left out and named, instead of ending the run.
        left_out: "step N: why", for those.
    """

    work: Work
    finished: FinishedFolder | None = None
    lenient: bool = False
    progress: Progress | None = None
    left_out: list[str] = field(default_factory=list)
    _plan: Plan | None = None
    _ahead: "_Ahead | None" = None
    _seen: dict[str, Callable[[], Finished]] = field(default_factory=dict)

    def __call__(self, chosen: Sequence[Checkpoint]) -> list[Finished]:
        """Scores of all checkpoints, in order; on several processes each does a part, and all get everything.

        Raises:
            CheckpointError, ConfigError: a checkpoint that cannot be read; where lenient, that none can.
        """
        ranks = current_ranks()
        mine = ranks.share(chosen)
        found: list[Finished] = []
        waiting: list[Callable[[], Finished]] = []
        with ThreadPoolExecutor(1) as pool:
            self._ahead = _Ahead(pool, mine)
            for n, checkpoint in enumerate(mine):
                self._tell(ranks, n, len(mine), checkpoint.step)
                last = checkpoint is chosen[-1]
                earlier, waiting = waiting, []
                try:
                    waiting = [self._score(checkpoint, self._ahead.digest(n), last=last)]
                except (CheckpointError, ConfigError) as error:
                    if not self.lenient:
                        raise
                    self.left_out.append(f"step {checkpoint.step}: {error}")
                finally:
                    # Whatever became of this one.
                    found += [end() for end in earlier]
                if last or not self.work.overlap:
                    found += [end() for end in waiting]
                    waiting = []
            found += [end() for end in waiting]
        if mine:
            self._tell(ranks, len(mine), len(mine), mine[-1].step)
        found, self.left_out = ranks.gather(found), ranks.gather(self.left_out)
        if not found:
            raise CheckpointError(f"no checkpoint can be read; {self.left_out[0]}")
        return _marked(found)

    def _tell(self, ranks: Ranks, done: int, total: int, step: int) -> None:
        if self.progress and ranks.is_main:
            self.progress(done, total, step)

    def _score(self, checkpoint: Checkpoint, digest: str | None, *, last: bool) -> Callable[[], Finished]:
        """Begins with a checkpoint; what is returned ends it, once."""
        kept = self.finished.get(checkpoint.step, digest) if self.finished else None
        # The last one is read whole: the maps are made from it.
        if kept is None and not last and digest in self._seen:
            seen = self._seen[digest]
            return lambda: _again(seen(), checkpoint)
        computed = kept is None or (last and kept.maps is None)
        begun = self._computed(checkpoint, digest, last) if computed else lambda: kept

        def end() -> Finished:
            found = begun()
            if computed and self.finished:
                self.finished.put(found, digest)
            return found

        once = _Once(end)
        if digest:
            self._seen.setdefault(digest, once)
        return once

    def _computed(self, checkpoint: Checkpoint, digest: str | None, last: bool) -> Callable[[], Finished]:
        subject = checkpoint.open()
        self._ahead.opened()
        if self._plan is None:
            self._plan = self.work.plan(subject)
        plan = self._plan
        measured = self.work.measure(subject, plan, checkpoint)
        origin = subject.origin
        digest = digest or (origin or {}).get("weight_sha256")
        facts = Facts(
            mixers=subject.mixers,
            n_layers=subject.n_layers,
            n_heads=subject.n_heads,
            probe=plan.record,
            notes=plan.notes,
            text=plan.windows_from,
            origin=origin,
        )

        def end() -> Finished:
            scores = measured()
            check_finite_scores(scores)
            maps = self.work.maps(subject, plan, scores) if last else None
            return Finished(scores=dataclasses.replace(scores, weight_sha256=digest), facts=facts, maps=maps)

        return end


class _Once:
    """What a function returns when it is called for the first time; the function is then let go."""

    def __init__(self, end: Callable[[], Finished]):
        self._end: Callable[[], Finished] | None = end
        self._found: Finished | None = None

    def __call__(self) -> Finished:
        if self._end is not None:
            self._found = self._end()
            self._end = None
        return self._found


class _Ahead:
    """Hashes the files and reads the weights of the next checkpoint, in a thread, while one is scored.

    An `identity` is not computed ahead: it may load the weights, and one model at a time is in memory.
    """

    def __init__(self, pool: ThreadPoolExecutor, checkpoints: Sequence[Checkpoint]):
        self.pool, self.checkpoints = pool, checkpoints
        self.current = 0
        self._digests: dict[int, Future] = {}
        self._prepared: Future | None = None

    def digest(self, n: int) -> str | None:
        """The hash of the n-th checkpoint, which is the current one from now on."""
        self.current = n
        for place in range(n, min(n + 2, len(self.checkpoints))):
            checkpoint = self.checkpoints[place]
            if place not in self._digests and checkpoint.identity is None and checkpoint.weight_files:
                self._digests[place] = self.pool.submit(checkpoint.sha256)
        if self._prepared is not None:
            self._prepared.result()
        begun = self._digests.get(n)
        return self.checkpoints[n].sha256() if begun is None else begun.result()

    def opened(self) -> None:
        """The current checkpoint has been loaded: the weights of the one after it may be read."""
        for following in self.checkpoints[self.current + 1 : self.current + 2]:
            if following.prepare is not None:
                self._prepared = self.pool.submit(following.prepare)


def _again(finished: Finished, checkpoint: Checkpoint) -> Finished:
    """The scores of equal weights, under this checkpoint's step."""
    scores = dataclasses.replace(finished.scores, step=checkpoint.step, tokens=checkpoint.tokens)
    return dataclasses.replace(finished, scores=scores, maps=None)


def _marked(found: list[Finished]) -> list[Finished]:
    """The same, each naming the first step that has its weights, where that is another one."""
    first: dict[str, int] = {}
    out = []
    for finished in found:
        scores = finished.scores
        earlier = first.setdefault(scores.weight_sha256, scores.step) if scores.weight_sha256 else scores.step
        same = None if earlier == scores.step else earlier
        out.append(
            dataclasses.replace(finished, scores=dataclasses.replace(scores, same_weights_as_step=same))
        )
    return out
