"""`python -m permille_rounds.keeper`: the same as the command `permille-keeper`."""

from permille_rounds.keeper.main import main

if __name__ == "__main__":
    main()
