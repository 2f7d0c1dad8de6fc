"""`python -m permille_keeper` is `permille-keeper`."""

from permille_keeper.main import main

if __name__ == "__main__":
    main()
