"""`zsim completion`: a script that completes commands, options and their choices in a shell.

It is made of the argument parser, so that it knows each option that there is.
"""

from __future__ import annotations

import argparse

from zsim.cli import terminal
from zsim.cli.parser import Parser, parser


def run(options: argparse.Namespace) -> int:
    """`zsim completion bash`: the script, for `eval "$(zsim completion bash)"`."""
    text = _fish(parser()) if options.shell == "fish" else _bash(parser())
    if options.shell == "zsh":
        text = "autoload -U +X bashcompinit && bashcompinit\n" + text
    for line in text.splitlines():
        terminal.say(line)
    return 0


def _choices(command: Parser) -> str:
    """Options and choices of a command, as words of a shell."""
    return " ".join(dict.fromkeys(command.names()))


def _bash(top: Parser) -> str:
    """A function of bash: commands first, then a command's options, else files."""
    cases = "\n".join(
        f"        {name}) choices={_quoted(_choices(command))} ;;"
        for name, command in top.commands().items()
    )
    return f"""\
_zsim() {{
    local choices current="${{COMP_WORDS[COMP_CWORD]}}"
    case "${{COMP_WORDS[1]}}" in
{cases}
        *) choices={_quoted(" ".join(top.commands()) + " --help --version")} ;;
    esac
    if [[ $COMP_CWORD -eq 1 ]]; then
        choices={_quoted(" ".join(top.commands()) + " --help --version")}
    fi
    COMPREPLY=($(compgen -W "$choices" -- "$current") $(compgen -f -- "$current"))
}}
complete -o filenames -F _zsim zsim
"""


def _fish(top: Parser) -> str:
    """Lines of fish: each command, and each option of each command with its help."""
    lines = []
    for name, command in top.commands().items():
        lines.append(f"complete -c zsim -n __fish_use_subcommand -a {name}")
        for action in command._actions:
            long = [option[2:] for option in action.option_strings if option.startswith("--")]
            about = f"complete -c zsim -n '__fish_seen_subcommand_from {name}'"
            if long:
                lines.append(f"{about} -l {long[0]} -d {_quoted(_help(action))}")
            elif action.choices and not action.option_strings:
                lines.append(f"{about} -a {_quoted(' '.join(map(str, action.choices)))}")
    return "\n".join(lines) + "\n"


def _help(action: argparse.Action) -> str:
    """The first words of an option's help."""
    return (action.help or "").split(";")[0].split(":")[0][:60]


def _quoted(text: str) -> str:
    """`text` as one word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"
