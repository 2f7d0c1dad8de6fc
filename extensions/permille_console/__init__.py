"""The console: pages below `/ui`, where operators start work and watch it.

It also works without JavaScript. Other extensions can add pages to it (`permille_console.extension`).
"""
