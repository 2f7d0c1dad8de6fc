"""Optional parts of an installation."""


def install_line(extra: str) -> str:
    """Return the command that adds an extra to this installation, as part of a sentence.

    pip and uv keep the permille that is installed, whether it came from an index, a wheel or a checkout. In
    another environment, they would ask an index for a package of this name.

    Example:
        >>> install_line("torch")
        "`pip install 'permille[torch]'` in the environment of permille"
    """
    return f"`pip install 'permille[{extra}]'` in the environment of permille"
