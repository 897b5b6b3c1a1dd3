# PowerShell completion for spd: put it in the file that $PROFILE names
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
