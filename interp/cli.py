"""The command `detect-induction`: find the induction heads of a checkpoint, a series, or a foreign model."""

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from interp.device_start import begin_device
from interp.interrupt import INTERRUPTED, ended_by_interrupt
from interp.output_files import STDOUT, check_outputs
from interp.records import SCORES, DetectionReport, to_csv, to_json, write_text
from interp.standard_output import leave, printed, stand_in_for_stderr, write_bytes
from models import without_lens

PROG = "detect-induction"
INTERRUPTION = f"{PROG}: interrupted"


def command() -> NoReturn:
    """The command as a process of its own, which ends with it."""
    from interp.ranks import current_ranks

    status = main()
    if current_ranks().world > 1:
        # torch.distributed ends its processes together.
        sys.exit(status)
    leave(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 when done, 1 after a named error in one line, 130 after Ctrl-C (argparse
    exits 2 on wrong usage).
    """
    options = _parser().parse_args(argv)
    # The process is this command's own.
    alone = argv is None
    if alone:
        # Nothing in it hooks a model by means of transformer_lens.
        without_lens()
    stand_in_for_stderr()
    # Imported late: `--help` and wrong usage answer at once.
    from interp.errors import DetectionError

    try:
        _run(options, alone)
    except BrokenPipeError:
        # The reader of the table went away (`| head`); nothing more can be said to it.
        return 0
    except KeyboardInterrupt:
        print(INTERRUPTION, file=sys.stderr)
        return INTERRUPTED
    except DetectionError as error:
        return _error(error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _error(f"{where}{error.strerror or error}")
    except Exception as error:
        said = _named(error)
        if said is None:
            raise
        return _error(said)
    return 0


def _named(error: Exception) -> str | None:
    from kernels import KernelError
    from models.errors import ConfigError, out_of_memory

    return str(error) if isinstance(error, ConfigError | KernelError) else out_of_memory(error)


def _error(message: object) -> int:
    print(f"{PROG}: error: {' '.join(str(message).split())}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Score every head of a language model on repeated random tokens, and date when "
        "induction appeared.",
        epilog="The table goes to stdout, progress to stderr. Exit status: 0 done, 1 a named error, 2 "
        "wrong usage, 130 interrupted.",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint folder, a run folder with step_<number> checkpoints, a Hugging Face model "
        "folder, a "
        "folder of its revisions, a .gguf file, or OWNER/NAME[@REVISION] on the hub (with --steps: its "
        "series of revisions)",
    )
    parser.add_argument(
        "--steps", help="checkpoints of a series: all, last, numbers and ranges LOW:HIGH, commas between"
    )
    parser.add_argument("--scores", help=f"some of {', '.join(SCORES)}, commas between (default: all)")
    probe = parser.add_argument_group(
        "probe", "defaults shrink where vocabulary or context demand it, and say so"
    )
    probe.add_argument("--sequences", type=_positive, metavar="N", help="sequences of the probe (default 16)")
    probe.add_argument(
        "--period", type=_positive, metavar="N", help="distinct tokens in a sequence (default 25)"
    )
    probe.add_argument("--repeats", type=_at_least_two, metavar="N", help="how often they come (default 4)")
    probe.add_argument("--seed", type=int, default=0, help="of the probe's tokens (default 0)")
    probe.add_argument(
        "--bos", type=_bos, default="auto", metavar="ID", help="auto (default), none, or a token id"
    )
    text = parser.add_argument_group("text windows, for loss and in-context learning")
    text.add_argument(
        "--text", metavar="PATH", help="a file or folder (default: the run's own, or Python's library)"
    )
    text.add_argument("--windows", type=_positive, metavar="N", help="how many windows")
    parser.add_argument(
        "--mamba-units", type=_units, metavar="UNITS", help="layer (default), state, or cluster:K"
    )
    parser.add_argument(
        "--linear-memory",
        action=argparse.BooleanOptionalAction,
        help="score chosen edges instead of whole patterns, with the same numbers and no attention maps "
        "(default: for probes longer than 1,024 tokens); on a GPU the sums of softmax and normalised linear "
        "attention then come from fused Triton kernels",
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:N")
    parser.add_argument(
        "--via",
        choices=("auto", "bridge", "mixers"),
        default="auto",
        help="how models of other projects are read: in our own mixers, through TransformerLens's "
        "bridge (softmax only), "
        "or auto (default): our mixers where there is a reader, else the bridge",
    )
    parser.add_argument(
        "--resume",
        metavar="FOLDER",
        help="keep each finished checkpoint's scores there, and take those that are there already; "
        "under `accelerate "
        "launch --multi_gpu --num_processes N -m interp.cli` the checkpoints are shared over the processes",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--top", type=_positive, default=8, metavar="N", help="heads in the table (default 8)")
    out.add_argument(
        "--json",
        metavar="FILE",
        help="write all scores as JSON (FILE - is stdout, here and below; the table then goes to stderr)",
    )
    out.add_argument("--csv", metavar="FILE", help="write one row for each step, layer, head and reading")
    out.add_argument("--html", metavar="FILE", help="write the report, one self-contained page")
    out.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _at_least_two(text: str) -> int:
    if _positive(text) < 2:
        raise argparse.ArgumentTypeError(
            f"{text}: tokens that come once have no earlier copy; 2 is the least"
        )
    return int(text)


def _bos(text: str) -> int | None | str:
    if text in ("auto", "none"):
        return None if text == "none" else text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are auto, none, and a token id")
    return int(text)


def _units(text: str) -> str:
    kind, colon, count = text.partition(":")
    if text in ("layer", "state") or (kind == "cluster" and colon and count.isdecimal() and int(count) > 0):
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: accepted are layer, state, and cluster:K with a number K")


def _run(options: argparse.Namespace, alone: bool) -> None:
    from interp.ranks import current_ranks

    main_process = current_ranks().is_main
    given = {f"--{kind}": getattr(options, kind) for kind in ("json", "csv", "html")}
    outputs = {option: name for option, name in given.items() if name is not None and main_process}
    # Before the work, not after it.
    check_outputs(outputs)
    _check_installed("rich", "the table")
    if options.html:
        _check_installed("plotly", "--html")
    if options.device.startswith("cuda"):
        begin_device(options.device)
    with ended_by_interrupt(INTERRUPTION, alone=alone):
        from interp import detect
        from interp.table import print_report

    with _progress(options.quiet or not main_process) as progress:
        report = detect(
            options.path,
            steps=options.steps,
            scores=None if options.scores is None else options.scores.split(","),
            n_sequences=options.sequences,
            period=options.period,
            repeats=options.repeats,
            seed=options.seed,
            device=options.device,
            mamba_units=options.mamba_units,
            bos=options.bos,
            text=options.text,
            via=options.via,
            n_windows=options.windows,
            linear_memory=options.linear_memory,
            resume=options.resume,
            progress=progress,
        )
    if not main_process:
        return
    _write(_contents(options, report))
    if STDOUT in outputs.values():
        print_report(report, top=options.top, file=sys.stderr)
    else:
        with printed():
            print_report(report, top=options.top)
    for name in outputs.values():
        if name != STDOUT:
            print(f"wrote {name}", file=sys.stderr)


def _write(contents: Sequence[tuple[str, str]]) -> None:
    """Files first: they stay where stdout cannot be written."""
    for name, content in sorted(contents, key=lambda found: found[0] == STDOUT):
        if name == STDOUT:
            write_bytes(content.encode("utf-8"))
        else:
            try:
                write_text(name, content)
            except OSError as error:
                # A full device names no file.
                error.filename = error.filename or name
                raise


def _contents(options: argparse.Namespace, report: DetectionReport) -> list[tuple[str, str]]:
    # All made before the first is written: what fails here leaves no file behind.
    found = []
    if options.json:
        found.append((options.json, to_json(report)))
    if options.csv:
        found.append((options.csv, to_csv(report)))
    if options.html:
        from interp.report import html_report

        found.append((options.html, html_report(report)))
    return found


def _check_installed(package: str, what: str) -> None:
    from interp.errors import DetectionError

    if importlib.util.find_spec(package) is None:
        raise DetectionError(f"{what} needs the package {package}, which is not installed here")


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """A callback for `detect`: a bar on a terminal, a line for each checkpoint elsewhere, nothing when
    quiet.
    """
    if quiet:
        yield None
    elif not sys.stderr.isatty():
        yield _plain_progress
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("loading", total=None)

            def show(done: int, total: int, step: int) -> None:
                bar.update(task, completed=done, total=total, description=f"step {step:,}")

            yield show


def _plain_progress(done: int, total: int, step: int) -> None:
    if done < total:
        print(f"{PROG}: checkpoint {done + 1} of {total}, step {step}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    command()
