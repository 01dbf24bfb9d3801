"""The command `farandole`: one file per subcommand.

Subcommands import their modules when they run, so that `farandole --help` takes little time.
"""

from __future__ import annotations

import sys

import typer

from farandole import __version__
from farandole._extras import explain_missing
from farandole._startup import leave
from farandole.cli.bench import app as bench
from farandole.cli.config import app as config
from farandole.cli.generate import generate
from farandole.cli.info import info
from farandole.cli.launch import LaunchCommand, launch
from farandole.cli.mistakes import Command
from farandole.cli.plan import plan
from farandole.cli.train import TrainCommand, train
from farandole.cli.tune import tune

HELP = """Parallel computing on PyTorch, on a laptop's cores or on a cluster.

\b
  farandole train                           train a language model
  farandole config keys                     the keys of its configuration
  farandole plan gpt2-small -n 8            does it fit, and how fast is it?
  farandole generate runs --prompt "def"    generate text
  farandole launch --ranks 4 script.py      run your own program on 4 ranks
  farandole bench training                  images per second of a ResNet
  farandole bench collectives               latency and bandwidth of collectives
  farandole tune                            the fastest algorithms between hosts
  farandole info                            what this machine offers

farandole COMMAND --help describes a command, with examples.
"""

app = typer.Typer(
    name="farandole",
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text, wrapped to the terminal
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # --nproc_per_node is --nproc-per-node
    },
)
app.command(cls=TrainCommand)(train)
app.command(cls=Command)(plan)
app.command(cls=Command)(generate)
# options end at the program; the words after it are its arguments
app.command(cls=LaunchCommand, context_settings={"allow_interspersed_args": False})(launch)
app.command(cls=Command)(info)
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
    """Run `farandole launch` with the words of a horovodrun command line, and end the process.

    The script is named farandole-horovodrun: a script named horovodrun would overwrite Horovod's, or be overwritten.
    """
    main(["launch", *sys.argv[1:]])


def main(words: list[str] | None = None) -> None:
    """Run the command line, and end the process; Ctrl-C ends it without a trace."""
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
