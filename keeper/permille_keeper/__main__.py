"""`python -m permille_keeper`: the same as the command `permille-keeper`."""

from permille_keeper.main import main

if __name__ == "__main__":
    main()
