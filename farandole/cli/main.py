"""The command `farandole`.  Each subcommand has its own file.

Subcommands import their modules when they run, so that `farandole --help` is fast.
"""

from __future__ import annotations

import sys

import typer

from farandole import __version__
from farandole._extras import explain_missing
from farandole._startup import leave
from farandole.cli.bench import app as bench
from farandole.cli.config import app as config
from farandole.cli.explain import explain
from farandole.cli.generate import generate
from farandole.cli.info import info
from farandole.cli.launch import LaunchCommand, launch
from farandole.cli.mistakes import Command, CommandGroup
from farandole.cli.plan import PlanCommand, plan
from farandole.cli.schedule import ScheduleCommand, schedule
from farandole.cli.serve import serve
from farandole.cli.train import TrainCommand, train
from farandole.cli.tune import tune

HELP = """Parallel computing with PyTorch, on a laptop's cores or on a cluster.

\b
  farandole train                           train a language model
  farandole config keys                     list the configuration keys
  farandole plan gpt2-small -n 8            predict memory and speed
  farandole schedule                        compare and draw pipeline schedules
  farandole generate runs --prompt "def"    generate text
  farandole serve runs --port 8000          answer requests over HTTP
  farandole launch --ranks 4 script.py      run your own program on 4 ranks
  farandole bench training                  measure ResNet training
  farandole bench collectives               measure collectives
  farandole bench serving runs              measure a server
  farandole tune                            find the fastest algorithms between hosts
  farandole info                            show versions and hardware
  farandole explain rankdied                explain an error message

farandole COMMAND --help describes a command, with examples.
"""

app = typer.Typer(
    name="farandole",
    cls=CommandGroup,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text, wrapped to the terminal width
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace(
            "_", "-"
        ),  # accepts --nproc_per_node for --nproc-per-node
    },
)
app.command(cls=TrainCommand)(train)
app.command(cls=PlanCommand)(plan)
app.command(cls=ScheduleCommand)(schedule)
app.command(cls=Command)(generate)
app.command(cls=Command)(serve)
# options end at the program name; later words are the program's arguments
app.command(cls=LaunchCommand, context_settings={"allow_interspersed_args": False})(launch)
app.command(cls=Command)(info)
app.command(cls=Command)(explain)
app.add_typer(config, name="config")
app.add_typer(bench, name="bench")
app.command(cls=Command)(tune)


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        typer.echo(f"farandole {__version__}")
        raise typer.Exit


def horovodrun() -> None:
    """Run `farandole launch` with the arguments of a horovodrun command, and end the process.

    The program can import `horovod`.  This function is the entry point of the script farandole-horovodrun.  The name
    horovodrun would conflict with Horovod's own script.
    """
    main(["launch", "--horovod-shim", *sys.argv[1:]])


def main(words: list[str] | None = None) -> None:
    """Run the `farandole` command with the arguments `words`, and end the process.

    By default, `words` contains the arguments of this process.  Ctrl-C ends the process without a traceback.
    """
    try:
        app(words, prog_name="farandole")
    except KeyboardInterrupt:
        leave(130)
    except ModuleNotFoundError as error:
        if (message := explain_missing(error)) is None:
            raise
        typer.echo(f"farandole: {message}", err=True)
        leave(1)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        leave(end.code or 0)
