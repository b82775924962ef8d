"""`paceline completion`: what a shell must know to finish what is typed.

click answers the shell; what differs here from click's own is that no space follows a key before its value, and that
bash, which takes `optimizer.lr=0.1` for three words, is asked for the whole line.
"""

from __future__ import annotations

import os
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
)
from click.shell_completion import split_arg_string as split

from paceline.cli.options import json_option
from paceline.cli.output import echo, print_json

VARIABLE = "_PACELINE_COMPLETE"

_BASH = r"""
%(complete_func)s() {
    local IFS=$'\n' line kind value
    COMPREPLY=()
    while IFS=',' read -r kind value; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
            unfinished) COMPREPLY+=("$value"); compopt -o nospace ;;
        esac
    done < <(COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \
        %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

_ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a answer finished described unfinished
    local kind value help
    answer=("${(@f)$(COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) %(complete_var)s=zsh_complete ${words[1]})}")
    for kind value help in $answer; do
        case $kind in
            dir) _path_files -/ ;;
            file) _path_files ;;
            unfinished) unfinished+=("$value") ;;
            plain) if [[ $help == _ ]]; then finished+=("$value"); else described+=("$value:$help"); fi ;;
        esac
    done
    (( $#described )) && _describe -V unsorted described -U
    (( $#finished )) && compadd -U -V unsorted -a finished
    (( $#unfinished )) && compadd -U -S '' -V unsorted -a unfinished
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""


class _Bash(BashComplete):
    """Bash, which breaks words at ``=`` and ``:`` too, and replaces only what follows the last of these."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split(line)[1:]
        return (words, "") if not words or line[-1:].isspace() else (words[:-1], words[-1])

    def format_completion(self, item: CompletionItem[Any]) -> str:
        _, incomplete = self.get_completion_args()
        breaks = set("=:") & set(os.environ.get("COMP_WORDBREAKS", "=:"))
        kept = max((incomplete.rfind(sign) + 1 for sign in breaks), default=0)
        return f"{item.type},{item.value[kept:]}"


class _Zsh(ZshComplete):
    """Zsh; a key before its value is followed by no space."""

    source_template = _ZSH


class _Fish(FishComplete):
    """Fish, which by itself puts no space after ``=`` and ``/``."""

    def format_completion(self, item: CompletionItem[Any]) -> str:
        item.type = "plain" if item.type == "unfinished" else item.type
        return super().format_completion(item)


def answer_shells() -> None:
    """Let click answer the shells with what is here."""
    for kind in (_Bash, _Zsh, _Fish):
        add_completion_class(kind)


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
def command(shell: str, as_json: bool) -> None:
    """Print the script that lets SHELL finish commands, options, recipes, keys with their values, and run directories.

    \b
    Examples:
      echo 'eval "$(paceline completion bash)"' >> ~/.bashrc
      paceline completion zsh > "${fpath[1]}/_paceline"
      paceline completion fish > ~/.config/fish/completions/paceline.fish
    """
    answer_shells()
    kind = get_completion_class(shell)
    assert kind is not None  # click brings all three
    group = click.get_current_context().find_root().command
    script = kind(group, {}, "paceline", VARIABLE).source()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        echo(script, nl=False)
