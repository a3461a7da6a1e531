"""Tab completion in bash for ``python -m graphmoe.<tool>``.

Hydra completes scripts and console commands, but not ``python -m module``: this adds a bash function
that asks Hydra for the module's completions. Other shells complete the command ``graphmoe-train``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

BASH = """\
_graphmoe_complete() {
    local words=($COMP_LINE) word="${COMP_WORDS[COMP_CWORD]}"
    if [[ "${words[1]}" != -m || "${words[2]}" != graphmoe.* || "$COMP_LINE" != *"${words[2]} "* ]]; then
        COMPREPLY=($(compgen -o default -- "$word"))
        return
    fi
    local choices=$(COMP_LINE="$COMP_LINE" "${words[0]}" -m "${words[2]}" -sc query=bash 2>/dev/null)
    COMPREPLY=($(compgen -o nospace -o default -W "$choices" -- "$word"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _graphmoe_complete python python3
"""


def is_install(argv: Sequence[str]) -> bool:
    """Whether the command line asks for the bash function, for use of ``python -m``."""
    asked = list(argv[1:3]) in (["-sc", "install=bash"], ["--shell-completion", "install=bash"])
    return asked and argv[0].endswith(".py")


def adapt_query() -> None:
    """Drop ``python -m`` from the line that the shell asks about: Hydra would take it for an override."""
    line = os.environ.get("COMP_LINE", "")
    _, found, after = line.partition(" -m ")
    if found:
        os.environ["COMP_LINE"] = after
