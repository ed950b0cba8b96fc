"""Command lines that are not configurations: their mistakes are one line, like every other error."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn

from lazyjax.config.keys import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit; options are written in full."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """One line, with the option that was probably meant."""
        hint = ""
        if message.startswith("unrecognized arguments: -"):
            word = message.split()[2].partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            close = difflib.get_close_matches(word, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{self.prog}: {message}{hint} ({self.prog} --help lists the options)")
