"""What is shown and logged while training: a bar or lines on stderr, TensorBoard where asked for."""

import sys
import time
from pathlib import Path
from typing import Any

from experiments.errors import TrainingError


class Progress:
    """Shows nothing; the base of the bar."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, record: dict[str, Any]) -> None:
        """Take one record of metrics.jsonl."""


class Bar(Progress):
    """A rich progress bar on stderr: step, loss, tokens a second, time left."""

    def __init__(self, name: str, total_steps: int, start: int = 0):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]} nats"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TextColumn("ETA"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task(name, total=total_steps, completed=start, loss="-", speed="-")

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, record: dict[str, Any]) -> None:
        shown = {"completed": record["step"]}
        if "loss_nats" in record:
            shown |= {"loss": f"{record['loss_nats']:.3f}", "speed": f"{record['tokens_per_s']:,.0f}"}
        self._bar.update(self._task, **shown)


class Lines(Progress):
    """Lines on stderr, for a log: at every tenth of the steps, and at least one a minute."""

    N_LINES, EVERY_S = 10, 60.0

    def __init__(self, name: str, total_steps: int, start: int = 0):
        self._name, self._total, self._said = name, total_steps, start
        self._at = time.monotonic()

    def update(self, record: dict[str, Any]) -> None:
        step, now = record["step"], time.monotonic()
        tenth = step * self.N_LINES // self._total > self._said * self.N_LINES // self._total
        if "loss_nats" not in record or not (tenth or now - self._at >= self.EVERY_S):
            return
        self._said, self._at = step, now
        print(
            f"train-lm: {self._name}: step {step:,} of {self._total:,}, loss {record['loss_nats']:.3f} nats, "
            f"{record['tokens_per_s']:,.0f} tokens/s",
            file=sys.stderr,
            flush=True,
        )


class TensorBoard(Progress):
    """Every number of every record as a TensorBoard scalar, under the run folder's `tensorboard/`."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TrainingError(
                "--tensorboard needs the package tensorboard, which is not installed"
            ) from error
        self._folder, self._writer_class = folder, SummaryWriter

    def __enter__(self) -> "TensorBoard":
        self._writer = self._writer_class(str(self._folder))
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def update(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if key != "step":
                self._writer.add_scalar(key, value, record["step"])


class Several(Progress):
    """Passes each record on to several."""

    def __init__(self, *parts: Progress):
        self._parts = parts

    def __enter__(self) -> "Several":
        for part in self._parts:
            part.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for part in reversed(self._parts):
            part.__exit__(*error)

    def update(self, record: dict[str, Any]) -> None:
        for part in self._parts:
            part.update(record)
