"""`sonnx completion`: the script by which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from ._common import exit_codes


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@exit_codes
def command(shell: str) -> None:
    """Print the script by which SHELL completes the commands and options of sonnx.

    Load it in the file that the shell reads when it starts: ~/.bashrc, ~/.zshrc, ~/.config/fish/completions/sonnx.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    completion = kind(click.get_current_context().find_root().command, {}, "sonnx", "_SONNX_COMPLETE")
    # `source` of click's BashComplete would start bash to find out its version
    click.echo(ShellComplete.source(completion))
