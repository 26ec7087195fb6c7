"""The command `attention-dashboard`: an interactive page of a model's attention, on this machine alone."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

from interp.dashboard.progress_line import ProgressLine
from interp.dashboard.quotation import quoted, whole_number
from interp.interrupt import INTERRUPTED, ended_by_interrupt
from interp.standard_output import say, stand_in_for_stderr

PROG = "attention-dashboard"
NO_PAGE = "interrupted; no page was written"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted, or write one page; returns 0 then, 1 after a named error in one line,
    130 where an interrupt left no page.

    Wrong usage is argparse's: status 2.
    """
    stand_in_for_stderr()
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    def importing() -> AbstractContextManager:
        return ended_by_interrupt(f"{PROG}: interrupted", alone=argv is None)

    with importing():
        parser = _parser()
        options = parser.parse_args(argv)
        _check_export(parser, options)
        # Imported late: `--help` and wrong usage answer at once.
        try:
            from interp.dashboard.messages import attempt
            from interp.dashboard.server import check_host
        except ModuleNotFoundError as error:
            return _error(f"{error.name} is not installed; pip install 'beyond-softmax[full]'")

    act = _serve if options.export is None else _export
    _, said = attempt(lambda: check_host(options.host, allow_remote=options.allow_remote))
    if said is None:
        try:
            _, said = attempt(lambda: act(options, importing()))
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            said = f"{where}{error.strerror or error}"
        except KeyboardInterrupt:
            print(file=sys.stderr)
            if options.export is not None:
                _error(NO_PAGE)
                return INTERRUPTED
    return 0 if said is None else _error(said)


def _error(message: str) -> int:
    print(f"{PROG}: error: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Look at a language model in a browser: attention, cuts, training, recurrent state.",
        epilog="Everything stays on this machine. Ctrl-C ends it. Exit status: 0 ended, 1 a named error, "
        "2 wrong usage, 130 interrupted while writing a page.",
    )
    kinds = (
        "a checkpoint folder, a run folder with step_<number> checkpoints, a Hugging Face folder or a .gguf "
        "file"
    )
    parser.add_argument("path", metavar="PATH", help=kinds)
    parser.add_argument("second", metavar="PATH2", nargs="?", help="another one to compare with")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine alone)"
    )
    parser.add_argument(
        "--port", type=_port, default=8050, metavar="N", help="0 takes a free one (default 8050)"
    )
    parser.add_argument(
        "--allow-remote", action="store_true", help="needed for a --host that other machines can reach"
    )
    parser.add_argument(
        "--browser", action=argparse.BooleanOptionalAction, default=False, help="open the page in a browser"
    )
    exported = parser.add_argument_group("one page instead of a server")
    exported.add_argument("--export", metavar="FILE", help="write one self-contained HTML page, then end")
    exported.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt of the page (may be given several times)"
    )
    exported.add_argument(
        "--heads",
        metavar="L0H1,...",
        help="its heads; L0 is all heads of that layer (default: all of a small model, 12 of a large one)",
    )
    exported.add_argument(
        "--steps",
        metavar="STEPS",
        help="its checkpoints: all, last, numbers, ranges low:high (default: up to 9, fewer where there is "
        "no room)",
    )
    return parser


def _check_export(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Wrong usage: what belongs to an exported page alone."""
    for name in ("prompt", "heads", "steps"):
        if options.export is None and getattr(options, name) is not None:
            parser.error(f"--{name} belongs to --export")
    if options.export in ("", "-"):
        parser.error(f"--export {options.export!r}; accepted: the name of a file to write")


def _export(options: argparse.Namespace, importing: AbstractContextManager) -> None:
    with importing:
        from interp.dashboard.export import export_page
    from interp.output_files import check_name

    check_name("--export", options.export)
    chosen = {"prompts": options.prompt or (), "heads": options.heads, "steps": options.steps}
    paths = [options.path, *([options.second] if options.second else [])]
    with ProgressLine(PROG) as line:
        size = export_page(paths, options.export, progress=line, warn=line.warn, **chosen)
    say(f"{PROG}: {options.export}  ({size / 1e6:.1f} MB, opens from the file)")


def _port(text: str) -> int:
    if not text.isdecimal() or whole_number(text, 65535) > 65535:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: accepted are 0 to 65535")
    return int(text)


def _serve(options: argparse.Namespace, importing: AbstractContextManager) -> None:
    import webbrowser

    with importing:
        from interp.dashboard.app import make_app
        from interp.dashboard.desk import Desk
        from interp.dashboard.server import serve_on, url

    paths = [options.path, *([options.second] if options.second else [])]
    with ProgressLine(PROG, every_s=None) as line:
        line(f"opening {' and '.join(paths)} ...")
        desk = Desk(paths, ahead=True)
    server = serve_on(make_app(desk).server, options.host, options.port)
    address = url(options.host, server.port)
    say(f"{PROG}: {address}  (Ctrl-C ends it)")
    if options.browser:
        webbrowser.open(address)
    server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
