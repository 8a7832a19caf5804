"""`python -m pelton.cli`, the same as `pelton`."""

from pelton.cli.main import main

if __name__ == "__main__":
    main(prog_name="pelton")
