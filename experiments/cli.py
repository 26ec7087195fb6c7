"""`train-lm RUN --out DIR`: train a named run or a configuration file. Exit 0 done, 1 a named error, 2
usage.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from experiments.typed_command import typed_command
from interp.interrupt import INTERRUPTED, ended_by_interrupt
from interp.standard_output import OutputError, printed, say, stand_in_for_stderr

DESCRIPTION = "Train a small language model and keep its checkpoints."
NOT_BEGUN = "train-lm: stopped before training began"
EPILOG = """\
RUN is a named run (train-lm --list), a .py file holding CONFIG, or a .json file as in run.json.
With --resume it may be left out: DIR/run.json holds the run and its settings.
Several processes: accelerate launch -m experiments.cli RUN --out DIR, or torchrun -m experiments.cli ...
"""


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    stand_in_for_stderr()
    try:
        # In a process of its own, until training begins.
        with ended_by_interrupt(NOT_BEGUN, alone=arguments is None):
            parser = _parser()
            options = parser.parse_args(arguments)
            prepared = _prepared(parser, options)
        return prepared if isinstance(prepared, int) else _train(*prepared, options)
    except BrokenPipeError:
        # The reader of the list went away (`| head`); nothing more can be said to it.
        return 0
    except OutputError as error:
        print(f"train-lm: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(NOT_BEGUN, file=sys.stderr)
        return INTERRUPTED


def _prepared(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int | tuple:
    """Name and configuration of what is to be trained, all imported; or an exit status."""
    if not options.list and (options.out is None or (options.run is None and not options.resume)):
        parser.error("RUN and --out DIR are needed (or --out DIR --resume, or --list)")
    from models.errors import ConfigError

    try:
        if options.list:
            return _print_runs()
        name, config = _configured(options)
    except ConfigError as error:
        print(f"train-lm: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # A path that the system does not take, such as one that is too long.
        if isinstance(error, OutputError | BrokenPipeError):
            raise
        print(f"train-lm: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    import experiments.train  # noqa: F401

    return name, config


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train-lm",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a named run, or a .py or .json file")
    parser.add_argument("--out", metavar="DIR", type=Path, help="run folder, new or empty")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="change a setting, e.g. optimiser.lr=1e-3 (repeatable)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="the same as --set training.steps=N")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--tensorboard", action="store_true", help="also log to DIR/tensorboard")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--list", action="store_true", help="print the named runs and end")
    return parser


def _print_runs() -> int:
    from experiments.runs import load_run, run_names

    names = run_names()
    width = max(map(len, names))
    with printed():
        for name in names:
            print(f"{name:<{width}}  {load_run(name).description}")
    return 0


def _configured(options: argparse.Namespace):
    from experiments.config import with_settings
    from experiments.runs import begun_run, find_run

    name, config = begun_run(options.out) if options.run is None else find_run(options.run)
    settings = list(options.settings)
    if options.steps is not None:
        settings.append(f"training.steps={options.steps}")
    return name, with_settings(config, settings)


def _train(name: str, config, options: argparse.Namespace) -> int:
    from experiments.errors import TrainingError
    from experiments.train import train
    from models.errors import CheckpointError, ConfigError, out_of_memory

    try:
        result = train(
            config,
            options.out,
            name=name,
            resume=options.resume,
            device=options.device,
            progress=_progress(name, config, options),
        )
    except (ConfigError, CheckpointError, TrainingError) as error:
        print(f"train-lm: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"train-lm: {error.strerror or error}: {error.filename or options.out}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if (said := out_of_memory(error)) is None:
            raise
        print(f"train-lm: {said}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"train-lm: {_stopped(options)}", file=sys.stderr)
        return INTERRUPTED
    if result.is_main and not options.quiet:
        say(_closing_line(result))
    return 0


def _stopped(options: argparse.Namespace) -> str:
    if not (options.out / "run.json").is_file():
        return f"stopped before the first checkpoint; {options.out} is as it was"
    return f"stopped; this goes on from the last checkpoint: {_resuming(options)}"


def _resuming(options: argparse.Namespace) -> str:
    """The command that goes on, as it can be typed here."""
    words = ["--out", str(options.out), "--resume"]
    words += ["--device", options.device] if options.device != "auto" else []
    words += [f"--{name}" for name in ("tensorboard", "quiet") if getattr(options, name)]
    command = typed_command("train-lm", "experiments.cli")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        command = "accelerate launch -m experiments.cli"
    return f"{command} {shlex.join(words)}"


def _progress(name: str, config, options: argparse.Namespace):
    from experiments.progress import Bar, Lines, Progress, Several, TensorBoard

    if os.environ.get("RANK", "0") != "0":
        return Progress()
    parts = []
    if options.tensorboard:
        parts.append(TensorBoard(options.out / "tensorboard"))
    if not options.quiet:
        kind = Bar if sys.stderr is not None and sys.stderr.isatty() else Lines
        parts.append(kind(name, config.training.steps))
    return Several(*parts)


def _closing_line(result) -> str:
    record = result.record
    parts = [f"step {record['step']}", f"{record['tokens']:,} tokens", f"{record['wall_s']:.0f} s"]
    for key, words in (
        ("held_out_loss_nats", "held-out loss"),
        ("held_out_repeat_loss_nats", "at repeated tokens"),
        ("held_out_in_context_learning_nats", "in-context learning"),
    ):
        if key in record:
            parts.append(f"{words} {record[key]:.3f} nats")
    return f"{result.path}: {' · '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
