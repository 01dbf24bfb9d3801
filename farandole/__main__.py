"""Run the command line with `python -m farandole` or `torchrun -m farandole train`."""

from farandole.cli.main import main

if __name__ == "__main__":
    main()
