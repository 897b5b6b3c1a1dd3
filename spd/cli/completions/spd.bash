# bash completion for spd: put it in ~/.local/share/bash-completion/completions/spd
_spd_completion() {
    # bash splits --option=value into three words: they are put together again
    local IFS=$'\n' word glue="" count=0
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
    COMPREPLY=( $( env COMP_WORDS="${words[*]}" COMP_CWORD="$((count - 1))" \
        _SPD_COMPLETE=complete_bash "$1" 2>/dev/null ) )
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]]; then compopt -o nospace; fi
}

complete -o default -F _spd_completion spd
