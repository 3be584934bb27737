"""``fp8compile watch run/``: the page of a run as a file, or served on loopback while it goes on; no torch is imported."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fp8compile.cli.ends import DONE, FAILED, WRONG, said
from fp8compile.cli.values import between
from fp8compile.extras.watching.reading import LoggedRun, NoRun

MOST_SAID = 20  # overflows that are printed


def add_watch_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the folder of fp8compile.extras.watching.watch(folder=...)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page to write (DIR/run.html)")
    parser.add_argument(
        "--serve", action="store_true", help="serve a page that goes on with the run; on loopback only"
    )
    parser.add_argument(
        "--port", type=between(0, 65535), default=8765, metavar="N", help="with --serve (8765); 0: any"
    )


def run_watch(values: Namespace) -> int:
    try:
        return _serve(values) if values.serve else _write(values)
    except NoRun as error:
        return said("watch", error, WRONG)
    except OSError as error:
        return said("watch", error, FAILED)


def _write(values: Namespace) -> int:
    from fp8compile.extras.watching.folder import runs_of
    from fp8compile.extras.watching.page import snapshot

    runs = list(runs_of(values.folder))
    out = values.out or values.folder / "run.html"
    out.write_text(snapshot(values.folder.resolve().name, runs), encoding="utf-8")
    for run in runs:
        print(*map(_printable, _about(run)), sep="\n")
    print(out)
    return DONE


def _printable(text: str) -> str:
    """Without what would command a terminal: a run's text may hold anything."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _about(run: LoggedRun) -> list[str]:
    parts = [f"{run.steps} step{'s' * (run.steps != 1)}"]
    parts += [f"{run.left_out} line{'s' * (run.left_out != 1)} left out evenly"] * bool(run.left_out)
    parts += [f"{run.corrupt} corrupt line{'s' * (run.corrupt != 1)} left out"] * bool(run.corrupt)
    begun = run.overflows
    parts += [f"inf or NaN began {len(begun)} time{'s' * (len(begun) != 1)}" if begun else "no inf and no NaN"]
    more = [f"  and {len(begun) - MOST_SAID} more, which the page lists"] * (len(begun) > MOST_SAID)
    return [f"{run.name}: {', '.join(parts)}", *(f"  {line}" for line in begun[:MOST_SAID]), *more]


def _serve(values: Namespace) -> int:
    from fp8compile.extras.watching.folder import files_of
    from fp8compile.extras.watching.server import Server

    files_of(values.folder)  # refuses what is no folder
    try:
        made = Server(values.folder, values.port)
    except OSError as error:
        why = error.strerror or error
        return said("watch", f"port {values.port} of 127.0.0.1: {why}. Fix: --port 0 takes one that is free", FAILED)
    with made as server:
        print(f"{server.address}  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return DONE
