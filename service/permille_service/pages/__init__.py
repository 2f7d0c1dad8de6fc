"""The web interface below `/ui`, where operators start work and watch it.

It also works without JavaScript.
"""
