# fish completion for spd: put it in ~/.config/fish/completions/spd.fish
function __spd_complete
    env _SPD_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$argv[1] \
        _TYPER_COMPLETE_ARGS=(commandline -cp) spd 2>/dev/null
end

complete --command spd --no-files --arguments "(__spd_complete get-args)" \
    --condition "__spd_complete is-args"
