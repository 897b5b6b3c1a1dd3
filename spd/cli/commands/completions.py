"""Shell completion: the scripts, and the answers behind TAB.

Owns the text of the scripts. Typer answers the question "what fits here"; its own installer, which
edits people's start-up files, is not offered.
"""

from __future__ import annotations

import typer
from typer.main import get_command

from spd.cli.options import CompletionOptions, Session

BASH = """# bash completion for spd: put it in ~/.local/share/bash-completion/completions/spd
_spd_completion() {
    # bash splits --option=value into three words: they are put together again
    local IFS=$'\\n' word glue="" count=0
    local -a words=()
    for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
        if [[ $count -gt 0 && ( -n $glue || $word == "=" ) ]]; then
            words[count-1]+="$word"
        else
            words[count]="$word"
            count=$((count + 1))
        fi
        if [[ $word == "=" ]]; then glue=1; else glue=""; fi
    done
    COMPREPLY=( $( env COMP_WORDS="${words[*]}" COMP_CWORD="$((count - 1))" \\
        _SPD_COMPLETE=complete_bash "$1" 2>/dev/null ) )
}

complete -o default -F _spd_completion spd
"""

ZSH = """#compdef spd
# zsh completion for spd: put it as _spd in a folder of $fpath

_spd_completion() {
  setopt localoptions rcquotes  # the answer writes an apostrophe as two
  eval "$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" \\
    _SPD_COMPLETE=complete_zsh "${words[1]}" 2>/dev/null)"
}

if [[ "${funcstack[1]}" == _spd ]]; then  # called for TAB, the first time and later; else sourced
  _spd_completion "$@"
else
  compdef _spd_completion spd
fi
"""

FISH = """# fish completion for spd: put it in ~/.config/fish/completions/spd.fish
function __spd_complete
    env _SPD_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$argv[1] \\
        _TYPER_COMPLETE_ARGS=(commandline -cp) spd 2>/dev/null
end

complete --command spd --no-files --arguments "(__spd_complete get-args)" \\
    --condition "__spd_complete is-args"
"""

POWERSHELL = """# PowerShell completion for spd: put it in the file that $PROFILE names
Register-ArgumentCompleter -Native -CommandName spd -ScriptBlock {
    param($wordToComplete, $commandAst, $cursorPosition)
    $Env:_SPD_COMPLETE = "complete_powershell"
    $Env:_TYPER_COMPLETE_ARGS = $commandAst.ToString()
    $Env:_TYPER_COMPLETE_WORD_TO_COMPLETE = $wordToComplete
    spd | ForEach-Object {
        $value, $help = $_ -Split ":::", 2
        [System.Management.Automation.CompletionResult]::new($value, $value, 'ParameterValue', $help)
    }
    $Env:_SPD_COMPLETE = ""
    $Env:_TYPER_COMPLETE_ARGS = ""
    $Env:_TYPER_COMPLETE_WORD_TO_COMPLETE = ""
}
"""


def script(shell: str) -> str:
    """The completion script of a shell."""
    return {"bash": BASH, "zsh": ZSH, "fish": FISH, "powershell": POWERSHELL}[shell]


def completions(session: Session, options: CompletionOptions) -> None:
    """Print the completion script of a shell."""
    from spd.cli.text.output import Sink

    Sink.stdout().write(script(options.shell))


def complete(app: typer.Typer, variable: str) -> int:
    """Answer a shell's question from the environment and end; Typer's installer stays hidden."""
    command = get_command(app)
    hidden = ("install_completion", "show_completion")
    command.params[:] = [param for param in command.params if param.name not in hidden]
    try:
        command(args=[], prog_name="spd", complete_var=variable, standalone_mode=False)
    except SystemExit as stop:
        return int(stop.code or 0)
    except Exception:  # a broken answer must never spill into a shell's prompt
        return 1
    return 1
