"""`python -m farandole`: the command line, as `torchrun -m farandole train` needs it."""

from farandole.cli.main import main

if __name__ == "__main__":
    main()
